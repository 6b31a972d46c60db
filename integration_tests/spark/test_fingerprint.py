"""The fingerprint of a sink's rows, through a real Spark: what changes it and what does not."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from datetime import datetime
from functools import reduce
from operator import add
from typing import TYPE_CHECKING, Any

import pytest
from pyspark.sql.types import (
    ArrayType,
    IntegerType,
    StringType,
    StructType,
    TimestampNTZType,
    UserDefinedType,
)

from integration_tests.support.spark import INCARNATION, TYPES, session_zone, typed
from sparkonce.model import BranchId, Committable
from sparkonce.sinks.base import TwoPhaseCommitSink
from sparkonce.spark_hooks.fingerprint import row_hash
from sparkonce.spark_hooks.partition_writer import SUMMARY_SCHEMA, PartitionSummary, PartitionWriter
from sparkonce.spark_hooks.shaping import Shapes
from sparkonce.txn_log.record import Fingerprint

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession


class ShowingSink(TwoPhaseCommitSink[list[str]]):
    """Puts the names of the columns that it sees into its committable."""

    kind = "showing"

    def beginTransaction(self, branch_id: BranchId) -> list[str]:
        return [str(branch_id)]

    def write(self, handle: list[str], batch: pa.RecordBatch) -> None:
        handle[1:] = batch.schema.names

    def preCommit(self, handle: list[str]) -> Committable:
        branch_id = BranchId.from_name(handle[0])
        assert branch_id is not None
        return Committable(branch_id, {"columns": [*handle[1:]]})

    def commit(self, committable: Committable) -> None: ...

    def abort(self, branch: BranchId | Committable) -> None: ...


def summaries(df: DataFrame, *selects: Sequence[str] | None) -> list[PartitionSummary]:
    """What the tasks return of one pass over `df`, with one sink for each of `selects`."""
    sinks = [
        ShowingSink(name=f"sink{number}", select=select)
        for number, select in enumerate(selects or [None])
    ]
    rows, shapes = Shapes().with_hashes(df, sinks)
    writer = PartitionWriter(sinks, INCARNATION, 7, shapes)
    texts = rows.mapInArrow(writer, SUMMARY_SCHEMA).toArrow().column(0).to_pylist()
    return [PartitionSummary.decode(text) for text in texts]


def contents(df: DataFrame, *selects: Sequence[str] | None) -> list[Fingerprint]:
    """Of each sink, over all tasks."""
    parts = [summary.parts for summary in summaries(df, *selects) if summary.parts]
    return [reduce(add, (part[name].content for part in parts)) for name in parts[0]]


def content(df: DataFrame) -> Fingerprint:
    return contents(df)[0]


Row = tuple[int | None, str | None, str | None, list[int | None] | None]
SCHEMA = "a int, b string, c string, d array<int>"


def some_rows(seed: int) -> list[Row]:
    dice = random.Random(seed)  # noqa: S311 - no secret

    def maybe(value: Any) -> Any:
        return value if dice.random() < 0.6 else None

    return [
        (
            maybe(dice.randrange(3)),
            maybe(dice.choice(["", "a", "b"])),
            maybe(dice.choice(["", "a", "b"])),
            maybe([maybe(dice.randrange(2)) for _ in range(dice.randrange(3))]),
        )
        for _ in range(dice.randrange(1, 20))
    ]


@pytest.mark.parametrize("seed", range(5))
def test_neither_order_nor_partitions_change_it(spark: SparkSession, seed: int) -> None:
    rows = some_rows(seed)
    df = spark.createDataFrame(rows, SCHEMA)
    expected = content(df)
    assert expected.rows == len(rows)
    shuffled = random.Random(seed).sample(rows, len(rows))  # noqa: S311 - no secret
    assert content(spark.createDataFrame(shuffled, SCHEMA).repartition(3)) == expected
    assert content(spark.createDataFrame(shuffled, SCHEMA).coalesce(1)) == expected


@pytest.mark.parametrize("seed", range(5))
def test_any_change_of_the_rows_changes_it(spark: SparkSession, seed: int) -> None:
    """A value, a null that moves to its neighbour, a row that is dropped or there twice."""
    rows = some_rows(seed)
    a, b, c, d = rows[0]
    changes: dict[str, list[Row]] = {
        "other value": [((a or 0) + 7, b, c, d), *rows[1:]],
        "null moves": [(a, None, "x", d), *rows[1:]],
        "null moved": [(a, "x", None, d), *rows[1:]],
        "null for a value": [(a, None, None, d), *rows[1:]],
        "row dropped": rows[1:],
        "row twice": [*rows, rows[0]],
        "longer list": [(a, b, c, [*(d or []), None]), *rows[1:]],
    }
    seen = {"unchanged": rows}
    for name, changed in changes.items():
        if sorted(map(repr, changed)) not in [sorted(map(repr, known)) for known in seen.values()]:
            seen[name] = changed
    found = {
        name: content(spark.createDataFrame(variant, SCHEMA).coalesce(1))
        for name, variant in seen.items()
        if variant
    }
    assert len(set(found.values())) == len(found), found


@pytest.mark.parametrize("kind", TYPES)
def test_every_type_passes_and_its_values_differ(spark: SparkSession, kind: str) -> None:
    values = [*TYPES[kind], "NULL"]
    df = typed(spark, kind, values)
    hashes = [row[0] for row in df.selectExpr(row_hash(df.schema)).collect()]
    assert len(set(hashes)) == len(values)
    expected = content(df)
    assert expected == Fingerprint(expected.algorithm, len(values), sum(hashes) % 2**64)


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        ("timestamp", "timestamp'2026-07-01T12:00:00Z'"),
        (
            "struct<a: timestamp, A: int>",
            "named_struct('a', timestamp'2026-07-01T12:00:00Z', 'A', 1)",
        ),
        ("variant", "timestamp'2026-07-01T12:00:00Z'"),
    ],
)
def test_sessions_zone_does_not_change_it(spark: SparkSession, kind: str, value: str) -> None:
    """A replay may run in another one."""
    seen = set()
    for zone in ("UTC", "Asia/Tokyo"):
        with session_zone(spark, zone):
            seen.add(content(typed(spark, kind, [value])).value)
    assert len(seen) == 1


def test_neither_nullability_nor_ansi_changes_it(
    spark: SparkSession, set_conf: Callable[[str, str], None]
) -> None:
    """A replay may come from a query with a `coalesce` more, or in a session of another mode."""
    query = """
        SELECT a, s, l, m, t FROM VALUES
        (1, named_struct('x', 1), array(1), map('k', 1), 'x'),
        (2, named_struct('x', 2), {l}, {m}, 'y') AS rows(a, s, l, m, t)"""
    seen = set()
    for mode in ("true", "false"):
        set_conf("spark.sql.ansi.enabled", mode)
        seen.add(content(spark.sql(query.format(l="NULL", m="NULL"))))
    assert len(seen) == 1
    df = spark.sql(query.format(l="array(2)", m="map('k', 2)"))
    schema = df.schema
    text = schema.json()
    for flag in ("nullable", "containsNull", "valueContainsNull"):
        text = text.replace(f'"{flag}":false', f'"{flag}":true')
    loose = StructType.fromJson(json.loads(text))
    assert loose != schema
    found = {content(spark.createDataFrame(df.toArrow(), each)) for each in (schema, loose)}
    assert len(found) == 1


def test_elements_do_not_pass_into_the_next_list(spark: SparkSession) -> None:
    df = spark.sql(
        "SELECT array(1) AS l, array(2, 3) AS r, map(1, 2) AS m, map() AS n"
        " UNION ALL SELECT array(1, 2), array(3), map(1, 2), map()"
        " UNION ALL SELECT array(1, 2), array(3), map(), map(1, 2)"
    )
    assert len({row[0] for row in df.selectExpr(row_hash(df.schema)).collect()}) == 3


def test_field_of_a_struct_is_no_column_of_an_alias(spark: SparkSession) -> None:
    """Of a join, in which one side is called as the struct on the other is."""
    left = spark.sql("SELECT 7 AS id").alias("customer")
    made = [left.join(spark.sql(f"SELECT named_struct('id', {n}) AS customer")) for n in range(2)]
    first, second = map(content, made)
    assert first != second
    assert content(spark.createDataFrame(made[0].toArrow())) == first


@pytest.mark.parametrize("alias", ["id", "items", "m", "sparkonce_0"])
def test_names_of_a_join_mean_its_columns(spark: SparkSession, alias: str) -> None:
    """Where the other side has, under an alias, what the names of lambdas and columns could mean.

    There is no column of structs, so nothing but the names keeps them apart.
    """
    other = spark.sql("SELECT 1 AS id, 7 AS n, 8 AS key").alias(alias)
    items = [
        f"SELECT 1 AS id, array(named_struct('n', {n})) AS items, map(9, {n}) AS m" for n in "12"
    ]
    made = [other.join(spark.sql(item), "id").where("id = 1") for item in items]
    first, second = map(content, made)
    assert first != second
    assert content(spark.createDataFrame(made[0].toArrow())) == first


class ShapesType(UserDefinedType):
    """Lists of lists of structs: SQL reaches nothing inside of a type of the user's."""

    @classmethod
    def sqlType(cls) -> ArrayType:
        shape = StructType().add("n", IntegerType()).add("s", StringType())
        return ArrayType(ArrayType(shape.add("at", TimestampNTZType())))

    @classmethod
    def module(cls) -> str:
        return __name__

    def serialize(self, obj: Any) -> Any:
        return obj.shapes


class Triangles:
    __UDT__ = ShapesType()

    def __init__(self, shapes: Any) -> None:
        self.shapes = shapes


def test_values_of_a_type_of_the_users(spark: SparkSession) -> None:
    point, second = (1, "1", None), datetime(2026, 1, 1)  # noqa: DTZ001 - TIMESTAMP_NTZ
    values = [
        *([[point], [point]], [[point, point]], [[point], [], [point]], [[point, None], [point]]),
        *([[(1, None, None)]], [[(None, "1", None)]], [[None]], [None], [[]], [], None),
        *([[(1, "1", second.replace(microsecond=n))]] for n in range(2)),
    ]
    schema = StructType().add("shapes", ShapesType())
    rows = [(None if value is None else Triangles(value),) for value in values]
    df = spark.createDataFrame(rows, schema, verifySchema=False)  # it knows no times inside
    assert len({row[0] for row in df.selectExpr(row_hash(schema)).collect()}) == len(values)
    inside = df.selectExpr("array(shapes) AS a", "struct(shapes) AS s", "map(1, shapes) AS m")
    for name in inside.columns:
        hashes = inside.selectExpr(row_hash(inside.select(name).schema)).collect()
        assert len({row[0] for row in hashes}) == len(values)


def test_what_sql_calls_equal_stays_equal(spark: SparkSession) -> None:
    """Two zeros, and a map whose entries stand in another order."""
    df = spark.sql(
        "SELECT 0.0D AS z, map(1, 'a', 2, null) AS m UNION ALL SELECT -0.0D, map(2, null, 1, 'a')"
    )
    assert len({row[0] for row in df.selectExpr(row_hash(df.schema)).collect()}) == 1


def test_row_without_columns_counts(spark: SparkSession) -> None:
    assert content(spark.range(3).selectExpr("NULL AS nothing")).rows == 3


ALIKE = [["A", "a"], ["\u00b5", "\u03bc"], ["s", "\u017f"], ["i", "\u0130"]]
"""Names that are one where case does not matter: micro, a long s, a capital i with a dot."""


@pytest.mark.parametrize(
    "names",
    [
        ["a.b", "a", "b"],
        ["a`b", "a``b"],
        ["*", " ", "x y"],
        ["ü", "名前"],
        *ALIKE,
        ["ß", "ss", "\u0130"],
        ["sparkonce_hash", "SPARKONCE_HASH_"],
        ["shape0", "hash0"],
    ],
)
def test_any_name_of_a_column_works_and_sinks_do_not_see_the_hash(
    spark: SparkSession, names: list[str]
) -> None:
    """Alone, and beside a sink with columns of its own; their content is the values'."""
    df = spark.range(5).selectExpr(*(f"id + {n} AS c{n}" for n in range(len(names))))
    named = df.toDF(*names)
    assert contents(named, None, ["1 AS one"])[0] == content(named)
    if names not in ALIKE:
        assert content(named) == content(df)
    for summary in summaries(named):
        for committable in summary.committables:
            assert committable.payload["columns"] == names
    for summary in summaries(named, None, ["1 AS one"]):
        shown = [committable.payload["columns"] for committable in summary.committables]
        assert shown in ([], [names, ["one"]])


def test_each_sink_has_the_fingerprint_of_its_own_columns(spark: SparkSession) -> None:
    df = spark.range(10).selectExpr("id", "string(id) AS name")
    left, right, left_again = contents(df, ["id"], ["name"], ["id"])
    assert left == left_again == contents(df, ["id"])[0]
    assert right == contents(df, ["name"])[0]
    assert left != right
