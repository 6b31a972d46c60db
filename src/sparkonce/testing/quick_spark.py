"""What lets short-lived Spark drivers start and run quickly: JVM options, and a setting.

    python -m sparkonce.testing.quick_spark

runs a small query. `jvm_options` runs it once and keeps an archive of the classes that Spark loads.
A JVM that maps the archive starts in about half the time (class data sharing, JEP 350). It takes
170 MB in the cache; `SPARKONCE_CLASS_ARCHIVE=off` does without.
"""

from __future__ import annotations

import hashlib
import os
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from sparkonce.testing.services.cache import SCRATCH, cache_dir, cached, progress
from sparkonce.testing.services.java import JVM_FLAGS, QUICK_START, java
from sparkonce.testing.services.process import Command, import_path, own_guard

_ARCHIVE = "spark.jsa"


def jvm_options() -> str:
    """JVM options for a driver; the first call on a machine takes half a minute, for the archive.

    Raises:
        ServiceError: there is no Java.
    """
    import pyspark  # noqa: PLC0415 - an extra

    if os.environ.get("SPARKONCE_CLASS_ARCHIVE") == "off":
        return _quick()
    # An archive fits only the JVM and the jars it was made with; others start without it.
    jars = Path(pyspark.__file__).parent / "jars"
    installed = jars.stat().st_mtime_ns if jars.is_dir() else 0
    parts = f"{Path(java()).resolve()} {jars} {pyspark.__version__} {installed}"
    digest = hashlib.sha256(parts.encode()).hexdigest()[:12]
    archive = cached(cache_dir() / f"spark-classes-{digest}", _record) / _ARCHIVE
    shared = [f"-XX:SharedArchiveFile={archive}"] if archive.is_file() else []
    return _quick(*shared)


def local_checkpoints() -> dict[str, str]:
    """The setting for checkpoints on a local disk, which takes a fifth of a test's CPU time off.

    By default Spark writes them through Hadoop's FileContext, which starts the program `readlink`
    twice for each file. Hadoop's FileSystem, which Spark uses where there is no FileContext, starts
    none. Both write a temporary file and rename it.
    """
    import pyspark  # noqa: PLC0415 - an extra

    package = "org.apache.spark.sql.execution.streaming"
    if not pyspark.__version__.startswith("4.0."):
        package += ".checkpointing"
    manager = f"{package}.FileSystemBasedCheckpointFileManager"
    return {"spark.sql.streaming.checkpointFileManagerClass": manager}


def submit_args(settings: Mapping[str, str] | None = None) -> str:
    """The value of PYSPARK_SUBMIT_ARGS that passes `jvm_options` and settings to a driver.

    Args:
        settings: of Spark; default: `local_checkpoints`.
    """
    return _submit_args(jvm_options(), local_checkpoints() if settings is None else settings)


def _quick(*more: str) -> str:
    return " ".join((*JVM_FLAGS, QUICK_START, *more))


def _submit_args(options: str, settings: Mapping[str, str]) -> str:
    given = "".join(f"--conf {key}={value} " for key, value in settings.items())
    return f"--driver-java-options '{options}' {given}pyspark-shell"


def _record(folder: Path) -> None:
    options = _quick(f"-XX:ArchiveClassesAtExit={folder / _ARCHIVE}", "-Xlog:disable")
    scratch = folder / SCRATCH
    command = Command(
        [sys.executable, "-m", __name__],
        log=scratch / "log",
        env={
            **os.environ,
            **import_path(),
            "PYSPARK_SUBMIT_ARGS": _submit_args(options, local_checkpoints()),
            "TMPDIR": str(scratch),
        },
    )
    with own_guard(None) as guard, progress("making Spark start quickly") as tick:
        # If it fails, drivers start without the archive; one that cannot start reports why.
        guard.run(command, tick=tick)


def main() -> None:
    """Load the classes of a streaming query; the JVM writes the archive when it exits by itself."""
    from sparkonce.testing.job import quiet_session  # noqa: PLC0415 - starts Spark

    folder = Path(tempfile.mkdtemp())
    spark = quiet_session("local[2]", folder)
    spark.range(100).write.json(f"{folder}/rows")
    query = (
        spark.readStream.schema("id long")
        .json(f"{folder}/rows")
        .writeStream.foreachBatch(
            lambda df, _: df.mapInArrow(lambda rows: rows, df.schema).toArrow()
        )
        .option("checkpointLocation", f"{folder}/checkpoint")
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    gateway = spark.sparkContext._gateway  # noqa: SLF001 - PySpark has no public way to the JVM
    assert gateway is not None  # noqa: S101 - for mypy
    spark.stop()
    gateway.shutdown()
    gateway.proc.stdin.close()
    gateway.proc.wait()


if __name__ == "__main__":
    main()
