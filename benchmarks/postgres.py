"""Postgres: sparkonce against Spark's JDBC sink, which delivers at least once.

    python benchmarks/postgres.py [--rows 2000000] [--rounds 3]

Rows are id, text, double and timestamptz. Spark's side is what one writes today: `df.write.jdbc` in
foreachBatch, with rewritten batches of 10,000 rows; for the upsert, a JDBC load
into a staging table and one INSERT … ON CONFLICT from there. Of the rows of an upsert, half meet a
key that is there.
"""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING, Any

import psycopg
from harness import arguments, beside, finish, measure, scratch, spark_session

from sparkonce import ExactlyOnce
from sparkonce.sinks import PostgresSink
from sparkonce.testing.services import PostgresServer, start_services

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from pyspark.sql import DataFrame

COLUMNS = "id bigint, name text, amount float8, at timestamptz"
KEYED = "id bigint PRIMARY KEY, name text, amount float8, at timestamptz"
SERVER = {"shared_buffers": "512MB", "max_wal_size": "8GB"}
"""As a server for such loads is set up; that of the tests has 64 MB for everything."""


class Tables:
    """Fresh tables, and writers that fill them."""

    def __init__(self, server: PostgresServer, folder: Path) -> None:
        self._dsn = server.dsn
        self._folder = folder
        known = psycopg.conninfo.conninfo_to_dict(server.dsn)
        self._url = (
            f"jdbc:postgresql://{known['host']}:{known['port']}/{known['dbname']}"
            "?reWriteBatchedInserts=true"
        )
        self._jdbc = {
            "user": str(known["user"]),
            "driver": "org.postgresql.Driver",
            "batchsize": "10000",
        }

    def _fresh(self, columns: str) -> str:
        self._run("CHECKPOINT")  # no contender pays for the pages of the one before
        name = f"b{uuid.uuid4().hex[:10]}"
        self._run(f"CREATE TABLE {name} ({columns})")
        return name

    def _run(self, query: str) -> None:
        with psycopg.connect(self._dsn, autocommit=True) as connection:
            connection.execute(query.encode())

    def _pipeline(self, table: str, **options: Any) -> ExactlyOnce:
        sink = PostgresSink(self._dsn, table=table, **options)
        return ExactlyOnce(table, sinks=[sink], log=f"sqlite:///{self._folder}/{table}.db")

    def staged(self) -> ExactlyOnce:
        return self._pipeline(self._fresh(COLUMNS))

    def direct(self) -> ExactlyOnce:
        return self._pipeline(self._fresh(COLUMNS), load="direct")

    def upsert(self) -> ExactlyOnce:
        return self._pipeline(self._fresh(KEYED), key=["id"])

    def upsert_direct(self) -> ExactlyOnce:
        # A task for each core, as the appends have it.
        return self._pipeline(self._fresh(KEYED), key=["id"], load="direct", writers=2)

    def jdbc(self) -> Callable[[DataFrame, int], None]:
        name = self._fresh(COLUMNS)

        def write(df: DataFrame, _batch_id: int) -> None:
            df.write.jdbc(self._url, name, mode="append", properties=self._jdbc)

        return write

    def jdbc_merged(self) -> Callable[[DataFrame, int], None]:
        name, staging = self._fresh(KEYED), self._fresh(COLUMNS)
        load = {**self._jdbc, "truncate": "true"}

        def write(df: DataFrame, _batch_id: int) -> None:
            df.write.jdbc(self._url, staging, mode="overwrite", properties=load)
            self._run(
                f"INSERT INTO {name} SELECT * FROM {staging} ON CONFLICT (id) DO UPDATE SET "
                "name = EXCLUDED.name, amount = EXCLUDED.amount, at = EXCLUDED.at"
            )

        return write


def keyed_columns(rows: int) -> list[str]:
    """The second half of the rows has the keys of the first."""
    return [
        f"id % {max(rows // 2, 1)} AS id",
        "concat('customer ', id % 9973) AS name",
        "id * 0.25D AS amount",
        "timestamp_seconds(1767225600 + id) AS at",
    ]


def main(*, rows: int, rounds: int, small_batches: int) -> None:
    sizes = {"rows": rows, "rounds": rounds, "small_batches": small_batches}
    with (
        scratch() as folder,
        start_services(["postgres"], quick_start=False, postgres_config=SERVER) as up,
    ):
        spark, tables = spark_session(up), Tables(up.postgres, folder)
        appended = measure(
            {
                "staged": tables.staged,
                "direct": tables.direct,
                "Spark's JDBC": tables.jdbc,
            },
            spark,
            folder / "append",
            title=f"{rows:,} rows in 4 batches appended to a Postgres table",
            **sizes,
        )
        merged = measure(
            {
                "upsert": tables.upsert,
                "upsert, direct": tables.upsert_direct,
                "JDBC, then merged": tables.jdbc_merged,
            },
            spark,
            folder / "upsert",
            title=f"{rows:,} rows in 4 batches, half of them updates of a Postgres table",
            columns=keyed_columns(rows),
            **sizes,
        )
        spark.stop()
    jdbc, jdbc_merged = appended["Spark's JDBC"], merged["JDBC, then merged"]
    finish(
        **beside(appended["staged"], jdbc, baseline="spark_jdbc"),
        **beside(appended["direct"], jdbc, baseline="spark_jdbc", prefix="direct_"),
        **beside(merged["upsert"], jdbc_merged, baseline="spark_jdbc", prefix="upsert_"),
        **beside(
            merged["upsert, direct"],
            jdbc_merged,
            baseline="spark_jdbc",
            prefix="upsert_direct_",
        ),
    )


if __name__ == "__main__":
    main(**arguments(__doc__))
