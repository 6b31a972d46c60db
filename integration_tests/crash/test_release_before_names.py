"""Names in external systems are those of the release before: a fixed branch looks the same.

    tests/golden/release_before_names.json          what an outsider saw under the release before
                 release_before_committables.json   the committables that it returned
    prepare ─► look ─► commit ─► look               the same under this tree must show the same

Only a new "release before" needs a new recording: run the slow test with SPARKONCE_RECORD_NAMES=1.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from kafka import KafkaAdminClient
from psycopg import sql

from integration_tests.crash import release_before
from integration_tests.crash.names_job import OWNER
from integration_tests.crash.release_before import ARCHIVE, Both, unpack
from integration_tests.crash.scenario import ROOT
from sparkonce.testing import checks
from sparkonce.testing.services import Services

RECORDED = ARCHIVE.with_name("release_before_names.json")
COMMITTABLES = ARCHIVE.with_name("release_before_committables.json")
COLUMNS = {"kafka": ["value"], "s3": ["id", "day"]}


class Outside:
    """Fresh targets, and what an outsider sees in them."""

    def __init__(self, folder: Path, services: Services, fresh_name: Callable[[], str]) -> None:
        self._services, self._folder = services, folder
        self._topic, self._bucket, self._schema = fresh_name(), fresh_name(), fresh_name()
        with self._postgres() as connection:
            connection.execute(sql.SQL("CREATE SCHEMA {}").format(sql.Identifier(self._schema)))
        postgres, schema = services.postgres, self._schema
        self.sinks: list[Both] = [
            release_before.kafka(services.kafka, self._topic),
            release_before.staged(postgres, f"{schema}.staged"),
            release_before.direct(postgres, f"{schema}.direct"),
            release_before.staged_upsert(postgres, f"{schema}.staged_upsert", "staged_upsert"),
            release_before.direct_upsert(postgres, f"{schema}.direct_upsert", "direct_upsert"),
            release_before.s3(services.s3["s3mock"], self._bucket),
            release_before.files(folder / "files"),
        ]

    def _postgres(self) -> psycopg.Connection:
        return psycopg.connect(self._services.postgres.dsn, autocommit=True)

    def close(self) -> None:
        with self._postgres() as connection:
            for (gid,) in connection.execute("SELECT gid FROM pg_prepared_xacts").fetchall():
                if gid.startswith(OWNER.prefix):  # left with its locks by a failed test
                    connection.execute(sql.SQL("ROLLBACK PREPARED {}").format(sql.Literal(gid)))
            connection.execute("SET lock_timeout = '10s'")
            schema = sql.Identifier(self._schema)
            connection.execute(sql.SQL("DROP SCHEMA {} CASCADE").format(schema))

    def run(self, tree: Path, configs: list[dict[str, Any]]) -> dict[str, Any]:
        """Every name that `tree` creates, before and after the commit, with fixed target names."""
        config, path = self._folder / "names.json", self._folder / "committables.json"
        for sink in configs:
            sink["settings"].pop("select", None)
            sink["columns"] = COLUMNS.get(sink["settings"]["name"], ["id", "name"])
        config.write_text(json.dumps(configs))
        seen = {}
        for step, look in (("prepare", self.prepared), ("commit", self.committed)):
            job = Path(__file__).with_name("names_job.py")
            subprocess.run(
                [sys.executable, "-P", str(job), step, str(config), str(path)],
                env={**os.environ, "PYTHONPATH": f"{tree / 'src'}{os.pathsep}{tree}"},
                check=True,
                timeout=120,
            )
            seen[step] = look()
        self.committables = self._with_fixed_names(json.loads(path.read_text()))
        return self._with_fixed_names(seen)

    def _with_fixed_names(self, found: dict[str, Any]) -> dict[str, Any]:
        text = json.dumps(found, sort_keys=True)
        for name in ("topic", "schema", "bucket"):
            text = text.replace(getattr(self, f"_{name}"), name.upper())
        fixed: dict[str, Any] = json.loads(text)
        return fixed

    def prepared(self) -> dict[str, Any]:
        server = self._services.kafka.bootstrap_servers
        with self._postgres() as connection:
            gids = connection.execute("SELECT gid FROM pg_prepared_xacts ORDER BY 1").fetchall()
            tables = self._tables(connection)
        with self._s3() as client:
            uploads = client.list_multipart_uploads(Bucket=self._bucket).get("Uploads", ())
        leaks = checks.kafka_leaks(server, OWNER.prefix)
        return {
            "Kafka transactions": sorted(str(leak) for leak in leaks),
            "Postgres transactions": [gid for (gid,) in gids if gid.startswith(OWNER.prefix)],
            "Postgres tables": tables,
            "S3 uploads": sorted(upload["Key"] for upload in uploads),
            "files": self._files(),
        }

    def committed(self) -> dict[str, Any]:
        with self._postgres() as connection:
            markers = sql.SQL("SELECT {} FROM {} ORDER BY 1").format(
                sql.SQL("to_jsonb(m) - 'committed_at'"),
                sql.SQL("{} AS m").format(sql.Identifier(self._schema, "sparkonce_commits")),
            )
            rows = [row for (row,) in connection.execute(markers)]
            tables = self._tables(connection)
        with self._s3() as client:
            listed = client.list_objects_v2(Bucket=self._bucket)["Contents"]
            objects = {
                entry["Key"]: client.head_object(Bucket=self._bucket, Key=entry["Key"])["Metadata"]
                for entry in listed
            }
        return {
            "Kafka groups": self._groups(),
            "Postgres markers": rows,
            "Postgres tables": tables,
            "S3 objects": objects,
            "files": self._files(),
        }

    def _groups(self) -> dict[str, list[tuple[str, int, int, str]]]:
        """By group: topic, partition, offset and metadata of the committed markers.

        Not with confluent-kafka, which now and then reads metadata past its end.
        """
        address = self._services.kafka.bootstrap_servers
        with contextlib.closing(KafkaAdminClient(bootstrap_servers=address)) as admin:
            groups = (group["group_id"] for group in admin.list_groups())
            found = admin.list_group_offsets([g for g in groups if g.startswith(OWNER.prefix)])
        markers = {
            name: [
                (at.topic, at.partition, value.offset, value.metadata)
                for at, value in sorted(offsets.items())
                if at.topic == self._topic and value.offset >= 0
            ]
            for name, offsets in found.items()
        }
        return {name: markers[name] for name in sorted(markers) if markers[name]}

    def _tables(self, connection: psycopg.Connection) -> list[list[Any]]:
        """The tables of sparkonce, each with its comment and its columns."""
        query = (
            "SELECT c.relname, obj_description(c.oid, 'pg_class'), array_agg(a.attname::text || ' '"
            " || format_type(a.atttypid, a.atttypmod) ORDER BY a.attnum) FROM pg_class c"
            " JOIN pg_namespace n ON n.oid = c.relnamespace JOIN pg_attribute a"
            " ON a.attrelid = c.oid AND a.attnum > 0"
            " WHERE n.nspname = %s AND c.relkind = 'r' AND c.relname LIKE 'sparkonce%%'"
            " GROUP BY c.relname, c.oid ORDER BY 1"
        )
        return [list(row) for row in connection.execute(query, [self._schema])]

    def _s3(self) -> contextlib.closing[Any]:
        return contextlib.closing(checks.s3_client(self._services.s3["s3mock"]))

    def _files(self) -> list[str]:
        """Paths relative to the sink's folder, with a fixed id of the folder."""
        folder = self._folder / "files"
        names = (str(path.relative_to(folder)) for path in folder.rglob("*"))
        return sorted(
            "_sparkonce_folder.ID" if name.startswith("_sparkonce_folder.") else name
            for name in names
        )


@pytest.fixture
def outside(tmp_path: Path, services: Services, fresh_name: Callable[[], str]) -> Iterator[Outside]:
    with contextlib.closing(Outside(tmp_path, services, fresh_name)) as made:
        yield made


def test_names_are_those_of_the_release_before(outside: Outside) -> None:
    found = outside.run(ROOT, [new.config for new, _ in outside.sinks])
    assert found == json.loads(RECORDED.read_text())


@pytest.mark.slow
def test_recorded_names_are_what_the_release_before_makes(outside: Outside, tmp_path: Path) -> None:
    (tmp_path / "tree").mkdir()
    found = outside.run(unpack(tmp_path / "tree"), [old.config for _, old in outside.sinks])
    if "SPARKONCE_RECORD_NAMES" in os.environ:
        for path, value in ((RECORDED, found), (COMMITTABLES, outside.committables)):
            path.write_text(json.dumps(value, indent=1, sort_keys=True) + "\n")
    assert found == json.loads(RECORDED.read_text())
    assert all(value for step in found.values() for value in step.values())
