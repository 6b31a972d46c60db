"""`doctor`: looks for trouble in every server, the log, the checkpoint and Spark's settings."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from sparkonce.cli.looking import FOUND, json_option
from sparkonce.cli.screen import Screen, show_findings
from sparkonce.cli.spark_settings import check_settings, read_settings
from sparkonce.cli.targets import checkpoint_option, open_job
from sparkonce.errors import ConfigurationError, SparkOnceError
from sparkonce.facts import Facts
from sparkonce.finding import Finding, Level
from sparkonce.parallel import at_once
from sparkonce.sinks import verbs
from sparkonce.sinks.base import AnySink
from sparkonce.spark_hooks.checkpoint import CheckpointFiles, open_checkpoint
from sparkonce.storage import local_path
from sparkonce.txn_log import TransactionLog
from sparkonce.txn_log.claim import RESTORING
from sparkonce.txn_log.record import Head, State, TransactionRecord
from sparkonce.txn_log.rules import require_here

if TYPE_CHECKING:
    from sparkonce.spark_hooks.exactly_once import ExactlyOnce


@click.command()
@click.argument("job")
@checkpoint_option
@click.option(
    "--conf",
    "conf_file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Spark's settings: a spark-defaults.conf.",
)
@json_option
def doctor(job: str, checkpoint: str | None, conf_file: Path | None, as_json: bool) -> int:
    """Check every server for what would cause trouble, and show how to fix it.

    The worst findings come first. Exits with 3 when there is a warning or an error. To try its
    rights it writes probes, and removes them. It makes the log of a job that never ran, as its
    first start would.
    """
    screen = Screen(as_json=as_json)
    with open_job(job, checkpoint, create=True) as pipeline:
        found = look(pipeline, checkpoint, conf_file)
    if as_json:
        screen.json(found)
    else:
        show_findings(screen, found)
    return FOUND if any(one["level"] != Level.OK.value for one in found) else 0


def look(pipeline: ExactlyOnce, checkpoint: str | None, conf_file: Path | None) -> list[Facts]:
    """Ask every sink, the log, the checkpoint and Spark's settings."""
    asked = at_once(_ask, pipeline.all_sinks)
    found = [
        *_facts("log", _log(pipeline)),
        *_facts("checkpoint", _checkpoint(pipeline, checkpoint)),
        *_facts("spark", check_settings(read_settings(conf_file), pipeline.sinks)),
    ]
    for sink, findings in zip(pipeline.all_sinks, asked, strict=True):
        found += _facts(sink.name, findings)
    return _worst_first(found)


def look_at_log(log: TransactionLog) -> list[Facts]:
    """Ask the log only: without a JOB no sink is known."""
    return _worst_first(_facts("log", log.diagnose()))


def _worst_first(found: list[Facts]) -> list[Facts]:
    levels = [level.value for level in reversed(Level)]
    return sorted(found, key=lambda one: levels.index(one["level"]))


def _facts(about: str, findings: Iterable[Finding]) -> list[Facts]:
    return [
        {"about": about, "level": one.level.value, "what": one.what, "fix": one.fix}
        for one in findings
    ]


def _ask(sink: AnySink) -> list[Finding]:
    found: list[Finding] = []
    try:
        found.extend(verbs.diagnose(sink))
    except Exception as error:  # noqa: BLE001 - a user's own sink may raise anything
        found.append(Finding(Level.ERROR, f"{sink.where}: {type(error).__name__}: {error}"))
    return found or [Finding(Level.OK, f"{sink.where}: the sink has no check of its own")]


def _log(pipeline: ExactlyOnce) -> Iterator[Finding]:
    log = pipeline.log
    yield from log.diagnose()
    try:
        require_here(log.head(pipeline.name), ConfigurationError)
    except ConfigurationError as error:
        yield Finding(Level.ERROR, f"{error}")
        return
    unfinished = log.unfinished(pipeline.name)
    if unfinished:
        batches = ", ".join(f"{r.id.batch_id} ({r.state.value})" for r in unfinished)
        yield Finding(
            Level.WARNING,
            f"not finished: batch {batches}",
            "start the query, or run sparkonce recover JOB",
        )


def _checkpoint(pipeline: ExactlyOnce, named: str | None) -> Iterator[Finding]:
    head = pipeline.log.head(pipeline.name)
    if head is None and named is None:
        yield Finding(Level.OK, "the query has not run yet")
        return
    location = named or (head.checkpoint if head else "")
    if not location:
        yield Finding(Level.OK, "its location is recorded from the query's next start on")
        return
    if local_path(location) is None and named is None:
        yield Finding(
            Level.OK, f"{location} is on no local disk: pass it as --checkpoint to have it read"
        )
        return
    try:
        checkpoint = open_checkpoint(location, head.query_id if head else None, start_jvm=True)
    except SparkOnceError as error:
        yield Finding(
            Level.WARNING,
            f"{error}",
            "run sparkonce where the checkpoint is, or name it with --checkpoint; if it was "
            "deleted, restore it: a fresh one reads its sources from the start and is refused",
        )
        return
    yield from _progress(pipeline, checkpoint, head)
    yield from _binding(pipeline, checkpoint)


def _progress(
    pipeline: ExactlyOnce, checkpoint: CheckpointFiles, head: Head | None
) -> Iterator[Finding]:
    """How far Spark and the transaction log have come."""
    committed = checkpoint.committed()
    newest = None if head is None else pipeline.log.newest(pipeline.name, head.query_id)
    if gap := _gap(checkpoint, committed, newest):
        yield gap
        return
    last = "there is none" if committed in {None, -1} else f"batch {committed} is the last"
    text = f"{checkpoint.location}: of the batches that Spark has committed, {last}"
    if newest and committed is not None:
        is_ahead = newest.id.batch_id > committed and newest.state is not State.ABANDONED
        is_finished = not is_ahead and not pipeline.log.unfinished(pipeline.name)
        text += f"; the transaction log's newest is {newest.id.batch_id} ({newest.state.value})"
        text += ", so only sparkonce can go on from here" * is_ahead
        text += ": other code may continue the query, too" * is_finished
    if head is None and committed is not None and checkpoint.has_offsets(committed + 1):
        yield Finding(
            Level.WARNING,
            f"batch {committed + 1} was begun by other code, which may have delivered some of it",
            "docs/howto/adopting.md explains how to go on",
        )
    yield Finding(Level.OK, text)
    if local_path(checkpoint.location) is not None:
        yield Finding(
            Level.WARNING,
            f"{checkpoint.location} is on this machine's disk",
            "keep it where a driver on another machine finds it (HDFS, S3, …)",
        )


def _gap(
    checkpoint: CheckpointFiles, committed: int | None, newest: TransactionRecord | None
) -> Finding | None:
    """What it means that the checkpoint, or the log, is behind the other one; None if neither is.

    A start is refused then, unless Spark has only repartitioned its state.
    """
    if newest is None or committed is None:
        return None
    batch_id, state = newest.id.batch_id, newest.state.value
    if newest.state is State.ABANDONED:
        return _abandoned_gap(checkpoint, committed, batch_id)
    if committed > batch_id:
        if checkpoint.repartitions_before(committed + 1) >= committed - batch_id:
            return Finding(
                Level.OK,
                f"{checkpoint.location}: since batch {batch_id}, the newest of the transaction log "
                f"({state}), Spark has only repartitioned its state; the next start enters batch "
                f"{committed}",
            )
        return Finding(
            Level.ERROR,
            f"Spark has committed batch {committed} in {checkpoint.location}, and the newest batch "
            f"of the transaction log is {batch_id} ({state}): the log is an older copy, or batches "
            "ran without it",
            "if other code ran the query meanwhile, start with "
            f'adopt="batch {committed + 1}" (docs/howto/adopting.md); else do not run '
            "`sparkonce recover` or `settle` on an older copy, and restore a newer one "
            "(docs/reference/errors/log.md, Restore a log)",
        )
    if not checkpoint.has_offsets(batch_id):
        return Finding(
            Level.ERROR,
            f"{checkpoint.location} has not begun batch {batch_id}, which the transaction log has "
            f"({state}): the checkpoint is an older copy",
            "start with the newest checkpoint; if it is lost, docs/howto/moving.md, A lost "
            "checkpoint",
        )
    return None


def _abandoned_gap(checkpoint: CheckpointFiles, committed: int, batch_id: int) -> Finding | None:
    if committed < batch_id:
        return None
    return Finding(
        Level.ERROR,
        f"Spark has committed batch {committed} in {checkpoint.location}, and batch {batch_id} is "
        "abandoned: it is in no sink, and Spark does not replay it",
        "start the query: it is refused, and says what to delete from the checkpoint",
    )


def _binding(pipeline: ExactlyOnce, checkpoint: CheckpointFiles) -> Iterator[Finding]:
    """Whether the checkpoint belongs to this log."""
    try:
        bound = checkpoint.binding()
    except SparkOnceError as error:
        yield Finding(Level.ERROR, f"{error}")
        return
    log_id = pipeline.log.id_of(pipeline.name)
    if bound is not None and bound.log_id == RESTORING:
        yield Finding(
            Level.ERROR,
            f"a savepoint command that fills {checkpoint.location} has not ended; of a rewind, "
            "some sinks may have lost their later rows and others not",
            "run the same `sparkonce savepoint` command again (restore, fork or rewind)",
        )
    elif bound is not None and bound.log_id != log_id:
        yield Finding(
            Level.ERROR,
            f"{checkpoint.location} belongs to the log with id {bound.log_id}, and log= has "
            f"{log_id}",
            "point log= to the log that the query was started with",
        )
