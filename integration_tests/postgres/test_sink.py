"""The Postgres sink on a real server. After each verb the world is looked at from outside:

a connection of the test's own sees rows, marker rows, staging tables and prepared transactions.
Both ways to hold a merge are tested: as a prepared transaction, and open in the driver's session.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import json
import pickle
import uuid
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from psycopg import errors as pg
from psycopg import sql

from integration_tests.postgres.every_version import staged
from integration_tests.support.collecting import cases_of
from integration_tests.support.postgres import (
    COLUMNS,
    OWNER,
    ROWS,
    World,
    commit_until_known,
    deliver,
    eventually,
    heard,
    merge_of,
    prepare,
    stage,
    task,
    world_on,
)
from sparkonce import ExactlyOnce
from sparkonce.errors import (
    CommitRejectedError,
    CommitUnresolvedError,
    ConfigurationError,
    PrepareRejectedError,
)
from sparkonce.model import BranchId, Committable
from sparkonce.sinks.postgres.merging.work import MergeWork
from sparkonce.sinks.postgres.server.connections import PgConnection
from sparkonce.testing.services import PostgresServer, start_services

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

globals().update(cases_of(staged))


# -- the verbs -------------------------------------------------------------------------------------


def test_batch_without_rows_needs_no_transaction(prepared: World) -> None:
    prepared.table()
    assert prepared.ready().vote(merge_of(), []) == ()
    assert prepared.state() == (0, 0, 0, 0)


def test_batches_follow_each_other(world: World) -> None:
    world.table()
    sink = world.ready()
    for batch in range(3):
        deliver(sink, batch=batch)
    assert world.markers() == [0, 1, 2]
    assert world.ids() == [1, 1, 1, 2, 2, 2, 3, 3, 3]


def test_connections_are_bounded_and_end_with_close(world: World) -> None:
    world.end_sessions()
    world.table()
    sink = world.ready()
    deliver(sink)
    query = "SELECT count(*) FROM pg_stat_activity WHERE application_name LIKE 'sparkonce%'"
    assert world.run(query)[0][0] <= 2
    sink.close()
    eventually(lambda: world.run(query) == [(0,)], "every connection closed")
    deliver(sink, batch=1)  # it can be used again


def test_connection_that_died_between_batches_is_replaced(world: World) -> None:
    """A firewall, a pooler or an operator ends idle sessions; no batch may fail by that."""
    world.table()
    sink = world.ready()
    deliver(sink)
    ended = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = %s"
    for batch in (1, 2):
        assert world.run(ended.replace("%s", "'sparkonce'"))
        deliver(sink, batch=batch)
    world.run(ended.replace("%s", "'sparkonce'"))
    assert sink.find_branches(OWNER) == []
    assert world.markers() == [0, 1, 2]


# -- other processes -------------------------------------------------------------------------------


def test_threads_commit_one_branch_at_the_same_time(world: World) -> None:
    world.table()
    sink = world.ready()
    committable = prepare(sink)
    with ThreadPoolExecutor(6) as pool:
        list(pool.map(lambda _: commit_until_known(sink, committable), range(6)))
    assert world.state() == (3, 1, 0, 0)


@pytest.mark.parametrize("ends", ["SELECT 1 / 0", "ROLLBACK"])
def test_held_merge_that_was_ended_unseen_is_merged_again(held_open: World, ends: str) -> None:
    """COMMIT answers the same without a transaction, as behind a pooler that lost the session."""
    held_open.table()
    sink = held_open.ready()
    of_task = stage(sink, ROWS)
    (committable,) = sink.vote(merge_of(), [of_task])
    (connection,) = sink._held._held.values()
    with contextlib.suppress(psycopg.Error):
        connection.execute(ends)
    sink.commit(committable)
    assert held_open.state() == (3, 1, 0, 0)


@pytest.mark.parametrize("another", [False, True])
@pytest.mark.parametrize("message", [2, 3])
def test_second_merge_that_was_ended_unseen_is_none(
    held_open: World, monkeypatch: pytest.MonkeyPatch, message: int, another: bool
) -> None:
    """Its rows without its marker would be there beside those of whoever merges them then."""
    held_open.table()
    sink = held_open.ready()
    committable = prepare(sink)
    sink.close()  # the open merge is gone
    sent: list[int] = []
    run = MergeWork.run

    def ending(self: MergeWork, connection: PgConnection, query: sql.Composed) -> None:
        sent.append(len(sent) + 1)
        if sent[-1] == message:
            connection.execute("ROLLBACK")
            if another:
                held_open.ready().commit(committable)
        run(self, connection, query)

    monkeypatch.setattr(MergeWork, "run", ending)
    if another:
        sink.commit(committable)
    else:
        with pytest.raises(CommitUnresolvedError, match="ended unseen"):
            sink.commit(committable)
        assert len(sent) == message
        assert held_open.state() == (0, 0, 1, 0)
    sink.commit(committable)
    assert held_open.state() == (3, 1, 0, 0)


def test_merge_held_by_a_driver_that_lives_but_is_cut_off(held_open: World) -> None:
    """Its session holds the marker row; it is ended, and the batch is merged again, once."""
    held_open.table()
    sink = held_open.ready(lock_timeout_s=0.2)
    child = held_open.child(sink, "prepare")
    committable = Committable.from_json(heard(child))
    with pytest.raises(CommitUnresolvedError, match="another session holds the lock.*lock timeout"):
        sink.commit(committable)
    eventually(lambda: held_open.open_merges() == 0, "the cut-off session was ended")
    sink.commit(committable)
    assert held_open.state() == (3, 1, 0, 0)


def test_second_merge_that_is_canceled(held_open: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a timeout or a DBA: no other session is blamed, and the next step is told."""
    held_open.table()
    sink = held_open.ready()
    committable = prepare(sink)
    sink.close()  # the open merge is gone

    def canceled(self: MergeWork, connection: PgConnection, query: sql.Composed) -> None:
        connection.execute("BEGIN; SET LOCAL statement_timeout = 1")
        connection.execute("SELECT pg_sleep(60)")

    with monkeypatch.context() as patch:
        patch.setattr(MergeWork, "run", canceled)
        with pytest.raises(CommitUnresolvedError, match="statement_timeout_s=") as told:
            sink.commit(committable)
    assert "another session" not in str(told.value)
    sink.commit(committable)
    assert held_open.state() == (3, 1, 0, 0)


# -- the server and the network --------------------------------------------------------------------


def test_another_server_behind_the_address_proves_nothing(
    world: World, postgres: PostgresServer, open_server: PostgresServer
) -> None:
    """What is absent there may well stand on the right one."""
    world.table()
    committable = prepare(world.ready())
    other = open_server if world.prepares else postgres
    with world_on(other, world.schema, prepares=not world.prepares) as elsewhere:
        elsewhere.table()
        with pytest.raises(CommitUnresolvedError, match="system identifier"):
            elsewhere.sink().commit(committable)  # there is not even a marker table
        wrong = elsewhere.ready()
        with pytest.raises(CommitUnresolvedError, match="system identifier"):
            wrong.commit(committable)
        assert elsewhere.state() == (0, 0, 0, 0)
    world.sinks[0].commit(committable)
    assert world.state() == (3, 1, 0, 0)


def test_marker_proves_a_commit_on_another_server(
    world: World, postgres: PostgresServer, open_server: PostgresServer
) -> None:
    """As behind pg_upgrade or a dump: it came there with the rows."""
    world.table()
    committable = prepare(world.ready())
    world.sinks[0].commit(committable)
    marker = world.run(f"SELECT * FROM {world.schema}.sparkonce_commits")[0]
    other = open_server if world.prepares else postgres
    with world_on(other, world.schema, prepares=not world.prepares) as elsewhere:
        elsewhere.table()
        sink = elsewhere.ready()
        values = ", ".join(["%s"] * len(marker))
        with psycopg.connect(elsewhere.dsn) as connection:
            insert = f"INSERT INTO {world.schema}.sparkonce_commits VALUES ({values})"
            connection.execute(insert.encode(), marker)
        sink.commit(committable)
        assert elsewhere.rows() == []


# -- losses ----------------------------------------------------------------------------------------


def test_staging_that_is_gone_before_the_merge(world: World) -> None:
    """Its COMMIT waits for no disk where the merge does, so a crash may take it back."""
    world.table()
    sink = world.ready()
    of_tasks = [stage(sink), stage(sink, branch_id=task(8))]
    world.run(f"DROP TABLE {world.schema}.{of_tasks[0].payload['staging']}")
    with pytest.raises(
        PrepareRejectedError, match=r"1 of 2 staging tables are gone, as after a crash"
    ):
        sink.vote(merge_of(), of_tasks)
    assert world.state() == (0, 0, 1, 0)


def test_staging_dropped_after_the_commit_is_no_loss(world: World) -> None:
    world.table()
    sink = world.ready()
    committable = prepare(sink)
    sink.commit(committable)
    assert world.staging() == []
    world.sink().commit(committable)
    assert world.state() == (3, 1, 0, 0)


def test_lost_merge_whose_key_was_taken_is_refused(held_open: World) -> None:
    """Decided, lost with its session, and a competing writer was faster: an operator settles it."""
    held_open.table("id bigint PRIMARY KEY, name text")
    sink = held_open.ready()
    committable = prepare(sink)
    sink.close()
    held_open.run(f"INSERT INTO {held_open.schema}.orders VALUES (2, 'other')")
    with pytest.raises(CommitRejectedError, match="orders_pkey") as caught:
        sink.commit(committable)
    assert held_open.staging()[0] in str(caught.value)
    assert held_open.state() == (1, 0, 1, 0)
    held_open.run(f"DELETE FROM {held_open.schema}.orders")
    sink.commit(committable)
    assert held_open.state() == (3, 1, 0, 0)


def test_target_that_is_gone_is_refused(held_open: World) -> None:
    held_open.table()
    sink = held_open.ready()
    committable = prepare(sink)
    sink.close()
    held_open.run(f"DROP TABLE {held_open.schema}.orders")
    with pytest.raises(CommitRejectedError, match="orders.*does not exist"):
        sink.commit(committable)
    assert len(held_open.staging()) == 1


# -- abort -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("by", ["id", "committable", "found"])
def test_staged_branch_is_aborted(prepared: World, by: str) -> None:
    """Exactly that branch; twice does no harm."""
    prepared.table()
    sink = prepared.ready()
    staged = stage(sink)
    other = stage(sink, branch_id=task(71))
    found = [c for c in sink.find_branches(OWNER) if c.branch_id == task()]
    branches: dict[str, BranchId | Committable]
    branches = {"id": task(), "committable": staged, "found": found[0]}
    for _ in range(2):
        prepared.sink().abort(branches[by])
        assert prepared.staging() == [other.payload["staging"]]


@pytest.mark.parametrize("way", ["by the role", "by the connection"])
def test_merge_of_a_role_that_was_switched_is_found_and_aborted(world: World, way: str) -> None:
    """A session goes by its login role, which alone may see and end what its like hold open."""
    app = f"{world.schema}_app"
    world.run(f"CREATE ROLE {app}; GRANT ALL ON SCHEMA {world.schema} TO {app}")
    world.table()
    world.run(f"ALTER TABLE {world.schema}.orders OWNER TO {app}")
    try:
        with world.role() as (login, conninfo):
            world.run(f"GRANT {app} TO {login}")
            options = "" if way == "by the role" else f"-c role={app}"
            if way == "by the role":
                world.run(f"ALTER ROLE {login} SET role = {app}")
            dsn = psycopg.conninfo.make_conninfo(conninfo, options=options)
            prepare(world.ready(dsn=dsn))
            assert world.state() == (0, 0, 1, 1)
            sink = world.sink(dsn=dsn)
            found = list(sink.find_branches(OWNER))
            for branch in found:
                sink.abort(branch)
            world.sinks[0].close()
            assert [branch.branch_id for branch in found] == [merge_of(), task()]
            eventually(lambda: world.state() == (0, 0, 0, 0), "nothing of the merge stands")
    finally:
        world.run(f"DROP OWNED BY {app} CASCADE; DROP ROLE {app}")


def test_notices_of_a_talkative_role_and_a_short_lock_timeout_keep_no_commit_back(
    world: World,
) -> None:
    """Each statement that the server logs comes as a notice; only a warning is of a standby."""
    world.table()
    options = "-c client_min_messages=log -c log_statement=all"
    dsn = psycopg.conninfo.make_conninfo(world.dsn, options=options)
    deliver(world.ready(dsn=dsn, lock_timeout_s=0.001))
    assert world.state() == (3, 1, 0, 0)


def test_abort_after_the_commit_changes_nothing(world: World) -> None:
    """It only drops staging that is left over."""
    world.table()
    sink = world.ready()
    committable = prepare(sink)
    sink.commit(committable)
    late = stage(sink, branch_id=task(9))  # a task attempt that lost
    for branch in (committable, merge_of(), task(), late):
        sink.abort(branch)
    assert world.state() == (3, 1, 0, 0)


@pytest.mark.parametrize("names", [["name", "id"], ["id"], ["id", "name", "more"], ["id", "Name"]])
def test_rows_with_other_columns_than_were_checked(prepared: World, names: list[str]) -> None:
    """COPY goes by position: they would land in each other's columns, or fail without a name."""
    prepared.table("id text, name text")
    sink = prepared.ready(pa.schema([("id", pa.string()), ("name", pa.string())]))
    with pytest.raises(PrepareRejectedError, match=r"\['id', 'name'\] were checked") as caught:
        stage(sink, pa.table({name: ["a"] for name in names}))
    assert str(names) in str(caught.value)
    assert prepared.state() == (0, 0, 0, 0)


def test_discarded_handle_leaves_nothing(prepared: World) -> None:
    prepared.table()
    sink = prepared.ready()
    handle = sink.beginTransaction(task())
    sink.write(handle, ROWS.to_batches()[0])
    sink.discard(handle)
    sink.discard(handle)
    eventually(lambda: prepared.open_merges() == 0, "the server rolled the COPY back")
    assert prepared.state() == (0, 0, 0, 0)


def test_hundreds_of_staging_tables_go_at_once(prepared: World) -> None:
    """More tables than one lock table would take at a time."""
    prepared.table()
    sink = prepared.ready()
    staged = [stage(sink, ROWS.slice(0, 1), task(attempt)) for attempt in range(120)]
    (merged,) = sink.vote(merge_of(), staged)
    sink.commit(merged)
    assert prepared.state() == (120, 1, 0, 0)


# -- what the target refuses -----------------------------------------------------------------------


def test_merge_that_takes_too_long_is_ended(world: World) -> None:
    world.table("id bigint CHECK (pg_sleep(id) IS NOT NULL), name text")
    sink = world.ready(statement_timeout_s=0.1)
    with pytest.raises(PrepareRejectedError, match=r"statement_timeout_s=0.1"):
        prepare(sink)
    assert world.state() == (0, 0, 1, 0)


def test_trigger_that_forbids_a_prepared_transaction_is_named(prepared: World) -> None:
    prepared.table()
    prepared.run(
        f"CREATE FUNCTION {prepared.schema}.f() RETURNS trigger LANGUAGE plpgsql AS "
        "$$ BEGIN NOTIFY changed; RETURN NULL; END $$"
    )
    prepared.run(
        f"CREATE TRIGGER t AFTER INSERT ON {prepared.schema}.orders "
        f"EXECUTE FUNCTION {prepared.schema}.f()"
    )
    with pytest.raises(PrepareRejectedError, match="NOTIFY"):
        prepare(prepared.ready())
    assert prepared.state() == (0, 0, 1, 0)


def test_full_table_of_prepared_transactions_is_named(
    postgres: PostgresServer, fresh_name: Callable[[], str]
) -> None:
    config = {"max_prepared_transactions": "1"}
    with (
        start_services(["postgres"], postgres_config=config) as services,
        world_on(services.postgres, fresh_name(), prepares=True) as world,
    ):
        world.table()
        sink = world.ready()
        prepare(sink)
        with pytest.raises(PrepareRejectedError, match="max_prepared_transactions"):
            prepare(sink, batch=1)
        assert world.state() == (0, 0, 2, 1)


# -- upsert ----------------------------------------------------------------------------------------


def test_upsert_updates_the_columns_of_the_batch(world: World) -> None:
    """Rows with a known key are updated, others inserted, and other columns are left alone."""
    world.table("id bigint PRIMARY KEY, name text, note text DEFAULT 'new'")
    world.run(f"INSERT INTO {world.schema}.orders VALUES (1, 'x', 'old'), (9, 'y', 'old')")
    sink = world.ready(key=["id"])
    deliver(sink)
    deliver(sink, batch=1)
    assert world.rows() == [(1, "a", "old"), (2, "b", "new"), (3, None, "new"), (9, "y", "old")]


def test_upsert_by_a_composite_key_in_any_order(world: World) -> None:
    world.table("id bigint, name text, UNIQUE (name, id)")
    sink = world.ready(key=["id", "name"])
    rows = pa.table({"id": [1, 1, 2], "name": ["a", "b", "a"]})
    for batch in range(2):
        deliver(sink, rows, batch)
    assert world.rows(order="1, 2") == [(1, "a"), (1, "b"), (2, "a")]


@pytest.mark.parametrize("where", ["one task", "two tasks"])
def test_key_that_comes_twice_in_a_batch_is_refused(world: World, where: str) -> None:
    """Which of the two rows would win is chance; the error names the key and an example."""
    world.table("id bigint PRIMARY KEY, name text")
    sink = world.ready(key=["id"])
    twice = pa.table({"id": [7, 8, 7], "name": ["a", "b", "c"]})
    if where == "one task":
        staged = [stage(sink, twice)]
    else:
        staged = [stage(sink, twice.slice(0, 2)), stage(sink, twice.slice(2), task(8))]
    with pytest.raises(PrepareRejectedError, match=r"key=\['id'\].*id = 7"):
        sink.vote(merge_of(), staged)
    assert world.state() == (0, 0, len(staged), 0)


# -- types -----------------------------------------------------------------------------------------

TEXT = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=20)
TIMES = st.datetimes()
UTC_TIMES = st.datetimes(
    dt.datetime.fromisoformat("0001-01-02"),
    dt.datetime.fromisoformat("9999-12-30"),
    timezones=st.just(dt.UTC),
)
DECIMALS = st.integers(-(10**10) + 1, 10**10 - 1).map(lambda n: Decimal(n).scaleb(-2))
INTERVALS = st.timedeltas(dt.timedelta(days=-999_999), dt.timedelta(days=999_999))
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**9), 10**9) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=5,
)
KINDS: Mapping[str, tuple[pa.DataType, str, st.SearchStrategy[Any]]] = {
    "i1": (pa.int8(), "smallint", st.integers(-128, 127)),
    "i2": (pa.int16(), "smallint", st.integers(-(2**15), 2**15 - 1)),
    "i4": (pa.int32(), "integer", st.integers(-(2**31), 2**31 - 1)),
    "i8": (pa.int64(), "bigint", st.integers(-(2**63), 2**63 - 1)),
    "in": (pa.int64(), "numeric", st.integers(-(2**63), 2**63 - 1)),
    "im": (pa.int64(), "numeric(30,5)", st.integers(-(2**63), 2**63 - 1)),
    "n": (pa.decimal128(10, 2), "numeric(12,3)", DECIMALS),
    "nn": (pa.decimal128(38, 2), "numeric", DECIMALS),
    "f4": (pa.float32(), "real", st.floats(width=32)),
    "f8": (pa.float64(), "double precision", st.floats()),
    "t": (pa.string(), "text", TEXT),
    "lt": (pa.large_string(), "text", TEXT),
    "v": (pa.string(), "varchar(20)", TEXT),
    "c": (pa.string(), "char(20)", TEXT),
    "bo": (pa.bool_(), "boolean", st.booleans()),
    "by": (pa.binary(), "bytea", st.binary(max_size=20)),
    "d": (pa.date32(), "date", st.dates()),
    "ts": (pa.timestamp("us"), "timestamp", TIMES),
    "tz": (pa.timestamp("us", "Europe/Paris"), "timestamptz", UTC_TIMES),
    "iv": (pa.duration("us"), "interval", INTERVALS),
    "ti": (pa.time64("us"), "time", st.times()),
    "u": (pa.string(), "uuid", st.uuids().map(str)),
    "ub": (pa.binary(), "uuid", st.uuids().map(lambda u: u.bytes)),
    "j": (pa.string(), "json", JSON.map(json.dumps)),
}
"""Batch's type, target's type, values; by column name."""

NO_NUL_IN_JSONB = JSON.map(json.dumps).filter(lambda text: "\\u0000" not in text)
KINDS = {**KINDS, "jb": (pa.large_string(), "jsonb", NO_NUL_IN_JSONB)}
PLAIN = ("i2", "i4", "i8", "n", "f4", "f8", "t", "bo", "by", "d", "ts", "iv", "ti")
"""Those whose arrays go as binary too."""

ARRAYS_AS_TEXT = ("v", "c", "tz", "u", "j", "jb")


def shown(value: Any) -> Any:
    """Makes NaN equal to itself, and JSON and UUID values comparable."""
    if isinstance(value, list):
        return [shown(item) for item in value]
    if isinstance(value, float):
        return repr(value)
    if isinstance(value, uuid.UUID):
        return value.bytes
    return value


def read_back(name: str, value: Any) -> Any:
    """What psycopg makes of the stored value."""
    if isinstance(value, list):
        return [read_back(name, item) for item in value]
    if value is None:
        return None
    if name in {"j", "jb"}:
        return json.loads(value)
    if name == "c":
        return value.ljust(20)
    if name == "u":
        return uuid.UUID(value).bytes
    return shown(value)


SHAPES = [
    *((name, "alone") for name in KINDS),
    *((name, "in an array") for name in (*PLAIN, *ARRAYS_AS_TEXT)),
    *((name, "beside text") for name in (*PLAIN, "u", "tz")),
]


@pytest.mark.parametrize(("name", "shape"), SHAPES)
def test_every_type_arrives_as_it_is(prepared: World, name: str, shape: str) -> None:
    """With nulls, in slices, alone and in arrays; by pgpq and, beside text, by psycopg."""
    arrow, target, values = KINDS[name]
    is_binary = shape == "alone" or (shape == "in an array" and name in PLAIN)
    if shape == "in an array":
        arrow, target = pa.list_(arrow), f"{target}[]"
        values = st.lists(st.none() | values, max_size=3)
    schema = pa.schema([("id", pa.int64()), ("v", arrow)])
    if shape == "beside text":
        schema = schema.append(pa.field("net", pa.string()))
    prepared.table(f"id bigint, v {target}, net inet")
    sink = prepared.ready(schema)
    assert sink._target is not None
    assert sink._target.is_binary == is_binary
    batches = iter(range(10_000))
    # Without the cast, psycopg reads the shortest text of a real as another double.
    wide = {"real": "v::double precision", "real[]": "v::double precision[]"}
    query = f"SELECT {wide.get(target, 'v')} FROM {prepared.schema}.orders ORDER BY id"
    outside = psycopg.connect(prepared.dsn, autocommit=True)

    @settings(deadline=None, max_examples=10, suppress_health_check=list(HealthCheck))
    @given(st.lists(st.none() | values, min_size=1, max_size=20))
    def arrives(column: list[Any]) -> None:
        rows = pa.table({"id": range(len(column) + 1), "v": pa.array([None, *column], arrow)})
        if shape == "beside text":
            rows = rows.append_column("net", pa.array(["::1"] * rows.num_rows))
        outside.execute(f"TRUNCATE {prepared.schema}.orders".encode())
        deliver(sink, rows.slice(1), next(batches))
        stored = outside.execute(query.encode())
        assert [shown(row[0]) for row in stored] == [read_back(name, value) for value in column]

    try:
        arrives()
    finally:
        outside.close()


def test_types_that_only_their_own_input_function_reads(prepared: World) -> None:
    """Strings go into any other type; an enum even as binary."""
    prepared.run(f"CREATE TYPE {prepared.schema}.mood AS ENUM ('ok', 'bad')")
    prepared.table(f"i inet, p interval, t time, z timetz, m {prepared.schema}.mood")
    columns = {"i": "10.0.0.1/32", "p": "1 day", "t": "01:02:03.000004", "z": "01:02:03+05:30"}
    columns["m"] = "ok"
    rows = pa.table({name: [value, None] for name, value in columns.items()})
    deliver(prepared.ready(rows.schema), rows)
    read = "i::text, p::text, t::text, z::text, m::text"
    stored = prepared.run(f"SELECT {read} FROM {prepared.schema}.orders")
    assert stored == [tuple(columns.values()), (None,) * 5]


@pytest.mark.parametrize(
    ("target", "value"),
    [
        ("smallint", pa.scalar(40_000)),
        ("numeric(5,2)", pa.scalar(1_000)),
        ("numeric(5,2)", pa.scalar(Decimal("1000.00"))),
        ("numeric(5,2)", pa.scalar(Decimal("1.001"))),
        ("real", pa.scalar(2**24 + 1)),
        ("varchar(3)", pa.scalar("abcd")),
        ("varchar(3)[]", pa.scalar(["abcd"])),
        ("varchar(3)", pa.scalar("abc ")),
        ("varchar(3)[]", pa.scalar(["abc "])),
        ("char(3)", pa.scalar("abc ")),
        ("interval(3)", pa.scalar(dt.timedelta(microseconds=1))),
        ("time(3)", pa.scalar(dt.time(microsecond=1))),
        ("time", pa.scalar("12:34:56.1234567")),
        ("interval", pa.scalar("0.1 years")),
        ("text", pa.scalar("a\0b")),
        ("uuid", pa.scalar("nonsense")),
        ("json", pa.scalar("{")),
        ("inet", pa.scalar("nonsense")),
        ("timestamp(3)", pa.scalar(dt.datetime.fromisoformat("2020-01-01T00:00:00.000001"))),
    ],
    ids=str,
)
def test_value_that_does_not_fit_is_refused_by_its_column(
    prepared: World, target: str, value: pa.Scalar[Any]
) -> None:
    """Never rounded, wrapped or cut; and nothing of the task stands."""
    prepared.table(f'id bigint, "a column" {target}')
    rows = pa.table({"id": [1], "a column": pa.array([value.as_py()], value.type)})
    with pytest.raises(PrepareRejectedError, match="column 'a column'") as caught:
        stage(prepared.ready(rows.schema), rows)
    assert caught.value.branch_id == task()
    eventually(lambda: prepared.open_merges() == 0, "the server rolled the COPY back")
    assert prepared.state() == (0, 0, 0, 0)


# -- names and settings ----------------------------------------------------------------------------


def test_table_without_schema_is_found_by_the_search_path(prepared: World) -> None:
    prepared.table()
    dsn = f"{prepared.dsn}?options=-csearch_path%3D{prepared.schema}"
    sink = prepared.ready(table="orders", dsn=dsn)
    deliver(sink)
    stage(sink, branch_id=task(batch=1))
    fresh = prepared.sink("orders", dsn=dsn)  # as a tool has it, without validate
    fresh.abort(task(batch=1))
    assert prepared.state() == (3, 1, 0, 0)


@pytest.mark.parametrize("option", ["table", "create", "dead_letter"])
def test_name_that_postgres_would_cut_is_refused(prepared: World, option: str) -> None:
    """Two such names would be one table: the rows of two pipelines, in silence."""
    prepared.table(COLUMNS)
    long = f"{prepared.schema}.{'ж' * 32}"
    prepared.run(f"CREATE TABLE {long[:-1]} (LIKE {prepared.schema}.orders)")
    options: dict[str, Any] = {
        "table": {"table": long},
        "create": {"table": f"{prepared.schema}.{'x' * 64}", "create": "if_missing"},
        "dead_letter": {"dead_letter": long},
    }
    sink = prepared.sink(**{"table": f"{prepared.schema}.orders", **options[option]})
    with pytest.raises(ConfigurationError, match="over 63 bytes"):
        sink.validate(ROWS.schema)


SCHEMA = ROWS.schema


@pytest.mark.parametrize(
    ("columns", "options", "schema", "message"),
    [
        (COLUMNS, {"table": "{s}.nothing"}, SCHEMA, "does not exist"),
        (COLUMNS, {"table": '{s}."Orders"'}, SCHEMA, r"there is \w+\.orders"),
        (COLUMNS, {"table": "{s}.or ders"}, SCHEMA, "quote its parts|read as SQL"),
        (COLUMNS, {"table": '{s}."orders'}, SCHEMA, "quote its parts"),
        (COLUMNS, {"table": "a.b.{s}.orders"}, SCHEMA, "a schema and a table|quote its parts"),
        ("id bigint", {}, SCHEMA, "no column 'name'"),
        ('id bigint, "Name" text', {}, SCHEMA, "'Name': case counts"),
        ("id text, name text", {}, SCHEMA, "'id': Spark's bigint .Arrow int64.*Postgres' text"),
        (COLUMNS + ", z int NOT NULL", {}, SCHEMA, "'z' is NOT NULL and has no default"),
        (COLUMNS, {"key": ["id"]}, SCHEMA, r'CREATE UNIQUE INDEX ON \w+\.orders \("id"\)'),
        (
            "id bigint, name text, UNIQUE (id, name)",
            {"key": ["id"]},
            SCHEMA,
            "CREATE UNIQUE INDEX",
        ),
        ("id bigint UNIQUE DEFERRABLE, name text", {"key": ["id"]}, SCHEMA, "deferrable"),
        (COLUMNS, {"key": ["nr"]}, SCHEMA, "key= names 'nr'"),
        (
            "id bigint GENERATED ALWAYS AS IDENTITY, name text",
            {},
            SCHEMA,
            "'id' is GENERATED ALWAYS",
        ),
        (COLUMNS, {}, pa.schema([("id", pa.int64()), ("id", pa.int64())]), "two columns 'id'"),
        (COLUMNS, {}, pa.schema([]), "no columns"),
    ],
)
def test_setting_that_cannot_work_is_refused_before_data_moves(
    prepared: World, columns: str, options: dict[str, Any], schema: pa.Schema, message: str
) -> None:
    prepared.table(columns)
    table = str(options.get("table", "{s}.orders")).replace("{s}", prepared.schema)
    sink = prepared.sink(**{**options, "table": table})
    with pytest.raises(ConfigurationError, match=message):
        sink.validate(schema)


@pytest.mark.parametrize("of", ["target", "dead letter"])
@pytest.mark.parametrize(
    ("kind", "message"), [("UNLOGGED", "SET LOGGED"), ("FOREIGN", "another server")]
)
def test_partition_that_would_lose_or_leak_rows_is_named(
    prepared: World, of: str, kind: str, message: str
) -> None:
    """At any depth: a crash empties one that is UNLOGGED, and a foreign one commits by itself."""
    at = prepared.schema
    prepared.run(
        f"CREATE FOREIGN DATA WRAPPER {at}; CREATE SERVER {at} FOREIGN DATA WRAPPER {at}; "
        f"CREATE TABLE {at}.plain ({COLUMNS}); "
        f"CREATE TABLE {at}.parted (branch text, batch_id bigint, rejected_at timestamptz, "
        "reason text, sqlstate text, constraint_name text, record jsonb, id bigint, name text) "
        f"PARTITION BY LIST (name); CREATE TABLE {at}.half PARTITION OF {at}.parted DEFAULT "
        f"PARTITION BY LIST (id); CREATE TABLE {at}.fit PARTITION OF {at}.half FOR VALUES IN (1); "
    )
    options = {"table": f"{at}.parted", "dead_letter": None}
    if of == "dead letter":
        options = {"table": f"{at}.plain", "dead_letter": "parted"}
    prepared.ready(**options)
    server = f"SERVER {at}" if kind == "FOREIGN" else ""
    prepared.run(f'CREATE {kind} TABLE {at}."un fit" PARTITION OF {at}.half DEFAULT {server}')
    try:
        with pytest.raises(ConfigurationError, match=f'{at}."un fit".*{message}'):
            prepared.ready(**options)
    finally:
        prepared.run(f"DROP FOREIGN DATA WRAPPER {at} CASCADE")


def test_what_a_decision_names_is_on_the_disk(world: World) -> None:
    """Staging too, from which a merge that was held open is made again after a crash."""
    world.table()
    sink = world.ready()
    staged = stage(sink)
    ((written,),) = world.run("SELECT pg_current_wal_insert_lsn()")
    (committable,) = sink.vote(merge_of(), [staged])
    assert world.run(f"SELECT pg_current_wal_flush_lsn() >= '{written}'::pg_lsn") == [(True,)]
    sink.commit(committable)
    assert world.state() == (3, 1, 0, 0)


def test_start_line_tells_how_a_merge_is_held(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    world.table()
    with caplog.at_level("INFO", logger="sparkonce"):
        world.ready()
    made, line = caplog.messages
    assert "CREATE TABLE IF NOT EXISTS" in made
    assert "sparkonce_commits" in made
    assert ("as a prepared transaction" in line) == world.prepares
    assert ("max_prepared_transactions is 0" in line) != world.prepares


def test_marker_table_is_made_by_many_at_once(prepared: World) -> None:
    prepared.table()
    sinks = [prepared.sink() for _ in range(8)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda sink: sink.validate(ROWS.schema), sinks))
    assert prepared.markers() == []


def test_error_that_postgres_raises_keeps_no_row(prepared: World) -> None:
    """The chained error ends in logs too."""
    prepared.table("id bigint PRIMARY KEY, name text")
    prepared.run(f"INSERT INTO {prepared.schema}.orders VALUES (2, 'x')")
    with pytest.raises(PrepareRejectedError) as caught:
        prepare(prepared.ready())
    assert isinstance(caught.value.__cause__, pg.UniqueViolation)
    assert "DETAIL" not in str(caught.value.__cause__)
    assert pickle.loads(pickle.dumps(caught.value)).branch_id == merge_of()  # noqa: S301


# -- under Spark -----------------------------------------------------------------------------------


def test_streaming_query_fills_a_table(
    spark: SparkSession, prepared: World, tmp_path: Path
) -> None:
    """Spark's own types, several tasks, two batches and a restart."""
    prepared.table(
        "id bigint PRIMARY KEY, name varchar(10), price numeric(12, 2), at timestamptz, day date, "
        "tags text[], doc jsonb, note text DEFAULT 'none'"
    )
    source = tmp_path / "in"
    source.mkdir()
    select = [
        *("id", "name", "cast(price AS decimal(10,2)) AS price", "at", "to_date(at) AS day"),
        *("split(name, '') AS tags", "to_json(struct(id, name)) AS doc"),
    ]
    for batch, ids in enumerate([(1, 2, 3), (3, 4)]):
        lines = [
            json.dumps({"id": n, "name": f"n{batch}", "price": 1.5, "at": "2024-01-02T03:04:05Z"})
            for n in ids
        ]
        (source / f"{batch}.json").write_text("\n".join(lines))
        sink = prepared.sink(key=["id"], select=select)
        pipeline = ExactlyOnce("orders", sinks=[sink], log=f"sqlite:///{tmp_path}/txn.db")
        stream = spark.readStream.schema("id long, name string, price double, at timestamp")
        query = stream.json(str(source)).repartition(3).writeStream.foreachBatch(pipeline)
        query = query.option("checkpointLocation", str(tmp_path / "ckpt"))
        query.trigger(availableNow=True).start().awaitTermination()
        assert prepared.markers() == list(range(batch + 1))
        assert (prepared.staging(), prepared.gids()) == ([], [])
    at = dt.datetime.fromisoformat("2024-01-02T03:04:05+00:00")
    assert prepared.rows() == [
        (n, name, Decimal("1.50"), at, at.date(), list(name), {"id": n, "name": name}, "none")
        for n, name in [(1, "n0"), (2, "n0"), (3, "n1"), (4, "n1")]
    ]


def test_key_taken_meanwhile_fails_the_query_and_leaves_nothing(
    spark: SparkSession, prepared: World, tmp_path: Path
) -> None:
    """The vote comes before the decision: the batch is aborted, and its replay delivers it."""
    prepared.table("id bigint PRIMARY KEY, name text")
    prepared.run(f"INSERT INTO {prepared.schema}.orders VALUES (2, 'other')")
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "0.json").write_text('{"id": 1}\n{"id": 2}')

    def run() -> None:
        pipeline = ExactlyOnce("orders", sinks=[prepared.sink()], log=f"sqlite:///{tmp_path}/t.db")
        stream = spark.readStream.schema("id long, name string").json(str(tmp_path / "in"))
        query = stream.writeStream.foreachBatch(pipeline)
        query = query.option("checkpointLocation", str(tmp_path / "ckpt"))
        query.trigger(availableNow=True).start().awaitTermination()

    with pytest.raises(Exception, match="orders_pkey"):
        run()
    assert prepared.state() == (1, 0, 0, 0)
    prepared.run(f"DELETE FROM {prepared.schema}.orders")
    run()
    assert prepared.state() == (2, 1, 0, 0)
