"""`doctor`: asks every server, the log, the checkpoint and Spark's settings what would bite."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import click

from sparkonce.cli.facts import Facts
from sparkonce.cli.looking import FOUND, json_option
from sparkonce.cli.screen import Screen, show_findings
from sparkonce.cli.targets import checkpoint_option, open_job
from sparkonce.errors import ConfigurationError, SparkOnceError
from sparkonce.finding import Finding, Level
from sparkonce.sinks.base import AnySink, at_once
from sparkonce.spark_hooks.checkpoint import open_checkpoint
from sparkonce.storage import local_path
from sparkonce.txn_log.record import State

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
    """Ask every server what would bite, and how to fix it.

    Ends with 3 when there is a warning or an error. In a bucket it writes one small object and
    removes it. It makes the log of a job that never ran, as its first start would.
    """
    screen = Screen(as_json=as_json)
    with open_job(job, checkpoint, create=True) as pipeline:
        asked = at_once(_ask, pipeline.all_sinks)
        found = [
            *_told("log", _log(pipeline)),
            *_told("checkpoint", _checkpoint(pipeline, checkpoint)),
            *_told("spark", _spark(_settings(conf_file))),
        ]
        for sink, findings in zip(pipeline.all_sinks, asked, strict=True):
            found += _told(sink.name, findings)
    if as_json:
        screen.json(found)
    else:
        show_findings(screen, found)
    return FOUND if any(one["level"] != Level.OK.value for one in found) else 0


def _told(about: str, findings: Iterable[Finding]) -> list[Facts]:
    return [
        {"about": about, "level": one.level.value, "what": one.what, "fix": one.fix}
        for one in findings
    ]


def _ask(sink: AnySink) -> list[Finding]:
    found: list[Finding] = []
    try:
        found.extend(sink.diagnose())
    except Exception as error:  # noqa: BLE001 - a sink of somebody else's may raise anything
        found.append(Finding(Level.ERROR, f"{sink.where}: {type(error).__name__}: {error}"))
    return found or [Finding(Level.OK, f"{sink.where}: the sink has no check of its own")]


def _log(pipeline: ExactlyOnce) -> Iterator[Finding]:
    log = pipeline.log
    yield from log.diagnose()
    unfinished = log.unfinished(pipeline.name)
    if unfinished:
        batches = ", ".join(f"{r.id.batch_id} ({r.state.value})" for r in unfinished)
        yield Finding(
            Level.WARNING, f"batches are not finished: {batches}", "sparkonce recover JOB"
        )


def _checkpoint(pipeline: ExactlyOnce, named: str | None) -> Iterator[Finding]:
    head = pipeline.log.head(pipeline.name)
    if head is None and named is None:
        yield Finding(Level.OK, "the query has not run yet")
        return
    location = named or (head.checkpoint if head else "")
    query_id = head.query_id if head else None
    if not location:
        yield Finding(Level.OK, "its location is noted from the query's next start on")
        return
    is_local = local_path(location) is not None
    if not is_local and named is None:
        yield Finding(
            Level.OK, f"{location} is on no local disk: pass it as --checkpoint to have it read"
        )
        return
    try:
        checkpoint = open_checkpoint(location, query_id, start_jvm=True)
    except SparkOnceError as error:
        yield Finding(
            Level.WARNING,
            f"{error}",
            "run sparkonce where the checkpoint is, or name it with --checkpoint; if it was "
            "deleted, restore it: a fresh one reads its sources from the start and is refused",
        )
        return
    committed = checkpoint.committed()
    last = "there is none" if committed in {None, -1} else f"batch {committed} is the last"
    told = f"{location}: of the batches that Spark has committed, {last}"
    newest = None if query_id is None else pipeline.log.newest(pipeline.name, query_id)
    if newest and committed is not None:
        is_ahead = newest.id.batch_id > committed and newest.state is not State.ABANDONED
        is_settled = not is_ahead and not pipeline.log.unfinished(pipeline.name)
        told += f"; the transaction log's newest is {newest.id.batch_id} ({newest.state.value})"
        told += ", so only sparkonce can go on from here" * is_ahead
        told += ": other code could go on from here, too" * is_settled
    if head is None and committed is not None and checkpoint.has_offsets(committed + 1):
        yield Finding(
            Level.WARNING,
            f"batch {committed + 1} was begun by other code, which may have delivered some of it",
            "docs/operations.md, Moving a running query here, says how to go on",
        )
    if is_local:
        yield Finding(
            Level.WARNING,
            f"{told}; it is on this machine's disk",
            "keep it where a driver on another machine finds it (HDFS, S3, …)",
        )
    else:
        yield Finding(Level.OK, told)
    try:
        bound = checkpoint.binding()
    except SparkOnceError as error:
        yield Finding(Level.ERROR, f"{error}")
        return
    log_id = pipeline.log.id_of(pipeline.name)
    if bound is not None and bound.log_id != log_id:
        yield Finding(
            Level.ERROR,
            f"{checkpoint.location} belongs to the log with id {bound.log_id}, and log= has "
            f"{log_id}",
            "point log= to the log that the query was started with",
        )


def _settings(conf_file: Path | None) -> dict[str, str] | None:
    """Of the file, else of a session that the job's module has made; None when nothing is known."""
    if conf_file is not None:
        try:
            text = conf_file.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ConfigurationError(
                f"--conf {conf_file} is no text: give the spark-defaults.conf of the job"
            ) from error
        lines = (line.strip() for line in text.splitlines())
        pairs = (
            line.replace("=", " ", 1).split(None, 1) for line in lines if line and line[0] != "#"
        )
        return {pair[0]: pair[1].strip() for pair in pairs if len(pair) > 1}
    from pyspark import SparkContext  # noqa: PLC0415 - the job has imported it

    context = SparkContext._active_spark_context  # noqa: SLF001 - None where there is none
    return None if context is None else dict(context.getConf().getAll())


def _spark(settings: Mapping[str, str] | None) -> Iterator[Finding]:
    if settings is None:
        yield Finding(
            Level.OK, "no settings known: pass --conf with the spark-defaults.conf of the job"
        )
        return
    found = list(_bad_settings(settings))
    yield from found or [Finding(Level.OK, "no setting is known to bite")]


def _bad_settings(settings: Mapping[str, str]) -> Iterator[Finding]:
    if settings.get("spark.speculation", "false").lower() == "true":
        yield Finding(
            Level.WARNING,
            "spark.speculation=true: every losing attempt prepares branches that have to be "
            "aborted; and before Spark 4.3, sinks that are written in several passes can get "
            "different rows where the query makes them by chance",
            "set spark.speculation=false for this job",
        )
    import pyspark  # noqa: PLC0415 - the job has imported it

    from sparkonce.spark_hooks.batch import SHUFFLE_CHECKS  # noqa: PLC0415 - imports pyspark

    major, minor = map(int, pyspark.__version__.split(".")[:2])
    default = "true" if (major, minor) >= (4, 2) else "false"
    checks = [settings.get(name, default).lower() == "true" for name in SHUFFLE_CHECKS]
    if (major, minor) < (4, 1) or not all(checks):
        yield Finding(
            Level.WARNING,
            f"{' and '.join(SHUFFLE_CHECKS)} are not both on: where an executor is lost and rows "
            "that differ when they are computed again decide to which task a shuffle sends them, "
            "some can be lost and others doubled",
            "set both to true (Spark 4.0 does not know them: use a newer one)",
        )
    if settings.get("spark.sql.streaming.stateStore.checkpointFormatVersion", "1") != "1":
        yield Finding(
            Level.ERROR,
            "spark.sql.streaming.stateStore.checkpointFormatVersion=2: a stateful query whose "
            "replayed batch reads no row fails for good",
            "set it to 1",
        )
    for name, value in settings.items():
        if name.endswith("asyncProgressTrackingEnabled") and value.lower() == "true":
            yield Finding(
                Level.ERROR,
                f"{name}=true: foreachBatch does not go with asynchronous progress tracking",
                "remove it",
            )
    if "spark.sql.streaming.checkpointFileManagerClass" in settings:
        yield Finding(
            Level.WARNING,
            "spark.sql.streaming.checkpointFileManagerClass is set: sparkonce reads the commit log "
            "through it, and has not been tested with managers of others",
            "make sure that it renames atomically",
        )
