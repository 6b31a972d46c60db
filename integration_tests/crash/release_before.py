"""A pipeline that begins under the release before, and that this tree finishes.

    tests/golden/release_before.tar.xz ─► its source tree ─► old driver, killed at a point
                                                                    │ checkpoint, log, targets
                                          this tree ─► `sparkonce recover`, or a new driver

The old side uses nothing of this tree: no names, no fail points, no settings. `OldDriver`,
`OldSink` and `OLD_POLICY` use the names of the old release and never change. If a setting of this
tree is renamed, change the constants below, and `targets`.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import tarfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from integration_tests.crash.scenario import PIPELINE, Scenario, Target
from integration_tests.crash.targets import file_target, kafka_target, postgres_target, s3_target
from sparkonce.testing.quick_spark import submit_args
from sparkonce.testing.services import KafkaServer, PostgresServer, S3Server
from sparkonce.testing.services.process import Command, Guard, log_tail
from sparkonce.txn_log import TransactionLog, open_log

ARCHIVE = Path(__file__).parent.parent.parent / "tests" / "golden" / "release_before.tar.xz"
SHA256 = "a56b9e4ac1c38d43e8e54e08de6136beb77c3017fc7c5c03ac2b0bd3ddd95e50"

DIRECT_LOAD: Mapping[str, Any] = {"load": "direct"}
"""With these settings this tree's `PostgresSink` writes in prepared transactions of the tasks."""

UPSERT: Mapping[str, Any] = {"key": ["id"]}
DIRECT_UPSERT: Mapping[str, Any] = {**DIRECT_LOAD, **UPSERT, "writers": 3}

OLD_POLICY = {"immediate": "prepared", "after_checkpoint": "checkpoint"}
"""By this tree's commit policies, their names in the release before."""

POLL_S = 0.02
REACH_S = 240.0


def unpack(folder: Path) -> Path:
    """The source tree of the release before, as `sinks`, `txn_log`, `spark_hooks` and `src`."""
    assert hashlib.sha256(ARCHIVE.read_bytes()).hexdigest() == SHA256, f"{ARCHIVE} was changed"
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(folder, filter="data")
    return folder


# -- the sinks, with the settings of both releases -------------------------------------------------


@dataclass(frozen=True)
class OldSink:
    """A sink under the release before; its `config` is what `old_job` reads."""

    kind: str
    target: list[str]
    settings: dict[str, Any]

    @property
    def config(self) -> dict[str, Any]:
        return {"kind": self.kind, "target": self.target, "settings": self.settings}


Both = tuple[Target, OldSink]


def kafka(server: KafkaServer, topic: str) -> Both:
    settings = {
        "name": "kafka",
        "bootstrap_servers": server.bootstrap_servers,
        "select": ["string(id) AS key", "to_json(struct(*)) AS value"],
    }
    return kafka_target(server, topic), OldSink("KafkaSink", [topic], settings)


def staged(server: PostgresServer, table: str) -> Both:
    """Through staging tables, and one prepared transaction of the driver."""
    return postgres_target(server, table, name="staged"), _old_postgres(server, table, "staged")


def direct(server: PostgresServer, table: str) -> Both:
    """In a prepared transaction of each task."""
    new = postgres_target(server, table, name="direct", **DIRECT_LOAD)
    return new, _old_postgres(server, table, "direct", mode="prepared")


def staged_upsert(server: PostgresServer, table: str, name: str = "staged") -> Both:
    new = postgres_target(server, table, name=name, **UPSERT)
    return new, _old_postgres(server, table, name, key=["id"])


def direct_upsert(server: PostgresServer, table: str, name: str = "direct") -> Both:
    new = postgres_target(server, table, name=name, **DIRECT_UPSERT)
    old = _old_postgres(server, table, name, mode="prepared", key=["id"], writers=3)
    return new, old


def _old_postgres(server: PostgresServer, table: str, name: str, **more: Any) -> OldSink:
    select = ["id", "date(day) AS day", "name", "amount", "run"]
    settings = {"name": name, "table": table, "select": select, **more}
    return OldSink("PostgresSink", [server.dsn], settings)


def s3(server: S3Server, bucket: str) -> Both:
    settings = {
        "name": "s3",
        "endpoint_url": server.endpoint_url,
        "access_key": server.access_key,
        "secret_key": server.secret_key,
        "region": server.region,
        "partition_by": ["day"],
    }
    return s3_target(server, bucket, "s3"), OldSink("S3Sink", [f"s3://{bucket}/out"], settings)


def files(folder: Path) -> Both:
    return file_target(folder, "files"), OldSink("FileSink", [str(folder)], {"name": "files"})


# -- the old driver --------------------------------------------------------------------------------


class OldDriver:
    """A driver of the release before, and its fail points in that release's files."""

    def __init__(self, folder: Path, tree: Path, config: Path, imported: Path) -> None:
        self._points, self._log = folder / "failpoints", folder / "driver.log"
        for name in ("armed", "hits"):
            (self._points / name).mkdir(parents=True)
        self._tree, self._imported = tree, imported
        self._guard = Guard()
        self._command = Command(
            [sys.executable, "-P", str(Path(__file__).with_name("old_job.py")), str(config)],
            log=self._log,
            env={
                **os.environ,
                "PYTHONPATH": f"{tree / 'src'}{os.pathsep}{tree}",
                "PYSPARK_SUBMIT_ARGS": submit_args(),
                "SPARKONCE_FAILPOINTS": str(self._points),
            },
        )

    @property
    def pid(self) -> int:
        assert self._guard.pid is not None
        return self._guard.pid

    def run_until(self, *stops: tuple[str, Mapping[str, object]]) -> None:
        """Start it and wait until it stops at every one of `stops`: a point, and where."""
        for point, where in stops:
            self._arm(point, where)
        self._guard.start(self._command)
        self.wait_for(lambda: self._hits() == set(range(len(stops))), stops)
        seen = json.loads(self._imported.read_text())
        wanted = [str(self._tree / "src" / "sparkonce" / "__init__.py"), True]
        assert seen == {"driver": wanted, "worker": wanted}, "this is not the release before"

    def _arm(self, point: str, where: Mapping[str, object]) -> None:
        order = {"point": point, "where": where, "action": "stop", "skip": 0}
        armed = self._points / "armed"
        path = armed / f"{len(list(armed.iterdir()))}.json"
        path.write_text(json.dumps(order))

    def _hits(self) -> set[int]:
        hits = (self._points / "hits").glob("*.json")
        return {int(json.loads(path.read_text())["arm"]) for path in hits}

    def wait_for(self, reached: Callable[[], bool], what: object) -> None:
        deadline = time.monotonic() + REACH_S
        while not reached():
            status = self._guard.status()
            assert status is None, f"ended with {status} before {what}: {log_tail(self._log)}"
            assert time.monotonic() < deadline, f"{what} not reached: {log_tail(self._log)}"
            time.sleep(POLL_S)

    def kill(self) -> None:
        """SIGKILL Python, its JVM and the workers; fail if the driver has ended already."""
        assert self._guard.status() is None, log_tail(self._log)
        self._guard.end()

    def close(self) -> None:
        self._guard.close()


# -- the pipeline ----------------------------------------------------------------------------------


class Upgrade(Scenario):
    """A pipeline whose first driver runs the release before."""

    old: OldDriver
    log_location: str
    """The log's address outside the query."""

    def begin(self, tree: Path, old_sinks: list[OldSink], log: str) -> None:
        """Write the configurations of both releases; `log` is the same for both."""
        is_inside = log == "checkpoint"
        self.log_address = log
        self.log_location = f"checkpoint:{self.checkpoint}" if is_inside else log
        self.write_config("config", self.checkpoint)
        folder = self.folder / "old"
        folder.mkdir()
        config, imported = folder / "config.json", folder / "imported.json"
        old = {
            "source": str(self.source),
            "folder": str(self.folder),
            "checkpoint": str(self.checkpoint),
            "sinks": [sink.config for sink in old_sinks],
            "pipeline": {"log": log, "commit": OLD_POLICY[self.commit]},
            "imported": str(imported),
        }
        config.write_text(json.dumps(old))
        self.old = OldDriver(folder, tree, config, imported)

    def wait_until_old_spark_planned(self, batch: int) -> None:
        """Wait until the old driver's Spark has recorded the files of `batch`."""
        planned = self.checkpoint / "offsets" / str(batch)
        self.old.wait_for(planned.exists, planned)

    def __exit__(self, failed: object, *more: object) -> None:
        if hasattr(self, "old"):
            self.old.close()
        super().__exit__(failed, *more)

    @contextmanager
    def log(self) -> Iterator[TransactionLog]:
        log = open_log(self.log_location, create=False)
        yield log
        log.close()

    def state_of(self, batch: int) -> str | None:
        """The state of `batch` in the log; None if the log has no record of it."""
        with self.log() as log:
            found = [r for r in log.history(PIPELINE) if r.id.batch_id == batch]
        return str(found[0].state.value) if found else None
