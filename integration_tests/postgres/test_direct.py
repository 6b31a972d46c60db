"""``load="direct"`` on a real server: a prepared transaction per task, looked at from outside."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg
import pyarrow as pa
import pytest

from integration_tests.postgres.every_version import direct
from integration_tests.support.collecting import cases_of
from integration_tests.support.direct_load import KEYED, prepare, ready
from integration_tests.support.postgres import (
    OWNER,
    ROWS,
    World,
    eventually,
    heard,
    kill,
    merge_of,
    stage,
    task,
    world_on,
)
from sparkonce import ExactlyOnce
from sparkonce.errors import CommitUnresolvedError, ConfigurationError, PrepareRejectedError
from sparkonce.model import BranchId, Committable, Owner
from sparkonce.sinks import PostgresSink, verbs
from sparkonce.sinks.postgres.merging import preparing
from sparkonce.sinks.postgres.server.outcome import leave_prepared
from sparkonce.spark_hooks.shaping import Shapes
from sparkonce.testing.services import start_services

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

globals().update(cases_of(direct))


# -- the verbs -------------------------------------------------------------------------------------


CDC = pa.schema({"k": pa.string(), "name": pa.string(), "gone": pa.bool_()})


@pytest.mark.parametrize(
    "kind", ["char(3)", "uuid", "jsonb", "{0}.short", "text COLLATE {0}.folding", "{0}.short[]"]
)
def test_deletion_by_a_key_of_several_spellings_is_refused(prepared: World, kind: str) -> None:
    """The other spelling may be in another task's open transaction, which it does not see."""
    prepared.run(f"CREATE DOMAIN {prepared.schema}.short AS char(3)")
    prepared.run(f"CREATE COLLATION {prepared.schema}.folding (locale = 'C')")
    # As ICU collations do, which not every server here has.
    prepared.run(
        "UPDATE pg_collation SET collisdeterministic = false WHERE collname = 'folding' "
        f"AND collnamespace = '{prepared.schema}'::regnamespace"
    )
    prepared.table(f"k {kind.format(prepared.schema)} UNIQUE, name text")
    given = pa.list_(pa.string()) if kind.endswith("[]") else pa.string()
    schema = CDC.set(0, pa.field("k", given))
    options: dict[str, Any] = {"key": ["k"], "delete": "gone"}
    with pytest.raises(ConfigurationError, match="'k'.*load=\"staged\""):
        ready(prepared, schema, **options)
    ready(prepared, schema, **options, writers=1)
    prepared.ready(schema, **options)


@pytest.mark.parametrize("kind", ["varchar(3)", 'text COLLATE "C"', "bigint", "bytea"])
def test_deletion_by_a_key_of_one_spelling(prepared: World, kind: str) -> None:
    given = {"bigint": pa.int32(), "bytea": pa.binary()}.get(kind, pa.string())
    prepared.table(f"k {kind} PRIMARY KEY, name text")
    ready(prepared, CDC.set(0, pa.field("k", given)), key=["k"], delete="gone")


def test_longest_name_is_a_gid(prepared: World) -> None:
    """All parts of a branch id at their longest stay within 199 bytes."""
    prepared.table()
    sink = ready(prepared)
    longest = task(
        65535,
        batch=10**8,
        token=10**4,
        sink="s" * 32,
        write_pass=9,
        owner=Owner("f" * 16, "e" * 36),
    )
    sink.commit(prepare(sink, branch_id=longest))
    assert len(str(longest)) <= 199
    assert prepared.state() == (3, 1, 0, 0)


def test_many_branches_are_committed_by_few_connections(prepared: World) -> None:
    prepared.end_sessions()
    prepared.table()
    sink = ready(prepared)
    committables = [prepare(sink, ROWS.slice(0, 1), task(n)) for n in range(40)]
    assert verbs.commit_many(sink, committables) == [None] * 40
    query = "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'sparkonce'"
    assert prepared.run(query)[0][0] <= 4
    assert prepared.state() == (40, 40, 0, 0)


def test_server_looks_whether_the_host_of_a_task_is_still_there(prepared: World) -> None:
    """A host without power closes nothing; by the system's default its locks last two hours."""
    prepared.table(KEYED)
    sink = ready(prepared)
    handle = sink.beginTransaction(task())
    for batch in ROWS.to_batches():
        sink.write(handle, batch)
    copying = "SELECT client_port FROM pg_stat_activity WHERE state = 'active' AND query ~ '^COPY'"
    eventually(lambda: len(prepared.run(copying)) == 1, "a task copies")
    ((client_port,),) = prepared.run(copying)
    ((port,),) = prepared.run("SHOW port")
    seconds = next_keepalive_s(int(port), client_port)
    sink.discard(handle)
    assert seconds <= 60


def next_keepalive_s(port: int, client_port: int) -> float:
    """When the system that the server runs on asks the client for a sign of life, in seconds."""
    found: list[float] = []

    def is_set() -> bool:
        for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
            _, local, remote, _, _, timer, *_ = line.split()
            ports = [int(end.rpartition(":")[2], 16) for end in (local, remote)]
            kind, _, ticks = timer.partition(":")
            if ports == [port, client_port] and kind == "02":  # and no answer is outstanding
                found.append(int(ticks, 16) / os.sysconf("SC_CLK_TCK"))
        return bool(found)

    eventually(is_set, "the timer of the server's end is set")
    return found[0]


# -- the two modes beside each other ---------------------------------------------------------------


@pytest.mark.parametrize("by", ["id", "committable", "found"])
def test_prepared_branch_is_aborted(prepared: World, by: str) -> None:
    """Exactly that one; twice does no harm, and a commit is not undone."""
    prepared.table()
    sink = ready(prepared)
    committable = prepare(sink)
    other = prepare(sink, branch_id=task(71))
    (found,) = (c for c in sink.find_branches(OWNER) if c.branch_id == task())
    branches: dict[str, BranchId | Committable]
    branches = {"id": task(), "committable": committable, "found": found}
    for _ in range(2):
        prepared.sink().abort(branches[by])
        assert prepared.gids() == [str(task(71))]
    sink.commit(other)
    sink.abort(other)
    assert prepared.state() == (3, 1, 0, 0)


# -- other processes, the server and the network --------------------------------------------------


def test_task_killed_in_the_middle_of_its_copy_leaves_nothing(prepared: World) -> None:
    prepared.table()
    child = prepared.child(ready(prepared), "copy")
    assert heard(child) == "written"
    kill(child)
    eventually(lambda: prepared.open_merges() == 0, "the server rolled the COPY back")
    assert prepared.state() == (0, 0, 0, 0)


@pytest.mark.parametrize("ends", ["SELECT 1 / 0", "ROLLBACK"])
def test_merge_that_failed_or_ended_does_not_pass_as_prepared(
    prepared: World, monkeypatch: pytest.MonkeyPatch, ends: str
) -> None:
    """Nor in the staged mode; and nobody is told to look for a standby."""
    prepared.table()
    sink = prepared.ready()
    staged = stage(sink)
    called = []

    def fail_unseen(connection: Any, gid: str) -> str | None:
        called.append(gid)
        with contextlib.suppress(psycopg.errors.DivisionByZero):
            connection.execute(ends.encode())
        return leave_prepared(connection, gid)

    monkeypatch.setattr(preparing, "leave_prepared", fail_unseen)
    with pytest.raises(PrepareRejectedError, match="the server answered ROLLBACK") as caught:
        sink.vote(merge_of(), [staged])
    assert called == [str(merge_of())]
    assert "standby" not in str(caught.value)
    assert (prepared.ids(), prepared.markers(), prepared.gids()) == ([], [], [])


def test_marker_table_that_is_gone_proves_nothing(prepared: World) -> None:
    prepared.table()
    sink = ready(prepared)
    committable = prepare(sink)
    sink.commit(committable)
    prepared.run(f"DROP TABLE {prepared.schema}.sparkonce_commits")
    with pytest.raises(CommitUnresolvedError, match="sparkonce_commits.*does not exist"):
        sink.commit(committable)
    prepared.run(f"CREATE TABLE {prepared.schema}.sparkonce_commits (batch_id bigint)")


# -- guards ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("most", "options", "message"),
    [
        (0, {}, 'max_prepared_transactions = 0.*load="staged"'),
        (2, {"key": ["id"], "writers": 3}, "here 3, and the server has max.* = 2"),
    ],
)
def test_server_that_allows_too_few_is_refused_at_the_start(
    few_servers: Callable[[int], World], most: int, options: dict[str, Any], message: str
) -> None:
    world = few_servers(most)
    world.table(KEYED)
    with pytest.raises(ConfigurationError, match=message):
        ready(world, **options)


@pytest.fixture
def few_servers(fresh_name: Callable[[], str]) -> Any:
    """A server that allows only so many prepared transactions."""
    with contextlib.ExitStack() as stack:

        def start(most: int) -> World:
            config = {"max_prepared_transactions": str(most)}
            services = stack.enter_context(start_services(["postgres"], postgres_config=config))
            return stack.enter_context(world_on(services.postgres, fresh_name(), prepares=True))

        yield start


def test_no_room_is_told_at_the_start_and_when_a_task_prepares(
    few_servers: Callable[[int], World], caplog: pytest.LogCaptureFixture
) -> None:
    """The setting is named, the batch aborted, and what was prepared before still stands."""
    world = few_servers(2)
    world.table()
    with caplog.at_level("INFO", logger="sparkonce"):
        sink = ready(world)
    assert "visible task by task" in caplog.text
    assert "2 of max_prepared_transactions = 2 are free" in caplog.text
    for n in range(2):
        prepare(sink, branch_id=task(n))
    with pytest.raises(PrepareRejectedError, match="raise max_prepared_transactions") as caught:
        prepare(sink, branch_id=task(2))
    assert pickle.loads(pickle.dumps(caught.value)).branch_id == task(2)  # noqa: S301
    assert world.state() == (0, 0, 0, 2)
    caplog.clear()
    ready(world)
    assert "2 of max_prepared_transactions = 2 are in use" in caplog.text


def test_another_server_proves_nothing(prepared: World, fresh_name: Callable[[], str]) -> None:
    prepared.table()
    committable = prepare(ready(prepared))
    with (
        start_services(["postgres"]) as services,
        world_on(services.postgres, prepared.schema, prepares=True) as elsewhere,
    ):
        elsewhere.table()
        with pytest.raises(CommitUnresolvedError, match="system identifier"):
            ready(elsewhere).commit(committable)
    prepared.sinks[0].commit(committable)
    assert prepared.state() == (3, 1, 0, 0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"load": "fast"}, 'must be "staged" or "direct"'),
        ({"load": "direct", "writers": 2}, "writers=2 needs columns"),
        ({"load": "staged", "key": ["id"], "writers": 2}, "writers=2 needs columns"),
        ({"load": "direct", "key": ["id"], "writers": 0}, "writers=0 must be a whole number"),
    ],
)
def test_setting_that_cannot_work(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        PostgresSink("host=127.0.0.1", table="t", **options)


# -- under Spark -----------------------------------------------------------------------------------


def test_rows_of_one_key_reach_one_task_whatever_spark_adapts(spark: SparkSession) -> None:
    """The number of tasks stays, and a replay that is cut otherwise gives each its rows again."""
    sink = PostgresSink("host=x", table="t", key=["a.b", "k"], load="direct", writers=5)
    assert spark.conf.get("spark.sql.adaptive.enabled") == "true"

    def dealt(partitions: int) -> dict[int, set[str]]:
        df = spark.range(1000).selectExpr("id % 100 AS k", "string(id % 7) AS `a.b`", "id")
        rows, shapes = Shapes().with_hashes(df.repartition(partitions), [sink])
        assert shapes == [0]  # the dot makes it a struct
        from pyspark.sql.functions import spark_partition_id

        keys = [f"shape0.`{name}`" for name in sink.distribute_by or ()]
        dealt = rows.repartition(sink.writers, *keys).select(
            "shape0.*", spark_partition_id().alias("n")
        )
        found: dict[int, set[str]] = {n: set() for n in range(5)}
        for row in dealt.collect():
            found[row["n"]].add(f"{row['k']} {row['a.b']}")
        return found

    first = dealt(3)
    assert all(first.values())
    assert sum(map(len, first.values())) == len(set.union(*first.values())) == 700
    assert dealt(8) == first


def run_query(
    spark: SparkSession, folder: Path, sinks: list[PostgresSink], **settings: Any
) -> None:
    pipeline = ExactlyOnce("orders", sinks=sinks, log=f"sqlite:///{folder}/txn.db", **settings)
    stream = spark.readStream.schema("id long, name string").option("maxFilesPerTrigger", 1)
    query = stream.json(str(folder / "in")).repartition(3).writeStream.foreachBatch(pipeline)
    query = query.option("checkpointLocation", str(folder / "ckpt"))
    running = query.trigger(availableNow=True).start()
    pipeline.awaitTermination(running)
    pipeline.close()


@pytest.mark.parametrize("commit", ["immediate", "after_checkpoint"])
def test_batches_with_the_same_keys_follow_each_other(
    spark: SparkSession, prepared: World, tmp_path: Path, commit: str
) -> None:
    """No batch, and no other sink of a batch, waits for locks of a prepared transaction."""
    prepared.table(KEYED)
    prepared.table(KEYED, "copies")
    (tmp_path / "in").mkdir()
    for batch in range(4):
        lines = [json.dumps({"id": n, "name": f"b{batch}"}) for n in range(50)]
        path = tmp_path / "in" / f"{batch}.json"
        path.write_text("\n".join(lines))
        os.utime(path, (batch, batch))  # Spark takes the oldest first
    sinks = [
        prepared.sink(key=["id"], load="direct", name="one"),
        prepared.sink(f"{prepared.schema}.copies", key=["id"], load="direct", name="two"),
    ]
    run_query(spark, tmp_path, sinks, commit=commit)
    for table in ("orders", "copies"):
        assert prepared.rows(table) == [(n, "b3") for n in range(50)]
    assert prepared.gids() == []
    # Four tasks for each sink; the driver alone writes the fourth batch, which is small as well.
    assert len(prepared.markers()) == 2 * (3 * 4 + 1)


def test_key_held_by_an_orphan_fails_the_batch_and_the_sweep_ends_it(
    spark: SparkSession, prepared: World, tmp_path: Path
) -> None:
    """A zombie of this query prepares behind its successor's back; the next start delivers."""
    prepared.table(KEYED)
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "0.json").write_text('{"id": 1, "name": "first"}')
    sink = prepared.sink(key=["id"], load="direct", lock_timeout_s=0.5)
    run_query(spark, tmp_path, [sink])
    (marker,) = prepared.run(f"SELECT branch FROM {prepared.schema}.sparkonce_commits")
    done = BranchId.from_name(marker[0])
    assert done is not None
    zombie = BranchId(done.owner, 1, done.token, done.sink, 0, 65_000)
    again = ready(prepared, key=["id"])
    prepare(again, ROWS, zombie)
    (tmp_path / "in" / "1.json").write_text('{"id": 1, "name": "second"}')
    # What stands with a lower token is swept before anything is written.
    run_query(spark, tmp_path, [sink])
    assert prepared.rows() == [(1, "second")]
    assert prepared.gids() == []


def test_two_sinks_into_one_table_with_one_key_end_at_the_lock_timeout(
    spark: SparkSession, prepared: World, tmp_path: Path
) -> None:
    """Nobody waits for ever; the error says where to look, and nothing of the batch is left."""
    prepared.table(KEYED)
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "0.json").write_text('{"id": 1, "name": "x"}')
    options: dict[str, Any] = {"key": ["id"], "load": "direct", "lock_timeout_s": 0.5}
    sinks = [prepared.sink(name=name, **options) for name in ("one", "two")]
    with pytest.raises(Exception, match="lock_timeout_s=0.5.*this pipeline's sink '(one|two)'"):
        run_query(spark, tmp_path, sinks)
    assert prepared.state() == (0, 0, 0, 0)


def test_row_that_a_deferred_constraint_refuses_aborts_the_batch_in_every_sink(
    spark: SparkSession, prepared: World, tmp_path: Path
) -> None:
    prepared.run(f"CREATE TABLE {prepared.schema}.known (id bigint PRIMARY KEY)")
    prepared.run(f"INSERT INTO {prepared.schema}.known VALUES (1)")
    prepared.table(
        f"id bigint CONSTRAINT known REFERENCES {prepared.schema}.known INITIALLY DEFERRED, "
        "name text"
    )
    prepared.table(name="copies")
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "0.json").write_text('{"id": 1}\n{"id": 2}')
    sinks = [
        prepared.sink(f"{prepared.schema}.copies", load="direct", name="free"),
        prepared.sink(load="direct", name="strict"),
    ]
    with pytest.raises(Exception, match='foreign key constraint "known"'):
        run_query(spark, tmp_path, sinks)
    # Another task may still have been at work, and prepare behind the failure.
    assert (prepared.ids(), prepared.rows("copies")) == ([], [])
    prepared.run(f"INSERT INTO {prepared.schema}.known VALUES (2)")
    run_query(spark, tmp_path, sinks)
    assert prepared.ids() == [1, 2]
    assert len(prepared.rows("copies")) == 2
    assert (prepared.staging(), prepared.gids()) == ([], [])
