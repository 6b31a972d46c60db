"""Upserts on a real server: which rows win, wait or are refused.

A merge is INSERT … ON CONFLICT: it makes the row to insert first, with its triggers, policies and
checks, and updates by what became of it.
"""

from __future__ import annotations

import datetime as dt
import uuid
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psycopg
import pyarrow as pa
import pytest
from psycopg import sql

from integration_tests.support.postgres import (
    DEADLINE_S,
    World,
    deliver,
    eventually,
    lose,
    merge_of,
    prepare,
    stage,
    task,
    vote_behind,
)
from sparkonce.errors import PrepareRejectedError

KEYED = "id bigint PRIMARY KEY, status text"


def filled(world: World, there: Sequence[object], columns: str = KEYED) -> None:
    """A table with the keys `there`, which takes no status 'bad'."""
    world.table(columns)
    for key in there:
        insert = sql.SQL("INSERT INTO {} (id, status) VALUES ({}, 'old')").format(
            sql.Identifier(world.schema, "orders"), sql.Literal(key)
        )
        world.run(insert)
    world.run(f"ALTER TABLE {world.schema}.orders ADD CHECK (status <> 'bad')")


@pytest.mark.parametrize(
    ("there", "ids"),
    [([], [1, 2]), ([1, 2], [3, 4]), ([1, 12, 30], [14, 12]), ([1, 2], [2, 1]), ([1, 9], [1, 5])],
)
@pytest.mark.parametrize("load", ["staged", "direct"])
@pytest.mark.parametrize("key", ["id", ["id"]])
def test_keys_that_are_new_and_keys_that_are_there(
    prepared: World, load: str, there: list[int], ids: list[int], key: str | list[str]
) -> None:
    filled(prepared, there)
    rows = states(ids)
    deliver(prepared.ready(rows.schema, key=key, load=load), rows)
    after = dict.fromkeys(there, "old") | dict.fromkeys(ids, "new")
    assert prepared.rows() == sorted(after.items())


def changing(world: World, assignment: str, table: str = "orders") -> None:
    """A trigger that changes each row before it is inserted."""
    world.run(
        f"CREATE FUNCTION {world.schema}.f() RETURNS trigger LANGUAGE plpgsql AS "
        f"$$ BEGIN {assignment}; RETURN NEW; END $$; "
        f"CREATE TRIGGER t BEFORE INSERT ON {world.schema}.{table} FOR EACH ROW "
        f"EXECUTE FUNCTION {world.schema}.f()"
    )


def states(ids: Sequence[Any], status: str = "new") -> pa.Table:
    return pa.table({"id": ids, "status": [status] * len(ids)})


def test_keys_of_several_tasks_make_one_merge(world: World) -> None:
    world.table(KEYED)
    world.run(f"INSERT INTO {world.schema}.orders VALUES (5, 'old')")
    sink = world.ready(states([1]).schema, key=["id"])
    staged = [stage(sink, states([n]), task(n)) for n in (1, 9)]
    (merged,) = sink.vote(merge_of(), staged)
    sink.commit(merged)
    assert world.rows() == [(1, "new"), (5, "old"), (9, "new")]


@pytest.mark.parametrize("write", ["upsert", "ignore", "merge"])
def test_key_is_taken_while_the_batch_merges(world: World, write: str) -> None:
    """Another session's row that is not committed when the merge begins counts like any other."""
    world.table(KEYED)
    rows = pa.table({"id": [1, 2, 3], "status": ["new"] * 3, "gone": [False, False, True]})
    delete = {"delete": "gone"} if write == "merge" else {}
    rows = rows if delete else rows.drop_columns(["gone"])
    sink = world.ready(rows.schema, key=["id"], write=write, **delete)
    change = f"INSERT INTO {world.schema}.orders VALUES (2, 'rival')"
    sink.commit(vote_behind(world, change, sink, rows))
    second = (2, "rival" if write == "ignore" else "new")
    last = [] if write == "merge" else [(3, "new")]
    assert world.rows() == [(1, "new"), second, *last]


def test_lost_merge_meets_a_key_that_came_meanwhile(world: World) -> None:
    """Its keys were new at the vote, and are not when it is merged again."""
    world.table(KEYED)
    sink = world.ready(states([1]).schema, key=["id"])
    committable = prepare(sink, states([1, 2]))
    lose(world, sink)
    world.run(f"INSERT INTO {world.schema}.orders VALUES (2, 'rival')")
    sink.commit(committable)
    assert world.rows() == [(1, "new"), (2, "new")]


def test_other_unique_column_still_aborts_the_batch(prepared: World) -> None:
    prepared.table(f"{KEYED} UNIQUE")
    prepared.run(f"INSERT INTO {prepared.schema}.orders VALUES (1, 'taken')")
    sink = prepared.ready(states([2]).schema, key=["id"])
    with pytest.raises(PrepareRejectedError, match="orders_status_key"):
        prepare(sink, states([2], "taken"))
    assert prepared.rows() == [(1, "taken")]


@pytest.mark.parametrize("there", [[], [1], [1, 2]])
@pytest.mark.parametrize("load", ["staged", "direct"])
def test_key_that_comes_twice_is_refused(prepared: World, load: str, there: list[int]) -> None:
    filled(prepared, there)
    rows = states([1, 2, 2])
    sink = prepared.ready(rows.schema, key=["id"], load=load)
    with pytest.raises(PrepareRejectedError, match="comes more than once in the batch.* id = 2"):
        sink.vote(merge_of(), [stage(sink, rows)])
    assert prepared.rows() == [(key, "old") for key in there]


@pytest.mark.parametrize(
    ("does", "last"),
    [
        ("DELETE FROM {orders} WHERE id = 2", []),
        ("UPDATE {orders} SET id = 9 WHERE id = 2", [(9, "old")]),
        ("UPDATE {orders} SET status = 'rival' WHERE id = 2", []),
        ("INSERT INTO {orders} VALUES (3, 'rival')", []),
    ],
)
def test_row_that_another_session_is_at(world: World, does: str, last: list[object]) -> None:
    """The merge waits for the session that was there first."""
    filled(world, [1, 2])
    rows = states([1, 2, 3])
    sink = world.ready(rows.schema, key=["id"])
    change = does.format(orders=f"{world.schema}.orders")
    sink.commit(vote_behind(world, change, sink, rows))
    assert world.rows() == [(1, "new"), (2, "new"), (3, "new"), *last]


def test_rows_are_locked_in_the_order_of_their_keys(world: World) -> None:
    """So that two pipelines wait for each other in one direction only."""
    filled(world, [])
    orders, keys = f"{world.schema}.orders", list(range(2000, 0, -1))
    world.run(f"INSERT INTO {orders} SELECT n, 'old' FROM generate_series(2000, 1, -1) n")
    world.run(f"ANALYZE {orders}")
    sink = world.ready(states([1]).schema, key=["id"])
    staged = stage(sink, states(keys))
    with psycopg.connect(world.dsn) as rival, ThreadPoolExecutor(1) as pool:
        rival.execute(f"SELECT FROM {orders} WHERE id = 1000 FOR UPDATE".encode())
        voting = pool.submit(sink.vote, merge_of(), [staged])
        eventually(lambda: world.waiting() > 0, "the merge waits for key 1000")
        free = world.run(f"SELECT id FROM {orders} FOR UPDATE SKIP LOCKED")
        assert sorted(free) == [(key,) for key in range(1001, 2001)]
        rival.commit()
        (merged,) = voting.result(DEADLINE_S)
    sink.commit(merged)
    assert world.rows() == [(key, "new") for key in reversed(keys)]


def test_trigger_of_an_insert_fires_for_keys_that_are_there(prepared: World) -> None:
    """ON CONFLICT updates by what it has made of the row."""
    prepared.table(KEYED)
    prepared.run(f"INSERT INTO {prepared.schema}.orders VALUES (1, 'old')")
    changing(prepared, "NEW.status := upper(NEW.status)")
    deliver(prepared.ready(states([1]).schema, key=["id"]), states([1]))
    assert prepared.rows() == [(1, "NEW")]


@pytest.mark.parametrize(
    ("kind", "index"),
    [
        ("text", "(id, kind bpchar_ops)"),  # for which blanks at the end are nothing
        ("char(3)", "(id, kind)"),
    ],
)
def test_keys_are_equal_when_the_index_finds_them_so(
    prepared: World, kind: str, index: str
) -> None:
    """As text these two would be different keys, and one of them not there."""
    filled(prepared, [], f"id bigint, kind {kind}, status text")
    prepared.run(f"CREATE UNIQUE INDEX ON {prepared.schema}.orders {index}")
    prepared.run(f"INSERT INTO {prepared.schema}.orders VALUES (1, 'a', 'old')")
    rows = states([1, 1]).append_column("kind", [["a", "a "]])
    sink = prepared.ready(rows.schema, key=["id", "kind"])
    with pytest.raises(PrepareRejectedError, match="second time|comes more than once"):
        prepare(sink, rows)
    assert prepared.run(f"SELECT status FROM {prepared.schema}.orders") == [("old",)]


@pytest.mark.parametrize("load", ["staged", "direct"])
def test_row_may_refer_to_one_that_comes_with_it(prepared: World, load: str) -> None:
    """A foreign key is looked at behind each statement, of which ON CONFLICT is one."""
    orders = f"{prepared.schema}.orders"
    prepared.table(f"id bigint PRIMARY KEY, boss bigint REFERENCES {orders}, status text")
    prepared.run(f"INSERT INTO {orders} VALUES (1, NULL, 'old')")
    rows = states([1, 2]).append_column("boss", pa.array([2, None], pa.int64()))
    sink = prepared.ready(rows.schema, key=["id"], load=load)
    deliver(sink, rows)
    assert prepared.rows() == [(1, 2, "new"), (2, None, "new")]


def test_new_row_that_follows_what_an_updated_one_was_referred_by_cascades(
    prepared: World,
) -> None:
    """A cascade comes behind both, so that it meets the new row, too."""
    orders = f"{prepared.schema}.orders"
    prepared.table(
        "id bigint PRIMARY KEY, code text UNIQUE, "
        f"parent text REFERENCES {orders} (code) ON UPDATE CASCADE"
    )
    prepared.run(f"INSERT INTO {orders} VALUES (1, 'x', NULL)")
    rows = pa.table({"id": [1, 2], "code": ["y", "x"], "parent": [None, "x"]})
    deliver(prepared.ready(rows.schema, key=["id"]), rows)
    assert prepared.rows() == [(1, "y", None), (2, "x", "y")]


def test_what_others_refer_to_may_move_to_a_new_row(prepared: World) -> None:
    orders = f"{prepared.schema}.orders"
    prepared.table("id bigint PRIMARY KEY, status text UNIQUE")
    prepared.run(f"INSERT INTO {orders} VALUES (1, 'x')")
    prepared.run(f"CREATE TABLE {prepared.schema}.lines (status text REFERENCES {orders} (status))")
    prepared.run(f"INSERT INTO {prepared.schema}.lines VALUES ('x')")
    rows = pa.table({"id": [1, 2], "status": ["y", "x"]})
    deliver(prepared.ready(rows.schema, key=["id"]), rows)
    assert prepared.rows() == [(1, "y"), (2, "x")]


def test_lock_timeout_ends_the_wait_for_a_row(world: World) -> None:
    filled(world, [1, 2])
    sink = world.ready(states([1]).schema, key=["id"], lock_timeout_s=1.0)
    with psycopg.connect(world.dsn) as rival:
        rival.execute(f"SELECT FROM {world.schema}.orders WHERE id = 2 FOR UPDATE".encode())
        with pytest.raises(PrepareRejectedError, match="lock timeout"):
            prepare(sink, states([1, 2]))
    assert world.rows() == [(1, "old"), (2, "old")]


def test_operators_of_others_are_not_taken_for_postgres_own(prepared: World) -> None:
    """As the extension intarray brings them, by which `<@` of two int2[] has two meanings."""
    schema = prepared.schema
    filled(prepared, [1])
    prepared.run(
        f"CREATE FUNCTION {schema}.no(int[], int[]) RETURNS boolean LANGUAGE sql "
        "AS $$ SELECT false $$; "
        f"CREATE OPERATOR {schema}.<@ (LEFTARG = int[], RIGHTARG = int[], FUNCTION = {schema}.no); "
        f"CREATE FUNCTION {schema}.no(bigint, bigint) RETURNS boolean LANGUAGE sql "
        "AS $$ SELECT false $$; "
        f"CREATE OPERATOR {schema}.= (LEFTARG = bigint, RIGHTARG = bigint, FUNCTION = {schema}.no)"
    )
    dsn = f"{prepared.dsn}?options=-c%20search_path%3D{schema},pg_catalog"
    deliver(prepared.ready(states([1]).schema, key=["id"], dsn=dsn), states([1]))
    assert prepared.rows() == [(1, "new")]


def test_trigger_of_the_partitioned_table_fires_in_its_partition(prepared: World) -> None:
    schema = prepared.schema
    prepared.run(
        f"CREATE TABLE {schema}.every (id bigint PRIMARY KEY, status text) PARTITION BY RANGE (id);"
        f"CREATE TABLE {schema}.orders PARTITION OF {schema}.every DEFAULT; "
        f"INSERT INTO {schema}.orders VALUES (1, 'old')"
    )
    changing(prepared, "NEW.status := upper(NEW.status)", "every")
    deliver(prepared.ready(states([1]).schema, key=["id"]), states([1]))
    assert prepared.rows() == [(1, "NEW")]


def test_policies_that_come_while_a_query_runs_hold(prepared: World) -> None:
    filled(prepared, [1])
    orders = f"{prepared.schema}.orders"
    with prepared.role("SELECT, INSERT, UPDATE") as (_, dsn):
        sink = prepared.ready(states([1]).schema, key=["id"], dsn=dsn)
        prepared.run(
            f"ALTER TABLE {orders} ENABLE ROW LEVEL SECURITY; "
            f"CREATE POLICY i ON {orders} FOR INSERT WITH CHECK (false); "
            f"CREATE POLICY s ON {orders} FOR SELECT USING (true); "
            f"CREATE POLICY u ON {orders} FOR UPDATE USING (true)"
        )
        with pytest.raises(PrepareRejectedError, match="row-level security"):
            prepare(sink, states([1]))
        sink.close()
    assert prepared.rows() == [(1, "old")]


def test_lost_update_is_made_again(world: World) -> None:
    filled(world, [1, 2])
    sink = world.ready(states([1]).schema, key=["id"])
    committable = prepare(sink, states([1, 2]))
    lose(world, sink)
    world.run(f"DELETE FROM {world.schema}.orders WHERE id = 2")
    sink.commit(committable)
    assert world.rows() == [(1, "new"), (2, "new")]


def test_update_that_the_table_refuses_aborts_the_batch(prepared: World) -> None:
    filled(prepared, [1, 2], f"{KEYED}, UNIQUE (status, id)")
    sink = prepared.ready(states([2]).schema, key=["id"])
    with pytest.raises(PrepareRejectedError, match="orders_status_check"):
        prepare(sink, states([1, 2], "bad"))
    assert prepared.rows() == [(1, "old"), (2, "old")]


def test_other_columns_stay_as_they_are(prepared: World) -> None:
    filled(prepared, [1], f"{KEYED}, note text NOT NULL DEFAULT 'none', n serial")
    prepared.run(f"UPDATE {prepared.schema}.orders SET note = 'kept'")
    deliver(prepared.ready(states([1]).schema, key=["id"]), states([1]))
    assert prepared.rows() == [(1, "new", "kept", 1)]


@pytest.mark.parametrize("check", ["note <> status", "{s}.differ(orders)"])
def test_row_is_checked_as_an_inserted_one_would_be(prepared: World, check: str) -> None:
    """ON CONFLICT checks the row with the defaults that an INSERT would have, whatever is there."""
    filled(prepared, [1], f"{KEYED}, note text DEFAULT 'none'")
    orders = f"{prepared.schema}.orders"
    prepared.run(
        f"CREATE FUNCTION {prepared.schema}.differ({orders}) RETURNS boolean LANGUAGE sql "
        "IMMUTABLE AS $$ SELECT $1.note <> $1.status $$"
    )
    prepared.run(
        f"ALTER TABLE {orders} ADD CONSTRAINT orders_check "
        f"CHECK ({check.format(s=prepared.schema)})"
    )
    prepared.run(f"UPDATE {orders} SET note = 'kept'")
    sink = prepared.ready(states([1]).schema, key=["id"])
    with pytest.raises(PrepareRejectedError, match="orders_check"):
        prepare(sink, states([1], "none"))
    assert prepared.rows() == [(1, "old", "kept")]


DAY = dt.date(2026, 1, 1)


BUILTIN = pytest.mark.parametrize(
    ("columns", "there", "new"),
    [
        ("id text PRIMARY KEY", "a", ["b", "ü"]),
        ('id text COLLATE "POSIX" PRIMARY KEY', "a", ["b", "ü"]),
        ("id varchar(9) PRIMARY KEY", "a", ["b", "c"]),
        ("id uuid PRIMARY KEY", str(uuid.UUID(int=1)), [str(uuid.UUID(int=n)) for n in (2, 3)]),
        ("id date PRIMARY KEY", DAY, [DAY.replace(day=n) for n in (2, 3)]),
        ("id bytea PRIMARY KEY", b"a", [b"b", b"c"]),
        ("id bigint UNIQUE", 1, [2, None]),
        ("id bigint UNIQUE", 1, [None]),
    ],
)


@BUILTIN
def test_keys_of_any_builtin_type(prepared: World, columns: str, there: Any, new: Any) -> None:
    prepared.table(f"{columns}, status text")
    insert = sql.SQL("INSERT INTO {} VALUES ({})").format(
        sql.Identifier(prepared.schema, "orders"), sql.Literal(there)
    )
    prepared.run(insert)
    rows = states(pa.array(new, pa.int64()) if new[-1] is None else new)  # type: ignore[arg-type]
    deliver(prepared.ready(rows.schema, key=["id"]), rows)
    assert len(prepared.rows()) == 1 + len(new)


@BUILTIN
def test_keys_of_any_builtin_type_are_updated(
    prepared: World, columns: str, there: Any, new: Any
) -> None:
    del there
    keys = [key for key in new if key is not None] or [5]
    filled(prepared, keys, f"{columns}, status text")
    rows = states(pa.array([*keys, None]) if None in new else keys)  # type: ignore[arg-type]
    deliver(prepared.ready(rows.schema, key=["id"]), rows)
    states_after = [row[1] for row in prepared.run(f"SELECT * FROM {prepared.schema}.orders")]
    assert states_after == ["new"] * len(rows)


@pytest.mark.parametrize(
    ("columns", "more"),
    [
        ("id text", "CREATE UNIQUE INDEX ON {s}.orders (id text_pattern_ops)"),
        ('id text COLLATE "C"', 'CREATE UNIQUE INDEX ON {s}.orders (id COLLATE "POSIX")'),
        ("id {s}.named PRIMARY KEY", ""),
        ("id {s}.kind PRIMARY KEY", ""),
        ("id text", "CREATE UNIQUE INDEX ON {s}.orders (id NULLS FIRST)"),
        ("id text", "CREATE UNIQUE INDEX ON {s}.orders (id DESC NULLS LAST)"),
    ],
)
def test_key_with_an_index_of_its_own_kind(prepared: World, columns: str, more: str) -> None:
    schema = prepared.schema
    prepared.run(f"CREATE DOMAIN {schema}.named AS text; CREATE TYPE {schema}.kind AS ENUM ('x')")
    prepared.table(f"{columns}, status text".format(s=schema))
    if more:
        prepared.run(more.format(s=schema))
    deliver(prepared.ready(states(["x"]).schema, key=["id"]), states(["x"]))
    deliver(prepared.ready(states(["x"]).schema, key=["id"]), states(["x"], "newer"), 1)
    assert prepared.rows() == [("x", "newer")]


def test_no_partition_is_locked_but_those_that_rows_go_to(prepared: World) -> None:
    """Another session may lock one, and locks are few."""
    prepared.table(
        "id bigint, day date, status text, PRIMARY KEY (id, day)) PARTITION BY LIST (day"
    )
    for day in (1, 2):
        prepared.run(
            f"CREATE TABLE {prepared.schema}.p{day} PARTITION OF {prepared.schema}.orders "
            f"FOR VALUES IN ('2026-01-0{day}')"
        )
    rows = states([1, 2]).append_column("day", [[DAY] * 2])
    sink = prepared.ready(rows.schema, key=["id", "day"], lock_timeout_s=1.0)
    with psycopg.connect(prepared.dsn) as blocker:
        blocker.execute(f"LOCK TABLE {prepared.schema}.p2".encode())
        deliver(sink, rows)
    assert prepared.ids() == [1, 2]


@pytest.mark.parametrize("load", ["staged", "direct"])
def test_index_that_is_gone_lets_no_key_come_twice(prepared: World, load: str) -> None:
    prepared.table(KEYED)
    rows = states([1, 2, 2])
    sink = prepared.ready(rows.schema, key=["id"], load=load)
    prepared.run(f"ALTER TABLE {prepared.schema}.orders DROP CONSTRAINT orders_pkey")
    with pytest.raises(PrepareRejectedError, match="no unique or exclusion constraint matching"):
        sink.vote(merge_of(), [stage(sink, rows)])
    assert prepared.rows() == []


def test_index_cannot_be_dropped_while_a_batch_merges(prepared: World) -> None:
    prepared.table(KEYED)
    sink = prepared.ready(states([1]).schema, key=["id"])
    staged = stage(sink, states([1, 2]))
    with psycopg.connect(prepared.dsn) as rival, ThreadPoolExecutor(2) as pool:
        rival.execute(f"INSERT INTO {prepared.schema}.orders VALUES (2, 'rival')".encode())
        voting = pool.submit(sink.vote, merge_of(), [staged])
        eventually(lambda: prepared.waiting() == 1, "the merge waits for key 2")
        drop = f"ALTER TABLE {prepared.schema}.orders DROP CONSTRAINT orders_pkey"
        dropping = pool.submit(prepared.run, drop)
        eventually(lambda: prepared.waiting() == 2, "the index cannot be dropped")
        rival.commit()
        (merged,) = voting.result(DEADLINE_S)
        sink.commit(merged)
        dropping.result(DEADLINE_S)
    assert prepared.rows() == [(1, "new"), (2, "new")]


def test_rows_meet_the_policies_of_on_conflict(prepared: World) -> None:
    """Also the policies for SELECT, which a plain INSERT does not check."""
    prepared.table(KEYED)
    orders = f"{prepared.schema}.orders"
    with prepared.role("SELECT, INSERT, UPDATE") as (_, dsn):
        prepared.run(
            f"ALTER TABLE {orders} ENABLE ROW LEVEL SECURITY; "
            f"CREATE POLICY i ON {orders} FOR INSERT WITH CHECK (true); "
            f"CREATE POLICY s ON {orders} FOR SELECT USING (status = 'seen'); "
            f"CREATE POLICY u ON {orders} FOR UPDATE USING (true)"
        )
        sink = prepared.ready(states([1]).schema, key=["id"], dsn=dsn)
        with pytest.raises(PrepareRejectedError, match="row-level security"):
            prepare(sink, states([1]))
        sink.close()
    assert prepared.rows() == []


@pytest.mark.parametrize("name", ["low", "width", "staged", "target", "sparkonce"])
def test_table_and_columns_of_any_name(prepared: World, name: str) -> None:
    other = "note" if name == "low" else "low"
    prepared.table(f"{name} bigint PRIMARY KEY, {other} text", name)
    sink = prepared.sink(table=f"{prepared.schema}.{name}", key=[name])
    rows = pa.table({name: [1, 2], other: ["a", "b"]})
    sink.validate(rows.schema)
    for batch in range(2):
        deliver(sink, rows, batch)
    assert prepared.rows(name) == [(1, "a"), (2, "b")]


@pytest.mark.parametrize(("given", "found"), [("4MB", "64MB"), ("100MB", "100MB")])
@pytest.mark.parametrize("load", ["staged", "direct"])
def test_merge_sorts_in_memory(prepared: World, load: str, given: str, found: str) -> None:
    prepared.table(KEYED)
    changing(prepared, "NEW.status := current_setting('work_mem')")
    dsn = f"{prepared.dsn}?options=-c%20work_mem%3D{given}"
    sink = prepared.ready(states([1]).schema, key=["id"], load=load, dsn=dsn)
    deliver(sink, states([1]))
    assert prepared.rows() == [(1, found)]
