"""`savepoint`: keep a query's checkpoint at a complete batch, restore it, fork it.

create                     reads a checkpoint, of a query that may be running
list show verify           need no JOB and no log; nor do export and delete
restore fork               fill a new checkpoint; the sinks are not touched
rewind                     fills one too, after it has taken later batches out of the sinks
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import click
from rich.console import Console
from rich.progress import Progress

from sparkonce.cli import facts
from sparkonce.cli.facts import Facts
from sparkonce.cli.fencing import may_fence, yes_option
from sparkonce.cli.looking import FOUND, json_option
from sparkonce.cli.screen import Screen, show_removals, when
from sparkonce.cli.targets import checkpoint_option, open_job
from sparkonce.errors import ConfigurationError, SavepointError
from sparkonce.protocol.operating import head_here
from sparkonce.protocol.pipeline import by_name, targets_of
from sparkonce.spark_hooks import savepoints as making
from sparkonce.spark_hooks.checkpoint import open_checkpoint
from sparkonce.spark_hooks.jobs import load_job
from sparkonce.spark_hooks.savepoints import Manifest, Rewind, Savepoints
from sparkonce.storage import open_folder
from sparkonce.txn_log import TransactionLog, checkpoint_log
from sparkonce.txn_log.places import is_same_place, place_of_log
from sparkonce.words import counted

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


@click.group()
def savepoint() -> None:
    """Copies of a checkpoint at a complete batch: to restore, to rewind to, or to fork.

    ROOT is a folder for savepoints: a path, or a URL that Spark's Hadoop knows.
    """


@savepoint.command()
@click.argument("job")
@click.argument("root")
@checkpoint_option
@click.option("--name", help="Of the savepoint; default: pipeline, batch and time.")
@click.option("--batch", type=int, help="The last batch to hold; default: the newest complete one.")
@json_option
def create(
    *,
    job: str,
    root: str,
    checkpoint: str | None,
    name: str | None,
    batch: int | None,
    as_json: bool,
) -> int:
    """Make a savepoint of JOB's query, which may be running."""
    with open_job(job, checkpoint) as pipeline:
        head = head_here(pipeline.log, pipeline.name)
        files = open_checkpoint(checkpoint or head.checkpoint, None, start_jvm=True)
        with _shown_progress() as progress:
            made = making.create(
                _place(root, create=True),
                pipeline.log,
                pipeline.name,
                files,
                name=name,
                batch=batch,
                progress=progress,
            )
    found = _facts(made)
    screen = Screen(as_json=as_json)
    if as_json:
        screen.json(found)
    else:
        screen.line(f"{made.name}: batch {made.batch} of {made.head.pipeline}, {_size(found)}")
    return 0


@savepoint.command(name="list")
@click.argument("root")
@json_option
def list_(root: str, *, as_json: bool) -> int:
    """The savepoints of ROOT, by name."""
    place = _place(root)
    found = [_facts(place.read(name)) for name in place.names()]
    screen = Screen(as_json=as_json)
    if as_json:
        screen.json(found)
    elif not found:
        screen.say(f"{place.address} has no savepoint")
    else:
        screen.table(
            ["savepoint", "pipeline", "batch", "made", "bytes"],
            [
                (f["name"], f["pipeline"], f["batch"], when(f["made_at"]), f"{f['bytes']:,}")
                for f in found
            ],
        )
    return 0


@savepoint.command()
@click.argument("root")
@click.argument("name")
@json_option
def show(root: str, name: str, *, as_json: bool) -> int:
    """What one savepoint holds."""
    manifest = _place(root).read(name)
    found = _facts(manifest)
    screen = Screen(as_json=as_json)
    if as_json:
        screen.json({**found, "files": {n: list(f) for n, f in manifest.files.items()}})
        return 0
    screen.title(manifest.name, "")
    screen.pairs(
        [
            ("pipeline", found["pipeline"]),
            ("last batch", found["batch"]),
            ("made", f"{when(found['made_at'])}, with Spark {manifest.spark}"),
            ("query", found["query_id"]),
            ("checkpoint", found["checkpoint"]),
            ("log", found["log"]),
            *((f"sink {name}", target) for name, target in found["sinks"].items()),
            ("holds", _size(found)),
        ]
    )
    return 0


@savepoint.command()
@click.argument("root")
@click.argument("name")
@json_option
def verify(root: str, name: str, *, as_json: bool) -> int:
    """Read every file and compare its checksum. Exits with 3 when one is damaged."""
    place = _place(root)
    manifest = place.read(name)
    damaged = dict(place.verify(manifest))
    screen = Screen(as_json=as_json)
    if as_json:
        screen.json({"name": name, "files": len(manifest.files), "damaged": damaged})
    else:
        for file, what in damaged.items():
            screen.line(f"{file} {what}", "red")
        if not damaged:
            screen.say(f"{name} is whole: {_size(_facts(manifest))}")
    return FOUND if damaged else 0


@savepoint.command()
@click.argument("root")
@click.argument("name")
@click.argument("to")
@json_option
def export(root: str, name: str, to: str, *, as_json: bool) -> int:
    """Copy a savepoint to TO, another folder for savepoints.

    After an interruption, run it again.
    """
    place, other = _place(root), _place(to, create=True)
    manifest = place.read(name)
    with _shown_progress() as progress:
        place.export(manifest, other, progress)
    screen = Screen(as_json=as_json)
    if as_json:
        screen.json(_facts(manifest))
    else:
        screen.say(f"{name} is in {other.address}: {_size(_facts(manifest))}")
    return 0


@savepoint.command()
@click.argument("root")
@click.argument("name")
@json_option
def delete(root: str, name: str, *, as_json: bool) -> int:
    """Delete a savepoint, and the files that no other one of ROOT needs.

    After an interruption, run it again.
    """
    gone = _place(root).delete(name)
    screen = Screen(as_json=as_json)
    if as_json:
        screen.json({"name": name, "deleted_files": gone})
    else:
        screen.say(f"{name} is deleted, with {counted(gone, 'file')} that only it had")
    return 0


@savepoint.command()
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
    place = _place(root)
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


@savepoint.command()
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
    place = _place(root)
    manifest = place.read(name)
    with load_job(job, create=True) as pipeline:
        targets = targets_of(pipeline.all_sinks)
        if unknown := set(shared) - targets.keys():
            raise ConfigurationError(
                f"--share {', '.join(sorted(unknown))}: {pipeline.name!r} has the sinks "
                f"{', '.join(targets)}"
            )
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


@savepoint.command()
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
    place = _place(root)
    manifest = place.read(name)
    query_id = None
    with load_job(job, create=False) as pipeline:
        sinks = by_name(pipeline.all_sinks)
        if unknown := set(kept) - {*sinks, *manifest.head.sinks}:
            raise ConfigurationError(
                f"--keep {', '.join(sorted(unknown))}: {pipeline.name!r} has the sinks "
                f"{', '.join(sinks)}"
            )
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


def _moved_path(given: str) -> tuple[str, str]:
    old, _, new = given.partition("=")
    if not (old and new):
        raise ConfigurationError(f"--source-path {given}: write OLD=NEW, both as URLs")
    return old, new


@contextlib.contextmanager
def _shown_progress() -> Iterator[Callable[[int, int], None]]:
    """A bar on a terminal, for copies that take long."""
    with Progress(console=Console(stderr=True), disable=not sys.stderr.isatty()) as bar:
        task = bar.add_task("copying")
        yield lambda kept, number: bar.update(task, completed=kept, total=number)


def _place(root: str, *, create: bool = False) -> Savepoints:
    return Savepoints.at(root, create=create, by_boto3=True)


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


def _facts(manifest: Manifest) -> Facts:
    return {
        "name": manifest.name,
        "pipeline": manifest.head.pipeline,
        "batch": manifest.batch,
        "made_at": facts.utc(manifest.made_at),
        "query_id": manifest.head.query_id,
        "checkpoint": manifest.head.checkpoint,
        "log": manifest.log,
        "sinks": dict(manifest.head.sinks),
        "files": len(manifest.files),
        "bytes": manifest.bytes,
        "spark": manifest.spark,
        "sparkonce": manifest.sparkonce,
    }


def _size(found: Facts) -> str:
    return f"{counted(found['files'], 'file')}, {found['bytes']:,} bytes"


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
