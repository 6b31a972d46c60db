"""Spark's settings, as far as they are known here, and those that cause trouble."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from sparkonce.errors import ConfigurationError
from sparkonce.finding import Finding, Level
from sparkonce.sinks import verbs
from sparkonce.sinks.base import AnySink


def read_settings(conf_file: Path | None) -> dict[str, str] | None:
    """The file's settings, or those of a session that the job's module has made.

    None when there is neither.

    Raises:
        ConfigurationError: the file is not text.
    """
    if conf_file is not None:
        try:
            text = conf_file.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ConfigurationError(
                f"--conf {conf_file} is not text: give the spark-defaults.conf of the job"
            ) from error
        lines = (line.strip() for line in text.splitlines())
        pairs = (
            line.replace("=", " ", 1).split(None, 1) for line in lines if line and line[0] != "#"
        )
        return {pair[0]: pair[1].strip() for pair in pairs if len(pair) > 1}
    from pyspark import SparkContext  # noqa: PLC0415 - the job has imported it

    context = SparkContext._active_spark_context  # noqa: SLF001 - None where there is none
    return None if context is None else dict(context.getConf().getAll())


def check_settings(
    settings: Mapping[str, str] | None, sinks: Sequence[AnySink] = ()
) -> Iterator[Finding]:
    """Which of Spark's settings cause trouble, by themselves or with these sinks."""
    if settings is None:
        yield Finding(
            Level.OK, "no settings known: pass --conf with the spark-defaults.conf of the job"
        )
        return
    found = [*_tasks(settings), *_streaming(settings), *_cores(settings, sinks)]
    yield from found or [Finding(Level.OK, "no setting is known to cause trouble")]


def _tasks(settings: Mapping[str, str]) -> Iterator[Finding]:
    """Settings by which rows can be lost or doubled between tasks."""
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
            f"{' and '.join(SHUFFLE_CHECKS)} are not both on: if an executor is lost, and a "
            "shuffle distributes rows by values that differ when Spark computes them again, rows "
            "can be lost or doubled",
            "set both to true (Spark 4.0 does not have them: use a newer one)",
        )


def _cores(settings: Mapping[str, str], sinks: Sequence[AnySink]) -> Iterator[Finding]:
    """More cores than a server has connections left."""
    from sparkonce.spark_hooks.probing import most_tasks  # noqa: PLC0415 - imports pyspark

    cores = most_tasks(settings) or 0
    for sink in sinks:
        if reason := verbs.lacks_room(sink, cores):
            yield Finding(
                Level.WARNING,
                reason,
                "raise the server's limit, or give the sink fewer tasks with writers=",
            )


def _streaming(settings: Mapping[str, str]) -> Iterator[Finding]:
    """Settings of streaming queries."""
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
                f"{name}=true: foreachBatch does not work with asynchronous progress tracking",
                "remove it",
            )
    if "spark.sql.streaming.checkpointFileManagerClass" in settings:
        yield Finding(
            Level.WARNING,
            "spark.sql.streaming.checkpointFileManagerClass is set: sparkonce reads the files that "
            "Spark's own managers write, and has not been tested with others",
            "make sure that it writes the same files, and renames atomically",
        )
