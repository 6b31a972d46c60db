"""The load path of the Postgres sink: connections of the workers, staging, and types."""

from __future__ import annotations

import datetime as dt
import os
import re
import tempfile
from collections.abc import Callable, Iterable, Mapping
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from psycopg.pq import Trace

from integration_tests.support.postgres import (
    OWNER,
    ROWS,
    World,
    deliver,
    eventually,
    heard,
    kill,
    stage,
    task,
)
from sparkonce import ExactlyOnce
from sparkonce.errors import CommitUnresolvedError, ConfigurationError, PrepareRejectedError
from sparkonce.once import once
from sparkonce.sinks import PostgresSink
from sparkonce.sinks.postgres.loading.staging import StagingWriter
from sparkonce.sinks.postgres.server.connections import Address, Pool
from sparkonce.sinks.postgres.server.sql import staging_name
from sparkonce.sinks.verbs import abort_each

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@pytest.fixture
def world(prepared: World) -> World:
    prepared.end_sessions()
    return prepared


# -- the workers' connections ----------------------------------------------------------------------


def sessions(world: World) -> list[tuple[int, str]]:
    """Process ids and names of our sessions."""
    return world.run(
        "SELECT pid, application_name FROM pg_stat_activity "
        "WHERE datname = current_database() AND starts_with(application_name, 'sparkonce')"
    )


def end(world: World, pid: int) -> None:
    world.run(f"SELECT pg_terminate_backend({pid})")
    eventually(lambda: pid not in dict(sessions(world)), "the session ended")


def write_all(sink: PostgresSink, handle: StagingWriter, rows: pa.Table) -> None:
    for batch in rows.to_batches():
        sink.write(handle, batch)
    sink.preCommit(handle)


@pytest.fixture
def worker(world: World) -> Pool:
    """The pool of this process as a Python worker, without what other tests left in it."""
    pool = once(Pool, Address.read(world.dsn))
    pool.close()
    return pool


def test_tasks_of_a_worker_share_a_connection_one_after_another(world: World, worker: Pool) -> None:
    """Its session is named after the branch while there is one, and after none in between."""
    world.table()
    sink = world.ready()
    sink.close()
    seen = set()
    for attempt in range(3):
        handle = sink.beginTransaction(task(attempt))
        ((pid, name),) = sessions(world)
        assert name == staging_name(task(attempt))
        sink.write(handle, ROWS.to_batches()[0])
        sink.preCommit(handle)
        assert sessions(world) == [(pid, "sparkonce")]
        seen.add(pid)
    assert len(seen) == 1
    worker.close()
    eventually(lambda: sessions(world) == [], "the connection closed")


def test_connection_that_died_while_nobody_used_it_is_replaced(world: World, worker: Pool) -> None:
    world.table()
    sink = world.ready()
    sink.close()
    stage(sink)
    ((pid, _),) = sessions(world)
    end(world, pid)
    stage(sink, branch_id=task(8))
    assert len(world.staging()) == 2
    assert dict(sessions(world)).keys().isdisjoint({pid})
    worker.close()


@pytest.mark.parametrize("how", ["refused value", "discarded", "ended by the server"])
def test_connection_that_an_error_has_touched_is_not_used_again(
    world: World, worker: Pool, how: str
) -> None:
    world.table("id bigint, name varchar(1)")
    sink = world.ready()
    sink.close()
    handle = sink.beginTransaction(task())
    ((pid, _),) = sessions(world)
    if how == "discarded":
        sink.discard(handle)
    else:
        if how == "ended by the server":
            end(world, pid)
        rows = ROWS.set_column(1, "name", [["a", "too long", None]])
        with pytest.raises(PrepareRejectedError):
            write_all(sink, handle, rows)
        sink.discard(handle)
    eventually(lambda: sessions(world) == [], "the connection closed")
    stage(sink, branch_id=task(8))
    assert [staging_name(task(8))] == world.staging()
    worker.close()


def test_forked_process_makes_a_connection_of_its_own(world: World, worker: Pool) -> None:
    """Two processes on one socket would read each other's answers."""
    world.table()
    sink = world.ready()
    sink.close()
    stage(sink)
    ((pid, _),) = sessions(world)
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            connection, is_new = once(Pool, Address.read(world.dsn)).take()
            os.write(write, f"{is_new} {connection.info.backend_pid}".encode())
            code = 0
        finally:
            os._exit(code)
    os.close(write)
    with os.fdopen(read) as pipe:
        is_new, backend = pipe.read().split()
    assert os.waitpid(child, 0)[1] == 0
    assert (is_new, int(backend) != pid) == ("True", True)
    stage(sink, branch_id=task(8))  # the parent's is as good as before
    eventually(lambda: [p for p, _ in sessions(world)] == [pid], "the same session goes on")
    worker.close()


def test_connection_that_nobody_uses_is_closed_in_time(world: World) -> None:
    """Others that are in use, or were used later, live on."""
    pool = Pool(Address.read(world.dsn), idle_s=0.05)
    held, _ = pool.take()
    for _ in range(2):
        pool.run(lambda connection: connection.execute("SELECT"))
        eventually(lambda: len(sessions(world)) == 1, "the idle connection closed")
    assert sessions(world) == [(held.info.backend_pid, "sparkonce")]
    pool.give(held)
    eventually(lambda: sessions(world) == [], "the last one closed")


def test_worker_that_is_killed_leaves_no_session(world: World) -> None:
    world.table()
    child = world.child(world.ready(), "prepare")
    world.sinks[0].close()
    assert heard(child)
    assert len(sessions(world)) == 1
    kill(child)
    eventually(lambda: sessions(world) == [], "the server noticed")


# -- orphans ---------------------------------------------------------------------------------------


def statements(world: World, sink: PostgresSink, action: Callable[[], object]) -> list[str]:
    """What the sink's one connection sends meanwhile, round trip by round trip."""
    connection, _ = once(Pool, Address.read(world.dsn)).take()
    with tempfile.NamedTemporaryFile() as file:
        connection.pgconn.trace(file.fileno())
        connection.pgconn.set_trace_flags(Trace.SUPPRESS_TIMESTAMPS)
        sink._pool.give(connection)
        action()
        connection.pgconn.untrace()
        sent = Path(file.name).read_text(encoding="utf-8", errors="replace").splitlines()
    return [line.split("\t", 3)[3] for line in sent if line.startswith("F\t")]


def test_orphans_of_many_tasks_go_in_few_round_trips(world: World) -> None:
    """One for each 50 tables, and one that is in use keeps none of the others alive."""
    world.table()
    sink = world.ready(lock_timeout_s=0.2)
    for attempt in range(60):
        stage(sink, ROWS.slice(0, 1), task(attempt))
    orphans = list(sink.find_branches(OWNER))
    with psycopg.connect(world.dsn) as reader:
        reader.execute(f"SELECT FROM {world.schema}.{staging_name(task(3))}".encode())
        outcomes = sink.abort_many(orphans)
        assert [type(error) for error in outcomes if error] == [CommitUnresolvedError]
        assert world.staging() == [staging_name(task(3))]
    for attempt in range(60):
        stage(sink, ROWS.slice(0, 1), task(attempt, batch=1))
    orphans = list(sink.find_branches(OWNER))
    assert len(orphans) == 61
    sent = statements(world, sink, lambda: sink.abort_many(orphans))
    assert world.staging() == []
    assert len([line for line in sent if "DROP TABLE" in line]) == len(sent) == 2


@pytest.mark.parametrize("way", ["sweep", "abort"])
def test_table_that_is_read_for_long_keeps_nothing_waiting(world: World, way: str) -> None:
    """A backup holds it for hours: the others go, and no drop waits as a merge may."""
    world.table()
    sink = world.ready(lock_timeout_s=3.0)
    for attempt in range(5):
        stage(sink, branch_id=task(attempt))
    held = staging_name(task(3))
    outcomes: list[Exception | None] = []

    def end_all() -> None:
        found = list(sink.find_branches(OWNER))
        outcomes[:] = sink.abort_many(found) if way == "sweep" else abort_each(sink, found)

    with psycopg.connect(world.dsn) as backup:
        backup.execute(f"LOCK TABLE {world.schema}.{held} IN ACCESS SHARE MODE".encode())
        sent = statements(world, sink, end_all)
    assert [type(error) for error in outcomes if error] == [CommitUnresolvedError]
    assert world.staging() == [held]
    drops = [line for line in sent if "DROP TABLE" in line]
    waits = [int(ms) for line in drops for ms in re.findall(r"'lock_timeout', '(\d+)ms'", line)]
    assert len(waits) == len(drops)
    assert waits == ([1000, *[10] * 5] if way == "sweep" else [1000] * 5)
    end_all()
    assert (outcomes, world.staging()) == ([None], [])


# -- types, beside those in postgres/test_sink.py --------------------------------------------------

EDGES = st.sampled_from(
    [-(2**63), -(2**63) + 946684800000000, -210866803200000000, 0, 946684800000000, 2**63 - 2]
)


@pytest.mark.parametrize("target", ["timestamp", "timestamptz", "interval"])
def test_microseconds_of_any_size_arrive_or_are_refused(world: World, target: str) -> None:
    """Also near those that mean infinity."""
    arrow: Any = pa.duration("us")
    if target != "interval":
        arrow = pa.timestamp("us", "UTC" if target == "timestamptz" else None)
    rows_of = pa.schema([("v", arrow)])
    world.table(f"v {target}")
    sink = world.ready(rows_of)
    attempts = iter(range(1, 10_000))
    read = "SELECT (extract(epoch FROM v) * 1000000)::bigint FROM {}.{}"
    near = st.builds(lambda edge, off: edge + off, EDGES, st.integers(-1000, 1000))
    values = (near | st.integers(-(2**63), 2**63 - 1)).filter(lambda n: -(2**63) <= n < 2**63 - 1)

    @settings(deadline=None, max_examples=40, suppress_health_check=list(HealthCheck))
    @given(values)
    def arrives(value: int) -> None:
        rows = pa.table({"v": pa.array([value], pa.int64()).cast(arrow)})
        branch_id = task(next(attempts))
        try:
            stage(sink, rows, branch_id)
        except PrepareRejectedError:
            assert target != "interval"
            assert value < -210866803200000000
            return
        assert world.run(read.format(world.schema, staging_name(branch_id))) == [(value,)]
        sink.abort(branch_id)

    arrives()


@pytest.mark.parametrize("strings", ["on", "off"])
def test_binary_arrives_whatever_the_role_says_of_backslashes(world: World, strings: str) -> None:
    """By text, too: beside a column that pgpq cannot send, and in an array."""
    world.table("v bytea, vs bytea[], net inet")
    values = [b"hi\\\x00\n", b"", None, b"\\x6869", b'"{}"\xff']
    rows = pa.table(
        {
            "v": pa.array(values, pa.binary()),
            "vs": pa.array([values, [], None, [None], [b"NULL"]], pa.list_(pa.binary())),
            "net": pa.array(["::1"] * 5),
        }
    )
    with world.role("INSERT") as (role, dsn):
        world.run(f"ALTER ROLE {role} SET standard_conforming_strings = {strings}")
        world.run(f"ALTER ROLE {role} SET escape_string_warning = off")
        sink = world.ready(rows.schema, dsn=dsn)
        assert sink._target is not None
        assert not sink._target.is_binary
        deliver(sink, rows)
        stored = world.run(f"SELECT v, vs FROM {world.schema}.orders ORDER BY ctid")
        sink.close()
    assert stored == list(zip(rows["v"].to_pylist(), rows["vs"].to_pylist(), strict=True))


@pytest.mark.parametrize("options", [{}, {"load": "direct"}])
def test_null_in_an_array_stays_one_whatever_the_role_says(
    world: World, options: dict[str, Any]
) -> None:
    """With `array_nulls = off` it is the text NULL to the server, where arrays go as text."""
    world.table("v text[], c varchar(9)[], net inet")
    texts = [["a", None], [None], ["NULL", None]]
    rows = pa.table({"v": texts, "c": texts, "net": ["::1"] * 3})
    with world.role("INSERT") as (role, dsn):
        world.run(f"ALTER ROLE {role} SET array_nulls = off")
        sink = world.ready(rows.schema, dsn=dsn, **options)
        deliver(sink, rows)
        stored = world.run(f"SELECT v, c FROM {world.schema}.orders ORDER BY ctid")
        sink.close()
    assert stored == [(text, text) for text in texts]


@pytest.mark.parametrize("type_", ["text", "inet", "uuid"])
def test_text_that_is_not_utf8_is_refused(world: World, type_: str) -> None:
    """As Spark has it after a cast of bytes to text. The message names table and column."""
    world.table(f"v {type_}")
    offsets = pa.array([0, 2, 4], pa.int32()).buffers()[1]
    texts = pa.StringArray.from_buffers(2, offsets, pa.py_buffer(b"ab\xff\xfe"))
    rows = pa.table({"v": texts})
    sink = world.ready(rows.schema)
    with pytest.raises(PrepareRejectedError, match=r"orders[,:] .*column 'v': "):
        deliver(sink, rows)


@pytest.fixture
def priced(world: World) -> str:
    """A table whose columns are arrays of domains."""
    s = world.schema
    world.run(
        f"CREATE DOMAIN {s}.money_ AS numeric(12,2); "
        f"CREATE DOMAIN {s}.price AS {s}.money_ CHECK (value > 0); "
        f'CREATE DOMAIN {s}.code AS varchar(3) COLLATE "C"; CREATE DOMAIN {s}.raw AS bytea; '
        f"CREATE DOMAIN {s}.list AS int[]; CREATE DOMAIN {s}.prices AS {s}.price[]"
    )
    return world.table(
        f"p {s}.price[], c {s}.code[], r {s}.raw[], l {s}.list[], d {s}.prices, n bigint"
    )


@pytest.mark.parametrize("options", [{}, {"dead_letter": "rejects"}, {"load": "direct"}])
@pytest.mark.usefixtures("priced")
def test_arrays_of_domains_arrive(world: World, options: dict[str, Any]) -> None:
    prices = [[Decimal("1.25"), None], [], None]
    columns = {
        "p": pa.array(prices, pa.list_(pa.decimal128(38, 18))),
        "d": pa.array(prices, pa.list_(pa.decimal128(12, 2))),
        "c": pa.array([["abc", None], [], None], pa.list_(pa.string())),
        "r": pa.array([[b"\\x", None], [], None], pa.list_(pa.binary())),
    }
    rows = pa.table(columns)
    deliver(world.ready(rows.schema, **options), rows)
    read = "p::numeric[], d::numeric[], c::text[], r::bytea[]"
    stored = world.run(f"SELECT {read} FROM {world.schema}.orders ORDER BY ctid")
    assert stored == list(zip(*(column.to_pylist() for column in columns.values()), strict=True))


@pytest.mark.usefixtures("priced")
@pytest.mark.parametrize(
    ("column", "values", "message"),
    [
        ("p", pa.array([["1.255"]]), "array<string>.*cast"),
        ("d", pa.array([["1.255"]]), "array<string>.*cast"),
        ("p", pa.array([[1.255]]), "cast"),
        ("p", pa.array([[Decimal("1.255")]]), "'p': a value"),
        ("d", pa.array([[Decimal("1.255")]]), "'d': a value"),
        ("c", pa.array([["abc "]]), "'c': a value"),
        ("l", pa.array([["{1}"]]), "arrays of arrays"),
        ("p", pa.array([[Decimal("-1.25")]]), "price_check"),
    ],
)
def test_element_that_its_domain_would_change_is_refused(
    world: World, column: str, values: Any, message: str
) -> None:
    """What holds for a column of the type under the domain, holds for each element."""
    rows = pa.table({column: values})
    with pytest.raises((ConfigurationError, PrepareRejectedError), match=message):
        deliver(world.ready(rows.schema), rows)
    assert world.rows() == []


def test_days_of_an_interval_are_hours_on_both_ways(world: World) -> None:
    """A day of Spark has 24 hours, also over a change of the clocks."""
    world.table("v interval, net inet")
    interval = pa.array([dt.timedelta(days=2, microseconds=1)], pa.duration("us"))
    deliver(world.ready(pa.schema([("v", interval.type)])), pa.table({"v": interval}))
    rows = pa.table({"v": interval, "net": ["::1"]})
    deliver(world.ready(rows.schema), rows, batch=1)
    assert world.run(f"SELECT v::text FROM {world.schema}.orders") == 2 * [("48:00:00.000001",)]


TIMES = (
    "0001-01-01 00:00:00",
    "1582-10-10 12:00:00",  # in no calendar of the time
    "1883-11-18 12:03:57",  # the day on which New York got its time zone
    "1969-12-31 23:59:59.999999",
    "2024-03-10 02:30:00",  # skipped by the clocks of New York
    "2024-11-03 01:30:00",  # came twice
    "9999-12-31 23:59:59.999999",
)


def nth(values: Iterable[str]) -> str:
    """SQL: the value at the row's id, and null in the row after the last."""
    return f"get(array({', '.join(values)}), cast(id AS int))"


PERIOD = nth(["INTERVAL '-1-2' YEAR TO MONTH"])
INSTANTS = [f"TIMESTAMP'{text}'" for text in TIMES]

SPARK_COLUMNS: Mapping[str, tuple[str, str]] = {
    "i1": (nth(f"{n}Y" for n in (-128, 127)), "smallint"),
    "i2": (nth(f"{n}S" for n in (-32768, 32767)), "smallint"),
    "i4": (nth(("-2147483647 - 1", "2147483647")), "integer"),
    "i8": (nth(("-9223372036854775807L - 1L", "9223372036854775807L")), "bigint"),
    "i8 in numeric": (nth(("-9223372036854775807L - 1L", "9223372036854775807L")), "numeric"),
    "n": (nth(("-99999999999999999999.999999999999999999BD", "1E-18BD")), "numeric(38,18)"),
    "f4": (nth(("float('NaN')", "1.17549435E-38F", "-0.0F")), "real"),
    "f8": (nth(("double('-Infinity')", "4.9E-324D", "0.1D")), "double precision"),
    "bo": (nth(("true", "false")), "boolean"),
    "t": (nth(("''", "'ü€😀'", r"'a\\tb\n\"'")), "text"),
    "v": (nth(("'12345'", "'ü€😀  '")), "varchar(5)"),
    "c": (nth(("'12345'", "'12'")), "char(5)"),
    "enum": (nth(("'ok'", "'not so'")), "{schema}.mood"),
    "domain": (nth(("1L", "2L")), "{schema}.small"),
    "by": (nth(("X''", "X'00FF5C'")), "bytea"),
    "d": (nth(f"DATE'{text[:10]}'" for text in TIMES), "date"),
    "ts": (nth(f"TIMESTAMP_NTZ'{text}'" for text in TIMES), "timestamp"),
    "tz": (nth(INSTANTS), "timestamptz"),
    "iv": (nth(("INTERVAL '-3 04:05:06.000007' DAY TO SECOND", "INTERVAL '0' SECOND")), "interval"),
    "u": (nth(("'01234567-89ab-cdef-0123-456789abcdef'",)), "uuid"),
    "j": (nth(("""'{"b" :1, "a":[null]}'""",)), "json"),
    "jb": (nth(("to_json(struct(id))",)), "jsonb"),
    "void": ("null", "integer"),
    "Mixed Case": ("id", "bigint"),
    "i8s": (nth(("array(1L, null)", "array()")), "bigint[]"),
    "ns": (nth(("array(1.50BD, null)",)), "numeric(5,2)[]"),
}
"""Expression in Spark and type in Postgres, by column."""

ONLY_AS_TEXT: Mapping[str, tuple[str, str]] = {
    "ym": (
        f"concat(extract(YEAR FROM {PERIOD}) * 12 + extract(MONTH FROM {PERIOD}), ' months')",
        "interval",
    ),
    "tzs": (f"array({', '.join(INSTANTS)}, null)", "timestamptz[]"),
    "vs": (nth(("array('a', null, '\\\"{,}')",)), "varchar(9)[]"),
    "net": (nth(("'::1/128'", "'10.0.0.0/8'")), "inet"),
}

SHOWN: Mapping[str, tuple[str, str]] = {
    "i8 in numeric": ("{}", "{}::bigint"),
    "f4": ("double({})", "{}::double precision"),
    "c": ("rpad({}, 5, ' ')", "{}"),
    "tz": ("unix_micros({})", "(extract(epoch FROM {}) * 1000000)::bigint"),
    "ym": ("{}", "(extract(year FROM {0}) * 12 + extract(month FROM {0}))::int || ' months'"),
    "u": ("{}", "{}::text"),
    "j": ("{}", "{}::text"),
    "jb": ("get_json_object({}, '$.id')", "{} ->> 'id'"),
    "tzs": (
        "transform({}, t -> unix_micros(t))",
        "(SELECT array_agg((extract(epoch FROM t) * 1000000)::bigint) FROM unnest({}) AS t)",
    ),
    "net": ("{}", "{}::text"),
}
"""Where Python's values of the two do not compare: the same in Spark's SQL and in Postgres'."""


@pytest.mark.parametrize("way", ["binary", "text"])
def test_every_type_of_spark_arrives(
    spark: SparkSession, world: World, tmp_path: Path, way: str
) -> None:
    """Under a time zone with skipped and repeated hours, and with nulls in every column."""
    columns = {**SPARK_COLUMNS, **(ONLY_AS_TEXT if way == "text" else {})}
    select = [f"{expression} AS `{name}`" for name, (expression, _) in columns.items()]
    world.run(
        f"CREATE TYPE {world.schema}.mood AS ENUM ('ok', 'not so'); "
        f"CREATE DOMAIN {world.schema}.small AS bigint CHECK (value < 3)"
    )
    types = {name: ddl.replace("{schema}", world.schema) for name, (_, ddl) in columns.items()}
    world.table(", ".join(["nr bigint", *(f'"{name}" {ddl}' for name, ddl in types.items())]))
    sink = world.sink(select=["id AS nr", *select])
    zone = spark.conf.get("spark.sql.session.timeZone")
    spark.conf.set("spark.sql.session.timeZone", "America/New_York")
    try:
        rows = spark.range(len(TIMES) + 1).repartition(2)
        rows.write.parquet(str(tmp_path / "in"))
        shown = [SHOWN.get(name, ("{}",))[0].format(f"`{name}`") for name in columns]
        sent = rows.selectExpr("id AS nr", *select).selectExpr("nr", *shown).collect()
        pipeline = ExactlyOnce("orders", sinks=[sink], log=f"sqlite:///{tmp_path}/txn.db")
        stream = spark.readStream.schema("id long").parquet(str(tmp_path / "in"))
        query = stream.writeStream.foreachBatch(pipeline)
        query = query.option("checkpointLocation", str(tmp_path / "ckpt"))
        query.trigger(availableNow=True).start().awaitTermination()
    finally:
        spark.conf.set("spark.sql.session.timeZone", str(zone))
    assert sink._target is not None
    assert sink._target.is_binary == (way == "binary")
    read = [SHOWN.get(name, ("", "{}"))[1].format(f'"{name}"') for name in columns]
    stored = world.run(f"SELECT nr, {', '.join(read)} FROM {world.schema}.orders ORDER BY nr")
    expected = sorted((tuple(row) for row in sent), key=lambda row: row[0])
    assert len(stored) == len(expected)
    for at, name in enumerate(["nr", *columns]):
        both = [
            (comparable(s[at]), comparable(e[at])) for s, e in zip(stored, expected, strict=True)
        ]
        assert [one for one, _ in both] == [other for _, other in both], name
        assert name == "nr" or name in {"Mixed Case", "tzs"} or "None" in both[-1]


def comparable(value: Any) -> str:
    """Floats by all their digits, so that NaN and -0.0 equal themselves."""
    return repr(bytes(value) if isinstance(value, bytearray) else value)
