"""`PostgresSink.take_back`: exactly a batch's rows go, or none; looked at from outside."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psycopg
import pyarrow as pa
import pytest
from psycopg import sql

from integration_tests.support import direct_load
from integration_tests.support.one_phase import OneBatch, Pipeline
from integration_tests.support.postgres import (
    COLUMNS,
    ROWS,
    World,
    eventually,
    prepare,
    roll_back_all,
    stage,
    task,
)
from sparkonce.errors import PreparedBranchLostError, SinkError, TakeBackRefusedError
from sparkonce.model import Committable
from sparkonce.sinks import Delivered, PostgresSink, Visible
from sparkonce.sinks.postgres.server.connections import PgConnection

KEYED = "id bigint PRIMARY KEY, name text"
LOADS = ["staged", "direct"]
PARTITIONED = (
    "CREATE TABLE {0}.orders (id bigint, name text) PARTITION BY RANGE (id);"
    "CREATE TABLE {0}.low PARTITION OF {0}.orders FOR VALUES FROM (0) TO (52);"
    "CREATE TABLE {0}.high PARTITION OF {0}.orders FOR VALUES FROM (52) TO (1000)"
)

CASCADE = (
    "ALTER TABLE {0}.orders ADD PRIMARY KEY (id);"
    "CREATE TABLE {0}.lines (id bigint REFERENCES {0}.orders ON DELETE CASCADE)"
)
UPSERT = (
    "CREATE FUNCTION {0}.put() RETURNS trigger LANGUAGE plpgsql AS '"
    "BEGIN UPDATE {0}.orders SET name = NEW.name WHERE id = NEW.id; "
    "IF FOUND THEN RETURN NULL; END IF; RETURN NEW; END'; "
    "CREATE TRIGGER put BEFORE INSERT ON {0}.orders FOR EACH ROW EXECUTE FUNCTION {0}.put()"
)
REFERRED = (
    "ALTER TABLE {0}.orders ADD PRIMARY KEY (id);"
    "CREATE TABLE {0}.lines (id bigint REFERENCES {0}.orders DEFERRABLE INITIALLY DEFERRED);"
    "INSERT INTO {0}.lines VALUES (31)"
)
TRIGGER = (
    "CREATE FUNCTION {0}.keep() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NULL; END'; "
    "CREATE TRIGGER keep BEFORE DELETE ON {0}.orders FOR EACH ROW WHEN (OLD.id = 31) "
    "EXECUTE FUNCTION {0}.keep()"
)


def rows_of(batch: int) -> pa.Table:
    """Three rows, whose ids no other batch has."""
    return pa.table({"id": pa.array([batch * 10 + n for n in range(3)], pa.int64()), "name": "abc"})


def ids_of(*batches: int) -> list[int]:
    return [batch * 10 + n for batch in batches for n in range(3)]


def delivered(sink: PostgresSink, load: str, batches: Sequence[int]) -> list[Delivered]:
    """Deliver the batches; their branches, newest first."""
    found: list[Delivered] = []
    for batch in batches:
        if load == "direct":
            halves = rows_of(batch).slice(0, 1), rows_of(batch).slice(1)
            made = [
                Delivered(direct_load.prepare(sink, half, task(n, batch)), len(half))
                for n, half in enumerate(halves)
            ]
        else:
            made = [Delivered(prepare(sink, rows_of(batch), batch), 3)]
        for branch in made:
            sink.commit(branch.committable)
        found = [*made, *found]
    return found


@pytest.fixture
def after(prepared: World) -> Callable[..., tuple[PostgresSink, list[Delivered]]]:
    """A sink with five batches, and the branches of those after batch 2."""

    def make(load: str = "staged", **options: Any) -> tuple[PostgresSink, list[Delivered]]:
        sink = prepared.ready(ROWS.schema, load=load, **options)
        delivered(sink, load, range(1, 3))
        return sink, delivered(sink, load, range(3, 6))

    return make


def test_batches_of_merges_go(world: World) -> None:
    """Also of merges that waited in an open transaction; rows of other transactions stay."""
    world.table()
    sink = world.ready()
    delivered(sink, "staged", range(1, 3))
    world.run(f"INSERT INTO {world.schema}.orders VALUES (999, 'of somebody else')")
    branches = delivered(sink, "staged", range(3, 6))
    assert sink.find_delivered(branches) == [Visible(3)] * 3
    assert world.ids() == [*ids_of(1, 2, 3, 4, 5), 999]
    for _ in range(2):  # the second call changes nothing
        sink.take_back(branches)
        assert world.ids() == [*ids_of(1, 2), 999]
        assert sink.find_delivered(branches) == [Visible(0)] * 3
    assert world.markers() == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize("table", ["plain", "partitioned"])
def test_every_load_and_table(
    prepared: World,
    after: Callable[..., tuple[PostgresSink, list[Delivered]]],
    load: str,
    table: str,
) -> None:
    """A sink that was never validated can do it; so can one with a key of its own in the table."""
    if table == "plain":
        prepared.table(KEYED)
    else:
        prepared.run(PARTITIONED.format(prepared.schema))
    _, branches = after(load)
    prepared.run(f"VACUUM (FREEZE) {prepared.schema}.orders")
    sink = prepared.sink()
    assert sum(found.rows for found in sink.find_delivered(branches)) == 9
    sink.take_back(branches)
    assert prepared.ids() == ids_of(1, 2)


def test_batch_of_one_phase_goes(prepares: Pipeline) -> None:
    """The log's record was written in the same transaction, and stays."""
    world, log = prepares.world, prepares.log()
    sink = world.ready()
    prepares.driver(sink, log).deliver(OneBatch(sink, 0))
    (record,) = log.history("orders")
    assert prepares.xids() == [(0, True)]
    share = record.shares[sink.name]
    branches = [Delivered(c, share.rows_of(c)) for c in share.committables]
    assert sink.find_delivered(branches) == [Visible(3)]
    sink.take_back(branches)
    assert (world.ids(), log.history("orders")) == ([], [record])


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ("UPDATE {}.orders SET name = 'x' WHERE id = 31", [Visible(3), Visible(3), Visible(2)]),
        ("DELETE FROM {}.orders WHERE id = 31", [Visible(3), Visible(3), Visible(2)]),
        ("ALTER TABLE {}.orders ALTER id TYPE numeric", [Visible(0)] * 3),
        ("DELETE FROM {}.sparkonce_commits WHERE batch_id = 3", "deleted it"),
        ("UPDATE {}.sparkonce_commits SET token = 9", [Visible(0)] * 3),
        (CASCADE, "lines_id_fkey"),
        (REFERRED, "lines_id_fkey.*delete the rows that refer"),
        (TRIGGER, "8 of the 9 rows"),
        (UPSERT, "trigger put on INSERT"),
    ],
    ids=[
        *("update", "delete", "rewritten", "no marker", "marker changed"),
        *("cascade", "referred to", "trigger", "upsert"),
    ],
)
def test_what_others_have_changed_is_noticed(
    prepared: World,
    after: Callable[..., tuple[PostgresSink, list[Delivered]]],
    change: str,
    expected: list[Visible] | str,
) -> None:
    """Nothing is removed then: not the rows of other batches either. A look shows what it can."""
    prepared.table()
    sink, branches = after()
    prepared.run(change.format(prepared.schema))
    before = prepared.rows(), prepared.rows("sparkonce_commits")
    if isinstance(expected, str):
        with pytest.raises(TakeBackRefusedError, match=expected):
            sink.find_delivered(branches)
    else:
        assert sink.find_delivered(branches) == expected
    with pytest.raises(TakeBackRefusedError):
        sink.take_back(branches)
    assert (prepared.rows(), prepared.rows("sparkonce_commits")) == before


@pytest.mark.parametrize("load", LOADS)
def test_rows_that_a_trigger_updated_stay(prepared: World, load: str) -> None:
    """Such a row has the batch's transaction, and one of the batch's rows is missing for it."""
    prepared.table(KEYED)
    prepared.run(UPSERT.format(prepared.schema))
    prepared.run(f"INSERT INTO {prepared.schema}.orders VALUES (31, 'of somebody else')")
    branches = delivered(prepared.ready(ROWS.schema, load=load), load, [3])
    sink = prepared.sink()
    for verb in (sink.find_delivered, sink.take_back):
        with pytest.raises(TakeBackRefusedError, match="DISABLE TRIGGER put"):
            verb(branches)
    assert prepared.ids() == ids_of(3)


def test_role_that_may_not_delete_is_refused_at_the_look(
    prepared: World, after: Callable[..., tuple[PostgresSink, list[Delivered]]]
) -> None:
    """Before a rewind has removed rows of other sinks."""
    prepared.table()
    _, branches = after()
    with prepared.role("INSERT, SELECT") as (role, dsn):
        prepared.run(f"GRANT SELECT, UPDATE ON {prepared.schema}.sparkonce_commits TO {role}")
        with pytest.raises(TakeBackRefusedError, match="permission denied for table orders"):
            prepared.sink(dsn=dsn).find_delivered(branches)


@pytest.mark.parametrize("moment", ["DELETE FROM", "SET rows = 0", "COMMIT"])
def test_transaction_that_ends_unseen_removes_nothing(
    prepared: World,
    after: Callable[..., tuple[PostgresSink, list[Delivered]]],
    monkeypatch: pytest.MonkeyPatch,
    moment: str,
) -> None:
    """As behind a pooler that hides the end of a session: each message would commit by itself."""
    prepared.table()
    sink, branches = after()
    execute, ended = psycopg.Connection.execute, []

    def ending(self: PgConnection, query: Any, *args: Any, **more: Any) -> Any:
        text = query if isinstance(query, str) else query.as_string(self)
        if not ended and moment in text and "set_config" not in text:
            ended.append(execute(self, "ROLLBACK"))
        return execute(self, query, *args, **more)

    with monkeypatch.context() as patch:
        patch.setattr(psycopg.Connection, "execute", ending)
        with pytest.raises(TakeBackRefusedError, match="ended unseen"):
            sink.take_back(branches)
    assert ended
    assert prepared.ids() == ids_of(1, 2, 3, 4, 5)
    assert sink.find_delivered(branches) == [Visible(3)] * 3


def test_update_that_is_not_committed_yet_is_waited_for(
    prepared: World, after: Callable[..., tuple[PostgresSink, list[Delivered]]]
) -> None:
    """The DELETE sees the row's new version, which is not the batch's."""
    prepared.table()
    sink, branches = after()
    with psycopg.connect(prepared.dsn) as rival:
        rival.execute(
            sql.SQL("UPDATE {} SET name = 'x' WHERE id = 41").format(
                sql.Identifier(prepared.schema, "orders")
            )
        )
        with ThreadPoolExecutor(1) as pool:
            taking = pool.submit(sink.take_back, branches)
            eventually(lambda: prepared.waiting() > 0, "the deletion waits")
            rival.commit()
            with pytest.raises(TakeBackRefusedError, match="8 of the 9 rows"):
                taking.result(60)
    assert prepared.ids() == ids_of(1, 2, 3, 4, 5)


@pytest.mark.parametrize(
    "options",
    [
        {"key": "id"},
        {"key": "id", "write": "ignore"},
        {"key": "id", "delete": "name = 'x'"},
        {"key": "id", "load": "direct", "writers": 1},
        {"dead_letter": "rejected"},
    ],
    ids=str,
)
def test_rows_that_may_be_others_are_refused(prepared: World, options: dict[str, Any]) -> None:
    """An upsert's rows all carry its transaction, so their number would prove nothing."""
    prepared.table(KEYED)
    load = options.get("load", "staged")
    sink = prepared.ready(ROWS.schema, **options)
    branches = delivered(sink, load, [1])
    for verb in (sink.find_delivered, sink.take_back):
        with pytest.raises(TakeBackRefusedError, match=r"only appended rows|dead_letter"):
            verb(branches)
    assert prepared.ids() == ids_of(1)


def test_direct_load_of_an_older_version_is_refused(prepared: World) -> None:
    """It did not record whether rows were updated."""
    prepared.table()
    sink = prepared.ready(ROWS.schema, load="direct")
    ((committable, rows), *_) = delivered(sink, "direct", [1])
    payload = {key: value for key, value in committable.payload.items() if key != "mode"}
    old = Committable(committable.branch_id, payload, committable.version)
    sink.commit(old)
    with pytest.raises(TakeBackRefusedError, match="older versions"):
        sink.find_delivered([Delivered(old, rows)])


@pytest.mark.parametrize("load", LOADS)
def test_late_commit_shows_nothing_again(
    prepared: World, after: Callable[..., tuple[PostgresSink, list[Delivered]]], load: str
) -> None:
    """A driver was paused in its commit; its staging tables are still there."""
    prepared.table()
    sink, branches = after(load)
    if load == "staged":
        committable = branches[0].committable
        batch = committable.branch_id.batch_id
        stage(sink, rows_of(int(str(batch))), task(batch=int(str(batch))))
    sink.take_back(branches)
    for committable, _ in branches:
        try:
            sink.commit(committable)
        except PreparedBranchLostError:
            pytest.fail("a batch that is taken back counts as committed")
    assert prepared.ids() == ids_of(1, 2)


def test_removal_is_killed_at_each_statement(
    prepared: World,
    after: Callable[..., tuple[PostgresSink, list[Delivered]]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All rows are there, or none; the next call finishes it."""
    prepared.table()
    sink, branches = after()
    execute = psycopg.Connection.execute
    seen: set[int] = set()
    for moment in range(100):
        count = 0

        def dying(self: PgConnection, *args: Any, moment: int = moment, **more: Any) -> Any:
            nonlocal count
            count += 1
            if count == moment + 1:
                self.close()
            return execute(self, *args, **more)

        sink.close()
        with monkeypatch.context() as patch:
            patch.setattr(psycopg.Connection, "execute", dying)
            with contextlib.suppress(SinkError):
                sink.take_back(branches)
        sink.close()
        monkeypatch.undo()
        left = prepared.ids()
        seen.add(len(left))
        assert left in (ids_of(1, 2), ids_of(1, 2, 3, 4, 5))
        sink.take_back(branches)
        assert prepared.ids() == ids_of(1, 2)
        if count <= moment:
            break
        prepared.run(f"TRUNCATE {prepared.schema}.orders, {prepared.schema}.sparkonce_commits")
        delivered(sink, "staged", range(1, 3))
        branches = delivered(sink, "staged", range(3, 6))
    else:
        pytest.fail("it never ended")
    assert moment > 5
    assert seen == {6, 15}


def test_another_server_proves_nothing(
    prepared: World, after: Callable[..., tuple[PostgresSink, list[Delivered]]]
) -> None:
    prepared.table(COLUMNS)
    sink, branches = after()
    elsewhere = [
        Delivered(
            Committable(c.branch_id, {**c.payload, "system": "123"}, c.version),
            rows,
        )
        for c, rows in branches
    ]
    with pytest.raises(TakeBackRefusedError, match="system identifier"):
        sink.find_delivered(elsewhere)
    with pytest.raises(TakeBackRefusedError, match="system identifier"):
        sink.take_back(elsewhere)
    assert prepared.ids() == ids_of(1, 2, 3, 4, 5)
    roll_back_all(prepared.dsn)
