"""`savepoint restore`, `fork` and `rewind`: fill a new checkpoint from a savepoint.

restore fork    the sinks are not touched
rewind          takes later batches out of the sinks first
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

import click

from sparkonce.cli import facts
from sparkonce.cli.fencing import may_fence, yes_option
from sparkonce.cli.looking import FOUND, json_option
from sparkonce.cli.screen import Screen, show_removals
from sparkonce.cli.targets import place_of_savepoints
from sparkonce.errors import ConfigurationError, SavepointError
from sparkonce.protocol.pipeline import by_name, targets_of
from sparkonce.spark_hooks import savepoints as making
from sparkonce.spark_hooks.jobs import load_job
from sparkonce.spark_hooks.savepoints import Manifest, Rewind
from sparkonce.storage import open_folder
from sparkonce.txn_log import TransactionLog, checkpoint_log
from sparkonce.txn_log.places import is_same_place, place_of_log

if TYPE_CHECKING:
    from sparkonce.spark_hooks.exactly_once import ExactlyOnce

_source_path = click.option(
    "--source-path",
    "moved",
    multiple=True,
    metavar="OLD=NEW",
    help="A file source's folder has moved; both as URLs.",
)


_into = click.option(
    "--into", metavar="LOCATION", required=True, help="The new checkpoint: an empty folder."
)


@click.command()
@click.argument("job")
@click.argument("root")
@click.argument("name")
@_into
@click.option(
    "--lost",
    is_flag=True,
    help="The checkpoint is lost for good, with its log; batches after the savepoint come again.",
)
@json_option
def restore(*, job: str, root: str, name: str, into: str, lost: bool, as_json: bool) -> int:
    """Fill a new checkpoint, with which JOB continues after the savepoint's batch.

    Refused when the sinks have later batches. Stop the query first. After an interruption, run it
    again.
    """
    place = place_of_savepoints(root)
    manifest = place.read(name)
    with load_job(job, create=False) as pipeline:
        making.restore(
            place,
            manifest,
            open_folder(into, create=True),
            pipeline=pipeline.name,
            open_log=lambda: _log_of(pipeline, into),
            parent_log=_parent_log(pipeline, manifest, is_lost=lost),
        )
    return _said_where(Screen(as_json=as_json), manifest, into, manifest.head.query_id)


@click.command()
@click.argument("job")
@click.argument("root")
@click.argument("name")
@_into
@click.option(
    "--share", "shared", multiple=True, metavar="SINK", help="May write where the first one does."
)
@_source_path
@json_option
def fork(
    *,
    job: str,
    root: str,
    name: str,
    into: str,
    shared: Sequence[str],
    moved: Sequence[str],
    as_json: bool,
) -> int:
    """Fill a new checkpoint, with which another JOB begins after the savepoint's batch.

    JOB has a name and targets of its own; the first pipeline goes on undisturbed. After an
    interruption, run it again.
    """
    place = place_of_savepoints(root)
    manifest = place.read(name)
    with load_job(job, create=True) as pipeline:
        targets = targets_of(pipeline.all_sinks)
        _check_known("--share", set(shared) - targets.keys(), pipeline)
        query_id = making.fork(
            place,
            manifest,
            open_folder(into, create=True),
            pipeline=pipeline.name,
            targets=targets,
            shared=shared,
            source_paths=dict(map(_moved_path, moved)),
            open_log=lambda: _log_of(pipeline, into),
        )
    return _said_where(Screen(as_json=as_json), manifest, into, query_id)


@click.command()
@click.argument("job")
@click.argument("root")
@click.argument("name")
@_into
@click.option(
    "--keep", "kept", multiple=True, metavar="SINK", help="Its rows stay; new ones come to them."
)
@_source_path
@click.option("--dry-run", is_flag=True, help="Only show what would be removed.")
@yes_option
@json_option
def rewind(
    *,
    job: str,
    root: str,
    name: str,
    into: str,
    kept: Sequence[str],
    moved: Sequence[str],
    dry_run: bool,
    yes: bool,
    as_json: bool,
) -> int:
    """Take the later batches out of JOB's sinks, and fill a checkpoint that continues before them.

    Stop the query first: a driver that still runs is fenced, so it asks unless that is known to be
    gone. Nothing is changed unless every sink has exactly the rows that the log knows. With
    --dry-run it exits with 3 when a sink refuses. After an interruption, run it again.
    """
    place = place_of_savepoints(root)
    manifest = place.read(name)
    query_id = None
    with load_job(job, create=False) as pipeline:
        sinks = by_name(pipeline.all_sinks)
        _check_known("--keep", set(kept) - {*sinks, *manifest.head.sinks}, pipeline)
        log = _log_now(pipeline, manifest, None if dry_run else into)
        if dry_run:
            found = Rewind.of(manifest, log, pipeline=pipeline.name, sinks=sinks, kept=kept)
        else:
            may_fence(log, pipeline.name, yes=yes)
            query_id, found = making.rewind(
                place,
                manifest,
                open_folder(into, create=True),
                pipeline=pipeline.name,
                sinks=sinks,
                kept=kept,
                source_paths=dict(map(_moved_path, moved)),
                open_log=lambda: _log_of(pipeline, into),
                parent_log=log,
            )
    return _said_what(Screen(as_json=as_json), found, into, query_id)


def _check_known(option: str, unknown: Collection[str], pipeline: ExactlyOnce) -> None:
    if unknown:
        raise ConfigurationError(
            f"{option} {', '.join(sorted(unknown))}: {pipeline.name!r} has the sinks "
            f"{', '.join(by_name(pipeline.all_sinks))}"
        )


def _moved_path(given: str) -> tuple[str, str]:
    old, _, new = given.partition("=")
    if not (old and new):
        raise ConfigurationError(f"--source-path {given}: write OLD=NEW, both as URLs")
    return old, new


def _log_of(pipeline: ExactlyOnce, into: str) -> TransactionLog:
    pipeline.open_log_in(into, create=True)
    return pipeline.log


def _parent_log(
    pipeline: ExactlyOnce, manifest: Manifest, *, is_lost: bool
) -> TransactionLog | None:
    """The log as it is now: the job's, or the one in the savepoint's old checkpoint."""
    if not pipeline.settings.is_log_in_checkpoint:
        return pipeline.log
    if is_lost:
        return None
    try:
        return checkpoint_log(manifest.head.checkpoint, create=False)
    except ConfigurationError as error:
        raise SavepointError(
            f"the savepoint's pipeline has its log in the checkpoint {manifest.head.checkpoint}, "
            f"which cannot be opened from here ({error}): run this where it is, so that it refuses "
            "later starts there; or, if it is lost for good, pass --lost"
        ) from error


def _log_now(pipeline: ExactlyOnce, manifest: Manifest, into: str | None) -> TransactionLog:
    """The log of the savepoint's pipeline, wherever restores have moved it, except to `into`."""
    log = _parent_log(pipeline, manifest, is_lost=False)
    assert log is not None  # noqa: S101 - for mypy
    while pipeline.settings.is_log_in_checkpoint:
        head = log.head(pipeline.name)
        place = None if head is None or head.moved_to is None else place_of_log(head.moved_to)
        if place is None or (into is not None and is_same_place(place, into)):
            break
        following = checkpoint_log(place, create=False)
        there = following.head(pipeline.name)
        if there is None or there.token == 0:
            raise SavepointError(
                f"the log of {pipeline.name!r} was being moved from {log.address} to {place} when "
                "a restore or a rewind into that place was interrupted: run it again first"
            )
        log = following
    return log


def _said_where(screen: Screen, manifest: Manifest, into: str, query_id: str) -> int:
    if screen.as_json:
        screen.json({"checkpoint": into, "query_id": query_id, "next_batch": manifest.batch + 1})
    else:
        screen.line(f"{into} is ready: the query's next start runs batch {manifest.batch + 1}")
    return 0


def _said_what(screen: Screen, found: Rewind, into: str, query_id: str | None) -> int:
    """What a rewind has done; or would do, without a query id."""
    removals = [facts.removal(removal) for removal in found.removals]
    if screen.as_json:
        done = {"checkpoint": into, "query_id": query_id, "next_batch": found.manifest.batch + 1}
        screen.json({**done, "sinks": removals})
    else:
        show_removals(screen, removals, is_done=query_id is not None)
        if query_id is not None:
            _said_where(screen, found.manifest, into, query_id)
    return FOUND if any(removal["refusal"] for removal in removals) else 0
