"""Finds Java, and downloads jars with the Ivy inside PySpark."""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from xml.etree import ElementTree as ET

from sparkonce.testing.services.cache import SCRATCH, cache_dir, cached, progress
from sparkonce.testing.services.errors import ServiceError
from sparkonce.testing.services.process import Command, Guard, own_guard

OLDEST_JAVA = 17
IVY_FILE = Path(__file__).with_name("ivy.xml")
JAR_SETS: Mapping[str, str] = {
    "broker": "downloading Kafka",
    "broker-3.9": "downloading Kafka 3.9",
    "connector": "downloading Spark's Kafka connector",
    "s3mock": "downloading S3Mock",
    "s3a": "downloading Hadoop's S3A",
    "committers": "downloading Spark's bridge to S3A's committers",
    "jdbc": "downloading Postgres' JDBC driver",
    "iceberg": "downloading Iceberg's runtime for Spark",
    "delta": "downloading Delta's runtime for Spark",
    "nessie": "downloading the catalog Nessie",
    "hadoop": "downloading HDFS",
    "flink": "downloading Flink's Kafka connector",
}
HADOOP = "3.5.0"
"""The version inside PySpark 4.3; ivy.xml names the same."""
JVM_FLAGS = ("-XX:+UseSerialGC", "-Xshare:auto", "-Djava.awt.headless=true")
QUICK_START = "-XX:TieredStopAtLevel=1"
"""Compile quickly instead of well: for servers that live for seconds."""


def java() -> str:
    """The `java` to use, whose version Spark and the servers accept.

    Raises:
        ServiceError: there is none, or it is too old.
    """
    return _checked_java(os.environ.get("JAVA_HOME"), os.environ.get("PATH"))


@functools.cache
def _checked_java(home: str | None, path: str | None) -> str:
    found = shutil.which("java", path=f"{home}/bin" if home else path)
    if found is None:
        where = f"in JAVA_HOME ({home})" if home else "on the PATH"
        raise ServiceError(f"There is no java {where}; install Java {OLDEST_JAVA} or newer.")
    # It writes to stderr, after other messages of the JVM: openjdk version "17.0.15" 2025-04-15
    answer = subprocess.run([found, "-version"], capture_output=True, text=True, check=False)
    version = re.search(r'version "(?:1\.)?(\d+)', answer.stderr)
    if version is None:
        raise ServiceError(f"{found} does not show its version; install Java {OLDEST_JAVA}.")
    if int(version[1]) < OLDEST_JAVA:
        raise ServiceError(
            f"{found} is Java {version[1]}, and Java {OLDEST_JAVA} or newer is needed; "
            "install it, or point JAVA_HOME to it."
        )
    return found


def ivy_jar() -> Path:
    """The jar of the Ivy that PySpark ships; found without importing PySpark."""
    spec = importlib.util.find_spec("pyspark")
    if spec is not None and spec.origin is not None:
        for jar in Path(spec.origin).parent.glob("jars/ivy-*.jar"):
            return jar
    raise ServiceError("The pyspark package, whose Ivy fetches the jars, is missing; install it.")


def check_hadoop(what: str) -> None:
    """Check that the jars of PySpark are of the Hadoop for which `what` is downloaded.

    Raises:
        ServiceError: they are of another version.
    """
    if not ivy_jar().with_name(f"hadoop-client-api-{HADOOP}.jar").exists():
        raise ServiceError(
            f"{what} is downloaded for Hadoop {HADOOP}, and the installed pyspark has another "
            "Hadoop; install a pyspark with that one."
        )


def jar_dir(conf: str, guard: Guard | None = None) -> Path:
    """A folder with the jars of one configuration of ivy.xml, downloaded at the first call."""

    def resolve(folder: Path) -> None:
        settings = os.environ.get("SPARKONCE_IVY_SETTINGS")
        scratch = folder / SCRATCH
        log = scratch / "log"
        with own_guard(guard) as runner, progress(JAR_SETS[conf], scratch) as tick:
            argv = [
                *(java(), "-jar", str(ivy_jar()), "-ivy", str(IVY_FILE), "-confs", conf),
                *(("-settings", settings) if settings else ()),
                *("-cache", f"{scratch}/cache"),
                *("-retrieve", f"{folder}/[artifact]-[revision].[ext]"),
            ]
            if runner.run(Command(argv, log=log), tick=tick) != 0:
                raise ServiceError(
                    f"{JAR_SETS[conf].capitalize()} failed; check the network, or name an Ivy "
                    f"settings file in SPARKONCE_IVY_SETTINGS. {ivy_complaint(log.read_text())}"
                )

    return cached(cache_dir() / "jars" / f"{conf}-{_digest(conf)}", resolve)


def _digest(conf: str) -> str:
    """A digest of the configuration: it changes when ivy.xml names other jars."""
    file = ET.parse(IVY_FILE)  # noqa: S314  # our own file
    entries = [entry for entry in file.iter() if str(entry.get("conf")).split("->")[0] == conf]
    text = b"".join(ET.tostring(entry) for entry in entries)
    return hashlib.sha256(text).hexdigest()[:12]


def ivy_complaint(output: str) -> str:
    """The parts of Ivy's output that show what is missing, in one line."""
    missing = re.findall(r":: (\S+#\S+;\S+: .*?)\s*$", output, re.MULTILINE)
    errors = re.findall(r"^\s*(?:ERRORS?: |Server access [Ee]rror.*?: )(.*)$", output, re.MULTILINE)
    causes = list(dict.fromkeys([*missing, *errors]))[:3]
    return f"Ivy says: {'; '.join(causes) or ' | '.join(output.split()[-30:])}"


def class_path(conf: str, guard: Guard) -> str:
    return os.pathsep.join(str(jar) for jar in sorted(jar_dir(conf, guard).glob("*.jar")))
