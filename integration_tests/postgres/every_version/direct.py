"""What the Postgres sink does on every version of the server, with load="direct"."""

from __future__ import annotations

import contextlib
import datetime as dt
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal
from typing import Any

import psycopg
import pyarrow as pa
import pytest

from integration_tests.support.direct_load import KEYED, prepare, ready
from integration_tests.support.postgres import (
    OWNER,
    ROWS,
    World,
    commit_until_known,
    eventually,
    heard,
    merge_of,
    task,
)
from integration_tests.support.postgres import prepare as prepare_staged
from integration_tests.support.proxy import Proxy, holds
from sparkonce.errors import CommitUnresolvedError, PreparedBranchLostError, PrepareRejectedError
from sparkonce.model import Owner
from sparkonce.sinks import PostgresSink


@pytest.mark.parametrize("key", [None, ["id"]])
def test_each_verb_and_what_stands_after_it(prepared: World, key: list[str] | None) -> None:
    """Nothing is visible before commit; then the rows and the marker of one task are."""
    prepared.table(KEYED)
    prepared.run(f"INSERT INTO {prepared.schema}.orders VALUES (9, 'before')")
    sink = ready(prepared, key=key)
    first = prepare(sink, ROWS.slice(0, 2))
    assert prepared.state() == (1, 0, 0, 1)
    second = prepare(sink, ROWS.slice(2), task(8))
    assert prepared.state() == (1, 0, 0, 2)
    assert sink.vote(merge_of(), [first, second]) == [first, second]
    assert prepared.gids() == [str(task(7)), str(task(8))]
    sink.commit(second)
    assert prepared.state() == (2, 1, 0, 1)
    sink.commit(first)
    assert prepared.state() == (4, 2, 0, 0)
    assert prepared.rows() == [(1, "a"), (2, "b"), (3, None), (9, "before")]
    marker = prepared.run(
        "SELECT branch, log_id, query_id, sink, batch_id, token, rows "
        f"FROM {prepared.schema}.sparkonce_commits ORDER BY rows"
    )
    parts = (OWNER.log_id, OWNER.query_id, "postgres", 0, 1)
    assert marker == [(str(task(8)), *parts, 1), (str(task(7)), *parts, 2)]


def test_commit_twice_changes_nothing(prepared: World) -> None:
    prepared.table()
    sink = ready(prepared)
    committable = prepare(sink)
    for each in (sink, sink, prepared.sink(load="direct"), prepared.sink()):
        each.commit(committable)
    assert prepared.state() == (3, 1, 0, 0)


def test_upsert_updates_the_rows_whose_key_is_there(prepared: World) -> None:
    prepared.table(KEYED)
    prepared.run(f"INSERT INTO {prepared.schema}.orders VALUES (2, 'old'), (9, 'other')")
    sink = ready(prepared, key=["id"])
    sink.commit(prepare(sink))
    assert prepared.rows() == [(1, "a"), (2, "b"), (3, None), (9, "other")]


def test_key_that_comes_twice_in_a_task_is_named(prepared: World) -> None:
    prepared.table(KEYED)
    sink = ready(prepared, key=["id"])
    with pytest.raises(PrepareRejectedError, match=r"more than once in the batch.*id = 2"):
        prepare(sink, pa.concat_tables([ROWS, ROWS.slice(1, 1)]))
    eventually(lambda: prepared.open_merges() == 0, "the task's session ended")
    assert prepared.state() == (0, 0, 0, 0)


def test_types_and_columns_reach_the_target_straight(prepared: World) -> None:
    """Domains, limits, defaults and generated columns; as binary and as text."""
    prepared.run(f"CREATE DOMAIN {prepared.schema}.small AS bigint CHECK (value < 4)")
    prepared.table(
        f"twice bigint GENERATED ALWAYS AS (id * 2) STORED, id {prepared.schema}.small, name "
        "varchar(3), price numeric(5,2), at timestamptz, tags text[], s text DEFAULT 'd'"
    )
    at = dt.datetime(2024, 1, 2, 3, 4, 5, tzinfo=dt.UTC)
    rows = pa.table(
        {
            "id": [3, None],
            "name": ["abc", None],
            "price": pa.array([Decimal("1.50"), None], pa.decimal128(5, 2)),
            "at": pa.array([at, None], pa.timestamp("us", "UTC")),
            "tags": [["x", None], None],
        }
    )
    sink = ready(prepared, rows.schema)
    sink.commit(prepare(sink, rows))
    wanted = [(6, 3, "abc", Decimal("1.50"), at, ["x", None], "d"), (None,) * 6 + ("d",)]
    assert prepared.rows() == wanted
    wide = pa.table({"id": [1], "name": ["abcd"]})
    with pytest.raises(PrepareRejectedError, match=r"column 'name'.*character varying\(3\)"):
        prepare(ready(prepared, wide.schema), wide, task(8))


def test_query_changes_its_mode(prepared: World) -> None:
    """What one mode prepared, the other finishes, finds and aborts."""
    prepared.table()
    straight, staged = ready(prepared), prepared.ready()
    first = prepare(straight)
    second = prepare_staged(staged, batch=1)
    staged.commit(first)
    straight.commit(second)
    assert prepared.state() == (6, 2, 0, 0)
    prepare(straight, branch_id=task(batch=2))
    prepare_staged(staged, batch=3)
    for found in staged.find_branches(OWNER):
        straight.abort(found)
    assert prepared.state() == (6, 2, 0, 0)


def test_nothing_of_others_is_found_or_ended(prepared: World) -> None:
    """Names that begin alike, `_` and `%` in them, and other applications' transactions."""
    prepared.table()
    sink = ready(prepared)
    for owner in (
        Owner(OWNER.log_id, OWNER.query_id + "0"),
        Owner(OWNER.log_id, OWNER.query_id[:-1]),
        Owner("f" * 16, OWNER.query_id),
    ):
        prepare(sink, branch_id=task(owner=owner))
    prepare(sink, branch_id=task(sink="a_b"))
    prepare(sink, branch_id=task(sink="axb"))
    alike = str(task()).replace("sparkonce.", "sparkonce_")
    for gid in ("shop-1", "%", "_", alike, f"{OWNER.prefix}hand-made", f"{task()}x"):
        prepared.run(f"BEGIN; PREPARE TRANSACTION '{gid}'")
    before = set(prepared.gids())
    found = list(sink.find_branches(OWNER))
    assert {c.branch_id.sink for c in found} == {"a_b", "axb"}
    sink.abort(next(c for c in found if c.branch_id.sink == "a_b"))
    assert before - set(prepared.gids()) == {str(task(sink="a_b"))}


def test_processes_and_threads_commit_at_the_same_time(prepared: World) -> None:
    prepared.table()
    sink = ready(prepared)
    committable = prepare(sink)
    children = [prepared.child(sink, "commit", committable=committable) for _ in range(2)]
    for child in children:
        assert child.stdin is not None
        child.stdin.write(b"!")
        child.stdin.flush()
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: commit_until_known(sink, committable), range(4)))
    assert {heard(c) for c in children} <= {"committed", "CommitUnresolvedError"}
    assert prepared.state() == (3, 1, 0, 0)


@pytest.mark.parametrize("key", [None, ["id"]])
def test_server_killed_between_prepare_and_commit(prepared: World, key: list[str] | None) -> None:
    prepared.table(KEYED)
    sink = ready(prepared, key=key)
    committable = prepare(sink)
    prepared.server.kill()
    with pytest.raises(CommitUnresolvedError, match="batch 0, sink 'postgres', table"):
        sink.commit(committable)
    prepared.server.start()
    assert prepared.state() == (0, 0, 0, 1)
    sink.commit(committable)
    assert prepared.state() == (3, 1, 0, 0)


def test_answer_of_the_commit_is_lost(prepared: World, cut: tuple[PostgresSink, Proxy]) -> None:
    """It arrived, nobody knows: the marker row proves it."""
    sink, proxy = cut
    committable = prepare(ready(prepared))
    proxy.lose = holds(b"COMMIT PREPARED")
    commit_until_known(sink, committable)
    assert proxy.lost == 1
    assert prepared.state() == (3, 1, 0, 0)


def test_answer_of_the_prepare_is_lost(prepared: World, cut: tuple[PostgresSink, Proxy]) -> None:
    """The task fails, and what it may have left is found and ended."""
    sink, proxy = cut
    proxy.lose = holds(b"PREPARE TRANSACTION")
    with pytest.raises(PrepareRejectedError):
        prepare(sink)
    assert proxy.lost == 1
    eventually(lambda: prepared.gids() == [str(task())], "the orphan stands")
    for found in sink.find_branches(OWNER):
        sink.abort(found)
    assert prepared.state() == (0, 0, 0, 0)


@pytest.mark.parametrize("ends", ["SELECT 1 / 0", "ROLLBACK"])
def test_transaction_that_failed_or_ended_does_not_pass_as_prepared(
    prepared: World, ends: str
) -> None:
    """Postgres answers PREPARE TRANSACTION with ROLLBACK then, or prepares the marker alone."""
    prepared.table()
    sink = ready(prepared)
    handle: Any = sink.beginTransaction(task())
    sink.write(handle, ROWS.to_batches()[0])
    closing = handle._closing

    def fail_unseen() -> None:
        with contextlib.suppress(psycopg.errors.DivisionByZero):
            handle._connection.execute(ends)
        closing()

    handle._closing = fail_unseen
    with pytest.raises(PrepareRejectedError, match="transaction"):
        sink.preCommit(handle)
    assert prepared.state() == (0, 0, 0, 0)


def test_branch_rolled_back_by_an_operator_is_lost(prepared: World) -> None:
    prepared.table()
    sink = ready(prepared)
    committable = prepare(sink)
    prepared.run(f"ROLLBACK PREPARED '{task()}'")
    with pytest.raises(PreparedBranchLostError, match="rolled? it back|roll it back") as caught:
        sink.commit(committable)
    assert caught.value.branch_id == task()
    assert prepared.state() == (0, 0, 0, 0)


def test_other_role_may_not_end_a_branch(prepared: World) -> None:
    """Both roles are named, nothing is called lost, and the right role goes on."""
    prepared.table()
    with prepared.role() as (_, dsn):
        sink = ready(prepared)
        committable = prepare(sink)
        other = prepared.sink(load="direct", dsn=dsn)
        with pytest.raises(CommitUnresolvedError, match="permission denied.*log in as 'postgres'"):
            other.commit(committable)
        with pytest.raises(CommitUnresolvedError, match="could not be aborted.*pg_prepared_xacts"):
            other.abort(task())
        sink.commit(committable)
        other.close()
    assert prepared.state() == (3, 1, 0, 0)


def test_other_database_of_the_server_proves_nothing(prepared: World) -> None:
    prepared.table()
    name = f"{prepared.schema}_db"
    prepared.run(f"CREATE DATABASE {name}")
    try:
        sink = ready(prepared)
        committable = prepare(sink)
        elsewhere = prepared.sink(dsn=f"{prepared.dsn.rpartition('/')[0]}/{name}")
        with pytest.raises(CommitUnresolvedError, match=f"database '{name}'.*in 'postgres'"):
            elsewhere.commit(committable)
        assert list(elsewhere.find_branches(OWNER)) == []
        sink.commit(committable)
        with pytest.raises(CommitUnresolvedError, match=f"database '{name}'"):
            elsewhere.commit(committable)
        elsewhere.close()
    finally:
        prepared.run(f"DROP DATABASE {name}")
    assert prepared.state() == (3, 1, 0, 0)


def test_role_with_the_least_rights_can_do_everything(prepared: World) -> None:
    prepared.table(KEYED)
    with prepared.role("SELECT (id, name), INSERT (id, name), UPDATE (name)") as (_, dsn):
        for n, key in enumerate([None, ["id"]]):
            sink = ready(prepared, dsn=dsn, key=key)
            sink.commit(prepare(sink, branch_id=task(batch=n)))
            prepare(sink, ROWS.slice(0, 0), branch_id=task(8, batch=n))
            for branch in sink.find_branches(OWNER):
                sink.abort(branch)
            sink.close()
        assert prepared.state() == (3, 2, 0, 0)
