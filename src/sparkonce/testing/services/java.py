"""Java, and the jars that the Ivy inside PySpark resolves."""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path

from sparkonce.testing.services.cache import cache_dir, cached, progress
from sparkonce.testing.services.errors import ServiceError
from sparkonce.testing.services.process import Command, Guard, log_tail

OLDEST_JAVA = 17
IVY_FILE = Path(__file__).with_name("ivy.xml")
JAR_SETS: Mapping[str, str] = {
    "broker": "downloading Kafka",
    "connector": "downloading Spark's Kafka connector",
    "s3mock": "downloading S3Mock",
    "s3a": "downloading Hadoop's S3A",
}
QUICK_START = ("-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-Xshare:auto")
"""JVM flags for servers that live for seconds."""


def java() -> str:
    """The `java` to use, of a version that Spark and the servers accept."""
    home = os.environ.get("JAVA_HOME")
    return _checked_java(home, os.environ.get("PATH"))


@functools.cache
def _checked_java(home: str | None, path: str | None) -> str:
    found = shutil.which("java", path=f"{home}/bin") if home else shutil.which("java", path=path)
    if found is None:
        where = f"in JAVA_HOME ({home})" if home else "on the PATH"
        raise ServiceError(f"There is no java {where}; install Java {OLDEST_JAVA} or newer.")
    # "-version" writes to stderr: openjdk version "17.0.15" 2025-04-15
    answer = subprocess.run([found, "-version"], capture_output=True, text=True, check=False)
    version = re.search(r'version "(?:1\.)?(\d+)', answer.stderr)
    if version is None:
        raise ServiceError(f"{found} does not tell its version; install Java {OLDEST_JAVA}.")
    if int(version[1]) < OLDEST_JAVA:
        raise ServiceError(
            f"{found} is Java {version[1]}, and Java {OLDEST_JAVA} or newer is needed; "
            "install it, or point JAVA_HOME to it."
        )
    return found


def ivy_jar() -> Path:
    """The Ivy that PySpark ships. PySpark itself is not imported."""
    spec = importlib.util.find_spec("pyspark")
    jars = Path(str(spec.origin)).parent.glob("jars/ivy-*.jar") if spec else iter(())
    found = next(jars, None)
    if found is None:
        raise ServiceError("The Ivy jar of the pyspark package is missing; install pyspark 4.")
    return found


def jar_dir(conf: str) -> Path:
    """A folder with the jars of one configuration of ivy.xml, downloaded at the first call."""
    digest = hashlib.sha256(IVY_FILE.read_bytes()).hexdigest()[:12]

    def resolve(folder: Path) -> None:
        with (
            tempfile.TemporaryDirectory(prefix="sparkonce-ivy-") as scratch,
            progress(JAR_SETS[conf], Path(scratch)) as tick,
        ):
            log = Path(scratch, "log")
            settings = os.environ.get("SPARKONCE_IVY_SETTINGS")
            argv = [
                *(java(), "-jar", str(ivy_jar()), "-ivy", str(IVY_FILE), "-confs", conf),
                *(("-settings", settings) if settings else ()),
                *("-cache", f"{scratch}/cache"),
                *("-retrieve", f"{folder}/[artifact]-[revision].[ext]"),
            ]
            guard = Guard()
            try:
                status = guard.run(Command(argv, log=log), tick=tick)
            finally:
                guard.close()
            if status != 0:
                raise ServiceError(
                    f"{JAR_SETS[conf].capitalize()} failed; check the network, or name an Ivy "
                    f"settings file in SPARKONCE_IVY_SETTINGS. Ivy's last words: {log_tail(log)}"
                )

    return cached(cache_dir() / "jars" / f"{conf}-{digest}", resolve)


def class_path(conf: str) -> str:
    # The JVM's own wildcard would work too; a list in a fixed order is the same on every machine.
    return os.pathsep.join(str(jar) for jar in sorted(jar_dir(conf).glob("*.jar")))
