"""`savepoint restore`, `fork` and `rewind`: fill a new checkpoint from a savepoint.

restore fork    the sinks are not touched
rewind          takes later batches out of the sinks first
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from sparkonce import facts
from sparkonce.cli.fencing import may_fence, yes_option
from sparkonce.cli.looking import FOUND, json_option
from sparkonce.cli.screen import Screen, show_removals
from sparkonce.cli.targets import place_of_savepoints
from sparkonce.errors import ConfigurationError, SavepointError, SparkOnceError
from sparkonce.protocol.pipeline import by_name, targets_of
from sparkonce.spark_hooks import savepoints as making
from sparkonce.spark_hooks.jobs import load_job
from sparkonce.spark_hooks.references import at, is_reference, refuse_plain_secrets, reveal
from sparkonce.spark_hooks.savepoints import Filling, Manifest, Rewind, Savepoints, retention
from sparkonce.storage import open_folder
from sparkonce.txn_log import TransactionLog, checkpoint_log
from sparkonce.txn_log.places import is_same_place, place_of_log

if TYPE_CHECKING:
    from sparkonce.spark_hooks.exactly_once import ExactlyOnce


class _MovingError(SavepointError):
    """A restore or a rewind was interrupted while it moved the log."""


@dataclass(frozen=True, slots=True)
class _Use:
    """A savepoint, the pipeline that will continue from it, and the checkpoint to fill.

    Attributes:
        place: where the savepoint is.
        manifest: its own.
        pipeline: of the JOB.
        into: location of the new checkpoint.
    """

    place: Savepoints
    manifest: Manifest
    pipeline: ExactlyOnce
    into: str

    @property
    def name(self) -> str:
        return self.pipeline.name

    def filling(self, moved: Sequence[str]) -> Filling:
        """The new checkpoint, whose folder is made; `moved` are pairs OLD=NEW."""
        paths = dict(map(_moved_path, moved))
        folder = open_folder(self.into, create=True)
        return Filling(self.place, self.manifest, folder, self.name, self._open_log, paths)

    def _open_log(self) -> TransactionLog:
        self.pipeline.open_log_in(self.into, create=True)
        return self.pipeline.log

    def check_known(self, option: str, unknown: Collection[str]) -> None:
        """Refuse names of sinks that the pipeline does not have."""
        if unknown:
            raise ConfigurationError(
                f"{option} {', '.join(sorted(unknown))}: {self.name!r} has the sinks "
                f"{', '.join(by_name(self.pipeline.all_sinks))}"
            )

    # -- the log as it is now ----------------------------------------------------------------------

    @property
    def is_log_inside(self) -> bool:
        return self.pipeline.settings.is_log_in_checkpoint

    def parent_log(self) -> TransactionLog:
        """The job's log, or the one in the savepoint's old checkpoint."""
        if not self.is_log_inside:
            return self.pipeline.log
        location = self.manifest.head.checkpoint
        try:
            return checkpoint_log(location, create=False)
        except ConfigurationError as error:
            raise SavepointError(
                f"the savepoint's pipeline has its log in the checkpoint {location}, which cannot "
                f"be opened from here ({error}): run this where it is, so that it refuses later "
                "starts there; or, if it is lost for good, use `savepoint restore --lost`"
            ) from error

    def check_is_lost(self) -> None:
        """Refuse --lost where the pipeline's log can be opened: two checkpoints would run."""
        if not self.is_log_inside:
            raise SavepointError(
                f"--lost: the log of {self.name!r} is not in its checkpoint, so it knows what was "
                "delivered: run this without --lost"
            )
        try:
            log = self.log_now(but_not=self.into)
        except _MovingError:
            raise
        except SparkOnceError:
            return
        head = log.head(self.name)
        if head is not None and head.moved_to is None:
            raise SavepointError(
                f"--lost: {log.address} is still there, with {self.name!r} in it: run this without "
                "--lost, so that it refuses later starts there"
            )

    def log_now(self, but_not: str | None) -> TransactionLog:
        """The log of the savepoint's pipeline, wherever restores have moved it, except to there."""
        log = self.parent_log()
        while self.is_log_inside:
            head = log.head(self.name)
            place = None if head is None or head.moved_to is None else place_of_log(head.moved_to)
            if place is None or (but_not is not None and is_same_place(place, but_not)):
                break
            following = checkpoint_log(place, create=False)
            there = following.head(self.name)
            if there is None or there.token == 0:
                raise _MovingError(
                    f"the log of {self.name!r} was being moved from {log.address} to {place} when "
                    "a restore or a rewind into that place was interrupted: run it again first"
                )
            log = following
        return log


def _uses_savepoint(*, create: bool) -> Callable[[Callable[..., int]], click.Command]:
    """Make a command of JOB ROOT NAME --into, whose first argument is a `_Use`.

    Args:
        create: whether the job's log may be made.
    """

    def decorate(action: Callable[..., int]) -> click.Command:
        @click.command()
        @click.argument("job")
        @click.argument("root")
        @click.argument("name")
        @click.option(
            "--into", metavar="LOCATION", required=True, help="The new checkpoint: an empty folder."
        )
        @click.option(
            "--source-kafka",
            "brokers",
            metavar="SERVERS",
            help="Check that Kafka still has the input: host:port,…, or a file of JSON.",
        )
        @wraps(action)
        def command(
            *, job: str, root: str, name: str, into: str, brokers: str | None, **options: Any
        ) -> int:
            place = place_of_savepoints(root)
            manifest = place.read(name)
            _check_input(manifest, brokers)
            with load_job(job, create=create) as pipeline:
                return action(_Use(place, manifest, pipeline, into), **options)

        return command

    return decorate


_source_path = click.option(
    "--source-path",
    "moved",
    multiple=True,
    metavar="OLD=NEW",
    help="A file source's folder has moved; both as URLs.",
)


@_uses_savepoint(create=False)
@click.option(
    "--lost",
    is_flag=True,
    help="The checkpoint is lost for good, with its log; batches after the savepoint come again.",
)
@_source_path
@yes_option
@json_option
def restore(use: _Use, *, lost: bool, moved: Sequence[str], yes: bool, as_json: bool) -> int:
    """Fill a new checkpoint, with which JOB continues after the savepoint's batch.

    Refused when the sinks have later batches. Stop the query first: a driver that still runs is
    fenced, so it asks unless that is known to be gone. After an interruption, run it again.
    """
    if lost:
        use.check_is_lost()
        query_id = making.restore_lost(use.filling(moved))
    else:
        log = use.log_now(but_not=use.into)
        confirm = partial(may_fence, log, use.name, yes=yes)
        query_id = making.restore(use.filling(moved), log, confirm)
    return _said_where(Screen(as_json=as_json), use, query_id)


@_uses_savepoint(create=True)
@click.option(
    "--share", "shared", multiple=True, metavar="SINK", help="May write where the first one does."
)
@_source_path
@json_option
def fork(use: _Use, *, shared: Sequence[str], moved: Sequence[str], as_json: bool) -> int:
    """Fill a new checkpoint, with which another JOB begins after the savepoint's batch.

    JOB has a name and targets of its own; the first pipeline goes on undisturbed. After an
    interruption, run it again.
    """
    targets = targets_of(use.pipeline.all_sinks)
    use.check_known("--share", set(shared) - targets.keys())
    query_id = making.fork(use.filling(moved), targets, shared)
    return _said_where(Screen(as_json=as_json), use, query_id)


@_uses_savepoint(create=False)
@click.option(
    "--keep", "kept", multiple=True, metavar="SINK", help="Its rows stay; new ones come to them."
)
@_source_path
@click.option("--dry-run", is_flag=True, help="Only show what would be removed.")
@yes_option
@json_option
def rewind(
    use: _Use,
    *,
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
    sinks = by_name(use.pipeline.all_sinks)
    use.check_known("--keep", set(kept) - {*sinks, *use.manifest.head.sinks})
    log = use.log_now(but_not=None if dry_run else use.into)
    query_id = None
    if dry_run:
        use.place.check_whole(use.manifest)
        found = Rewind.of(use.manifest, log, pipeline=use.name, sinks=sinks, kept=kept)
    else:
        confirm = partial(may_fence, log, use.name, yes=yes)
        query_id, found = making.rewind(use.filling(moved), log, sinks, kept, confirm)
    return _said_what(Screen(as_json=as_json), use, found, query_id)


def _check_input(manifest: Manifest, brokers: str | None) -> None:
    """Refuse a savepoint whose input Kafka has deleted; without brokers, say what is not known."""
    if brokers is not None:
        retention.check_input(manifest, _settings_of(brokers))
    elif retention.positions(manifest.record.offsets):
        click.echo(
            "not checked whether Kafka still has the input that follows: see --source-kafka",
            err=True,
        )


def _settings_of(brokers: str) -> dict[str, Any]:
    if not brokers.endswith(".json"):
        return {"bootstrap.servers": brokers}
    try:
        settings = json.loads(Path(brokers).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"--source-kafka {brokers} cannot be read: {error}") from error
    if not isinstance(settings, dict) or "bootstrap.servers" not in settings:
        raise ConfigurationError(
            f"--source-kafka {brokers}: write settings of librdkafka, with bootstrap.servers"
        )
    refuse_plain_secrets(settings, brokers)
    for name, value in settings.items():
        if is_reference(value):
            ((kind, place),) = value.items()
            settings[name] = reveal(kind, place, at(brokers, name))
    return settings


def _moved_path(given: str) -> tuple[str, str]:
    old, _, new = given.partition("=")
    if not (old and new):
        raise ConfigurationError(f"--source-path {given}: write OLD=NEW, both as URLs")
    return old, new


def _said_where(screen: Screen, use: _Use, query_id: str) -> int:
    batch = use.manifest.batch + 1
    if screen.as_json:
        screen.json({"checkpoint": use.into, "query_id": query_id, "next_batch": batch})
    else:
        screen.line(f"{use.into} is ready: the query's next start runs batch {batch}")
    return 0


def _said_what(screen: Screen, use: _Use, found: Rewind, query_id: str | None) -> int:
    """What a rewind has done; or would do, without a query id."""
    removals = [facts.removal(removal) for removal in found.removals]
    if screen.as_json:
        done = {"checkpoint": use.into, "query_id": query_id, "next_batch": use.manifest.batch + 1}
        screen.json({**done, "sinks": removals})
    else:
        show_removals(screen, removals, is_done=query_id is not None)
        if query_id is not None:
            _said_where(screen, use, query_id)
    return FOUND if any(removal["refusal"] for removal in removals) else 0
