"""What the Postgres sink does on every version of the server, through staging tables."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psycopg
import pyarrow as pa
import pytest
from psycopg import sql

from integration_tests.support.postgres import (
    DEADLINE_S,
    OWNER,
    ROWS,
    World,
    commit_until_known,
    deliver,
    eventually,
    heard,
    kill,
    lose,
    merge_of,
    prepare,
    stage,
    task,
)
from integration_tests.support.proxy import Proxy, holds
from sparkonce.errors import (
    CommitUnresolvedError,
    ConfigurationError,
    PreparedBranchLostError,
    PrepareRejectedError,
)
from sparkonce.model import BranchId, Committable, Owner


def test_each_verb_and_what_stands_after_it(world: World) -> None:
    """Nothing is visible before commit; nothing but the rows and a marker is left after it."""
    world.table()
    sink = world.ready()
    handle = sink.beginTransaction(task())
    sink.write(handle, ROWS.to_batches()[0])
    assert world.staging() == []
    first = sink.preCommit(handle)
    assert world.state() == (0, 0, 1, 0)
    second = stage(sink, ROWS.slice(0, 2), task(8))
    assert world.state() == (0, 0, 2, 0)
    (merged,) = sink.vote(merge_of(), [first, second])
    assert world.state() == (0, 0, 2, 1)
    assert merged.branch_id == merge_of()
    assert merged.safe_until is None
    sink.commit(merged)
    assert world.state() == (5, 1, 0, 0)
    assert world.rows(order="1, 2") == [(1, "a"), (1, "a"), (2, "b"), (2, "b"), (3, None)]
    marker = world.run(
        "SELECT branch, log_id, query_id, sink, batch_id, token, rows "
        f"FROM {world.schema}.sparkonce_commits"
    )
    parts = (OWNER.log_id, OWNER.query_id, "postgres", 0, 1, 5)
    assert marker == [(str(merge_of()), *parts)]


def test_commit_twice_changes_nothing(world: World) -> None:
    world.table()
    sink = world.ready()
    committable = prepare(sink)
    sink.commit(committable)
    sink.commit(committable)
    world.sink().commit(committable)
    assert world.state() == (3, 1, 0, 0)


def test_commit_after_the_preparing_process_was_killed(world: World) -> None:
    """A prepared transaction is simply committed; an open one has died and is merged again."""
    world.table()
    sink = world.ready()
    child = world.child(sink, "prepare")
    committable = Committable.from_json(heard(child))
    assert world.state() == (0, 0, 1, 1)
    kill(child)
    if not world.prepares:
        eventually(lambda: world.open_merges() == 0, "the server rolled the open merge back")
    sink.commit(committable)
    assert world.state() == (3, 1, 0, 0)


def test_executor_killed_in_the_middle_of_its_copy_leaves_nothing(prepared: World) -> None:
    prepared.table()
    sink = prepared.ready()
    child = prepared.child(sink, "copy")
    assert heard(child) == "written"
    assert prepared.open_merges() == 1
    kill(child)
    eventually(lambda: prepared.open_merges() == 0, "the server rolled the COPY back")
    assert prepared.state() == (0, 0, 0, 0)


@pytest.mark.parametrize("holder", ["nobody", "one of them"])
def test_two_processes_commit_at_the_same_time(world: World, holder: str) -> None:
    """Whoever wins, both say committed and the rows are there once."""
    world.table()
    sink = world.ready()
    committable = prepare(sink)
    if holder == "nobody":
        sink.close()
    children = [world.child(sink, "commit", committable=committable) for _ in range(2)]
    for child in children:
        assert child.stdin is not None
        child.stdin.write(b"!")
        child.stdin.flush()
    if holder != "nobody":
        commit_until_known(sink, committable)
    answers = [heard(child) for child in children]
    assert set(answers) <= {"committed", "CommitUnresolvedError"}
    commit_until_known(sink, committable)
    assert world.state() == (3, 1, 0, 0)


def test_server_killed_between_prepare_and_commit(world: World) -> None:
    world.table()
    sink = world.ready()
    committable = prepare(sink)
    world.server.kill()
    with pytest.raises(CommitUnresolvedError, match="batch 0, sink 'postgres', table"):
        sink.commit(committable)
    world.server.start()
    assert world.state() == (0, 0, 1, 1 if world.prepares else 0)
    sink.commit(committable)
    assert world.state() == (3, 1, 0, 0)


def test_answer_of_the_commit_is_lost(world: World) -> None:
    """The commit arrived, nobody knows: the marker row proves it."""
    world.table()
    port = int(world.dsn.rpartition(":")[2].partition("/")[0])
    proxy = Proxy(port)
    try:
        dsn = world.dsn.replace(f":{port}/", f":{proxy.port}/")
        sink = world.sink(dsn=dsn)
        sink.validate(ROWS.schema)
        direct = world.ready()
        (merged,) = sink.vote(merge_of(), [stage(direct)])
        proxy.lose = holds(b"COMMIT PREPARED" if world.prepares else b"COMMIT\0")
        commit_until_known(sink, merged)
        assert proxy.lost == 1
        sink.close()
    finally:
        proxy.close()
    assert world.state() == (3, 1, 0, 0)


def test_prepared_transaction_rolled_back_by_an_operator_is_merged_again(prepared: World) -> None:
    prepared.table()
    sink = prepared.ready()
    committable = prepare(sink)
    prepared.run(f"ROLLBACK PREPARED '{merge_of()}'")
    sink.commit(committable)
    sink.commit(committable)
    assert prepared.state() == (3, 1, 0, 0)


def test_staging_dropped_as_well_is_a_loss(world: World) -> None:
    """Proven: the merge is gone, the tables are gone, and there is no marker."""
    world.table()
    sink = world.ready()
    committable = prepare(sink)
    lose(world, sink)
    (table,) = world.staging()
    world.run(f"DROP TABLE {world.schema}.{table}")
    with pytest.raises(PreparedBranchLostError, match="batch 0, sink 'postgres'") as caught:
        sink.commit(committable)
    assert table in str(caught.value)
    assert caught.value.branch_id == merge_of()
    assert world.state() == (0, 0, 0, 0)


@pytest.mark.parametrize("by", ["id", "committable", "found"])
def test_merged_branch_is_aborted(world: World, by: str) -> None:
    world.table()
    sink = world.ready()
    committable = prepare(sink)
    assert world.state() == (0, 0, 1, 1)
    found = {c.branch_id: c for c in sink.find_branches(OWNER)}
    assert list(found) == [merge_of(), task()]  # the merge first: it locks its staging tables
    branches: dict[str, BranchId | Committable]
    branches = {"id": merge_of(), "committable": committable, "found": found[merge_of()]}
    sink.abort(branches[by])
    assert world.state() == (0, 0, 0 if by == "committable" else 1, 0)
    sink.abort(branches[by])
    sink.abort(found[task()])
    assert world.state() == (0, 0, 0, 0)
    assert sink.find_branches(OWNER) == []


def test_merge_of_a_dead_driver_is_found_and_aborted(world: World) -> None:
    """Prepared, or open in a session whose client went away without a word."""
    world.table()
    sink = world.ready()
    child = world.child(sink, "prepare")
    heard(child)
    for branch in sink.find_branches(OWNER):
        sink.abort(branch)
    eventually(lambda: world.state() == (0, 0, 0, 0), "nothing of the dead driver stands")


def test_nothing_of_others_is_found_or_dropped(prepared: World) -> None:
    """Another query, another log, a sink whose name begins alike, and a table that looks ours."""
    prepared.table()
    sink = prepared.ready()
    others = [
        Owner(OWNER.log_id, OWNER.query_id + "0"),
        Owner(OWNER.log_id, OWNER.query_id[:-1]),
        Owner("f" * 16, OWNER.query_id),
    ]
    for owner in others:
        stage(sink, branch_id=task(owner=owner))
        sink.vote(merge_of(owner=owner), [stage(sink, branch_id=task(8, owner=owner))])
    ours = stage(sink)
    longer = stage(sink, branch_id=task(sink="postgres_eu"))
    name = str(ours.payload["staging"])
    likeness = name.replace("_a7_", "_a8_")
    prepared.run(f"CREATE TABLE {prepared.schema}.{likeness} ()")
    prepared.run(f"COMMENT ON TABLE {prepared.schema}.{likeness} IS '{task(9)}'")
    before, gids = set(prepared.staging()), prepared.gids()
    found = list(sink.find_branches(OWNER))
    assert {c.branch_id for c in found} == {ours.branch_id, longer.branch_id}
    for branch in found:
        sink.abort(branch)
    assert before - set(prepared.staging()) == {name, longer.payload["staging"]}
    assert prepared.gids() == gids


@pytest.mark.parametrize(
    ("columns", "constraint"),
    [
        ("id bigint PRIMARY KEY, name text", "orders_pkey"),
        ("id bigint CONSTRAINT small CHECK (id < 3), name text", "small"),
        ("id bigint, name text NOT NULL", "not-null constraint"),
        ("id bigint UNIQUE DEFERRABLE INITIALLY DEFERRED, name text", "orders_id_key"),
        (
            "id bigint CONSTRAINT known REFERENCES {schema}.known INITIALLY DEFERRED, name text",
            "known",
        ),
    ],
)
def test_violated_constraint_is_found_before_the_decision(
    world: World, columns: str, constraint: str
) -> None:
    """Also a deferred one. The error names the constraint, and shows no row."""
    world.run(f"CREATE TABLE {world.schema}.known (id bigint PRIMARY KEY)")
    world.run(f"INSERT INTO {world.schema}.known VALUES (1), (2)")
    world.table(columns.format(schema=world.schema))
    world.run(f"INSERT INTO {world.schema}.orders VALUES (2, 'here')")
    if "known" in constraint:
        world.run(f"DELETE FROM {world.schema}.orders")
    before = world.ids()
    sink = world.ready()
    with pytest.raises(PrepareRejectedError, match=constraint) as caught:
        prepare(sink)
    assert "batch 0, sink 'postgres', table" in str(caught.value)
    assert "(2)" not in f"{caught.value} {caught.value.__cause__!r}"
    assert world.state() == (len(before), 0, 1, 0)


def test_lock_that_is_not_given_ends_the_vote(world: World) -> None:
    world.table()
    sink = world.ready(lock_timeout_s=0.2)
    staged = stage(sink)
    with psycopg.connect(world.dsn) as blocker:
        blocker.execute(f"LOCK TABLE {world.schema}.orders".encode())
        with pytest.raises(PrepareRejectedError, match=r"lock_timeout_s=0.2"):
            sink.vote(merge_of(), [staged])
    assert world.state() == (0, 0, 1, 0)


def test_deadlock_with_another_writer_is_tried_again(world: World) -> None:
    """Postgres ends one of the two; when it is ours, the same statement succeeds afterwards."""
    world.table("id bigint PRIMARY KEY, name text")
    world.run(f"INSERT INTO {world.schema}.orders VALUES (1, 'x'), (2, 'x'), (3, 'x')")
    world.run("ALTER ROLE CURRENT_USER IN DATABASE postgres SET deadlock_timeout = '50ms'")

    def update(connection: psycopg.Connection[Any], row: int) -> None:
        query = f"UPDATE {world.schema}.orders SET name = 'r' WHERE id = {row}"
        connection.execute(query.encode())

    try:
        sink = world.ready(key=["id"])
        staged = stage(sink)
        with (
            psycopg.connect(world.dsn) as rival,
            psycopg.connect(world.dsn) as gate,
            ThreadPoolExecutor(2) as pool,
        ):
            # A session looks for a deadlock once, a while after it began to wait: let it be ours.
            rival.execute("SET deadlock_timeout = '1h'")
            update(rival, 3)
            update(gate, 2)
            voting = pool.submit(sink.vote, merge_of(), [staged])
            eventually(lambda: world.waiting() >= 1, "the merge has row 1 and waits for row 2")
            blocked = pool.submit(update, rival, 1)
            eventually(lambda: world.waiting() >= 2, "the rival waits for row 1")
            gate.rollback()  # the merge goes on to row 3
            blocked.result(DEADLINE_S)
            rival.commit()
            (merged,) = voting.result(DEADLINE_S)
        sink.commit(merged)
    finally:
        world.run("ALTER ROLE CURRENT_USER IN DATABASE postgres RESET deadlock_timeout")
    assert world.rows() == [(1, "a"), (2, "b"), (3, None)]


@pytest.mark.parametrize(
    ("name", "written"),
    [
        ("Mixed Case", '"Mixed Case"'),
        ('quo"te', '"quo""te"'),
        ("100%s_", '"100%s_"'),
        ("select", '"select"'),
        ("grün.gelb", '"grün.gelb"'),
        ("x" * 63, "x" * 63),
    ],
)
def test_names_of_every_kind(world: World, name: str, written: str) -> None:
    """In schema, table and columns, from validate to commit, merged again, aborted."""
    schema = sql.Identifier(f"{world.schema}{name}"[:63])
    column = sql.Identifier(name)
    world.run(
        sql.SQL(
            "CREATE SCHEMA {0}; CREATE TABLE {0}.{1} ({1} bigint, {2} text, UNIQUE ({1}))"
        ).format(schema, column, sql.Identifier("%(x)s"))
    )
    try:
        rows = pa.table({name: pa.array([1, 2]), "%(x)s": ["a", None]})
        table = f"{schema.as_string()}.{written}"
        sink = world.sink(table, key=[name])
        sink.validate(rows.schema)
        deliver(sink, rows)
        again = prepare(sink, rows, batch=1)
        if world.prepares:
            world.run(f"ROLLBACK PREPARED '{merge_of(1)}'")
        else:
            sink.close()
        sink.commit(again)
        stage(sink, rows, task(batch=2))
        for branch in sink.find_branches(OWNER):
            sink.abort(branch)
        query = sql.SQL("SELECT * FROM {}.{} ORDER BY 1").format(schema, column)
        assert world.run(query) == [(1, "a"), (2, None)]
        assert sink.find_branches(OWNER) == []
    finally:
        world.run(sql.SQL("DROP SCHEMA {} CASCADE").format(schema))


def test_columns_that_the_batch_lacks_get_their_defaults(prepared: World) -> None:
    prepared.table(
        "n int GENERATED ALWAYS AS IDENTITY, name text, twice bigint GENERATED ALWAYS AS (id * 2) "
        "STORED, id bigint, s text NOT NULL DEFAULT 'd', m int GENERATED BY DEFAULT AS IDENTITY"
    )
    deliver(prepared.ready())
    assert prepared.rows() == [
        (1, "a", 2, 1, "d", 1),
        (2, "b", 4, 2, "d", 2),
        (3, None, 6, 3, "d", 3),
    ]


def test_partitioned_table_and_domain_are_targets_too(prepared: World) -> None:
    prepared.run(f"CREATE DOMAIN {prepared.schema}.small AS bigint CHECK (value < 3)")
    prepared.run(
        f"CREATE TABLE {prepared.schema}.orders (id {prepared.schema}.small, name text) "
        "PARTITION BY RANGE (id)"
    )
    prepared.run(f"CREATE TABLE {prepared.schema}.p PARTITION OF {prepared.schema}.orders DEFAULT")
    sink = prepared.ready()
    deliver(sink, ROWS.slice(0, 2))
    assert prepared.ids() == [1, 2]
    with pytest.raises(PrepareRejectedError, match="small_check"):
        prepare(sink, ROWS, batch=1)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        ("ALTER TABLE {s}.orders SET UNLOGGED", "UNLOGGED"),
        ("CREATE VIEW {s}.v AS SELECT * FROM {s}.orders", "no table"),
        ("CREATE TABLE {s}.sparkonce_commits (branch text)", "rename yours"),
        ("REVOKE CREATE ON SCHEMA {s} FROM {r}", "GRANT CREATE ON SCHEMA"),
        ("REVOKE INSERT ON {s}.orders FROM {r}", "GRANT INSERT"),
        ("REVOKE UPDATE ON {s}.orders FROM {r}", "GRANT UPDATE"),
        ("REVOKE SELECT ON {s}.orders FROM {r}", "GRANT SELECT"),
        ("REVOKE CONNECT ON DATABASE postgres FROM PUBLIC", "permission denied for database"),
    ],
)
def test_missing_right_or_unfit_table_is_named(prepared: World, spoil: str, message: str) -> None:
    schema = prepared.schema
    prepared.table("id bigint PRIMARY KEY, name text")
    with prepared.role("SELECT, INSERT, UPDATE") as (role, dsn):
        name = "v" if "VIEW" in spoil else "orders"
        prepared.run(spoil.format(s=schema, r=role))
        if "VIEW" in spoil:
            prepared.run(f"GRANT ALL ON {schema}.v TO {role}")
        sink = prepared.sink(f"{schema}.{name}", dsn=dsn, key=["id"])
        try:
            with pytest.raises(ConfigurationError, match=message):
                sink.validate(ROWS.schema)
        finally:
            prepared.run("GRANT CONNECT ON DATABASE postgres TO PUBLIC")


def test_role_with_the_least_rights_can_do_everything(world: World) -> None:
    """No superuser, no ownership of the target: what `validate` asks for is enough."""
    world.table("id bigint PRIMARY KEY, name text")
    with world.role("SELECT (id, name), INSERT, UPDATE (name)") as (_, dsn):
        sink = world.ready(dsn=dsn, key=["id"])
        deliver(sink)
        deliver(sink, batch=1)
        prepare(sink, batch=2)
        for branch in sink.find_branches(OWNER):
            sink.abort(branch)
        assert world.state() == (3, 2, 0, 0)
        sink.close()
