"""How rows meet those in the table: upsert, ignore, merge with deletions, created tables, rejects.

Each mode on a real server, under both ways to hold a merge, and merged again after it was lost.
"""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import psycopg
import pyarrow as pa
import pyarrow.compute
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from integration_tests.support.postgres import (
    OWNER,
    World,
    commit_until_known,
    deliver,
    lose,
    merge_of,
    prepare,
    stage,
    task,
    vote_behind,
)
from sparkonce import ExactlyOnce, failpoints
from sparkonce.errors import CommitRejectedError, ConfigurationError, PrepareRejectedError
from sparkonce.model import Committable
from sparkonce.sinks import FileSink, PostgresSink
from sparkonce.spark_hooks.validating import validate_sinks

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pc: Any = pyarrow.compute  # its stubs do not know `equal`

STATES = "id bigint PRIMARY KEY, status text, note text"
CHANGES = pa.schema(
    [("op", pa.string()), ("ts", pa.int64()), ("id", pa.int64()), ("status", pa.string())]
)
SCHEMA_OF_STATES = pa.schema([("id", pa.int64()), ("status", pa.string())])
CDC: Mapping[str, Any] = {"key": ["id"], "order_by": "ts", "delete": "op = 'D'"}


def changes(*rows: tuple[str | None, int | None, int | None, str | None]) -> pa.Table:
    return pa.Table.from_pylist(
        [dict(zip(CHANGES.names, row, strict=True)) for row in rows], schema=CHANGES
    )


def states(*rows: tuple[int | None, str | None]) -> pa.Table:
    return changes(*((None, None, *row) for row in rows)).select(["id", "status"])


def in_tasks(sink: PostgresSink, *tables: pa.Table) -> list[Any]:
    """Each table by a task of its own."""
    return [stage(sink, rows, task(attempt)) for attempt, rows in enumerate(tables, 7)]


# -- what becomes of a row whose key is there ------------------------------------------------------


def test_update_sets_the_columns_that_are_named(world: World) -> None:
    """A new row gets all of its columns."""
    world.table()
    world.run(f"ALTER TABLE {world.schema}.orders ADD UNIQUE (id), ADD status text")
    world.run(f"INSERT INTO {world.schema}.orders VALUES (1, 'kept', 'old')")
    rows = pa.table({"id": [1, 2], "name": ["x", "y"], "status": ["new", "new"]})
    deliver(world.ready(rows.schema, key=["id"], update=["status"]), rows)
    assert world.rows() == [(1, "kept", "new"), (2, "y", "new")]


def test_ignored_row_leaves_the_one_that_is_there(world: World) -> None:
    """The marker tells the rows of the batch, those that were ignored too."""
    world.table(STATES)
    world.run(f"INSERT INTO {world.schema}.orders VALUES (1, 'old')")
    rows = states((1, "new"), (2, "new"))
    sink = world.ready(rows.schema, key=["id"], write="ignore")
    deliver(sink, rows)
    deliver(sink, rows, batch=1)
    assert world.rows() == [(1, "old", None), (2, "new", None)]
    assert world.run(f"SELECT rows FROM {world.schema}.sparkonce_commits") == [(2,), (2,)]


@pytest.mark.parametrize("mode", ["upsert", "ignore", "merge"])
def test_last_row_of_a_key_counts(world: World, mode: str) -> None:
    """Also where the rows of a key are in several tasks; NULL comes before every value."""
    world.table(STATES)
    delete = {"delete": "op = 'D'"} if mode == "merge" else {}
    first = changes((None, 1, 1, "a"), (None, 3, 2, "last"), (None, None, 3, "none"))
    second = changes((None, 2, 1, "last"), (None, 2, 2, "b"), (None, 0, 3, "last"))
    columns = CHANGES.names if mode == "merge" else ["ts", "id", "status"]
    first, second = first.select(columns), second.select(columns)
    sink = world.ready(first.schema, write=mode, key=["id"], order_by="ts", **delete)
    (merged,) = sink.vote(merge_of(), in_tasks(sink, first, second))
    sink.commit(merged)
    assert world.rows() == [(n, "last", None) for n in (1, 2, 3)]


def test_several_columns_order_the_rows(prepared: World) -> None:
    prepared.table(STATES + ", day date, seq int")
    rows = pa.table(
        {
            "id": [1, 1, 1],
            "day": pa.array(["2026-01-01", "2026-01-02", "2026-01-02"]).cast(pa.date32()),
            "seq": pa.array([9, 1, 2], pa.int32()),
            "status": ["a", "b", "c"],
        }
    )
    deliver(prepared.ready(rows.schema, key=["id"], order_by=["day", "seq"]), rows)
    assert prepared.run(f"SELECT status, seq FROM {prepared.schema}.orders") == [("c", 2)]


@pytest.mark.parametrize("mode", ["upsert", "ignore", "merge"])
@pytest.mark.parametrize("place", [2, None])
def test_tie_for_the_last_row_is_refused(world: World, mode: str, place: int | None) -> None:
    """Which of the two would win is chance; a tie behind the last one does not matter."""
    world.table(STATES)
    delete = {"delete": "op = 'D'"} if mode == "merge" else {}
    columns = CHANGES.names if mode == "merge" else ["ts", "id", "status"]
    first, second = (
        changes((op, place, 7, status), (None, 1, 8, status), (None, 2, 8, "last")).select(columns)
        for op, status in (("D", "a"), ("U", "b"))
    )
    sink = world.ready(first.schema, write=mode, key=["id"], order_by="ts", **delete)
    with pytest.raises(PrepareRejectedError, match=r"order_by=\['ts'\], .* id = (7|8)"):
        sink.vote(merge_of(), in_tasks(sink, first, second))
    assert world.state() == (0, 0, 2, 0)
    for branch in sink.find_branches(OWNER):
        sink.abort(branch)
    rows = pa.concat_tables([first.slice(0, 1), first.slice(1, 1), second.slice(1)])
    deliver(sink, rows)
    assert world.run(f"SELECT status FROM {world.schema}.orders WHERE id = 8") == [("last",)]


@pytest.mark.parametrize("mode", ["upsert", "ignore", "merge"])
def test_key_that_comes_twice_without_an_order_is_refused(world: World, mode: str) -> None:
    """Also two deletions: nobody said that such a batch may come."""
    world.table(STATES)
    delete = {"delete": "op = 'D'"} if mode == "merge" else {}
    columns = ["op", "id", "status"] if mode == "merge" else ["id", "status"]
    rows = changes(("D", 1, 7, "a"), ("D", 1, 8, "a"), ("D", 1, 7, "a")).select(columns)
    sink = world.ready(rows.schema, write=mode, key=["id"], **delete)
    with pytest.raises(PrepareRejectedError, match=r"key=\['id'\].*id = 7; .*order_by="):
        prepare(sink, rows)
    assert world.state() == (0, 0, 1, 0)


@pytest.mark.parametrize("mode", ["upsert", "ignore", "merge"])
def test_keys_with_a_null_equal_no_other_key(world: World, mode: str) -> None:
    """Each such row is inserted, whatever the order says; its deletion deletes nothing."""
    world.table("id bigint UNIQUE, status text")
    delete = {"delete": "op = 'D'"} if mode == "merge" else {}
    columns = CHANGES.names if mode == "merge" else ["ts", "id", "status"]
    rows = changes((None, 1, None, "a"), (None, 1, None, "b"), (None, 2, None, "c"))
    sink = world.ready(rows.select(columns).schema, write=mode, key=["id"], order_by="ts", **delete)
    deliver(sink, rows.select(columns))
    if mode == "merge":
        deliver(sink, changes(("D", 9, None, "a")), batch=1)
    assert world.rows(order="2") == [(None, "a"), (None, "b"), (None, "c")]


# -- deletions -------------------------------------------------------------------------------------


def test_deletions_and_updates_of_one_batch(world: World) -> None:
    """Helper columns need not be in the table; other columns of an updated row stay."""
    world.table(STATES)
    world.run(
        f"INSERT INTO {world.schema}.orders VALUES "
        "(1, 'old', 'n'), (2, 'old', 'n'), (3, 'old', 'n'), (4, 'old', 'n')"
    )
    sink = world.ready(CHANGES, **CDC)
    rows = [
        ("D", 1, 1, None),  # gone
        ("D", 1, 2, None),  # deleted, and there again
        ("I", 2, 2, "again"),
        ("U", 1, 3, "new"),  # changed, and then gone
        ("D", 2, 3, None),
        (None, 1, 4, "new"),  # NULL is no deletion
        ("I", 1, 5, "new"),  # came and went
        ("D", 2, 5, None),
        ("D", 1, 6, None),  # was never there
        ("I", 1, 7, "new"),
    ]
    (merged,) = sink.vote(merge_of(), in_tasks(sink, changes(*rows[::2]), changes(*rows[1::2])))
    sink.commit(merged)
    sink.commit(merged)
    assert world.rows() == [(2, "again", "n"), (4, "new", "n"), (7, "new", None)]
    assert world.state()[1:] == (1, 0, 0)


def test_boolean_column_marks_the_deletions(prepared: World) -> None:
    """By its exact name; it needs not be in the table."""
    prepared.table(STATES)
    prepared.run(f"INSERT INTO {prepared.schema}.orders VALUES (1), (2)")
    rows = pa.table({"id": [1, 2, 3], "Is gone": [True, False, None]})
    deliver(prepared.ready(rows.schema, key=["id"], delete="Is gone"), rows)
    assert prepared.ids() == [2, 3]


def test_deletion_frees_what_another_row_takes(world: World) -> None:
    """Another unique column: the deletions of a batch come before its other rows."""
    world.table("id bigint PRIMARY KEY, status text UNIQUE")
    world.run(f"INSERT INTO {world.schema}.orders VALUES (2, 'taken')")
    deliver(world.ready(CHANGES, **CDC), changes(("I", 1, 1, "taken"), ("D", 1, 2, None)))
    assert world.rows() == [(1, "taken")]


def test_deleted_row_needs_nothing_but_its_key(prepared: World) -> None:
    """As a change log sends it: what is NOT NULL in the table is null there."""
    prepared.table("id bigint PRIMARY KEY, status text NOT NULL")
    prepared.run(f"INSERT INTO {prepared.schema}.orders VALUES (1, 'x')")
    deliver(prepared.ready(CHANGES, **CDC), changes(("D", 1, 1, None)))
    assert prepared.ids() == []


@pytest.mark.parametrize("written", ['"Mixed Case"', '"100%s_"'])
def test_names_of_every_kind_in_a_merge(world: World, written: str) -> None:
    """In table, key, helpers, condition and dead letter table, merged again too."""
    world.table(f"{written} bigint PRIMARY KEY, status text CHECK (status <> 'bad')", written)
    name = written.strip('"')
    rows = pa.table(
        {"Op %": ["I", "D", "I", "I"], "T s": [1, 2, 1, 1], name: [1, 1, 2, 3]}
    ).append_column("status", pa.array(["a", None, "b", "bad"]))
    sink = world.sink(
        f"{world.schema}.{written}",
        key=[name],
        order_by=["T s"],
        delete="\"Op %\" = 'D' -- a comment",
        dead_letter='"Re jects%"',
    )
    sink.validate(rows.schema)
    committable = prepare(sink, rows)
    lose(world, sink)
    sink.commit(committable)
    assert world.rows(written) == [(2, "b")]
    (rejected,) = world.run(f'SELECT record FROM {world.schema}."Re jects%"')
    assert rejected == ({"Op %": "I", "T s": 1, name: 3, "status": "bad"},)


@pytest.mark.parametrize("dead_letter", [None, "rejects"])
def test_partitioned_target(world: World, dead_letter: str | None) -> None:
    """Rows are updated and deleted in whichever partition they are."""
    world.table("id bigint PRIMARY KEY, status text) PARTITION BY HASH (id")
    for part in range(3):
        world.run(
            f"CREATE TABLE {world.schema}.p{part} PARTITION OF {world.schema}.orders "
            f"FOR VALUES WITH (MODULUS 3, REMAINDER {part})"
        )
    sink = world.ready(CHANGES, **CDC, dead_letter=dead_letter)
    deliver(sink, changes(*(("I", 1, n, "a") for n in range(20))))
    deliver(sink, changes(*(("UD"[n % 2], 1, n, "b") for n in range(20))), batch=1)
    assert world.rows() == [(n, "b") for n in range(0, 20, 2)]


def test_staging_has_the_collations_of_the_table(prepared: World) -> None:
    """So that keys are equal and ordered in a batch as they are in the table."""
    prepared.table('id text COLLATE "POSIX" PRIMARY KEY, ids text[] COLLATE "C", name text')
    rows = pa.table({"id": ["a"], "ids": [["b"]], "name": ["c"]})
    staged = stage(prepared.ready(rows.schema, key=["id"], order_by=["name", "ids"]), rows)
    query = (
        "SELECT attname, attcollation::regcollation::text FROM pg_attribute "
        "WHERE attnum > 0 AND attrelid = '{}.{}'::regclass ORDER BY 1"
    )
    names = (prepared.schema, staged.payload["staging"])
    assert prepared.run(query.format(*names)) == [
        ("id", '"POSIX"'),
        ("ids", '"C"'),
        ("name", '"default"'),
    ]


# -- crashes and other writers ---------------------------------------------------------------------

MODES: Mapping[str, tuple[Mapping[str, Any], list[tuple[int, str | None, str | None]]]] = {
    "upsert": ({"key": ["id"], "order_by": "ts"}, [(1, "new", "n"), (2, "z", "n"), (3, "c", None)]),
    "ignore": (
        {"key": ["id"], "order_by": "ts", "write": "ignore"},
        [(1, "old", "n"), (2, "old", "n"), (3, "c", None)],
    ),
    "merge": ({**CDC}, [(1, "new", "n"), (3, "c", None)]),
    "merge with rejects": ({**CDC, "dead_letter": "rejects"}, [(1, "new", "n"), (3, "c", None)]),
}
"""Settings, and the table after the batch of the next tests."""


def mode_of_world(
    world: World, mode: str, /, **more: Any
) -> tuple[PostgresSink, pa.Table, list[Any]]:
    options, after = MODES[mode]
    world.table(STATES)
    world.run(f"INSERT INTO {world.schema}.orders VALUES (1, 'old', 'n'), (2, 'old', 'n')")
    rows = changes(("U", 1, 1, "a"), ("U", 2, 1, "new"), ("D", 1, 2, "z"), ("I", 1, 3, "c"))
    if "delete" not in options:
        rows = rows.drop_columns(["op"])
    return world.ready(rows.schema, **options, **more), rows, after


@pytest.mark.parametrize("mode", MODES)
def test_batch_of_each_mode_is_merged_again(world: World, mode: str) -> None:
    """The merge is lost after the decision; a second commit changes nothing."""
    sink, rows, after = mode_of_world(world, mode)
    before = world.rows()
    committable = prepare(sink, rows)
    assert world.rows() == before
    lose(world, sink)
    sink.commit(committable)
    sink.commit(committable)
    world.sink().commit(committable)
    assert world.rows() == after
    assert world.state()[1:] == (1, 0, 0)


@pytest.mark.parametrize("mode", ["upsert", "ignore", "merge"])
def test_tasks_prepare_each_mode_by_themselves(prepared: World, mode: str) -> None:
    """With load="direct" nothing is left to the driver but the commit."""
    sink, rows, after = mode_of_world(prepared, mode, load="direct")
    before = prepared.rows()
    # As Spark deals rows out: those of a key are in one task.
    parts = [rows.filter(pc.equal(pc.equal(rows["id"], 1), is_one)) for is_one in (True, False)]
    branches = sink.vote(merge_of(), in_tasks(sink, *parts))
    assert (prepared.rows(), len(prepared.gids())) == (before, 2)
    prepared.server.kill()
    prepared.server.start()
    for branch in (*branches, *branches):
        commit_until_known(sink, branch)
    assert prepared.rows() == after
    assert (prepared.staging(), prepared.gids()) == ([], [])
    tie = pa.concat_tables([rows.slice(0, 1), rows.slice(0, 1)])
    with pytest.raises(PrepareRejectedError, match=r"order_by=\['ts'\], .* id = 1"):
        stage(sink, tie, task(batch=1))


@pytest.mark.parametrize("mode", MODES)
def test_server_is_killed_before_the_commit_of_each_mode(world: World, mode: str) -> None:
    sink, rows, after = mode_of_world(world, mode)
    committable = prepare(sink, rows)
    world.server.kill()
    world.server.start()
    fresh = world.sink()  # as the next driver has it, before anything is checked
    fresh.commit(committable)
    fresh.commit(committable)
    assert world.rows() == after
    assert world.state()[1:] == (1, 0, 0)


@pytest.mark.parametrize("mode", MODES)
def test_other_writer_takes_a_key_before_the_vote_ends(world: World, mode: str) -> None:
    """The merge waits for it, and then finds its row."""
    sink, rows, after = mode_of_world(world, mode)
    change = f"INSERT INTO {world.schema}.orders VALUES (3, 'rival', 'r')"
    sink.commit(vote_behind(world, change, sink, rows))
    last = (3, "rival" if mode == "ignore" else "c", "r")
    assert world.rows() == [*after[:-1], last]


@pytest.mark.parametrize("mode", MODES)
def test_other_writer_takes_a_key_from_a_lost_merge(world: World, mode: str) -> None:
    """Decided, lost, and merged again: what was inserted meanwhile is met as any other row."""
    sink, rows, after = mode_of_world(world, mode)
    committable = prepare(sink, rows)
    lose(world, sink)
    world.run(f"INSERT INTO {world.schema}.orders VALUES (3, 'rival', 'r')")
    sink.commit(committable)
    last = (3, "rival" if mode == "ignore" else "c", "r")
    assert world.rows() == [*after[:-1], last]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ("ALTER TABLE {s}.orders ALTER amount TYPE numeric(12, 0)", "'amount' was numeric"),
        ("CREATE RULE nowhere AS ON INSERT TO {s}.orders DO INSTEAD NOTHING", "rule 'nowhere'"),
        ("DELETE FROM {s}.{staging}", "hold 0 rows now"),
    ],
)
def test_table_that_changed_before_a_lost_merge_is_merged_again(
    world: World, change: str, told: str
) -> None:
    """A cast would round the rows, or a rule take them, and nobody would tell."""
    world.table("id bigint, amount numeric(12, 2)")
    amounts = pa.array([Decimal("1.75")], pa.decimal128(12, 2))
    rows = pa.table({"id": pa.array([1], pa.int64()), "amount": amounts})
    sink = world.ready(rows.schema)
    committable = prepare(sink, rows)
    lose(world, sink)
    (staging,) = cast("list[str]", committable.payload["staging"])
    world.run(change.format(s=world.schema, staging=staging))
    with pytest.raises(CommitRejectedError, match=told):
        sink.commit(committable)
    assert world.state() == (0, 0, 1, 0)


def test_payload_without_a_shape_is_merged_again(world: World) -> None:
    """An older sparkonce has decided it."""
    world.table()
    sink = world.ready()
    committable = prepare(sink)
    payload = {name: value for name, value in committable.payload.items() if name != "shape"}
    lose(world, sink)
    sink.commit(Committable(committable.branch_id, payload, version=3))
    assert world.state() == (3, 1, 0, 0)


def test_other_writer_updates_a_row_that_is_deleted(world: World) -> None:
    """Whatever it made of the row, the row of that key goes."""
    sink, rows, after = mode_of_world(world, "merge")
    change = f"UPDATE {world.schema}.orders SET note = 'r' WHERE id = 2"
    sink.commit(vote_behind(world, change, sink, rows))
    assert world.rows() == after


def test_many_pipelines_merge_the_same_keys(prepared: World) -> None:
    """A deadlock is tried again, and every batch lands whole."""
    prepared.table(STATES)
    ids = range(200)

    def run(number: int) -> None:
        sink = prepared.ready(CHANGES, name=f"s{number}", **CDC)
        for batch in range(4):
            order = ids if number % 2 else ids[::-1]
            rows = changes(*(("UD"[(n + number) % 2], 1, n, str(number)) for n in order))
            branch = merge_of(batch, sink=f"s{number}")
            staged = stage(sink, rows, task(batch=batch, sink=f"s{number}"))
            (merged,) = sink.vote(branch, [staged])
            sink.commit(merged)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(run, range(4)))
    assert len(prepared.markers()) == 16
    assert (prepared.staging(), prepared.gids()) == ([], [])


# -- a stream of changes against a model -----------------------------------------------------------

OPERATIONS = st.sampled_from(["I", "U", "D", None])
BATCH = st.lists(st.tuples(OPERATIONS, st.integers(0, 5), st.sampled_from("abc")), max_size=12)


@pytest.mark.parametrize("dead_letter", [None, "rejects"])
def test_random_batches_of_changes_equal_a_model(prepared: World, dead_letter: str | None) -> None:
    """In two tasks, in any order, some lost and merged again."""
    prepared.table(STATES)
    sink = prepared.ready(CHANGES, **CDC, dead_letter=dead_letter)
    numbers = iter(range(100_000))
    outside = psycopg.connect(prepared.dsn, autocommit=True)

    @settings(deadline=None, max_examples=40, suppress_health_check=list(HealthCheck))
    @given(st.lists(st.tuples(BATCH, st.randoms(use_true_random=False), st.booleans()), max_size=5))
    def equals_the_model(batches: Sequence[tuple[Any, Any, bool]]) -> None:
        outside.execute(f"TRUNCATE {prepared.schema}.orders".encode())
        model: dict[int, str] = {}
        for operations, random, is_lost in batches:
            rows = [(op, ts, key, value) for ts, (op, key, value) in enumerate(operations)]
            for op, _, key, value in rows:
                if op == "D":
                    model.pop(key, None)
                else:
                    model[key] = value
            random.shuffle(rows)
            number = next(numbers)
            halves = [changes(*rows[: len(rows) // 2]), changes(*rows[len(rows) // 2 :])]
            staged = [
                stage(sink, half, task(attempt, number)) for attempt, half in enumerate(halves)
            ]
            (merged,) = sink.vote(merge_of(number), staged)
            if is_lost:
                outside.execute(f"ROLLBACK PREPARED '{merge_of(number)}'".encode())
            sink.commit(merged)
            seen = outside.execute(f"SELECT id, status FROM {prepared.schema}.orders".encode())
            assert dict(seen.fetchall()) == model

    try:
        equals_the_model()
    finally:
        outside.close()


# -- settings that the server judges ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"key": ["id"]}, "it has no column 'op'"),
        ({"key": ["id"], "order_by": "ts"}, "it has no column 'op'"),
        ({"key": ["id"], "delete": "op = 'D'"}, "it has no column 'ts'"),
        ({**CDC, "delete": "what = 'D'"}, 'condition .*column "what" does not exist'),
        ({**CDC, "delete": "op ="}, "is no condition over the batch's columns: syntax error"),
        ({**CDC, "delete": "op"}, "delete='op' is no condition.*COALESCE types text and boolean"),
        ({**CDC, "delete": "count(*) > 1 AND op = 'D'"}, "is no condition"),
        ({**CDC, "order_by": "tsx"}, "order_by= names 'tsx', which the batch does not have"),
        ({**CDC, "order_by": "doc"}, "order_by=.'doc'.: could not identify an ordering operator"),
        ({**CDC, "update": ["state"]}, "update= names 'state', which the batch does not have"),
        ({**CDC, "update": ["op"]}, "it has no column 'op'"),
        ({**CDC, "dead_letter": "{s}.orders"}, "dead_letter= must be another table"),
        (
            {**CDC, "dead_letter": "sparkonce_commits"},
            "not a table with the columns branch, batch_id",
        ),
        ({**CDC, "dead_letter": "a b"}, "dead_letter='a b' is not a name"),
        ({**CDC, "dead_letter": "a.b.c"}, "dead_letter='a.b.c' must have a schema and a table"),
    ],
)
def test_setting_that_the_server_refuses(
    prepared: World, options: dict[str, Any], message: str
) -> None:
    prepared.table(STATES + ", doc json")
    if "dead_letter" in options:
        options = {**options, "dead_letter": options["dead_letter"].format(s=prepared.schema)}
    schema = CHANGES.append(pa.field("doc", pa.string()))
    with pytest.raises(ConfigurationError, match=message):
        prepared.ready(schema, **options)


def test_unique_index_in_which_nulls_are_equal(prepared: World) -> None:
    """A plain upsert follows it; what has to find the last row itself is refused."""
    (version,) = prepared.run("SELECT current_setting('server_version_num')::int")[0]
    if version < 150_000:
        pytest.skip("NULLS NOT DISTINCT came with Postgres 15")
    prepared.table("id bigint UNIQUE NULLS NOT DISTINCT, status text")
    for options in ({"order_by": "status"}, {"write": "ignore"}, {"dead_letter": "rejects"}):
        with pytest.raises(ConfigurationError, match="NULLS NOT DISTINCT.*NOT NULL"):
            prepared.ready(SCHEMA_OF_STATES, key=["id"], **options)
    sink = prepared.ready(SCHEMA_OF_STATES, key=["id"])
    deliver(sink, states((None, "a")))
    deliver(sink, states((None, "b")), batch=1)
    assert prepared.rows() == [(None, "b")]


def test_unique_index_that_compares_by_another_collation(prepared: World) -> None:
    """It may take two keys for one which the batch tells apart, or the reverse."""
    schema, orders = prepared.schema, f"{prepared.schema}.orders"
    prepared.table("id bigint, status text UNIQUE")
    prepared.run(f"CREATE COLLATION {schema}.folding (locale = 'C')")
    prepared.run(f"CREATE UNIQUE INDEX folded ON {orders} (status COLLATE {schema}.folding)")
    prepared.ready(SCHEMA_OF_STATES, key=["status"])  # all tell texts apart by their bytes
    # As ICU collations do, which not every server here has.
    prepared.run(
        "UPDATE pg_collation SET collisdeterministic = false WHERE collname = 'folding' "
        f"AND collnamespace = '{schema}'::regnamespace"
    )
    with pytest.raises(ConfigurationError, match="'folded' .*collation"):
        prepared.ready(SCHEMA_OF_STATES, key=["status"])
    prepared.ready(SCHEMA_OF_STATES, key=None)


# -- created tables --------------------------------------------------------------------------------

EVERY_TYPE: Mapping[str, tuple[pa.DataType, Any, str]] = {
    "i1": (pa.int8(), -1, "smallint"),
    "i2": (pa.int16(), 2, "smallint"),
    "i4": (pa.int32(), 3, "integer"),
    "i8": (pa.int64(), 4, "bigint"),
    "f4": (pa.float32(), 0.5, "real"),
    "f8": (pa.float64(), 0.1, "double precision"),
    "n": (pa.decimal128(12, 2), Decimal("1.50"), "numeric(12,2)"),
    "Te xt": (pa.string(), "a", "text"),
    "by": (pa.binary(), b"\0a", "bytea"),
    "bo": (pa.bool_(), True, "boolean"),
    "d": (pa.date32(), dt.date(2026, 1, 2), "date"),
    "ts": (pa.timestamp("us"), dt.datetime.fromisoformat("2026-01-02"), "timestamp without"),
    "tz": (
        pa.timestamp("us", "UTC"),
        dt.datetime.fromisoformat("2026-01-02T00:00Z"),
        "timestamp with",
    ),
    "t": (pa.time64("ns"), dt.time(1, 2, 3, 4), "time without"),
    "span": (pa.duration("us"), dt.timedelta(hours=1, microseconds=2), "interval"),
    "l": (pa.list_(pa.string()), ["a", None], "text[]"),
    "ln": (pa.list_(pa.decimal128(5, 1)), [Decimal("1.5")], "numeric(5,1)[]"),
}
"""Arrow's type, a value, and the type that is made for it; by column name."""


def declared(world: World, name: str = "orders") -> dict[str, str]:
    query = (
        "SELECT attname, format_type(atttypid, atttypmod) FROM pg_attribute WHERE attnum > 0 "
        f"AND attrelid = '{world.schema}.{name}'::regclass ORDER BY attnum"
    )
    return dict(world.run(query))


def test_missing_table_is_created_and_said_so(
    prepared: World, caplog: pytest.LogCaptureFixture
) -> None:
    """Every type that has a default, with values; the statement is in the log."""
    schema = pa.schema([(name, kind) for name, (kind, _, _) in EVERY_TYPE.items()])
    rows = pa.Table.from_pylist(
        [{name: value for name, (_, value, _) in EVERY_TYPE.items()}], schema
    )
    sink = prepared.sink(key=["i8", "Te xt"], create="if_missing")
    with caplog.at_level("INFO", logger="sparkonce"):
        sink.validate(schema)
    line, of_markers = [text for text in caplog.messages if "CREATE TABLE" in text]
    assert "sparkonce_commits" in of_markers
    assert f'"{prepared.schema}"."orders" ("i1" smallint, ' in line
    assert 'PRIMARY KEY ("i8", "Te xt")' in line
    for (name, kind), (_, _, made) in zip(
        declared(prepared).items(), EVERY_TYPE.values(), strict=True
    ):
        assert kind.startswith(made), name
    deliver(sink, rows)
    deliver(sink, rows, batch=1)
    assert prepared.rows() == [tuple(value for _, value, _ in EVERY_TYPE.values())]
    caplog.clear()
    with caplog.at_level("INFO", logger="sparkonce"):
        prepared.ready(schema, key=["i8", "Te xt"], create="if_missing")
    assert "CREATE TABLE" not in caplog.text


def test_missing_table_of_a_merge_has_no_column_for_the_mark(prepared: World) -> None:
    """A boolean mark is false in every row; what a condition reads may be data."""
    schema = pa.schema([("id", pa.int64()), ("ts", pa.int64()), ("gone", pa.bool_())])
    sink = prepared.ready(
        schema, key=["id"], order_by="ts", delete="gone", create="if_missing", dead_letter="dead"
    )
    assert declared(prepared) == {"id": "bigint", "ts": "bigint"}
    deliver(sink, pa.table({"id": [1, 1, 2], "ts": [1, 2, 1], "gone": [False, True, False]}))
    assert prepared.rows() == [(2, 1)]


@pytest.mark.parametrize(
    ("table", "schema", "key", "message"),
    [
        (
            "{s}.orders",
            pa.schema([("id", pa.int64()), ("s", pa.struct([("a", pa.int64())]))]),
            None,
            "cannot choose a type for column 's': Spark's struct.*create the table yourself",
        ),
        ("{s}.orders", pa.schema([("v", pa.null())]), None, "column 'v': Spark's void"),
        (
            "{s}.orders",
            pa.schema([("v", pa.list_(pa.list_(pa.int64())))]),
            None,
            "column 'v': Spark's array<array<bigint>>",
        ),
        ("{s}.orders", SCHEMA_OF_STATES, ["nr"], "key= names 'nr'"),
        ("{s}_nowhere.orders", SCHEMA_OF_STATES, None, 'schema "\\w+_nowhere" does not exist'),
        ("a b", SCHEMA_OF_STATES, None, "it is not a name"),
    ],
)
def test_table_that_cannot_be_created(
    prepared: World, table: str, schema: pa.Schema, key: list[str] | None, message: str
) -> None:
    sink = prepared.sink(table.format(s=prepared.schema), key=key, create="if_missing")
    with pytest.raises(ConfigurationError, match=message):
        sink.validate(schema)
    assert prepared.run(f"SELECT FROM pg_tables WHERE schemaname = '{prepared.schema}'") == []


def test_table_is_never_created_unasked(prepared: World) -> None:
    with pytest.raises(ConfigurationError, match='does not exist.*create="if_missing"'):
        prepared.ready(SCHEMA_OF_STATES)


def test_many_drivers_create_the_table_at_once(prepared: World) -> None:
    sinks = [
        prepared.sink(key=["id"], create="if_missing", dead_letter="rejects") for _ in range(8)
    ]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda sink: sink.validate(SCHEMA_OF_STATES), sinks))
    deliver(sinks[0], states((1, "a")))
    assert prepared.rows() == [(1, "a")]


# -- rejected rows ---------------------------------------------------------------------------------


def rejected(world: World, name: str = "rejects") -> list[tuple[Any, ...]]:
    """Batch, SQLSTATE, constraint and row."""
    query = f"SELECT batch_id, sqlstate, constraint_name, record FROM {world.schema}.{name}"
    return world.run(f"{query} ORDER BY record ->> 'id', record ->> 'status'")


@pytest.mark.parametrize(
    ("columns", "bad", "state", "constraint"),
    [
        ("id bigint, status text NOT NULL", (7, None), "23502", None),
        ("id bigint PRIMARY KEY, status text", (None, "x"), "23502", None),
        ("id bigint CONSTRAINT small CHECK (id < 5), status text", (7, "x"), "23514", "small"),
        ("id bigint PRIMARY KEY, status text", (0, "x"), "23505", "orders_pkey"),
        (
            "id bigint PRIMARY KEY DEFERRABLE INITIALLY DEFERRED, status text",
            (0, "x"),
            "23505",
            "orders_pkey",
        ),
        (
            "id bigint CONSTRAINT known REFERENCES {s}.known INITIALLY DEFERRED, status text",
            (7, "x"),
            "23503",
            "known",
        ),
        ("id bigint, status varchar(3)", (7, "long"), "22001", None),
        ("id bigint, status char(3)", (7, "long"), "22001", None),
        ("id numeric(2,0), status text", (100, "x"), "22003", None),
        ("id bigint, status {s}.short", (7, "long"), "23514", "short_check"),
        ("id bigint, status text) PARTITION BY LIST (status", (7, "homeless"), "23514", None),
        (
            "id bigint, status text, half numeric GENERATED ALWAYS AS (1 / (id - 7)) STORED",
            (7, "x"),
            "22012",
            None,
        ),
    ],
)
def test_row_that_violates_a_constraint_is_put_aside(
    world: World, columns: str, bad: tuple[Any, Any], state: str, constraint: str | None
) -> None:
    """The rest of the batch commits with it, in one transaction; the record has every column."""
    world.run(f"CREATE TABLE {world.schema}.known (id bigint PRIMARY KEY)")
    world.run(f"INSERT INTO {world.schema}.known SELECT generate_series(0, 4)")
    world.run(f"CREATE DOMAIN {world.schema}.short AS text CHECK (length(value) < 4)")
    world.table(columns.format(s=world.schema))
    if "PARTITION" in columns:
        world.run(
            f"CREATE TABLE {world.schema}.p PARTITION OF {world.schema}.orders "
            "FOR VALUES IN ('ok', 'own')"
        )
    world.run(f"INSERT INTO {world.schema}.orders VALUES (0, 'own')")
    sink = world.ready(SCHEMA_OF_STATES, dead_letter="rejects")
    good = [(n, "ok") for n in range(1, 5)]
    staged = in_tasks(sink, states(*good[:2]), states(bad, *good[2:]))
    (merged,) = sink.vote(merge_of(), staged)
    assert (world.ids(), rejected(world)) == ([0], [])
    sink.commit(merged)
    sink.commit(merged)
    assert world.ids() == [0, 1, 2, 3, 4]
    assert rejected(world) == [(0, state, constraint, {"id": bad[0], "status": bad[1]})]
    assert world.state()[1:] == (1, 0, 0)
    (row,) = world.run(
        "SELECT r.reason <> '', r.rejected_at = c.committed_at, c.rows "
        f"FROM {world.schema}.rejects r JOIN {world.schema}.sparkonce_commits c USING (branch)"
    )
    assert row == (True, True, 5)


@pytest.mark.parametrize("name", ["work", "staged", "target", "sparkonce", "excluded"])
def test_rejected_row_of_a_table_with_any_column_name(prepared: World, name: str) -> None:
    """Names of the merge's own mean the user's columns nowhere, nor the other way round."""
    prepared.table(f"id bigint PRIMARY KEY CHECK (id < 5), {name} bigint, op text")
    schema = pa.schema([("id", pa.int64()), (name, pa.int64()), ("op", pa.string())])
    options: dict[str, Any] = {"key": ["id"], "order_by": name, "delete": "op = 'D'"}
    sink = prepared.ready(schema, dead_letter="rejects", **options)
    rows = [(1, 1, None), (1, 2, None), (2, 3, None), (3, 9, None), (3, 10, "D"), (7, 4, None)]
    named = [dict(zip(schema.names, row, strict=True)) for row in rows]
    deliver(sink, pa.Table.from_pylist(named, schema=schema))
    assert prepared.rows() == [(1, 2, None), (2, 3, None)]
    assert [row[-1] for row in rejected(prepared)] == [{"id": 7, name: 4, "op": None}]


def test_number_of_rejected_rows_is_logged(
    prepared: World, caplog: pytest.LogCaptureFixture
) -> None:
    """A batch without such rows says nothing."""
    prepared.table("id bigint CHECK (id > 0), status text")
    sink = prepared.ready(SCHEMA_OF_STATES, dead_letter="rejects")
    with caplog.at_level("WARNING", logger="sparkonce"):
        deliver(sink, states((1, "a")))
        assert caplog.messages == []
        deliver(sink, states((-1, "a"), (1, "a"), (-2, "a")), batch=1)
    (line,) = caplog.messages
    assert line.endswith(f".orders: 2 of 3 rows are rejected and go to {prepared.schema}.rejects")


@pytest.mark.parametrize("partitioned", [False, True])
@pytest.mark.parametrize("rejecting", ["orders", "items"])
def test_rejects_next_to_a_table_of_a_foreign_key(
    prepared: World, rejecting: str, *, partitioned: bool
) -> None:
    """Neither sink sees the other's rows before the decision, so valid rows would be rejected."""
    at = prepared.schema
    parent = "PARTITION BY RANGE (id)" if partitioned else ""
    prepared.run(f"CREATE TABLE {at}.orders (id bigint PRIMARY KEY, status text) {parent}")
    if partitioned:
        prepared.run(f"CREATE TABLE {at}.p PARTITION OF {at}.orders DEFAULT")
    prepared.run(f"CREATE TABLE {at}.items (id bigint REFERENCES {at}.orders, status text)")

    def validate(*rejecting: str) -> None:
        names = ("orders", "items")
        sinks = [
            prepared.sink(
                f"{at}.{name}", name=name, dead_letter="rejects" if name in rejecting else None
            )
            for name in names
        ]
        validate_sinks(sinks, dict.fromkeys(names, SCHEMA_OF_STATES))

    validate()
    with pytest.raises(ConfigurationError, match="dead_letter= would reject valid rows.*items"):
        validate(rejecting)
    prepared.run(f"ALTER TABLE {at}.items DROP CONSTRAINT items_id_fkey")
    validate(rejecting)


@pytest.mark.parametrize("of", ["ALL TABLES", "TABLES IN SCHEMA {s}", "TABLE {s}.orders"])
def test_publication_that_carries_staging_is_told(
    prepared: World, caplog: pytest.LogCaptureFixture, of: str
) -> None:
    """A subscriber has no such tables; and an update of the work table is allowed all the same."""
    at = prepared.schema
    prepared.table("id bigint CHECK (id > 0), status text")
    prepared.run(f'CREATE PUBLICATION "All of {at}" FOR {of.format(s=at)}')
    try:
        with caplog.at_level("WARNING", logger="sparkonce"):
            sink = prepared.ready(SCHEMA_OF_STATES, dead_letter="rejects")
            told = [line for line in caplog.messages if f"'All of {at}'" in line]
            assert len(told) == (0 if of.startswith("TABLE ") else 1)
            assert all("FOR TABLE" in line and "staging" in line for line in told)
            caplog.clear()
            prepared.ready(SCHEMA_OF_STATES, load="direct")
            assert len(caplog.messages) == len(told)  # of the table of its markers
        deliver(sink, states((1, "a"), (-1, "b")))
    finally:
        prepared.run(f'DROP PUBLICATION "All of {at}"')
    assert (prepared.rows(), len(rejected(prepared))) == ([(1, "a")], 1)


def test_any_rows_of_a_batch_may_be_bad(prepared: World) -> None:
    """Exactly the bad ones are put aside, wherever they are and however many."""
    prepared.table("id bigint CHECK (id >= 0), status text")
    sink = prepared.ready(SCHEMA_OF_STATES, dead_letter="rejects")
    numbers = iter(range(100_000))
    outside = psycopg.connect(prepared.dsn, autocommit=True)

    @settings(deadline=None, max_examples=40, suppress_health_check=list(HealthCheck))
    @given(st.lists(st.booleans(), min_size=1, max_size=70))
    @example([True] * 40)
    @example([False] * 40)
    def bad_ones_are_put_aside(is_good: list[bool]) -> None:
        for table in ("orders", "rejects"):
            outside.execute(f"TRUNCATE {prepared.schema}.{table}".encode())
        ids = [n if good else -n for n, good in enumerate(is_good, 1)]
        deliver(sink, states(*((n, None) for n in ids)), next(numbers))
        assert prepared.ids() == [n for n in ids if n > 0]
        query = f"SELECT (record -> 'id')::int FROM {prepared.schema}.rejects"
        found = [row[0] for row in outside.execute(query.encode())]
        assert sorted(found) == sorted(n for n in ids if n < 0)

    try:
        bad_ones_are_put_aside()
    finally:
        outside.close()


def test_row_that_refers_to_a_later_row_is_not_put_aside(world: World) -> None:
    """Where the batch is taken apart, such a row gets another chance; a chain of them too."""
    world.table(f"id bigint PRIMARY KEY, parent bigint REFERENCES {world.schema}.orders, v int")
    world.run(f"ALTER TABLE {world.schema}.orders ADD CHECK (v > 0)")
    rows = pa.table(
        {
            "id": range(50),
            "parent": [*range(1, 50), None],
            "v": pa.array([0, *[1] * 49], pa.int32()),
        }
    )
    sink = world.ready(rows.schema, dead_letter="rejects")
    deliver(sink, rows)
    assert world.ids() == list(range(1, 50))
    assert [row[3]["id"] for row in rejected(world)] == [0]


def test_value_that_comes_twice_in_an_append(world: World) -> None:
    """One of the rows stays, and the other one is put aside."""
    world.table("id bigint PRIMARY KEY, status text")
    rows = states((7, "same"), (8, "x"), (7, "same"))
    deliver(world.ready(SCHEMA_OF_STATES, dead_letter="rejects"), rows)
    assert world.ids() == [7, 8]
    assert rejected(world) == [(0, "23505", "orders_pkey", {"id": 7, "status": "same"})]


def test_deletion_that_is_refused_is_put_aside(world: World) -> None:
    """A row that others refer to stays."""
    world.table(STATES)
    world.run(f"INSERT INTO {world.schema}.orders VALUES (1), (2), (3)")
    world.run(f"CREATE TABLE {world.schema}.items (id bigint REFERENCES {world.schema}.orders)")
    world.run(f"INSERT INTO {world.schema}.items VALUES (2)")
    sink = world.ready(CHANGES, **CDC, dead_letter="rejects")
    deliver(sink, changes(("D", 1, 1, None), ("D", 1, 2, None), ("U", 1, 3, "new")))
    assert world.rows() == [(2, None, None), (3, "new", None)]
    ((_, state, constraint, record),) = rejected(world)
    assert (state, constraint, record["op"]) == ("23503", "items_id_fkey", "D")


@pytest.mark.parametrize("order_by", [None, "ts"])
def test_duplicate_key_is_no_rejected_row(world: World, order_by: str | None) -> None:
    """Which of the two is right nobody knows, also where the batch has to be taken apart."""
    world.table("id bigint PRIMARY KEY, status text CHECK (status <> 'bad'), ts bigint")
    # Postgres meets the bad row first: from then on it sees one row after the other.
    rows = changes((None, 1, 6, "bad"), (None, 1, 7, "a"), (None, 1, 7, "c")).drop_columns(["op"])
    sink = world.ready(rows.schema, key=["id"], order_by=order_by, dead_letter="rejects")
    with pytest.raises(PrepareRejectedError, match="id = 7"):
        prepare(sink, rows)
    assert world.state() == (0, 0, 1, 0)
    assert rejected(world) == []


def test_whatever_is_no_fault_of_a_row_aborts_the_batch(world: World) -> None:
    """A trigger's own error, or a lock that is not given."""
    world.table("id bigint, status text")
    world.run(
        f"CREATE FUNCTION {world.schema}.f() RETURNS trigger LANGUAGE plpgsql AS "
        "$$ BEGIN RAISE EXCEPTION 'closed today'; END $$"
    )
    world.run(
        f"CREATE TRIGGER t BEFORE INSERT ON {world.schema}.orders "
        f"EXECUTE FUNCTION {world.schema}.f()"
    )
    sink = world.ready(SCHEMA_OF_STATES, dead_letter="rejects", lock_timeout_s=0.2)
    with pytest.raises(PrepareRejectedError, match="closed today"):
        prepare(sink, states((1, "a")))
    world.run(f"DROP TRIGGER t ON {world.schema}.orders")
    with psycopg.connect(world.dsn) as blocker:
        blocker.execute(f"LOCK TABLE {world.schema}.orders".encode())
        with pytest.raises(PrepareRejectedError, match=r"lock_timeout_s=0.2"):
            prepare(sink, states((1, "a")), batch=1)
    assert world.state() == (0, 0, 2, 0)
    assert rejected(world) == []


def test_rejected_rows_are_there_once_after_a_crash(world: World) -> None:
    """They are part of the merge: it is lost with them, and made again with them."""
    world.table("id bigint CHECK (id > 0), status text")
    sink = world.ready(SCHEMA_OF_STATES, dead_letter="rejects")
    committable = prepare(sink, states((-1, "a"), (1, "b")))
    lose(world, sink)
    assert rejected(world) == []
    for _ in range(2):
        commit_until_known(sink, committable)
        assert world.ids() == [1]
        assert len(rejected(world)) == 1
    world.server.kill()
    world.server.start()
    world.sink().commit(committable)
    assert (world.ids(), len(rejected(world))) == ([1], 1)


@pytest.mark.parametrize("dead_letter", [None, "rejects"])
def test_lost_merge_whose_key_was_taken(held_open: World, dead_letter: str | None) -> None:
    """With a dead letter table no operator is needed: the row goes there."""
    held_open.table("id bigint PRIMARY KEY, status text")
    sink = held_open.ready(SCHEMA_OF_STATES, dead_letter=dead_letter)
    committable = prepare(sink, states((1, "a"), (2, "b")))
    lose(held_open, sink)
    held_open.run(f"INSERT INTO {held_open.schema}.orders VALUES (2, 'other')")
    if dead_letter is None:
        with pytest.raises(CommitRejectedError, match="orders_pkey"):
            sink.commit(committable)
        return
    sink.commit(committable)
    assert held_open.rows() == [(1, "a"), (2, "other")]
    assert rejected(held_open) == [(0, "23505", "orders_pkey", {"id": 2, "status": "b"})]


def test_role_that_may_read_and_update_some_columns_only(world: World) -> None:
    """Those of the key, and those that an update sets."""
    world.table(STATES)
    world.run(f"INSERT INTO {world.schema}.orders VALUES (1, 'old', 'kept')")
    with world.role("INSERT, SELECT (id, status), UPDATE (status)") as (_, dsn):
        rows = pa.table({"id": [1, 2], "status": ["new", "new"], "note": ["n", "n"]})
        with pytest.raises(ConfigurationError, match="may not read column 'note'"):
            world.ready(rows.schema, key=["id"], dsn=dsn)
        deliver(world.ready(rows.schema, key=["id"], update=["status"], dsn=dsn), rows)
        deliver(world.ready(rows.schema, key=["id"], write="ignore", dsn=dsn), rows, batch=1)
        assert world.rows() == [(1, "new", "kept"), (2, "new", "n")]
        for sink in world.sinks:
            sink.close()


def test_role_with_the_least_rights_merges_and_rejects(world: World) -> None:
    world.table("id bigint PRIMARY KEY, status text CHECK (status <> 'bad')")
    with world.role("SELECT, INSERT, UPDATE (status)") as (role, dsn):
        options = {"dsn": dsn, "dead_letter": "rejects"}
        with pytest.raises(ConfigurationError, match="GRANT DELETE on the table"):
            world.ready(CHANGES, **CDC, **options)
        world.run(f"GRANT DELETE ON {world.schema}.orders TO {role}")
        sink = world.ready(CHANGES, **CDC, **options)
        deliver(sink, changes(("I", 1, 1, "a"), ("I", 1, 2, "b"), ("I", 1, 3, "bad")))
        deliver(sink, changes(("D", 1, 1, None)), batch=1)
        assert world.ids() == [2]
        assert len(rejected(world)) == 1
        world.run(f"ALTER TABLE {world.schema}.rejects OWNER TO CURRENT_USER")
        with pytest.raises(ConfigurationError, match='rejects"; GRANT INSERT on it'):
            world.ready(CHANGES, **CDC, **options)
        sink.close()


# -- under Spark -----------------------------------------------------------------------------------


@pytest.mark.parametrize("point", ["vote.after", "decide.after", "commit.after"])
def test_stream_of_changes_fails_and_is_replayed(
    spark: SparkSession,
    prepared: World,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    point: str,
) -> None:
    """Into a table that it creates, through foreachBatch; each change counts once."""
    (tmp_path / "in").mkdir()

    def fail(reached: str, _where: object) -> None:
        if reached == point:
            raise failpoints.InjectedError(reached)

    def run(*rows: tuple[str, int, int, str | None]) -> None:
        lines = [json.dumps(dict(zip(CHANGES.names, row, strict=True))) for row in rows]
        path = tmp_path / "in" / f"{len(list((tmp_path / 'in').iterdir()))}.json"
        path.write_text("\n".join(lines))
        monkeypatch.setattr(failpoints, "handler", fail)
        with pytest.raises(Exception, match=point.replace(".", r"\.")):
            start()
        monkeypatch.undo()
        start()

    def start() -> None:
        sink = prepared.sink(
            key=["id"],
            order_by="ts",
            delete="gone",
            select=["id", "ts", "status", "op = 'D' AS gone"],
            create="if_missing",
            dead_letter="rejects",
        )
        pipeline = ExactlyOnce("changes", sinks=[sink], log=f"sqlite:///{tmp_path}/txn.db")
        stream = spark.readStream.schema("op string, ts long, id long, status string")
        query = stream.json(str(tmp_path / "in")).repartition(2).writeStream.foreachBatch(pipeline)
        query = query.option("checkpointLocation", str(tmp_path / "ckpt"))
        query.trigger(availableNow=True).start().awaitTermination()

    run(("I", 1, 1, "a"), ("I", 2, 2, "b"), ("U", 3, 1, "c"), ("I", 4, 3, "d"))
    assert declared(prepared) == {"id": "bigint", "ts": "bigint", "status": "text"}
    assert prepared.rows() == [(1, 3, "c"), (2, 2, "b"), (3, 4, "d")]
    prepared.run(f"ALTER TABLE {prepared.schema}.orders ADD CHECK (status <> 'bad')")
    run(("D", 5, 1, None), ("U", 6, 2, "bad"), ("D", 7, 3, None), ("I", 8, 3, "again"))
    assert prepared.rows() == [(2, 2, "b"), (3, 8, "again")]
    assert [(row[0], row[3]["ts"]) for row in rejected(prepared)] == [(1, 6)]
    assert prepared.state() == (2, 2, 0, 0)


def test_violated_constraint_aborts_the_batch_in_every_sink(
    spark: SparkSession, prepared: World, tmp_path: Path
) -> None:
    """Without a dead letter table; the replay delivers it to all once the constraint is gone."""
    prepared.table("id bigint, status text CONSTRAINT known CHECK (status <> 'odd')")
    (tmp_path / "in").mkdir()
    (tmp_path / "out").mkdir()
    (tmp_path / "in" / "0.json").write_text('{"id": 1}\n{"id": 2, "status": "odd"}')

    def run() -> None:
        sinks = [FileSink(tmp_path / "out"), prepared.sink()]
        pipeline = ExactlyOnce("orders", sinks=sinks, log=f"sqlite:///{tmp_path}/txn.db")
        stream = spark.readStream.schema("id long, status string").json(str(tmp_path / "in"))
        query = stream.writeStream.foreachBatch(pipeline)
        query = query.option("checkpointLocation", str(tmp_path / "ckpt"))
        query.trigger(availableNow=True).start().awaitTermination()

    def delivered() -> list[int]:
        files = (tmp_path / "out").glob("*.parquet")
        return sorted(value for path in files for value in pq.read_table(path)["id"].to_pylist())

    with pytest.raises(Exception, match='check constraint "known"'):
        run()
    assert (delivered(), prepared.state()) == ([], (0, 0, 0, 0))
    prepared.run(f"ALTER TABLE {prepared.schema}.orders DROP CONSTRAINT known")
    run()
    assert (delivered(), prepared.state()) == ([1, 2], (2, 1, 0, 0))
