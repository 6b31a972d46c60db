"""The fast append of the Postgres sink: loads become partitions, and what proves a commit stays.

Both ways to hold a merge are tested: as a prepared transaction, and open in the driver's session.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg
import pyarrow as pa
import pytest
from psycopg import IsolationLevel

from integration_tests.postgres.world import (
    OWNER,
    ROWS,
    World,
    commit_until_known,
    deliver,
    eventually,
    heard,
    kill,
    merge_of,
    prepare,
    stage,
    task,
    world_on,
)
from integration_tests.proxy import Proxy, holds
from sparkonce import ExactlyOnce
from sparkonce.errors import (
    CommitUnresolvedError,
    ConfigurationError,
    PreparedBranchLostError,
    PrepareRejectedError,
)
from sparkonce.model import Committable
from sparkonce.sinks import PostgresSink
from sparkonce.sinks.postgres.attaching import load_number, partition_name
from sparkonce.sinks.postgres.sql import staging_name
from sparkonce.testing.services import postgres_versions, start_services, unavailable

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

LOAD = "load bigint NOT NULL DEFAULT 0"
COLUMNS = "id bigint, name text"
TRIGGER = (
    "CREATE TRIGGER t BEFORE INSERT ON {s}.orders FOR EACH STATEMENT "
    "EXECUTE FUNCTION suppress_redundant_updates_trigger()"
)


class Loads(World):
    """A world whose table takes loads as partitions."""

    def partitioned(self, columns: str = COLUMNS) -> None:
        self.run(
            f"CREATE TABLE {self.schema}.orders ({columns}, {LOAD}) PARTITION BY LIST (load); "
            f"CREATE TABLE {self.schema}.small PARTITION OF {self.schema}.orders FOR VALUES IN (0)"
        )

    def attaching(self, schema: pa.Schema = ROWS.schema, **options: Any) -> PostgresSink:
        return self.ready(schema, **{"attach": "load", "attach_rows": 3, **options})

    def partitions(self) -> list[str]:
        """But for the one of small loads."""
        return [
            name
            for (name,) in self.run(
                "SELECT c.relname FROM pg_inherits JOIN pg_class c ON c.oid = inhrelid "
                f"WHERE inhparent = '{self.schema}.orders'::regclass ORDER BY 1"
            )
            if name != "small"
        ]


@pytest.fixture
def world(world: World) -> Iterator[Loads]:
    loads = Loads(world.server, world.schema, prepares=world.prepares)
    yield loads
    loads.close()


@pytest.mark.parametrize("is_large", [True, False])
def test_each_verb_and_what_stands_after_it(world: Loads, is_large: bool) -> None:
    """All loads of a batch become partitions, or none: of 3 and 2 rows, at least 2 on average."""
    world.partitioned()
    sink = world.attaching(attach_rows=2 if is_large else 3)
    staged = [stage(sink), stage(sink, ROWS.slice(1), task(8))]
    assert world.state() == (0, 0, 2, 0)
    (merged,) = sink.vote(merge_of(), staged)
    assert world.state() == (0, 0, 2, 1)
    assert world.partitions() == []
    sink.commit(merged)
    assert world.state() == (5, 1, 0, 0)
    one, two = (load_number(staging_name(t)) if is_large else 0 for t in (task(), task(8)))
    names = [partition_name("orders", number) for number in (one, two)] if is_large else []
    assert world.partitions() == sorted(names)
    rows = [(1, "a", one), (2, "b", one), (2, "b", two), (3, None, one), (3, None, two)]
    assert world.rows(order="id, load") == sorted(rows, key=lambda row: (row[0], row[2]))
    if is_large:
        assert world.run(
            "SELECT obj_description(oid, 'pg_class'), reloptions, relpersistence FROM pg_class "
            f"WHERE oid = '{world.schema}.{names[0]}'::regclass"
        ) == [(f"loaded by {merge_of()}", None, "p")]


def test_nothing_drops_what_is_committed(world: Loads) -> None:
    """Neither a second commit, nor any abort of it, nor a sweep that had seen its tables."""
    world.partitioned()
    sink = world.attaching()
    staged = [stage(sink), stage(sink, branch_id=task(8))]
    seen = list(sink.find_branches(OWNER))
    assert len(seen) == 2
    (merged,) = sink.vote(merge_of(), staged)
    sink.commit(merged)
    for _ in range(2):
        sink.commit(merged)
        sink.abort(merged)
        sink.abort(merge_of())
        assert sink.abort_many(seen) == [None, None]
        for branch in (*staged, task(), task(8)):
            sink.abort(branch)
    assert sink.find_branches(OWNER) == []
    assert world.state() == (6, 1, 0, 0)


def test_aborted_batch_leaves_nothing(world: Loads) -> None:
    world.partitioned()
    sink = world.attaching()
    prepare(sink)
    branches = list(sink.find_branches(OWNER))
    assert [branch.branch_id for branch in branches] == [merge_of(), task()]
    assert sink.abort_many(branches) == [None, None]
    assert world.state() == (0, 0, 0, 0)
    assert world.partitions() == []


def test_batch_is_attached_again_when_it_was_lost(world: Loads) -> None:
    """By an operator's ROLLBACK PREPARED, or with the connection that held it."""
    world.partitioned()
    sink = world.attaching()
    committable = prepare(sink)
    if world.prepares:
        world.run(f"ROLLBACK PREPARED '{merge_of()}'")
    sink.close()
    assert world.state() == (0, 0, 1, 0)
    world.sink().commit(committable)  # what the record holds is all that is needed
    sink.commit(committable)
    assert world.state() == (3, 1, 0, 0)
    assert len(world.partitions()) == 1


def test_driver_killed_between_prepare_and_commit(world: Loads) -> None:
    world.partitioned()
    sink = world.attaching()
    child = world.child(sink, "prepare")
    committable = Committable.from_json(heard(child))
    kill(child)
    commit_until_known(sink, committable)
    assert world.state() == (3, 1, 0, 0)


def test_server_killed_between_prepare_and_commit(world: Loads) -> None:
    """Rows that were loaded are as lasting as any others."""
    world.partitioned()
    sink = world.attaching()
    committable = prepare(sink)
    world.server.kill()
    with pytest.raises(CommitUnresolvedError):
        sink.commit(committable)
    world.server.start()
    sink.commit(committable)
    world.server.kill()
    world.server.start()
    assert world.state() == (3, 1, 0, 0)


def test_answer_of_the_commit_is_lost(world: Loads) -> None:
    world.partitioned()
    port = int(world.dsn.rpartition(":")[2].partition("/")[0])
    proxy = Proxy(port)
    try:
        sink = world.attaching(dsn=world.dsn.replace(f":{port}/", f":{proxy.port}/"))
        (merged,) = sink.vote(merge_of(), [stage(world.attaching())])
        proxy.lose = holds(b"COMMIT PREPARED" if world.prepares else b"COMMIT\0")
        commit_until_known(sink, merged)
        assert proxy.lost == 1
        sink.close()
    finally:
        proxy.close()
    assert world.state() == (3, 1, 0, 0)
    assert len(world.partitions()) == 1


def test_load_that_is_gone_is_a_loss(world: Loads) -> None:
    world.partitioned()
    sink = world.attaching()
    committable = prepare(sink)
    if world.prepares:
        world.run(f"ROLLBACK PREPARED '{merge_of()}'")
    sink.close()
    eventually(lambda: world.open_merges() == 0, "the open merge rolled back")
    world.run(f"DROP TABLE {world.schema}.{world.staging()[0]}")
    with pytest.raises(PreparedBranchLostError):
        sink.commit(committable)


@pytest.mark.parametrize("attach_rows", [1, 3])
def test_snapshot_between_two_loads_never_shows_a_part_of_the_batch(
    world: Loads, attach_rows: int
) -> None:
    """Partitions do not belong to a snapshot, their rows do; so the rows are frozen."""
    world.partitioned()
    sink = world.attaching(attach_rows=attach_rows)
    first = stage(sink)
    with psycopg.connect(world.dsn) as reader:
        reader.isolation_level = IsolationLevel.REPEATABLE_READ
        reader.execute("SELECT")  # its snapshot is from here
        query = f"SELECT count(*) FROM {world.schema}.orders".encode()
        assert reader.execute(query).fetchone() == (0,)
        second = stage(sink, ROWS.slice(1), task(8))
        (merged,) = sink.vote(merge_of(), [first, second])
        assert reader.execute(query).fetchone() == (0,)
        sink.commit(merged)
        assert reader.execute(query).fetchone() in {(0,), (5,)}


def test_load_is_not_read_when_it_is_attached(world: Loads) -> None:
    world.partitioned()
    deliver(world.attaching())
    (name,) = world.partitions()
    world.sinks[0].close()  # its session reports what it did, at the latest now
    world.run("SELECT pg_stat_force_next_flush()")
    read = f"SELECT seq_scan FROM pg_stat_user_tables WHERE relname = '{name}'"
    eventually(lambda: world.run(read) != [], "the statistics of the partition")
    assert world.run(read) == [(0,)]


def test_what_the_target_computes_is_computed(world: Loads) -> None:
    """Defaults, generated columns, and indexes that belong to the target."""
    world.partitioned(
        "id bigint, name text, note text NOT NULL DEFAULT 'new', "
        "twice bigint GENERATED ALWAYS AS (id * 2) STORED"
    )
    world.run(f"CREATE UNIQUE INDEX ON {world.schema}.orders (id, load)")
    deliver(world.attaching())
    assert [row[:4] for row in world.rows()] == [
        (1, "a", "new", 2),
        (2, "b", "new", 4),
        (3, None, "new", 6),
    ]
    (name,) = world.partitions()
    indexes = f"SELECT count(*) FROM pg_indexes WHERE tablename = '{name}'"
    assert world.run(indexes) == [(1,)]


@pytest.mark.parametrize(
    ("columns", "match"),
    [
        ("id bigint CHECK (id < 3), name text", "orders_id_check"),
        ("id bigint, name text NOT NULL", "not-null constraint"),
        ("id bigint REFERENCES {schema}.known, name text", "orders_id_fkey|_fkey"),
        ("id bigint, name text, UNIQUE (name, load)", "could not create unique index|_key"),
    ],
)
def test_violated_constraint_is_found_before_the_decision(
    world: Loads, columns: str, match: str
) -> None:
    world.run(f"CREATE TABLE {world.schema}.known (id bigint PRIMARY KEY)")
    world.partitioned(columns.format(schema=world.schema))
    rows = pa.concat_tables([ROWS, ROWS])
    with pytest.raises(PrepareRejectedError, match=match):
        prepare(world.attaching(), rows)
    assert world.state()[:2] == (0, 0)
    assert world.partitions() == []


def test_two_pipelines_attach_one_after_the_other(world: Loads) -> None:
    """The second waits for the first one's decision, and says so when that takes too long."""
    world.partitioned()
    one, other = world.attaching(), world.attaching(name="other", lock_timeout=0.2)
    first = prepare(one)
    staged = stage(other, branch_id=task(sink="other"))
    with pytest.raises(PrepareRejectedError, match=r"lock_timeout=0.2 s"):
        other.vote(merge_of(sink="other"), [staged])
    one.commit(first)
    (second,) = other.vote(merge_of(sink="other"), [staged])
    other.commit(second)
    assert world.state() == (6, 2, 0, 0)


def test_names_of_every_kind(world: Loads) -> None:
    columns = f'"É%s" bigint, "a ""b" text, {LOAD.replace("load", chr(34) + "my Load" + chr(34))}'
    table = f'{world.schema}."{"Ü" * 31}"'
    world.run(f'CREATE TABLE {table} ({columns}) PARTITION BY LIST ("my Load")')
    world.run(f"CREATE TABLE {world.schema}.s0 PARTITION OF {table} FOR VALUES IN (0)")
    rows = ROWS.rename_columns(["É%s", 'a "b'])
    sink = world.attaching(rows.schema, table=table, attach="my Load")
    deliver(sink, rows)
    deliver(sink, rows.slice(2), batch=1)
    assert world.run(f"SELECT count(*), min(tableoid::regclass::text) FROM {table}")[0][0] == 4


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        ("ALTER TABLE {s}.orders ALTER load DROP DEFAULT", "'load' is NOT NULL and has no default"),
        ("ALTER TABLE {s}.orders ALTER load SET DEFAULT 1", "DEFAULT 0"),
        ("DROP TABLE {s}.small", "FOR VALUES IN .0."),
        ("CREATE TABLE {s}.rest PARTITION OF {s}.orders DEFAULT", "DETACH it"),
        ("ALTER TABLE {s}.orders ALTER load DROP NOT NULL", "bigint NOT NULL"),
        ("DROP TABLE {s}.orders; CREATE TABLE {s}.orders (id int8, name text)", "partitioned by"),
        ("ALTER TABLE {s}.orders ENABLE ROW LEVEL SECURITY", "row security"),
        (TRIGGER, "trigger 't'"),
        ("CREATE PUBLICATION {s}_p FOR TABLE {s}.orders", "publication"),
        ("CREATE PUBLICATION {s}_p FOR TABLE {s}.small", "publication"),
    ],
)
def test_target_that_cannot_take_partitions_is_refused(
    world: Loads, spoil: str, message: str
) -> None:
    """Also where something would not happen to the rows that happens to inserted ones."""
    world.partitioned()
    world.run(spoil.format(s=world.schema))
    try:
        with pytest.raises(ConfigurationError, match=message):
            world.attaching()
    finally:
        world.run(f"DROP PUBLICATION IF EXISTS {world.schema}_p")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (TRIGGER, "trigger 't'"),
        ("ALTER TABLE {s}.orders ENABLE ROW LEVEL SECURITY", "row security"),
        ("CREATE PUBLICATION {s}_p FOR TABLE {s}.orders", "publication '{s}_p'"),
        (
            (
                "CREATE TABLE {s}.root (id bigint, name text, load bigint NOT NULL DEFAULT 0) "
                "PARTITION BY RANGE (id); "
                "ALTER TABLE {s}.root ATTACH PARTITION {s}.orders FOR VALUES FROM (0) TO (99); "
                "CREATE PUBLICATION {s}_p FOR TABLE {s}.root "
                "WITH (publish_via_partition_root = true)"
            ),
            "publication '{s}_p'",
        ),
        ("CREATE RULE lead AS ON INSERT TO {s}.orders DO ALSO NOTIFY x", "its rule 'lead'"),
    ],
)
def test_target_that_gets_what_must_see_its_rows_while_the_query_runs(
    world: Loads, change: str, message: str
) -> None:
    """The next batch is refused, also one whose tasks have loaded already."""
    world.partitioned()
    sink = world.attaching()
    deliver(sink)
    staged = [stage(sink, branch_id=task(batch=1))]
    world.run(change.format(s=world.schema))
    try:
        with pytest.raises(PrepareRejectedError, match=message.format(s=world.schema)):
            sink.vote(merge_of(1), staged)
        assert len(world.partitions()) == 1
        assert len(world.rows()) == 3
    finally:
        world.run(f"DROP PUBLICATION IF EXISTS {world.schema}_p")


@pytest.fixture
def decoded(fresh_name: Callable[[], str]) -> Iterator[Loads]:
    """A world of which a slot with test_decoding has all, and one with pgoutput: `<schema>_p`."""
    if "postgres" in (reasons := unavailable()):
        pytest.skip(f"postgres: {reasons['postgres']}")
    oldest = next(iter(postgres_versions()), None)  # the newest may be one of a wheel, without it
    config, name = {"wal_level": "logical"}, fresh_name()
    with (
        start_services(["postgres"], postgres_version=oldest, postgres_config=config) as services,
        world_on(services.postgres, name, prepares=True) as world,
    ):
        loads = Loads(world.server, name, prepares=True)
        slot = "SELECT pg_create_logical_replication_slot('{}', '{}')"
        try:
            loads.run(slot.format(name, "test_decoding"))
        except psycopg.errors.UndefinedFile as error:
            pytest.skip(f"this Postgres has no test_decoding: {error}")
        loads.run(slot.format(f"{name}_p", "pgoutput"))
        yield loads
        loads.close()


@pytest.mark.parametrize("attaches", [True, False])
def test_reader_without_a_publication_is_told(
    decoded: Loads, caplog: pytest.LogCaptureFixture, attaches: bool
) -> None:
    """It gets loads as rows of their staging tables, and nobody says that these became others."""
    decoded.partitioned()
    with caplog.at_level("WARNING", logger="sparkonce"):
        deliver(decoded.attaching() if attaches else decoded.ready())
    told = [line for line in caplog.messages if f"slot '{decoded.schema}'" in line]
    assert len(caplog.messages) == len(told) == attaches
    assert all("test_decoding" in line and "leave attach= out" in line for line in told)
    query = f"SELECT data FROM pg_logical_slot_get_changes('{decoded.schema}', NULL, NULL)"
    changes = [data for (data,) in decoded.run(query) if ": INSERT:" in data]
    assert len(decoded.rows()) == 3
    of_staging = [data for data in changes if data.startswith(f"table {decoded.schema}.sparkonce_")]
    assert len(of_staging) == 3 + 1  # the marker
    assert len(changes) - len(of_staging) == (0 if attaches else 3)


def test_role_that_does_not_own_the_target_is_refused(world: Loads) -> None:
    world.partitioned()
    with world.role("SELECT, INSERT") as (role, dsn):
        with pytest.raises(ConfigurationError, match="owner"):
            world.attaching(dsn=dsn)
        world.run(f"ALTER TABLE {world.schema}.orders OWNER TO {role}")
        world.run(f"ALTER TABLE {world.schema}.small OWNER TO {role}")
        sink = world.attaching(dsn=dsn)
        deliver(sink)
        assert world.state() == (3, 1, 0, 0)
        sink.close()


@pytest.mark.parametrize("wrong", [{"key": ["id"]}, {"attach_rows": 0}])
def test_wrong_setting_is_named(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=next(iter(wrong))):
        PostgresSink("postgresql://localhost/shop", table="t", attach="load", **wrong)


def test_streaming_query_attaches_what_its_tasks_load(
    spark: SparkSession, world: Loads, tmp_path: Path
) -> None:
    """Two batches of two tasks, the second too small, and a restart that replays nothing."""
    world.partitioned()
    (tmp_path / "in").mkdir()
    for batch, count in enumerate((400, 4)):
        lines = "\n".join(json.dumps({"id": n, "name": f"b{batch}"}) for n in range(count))
        (tmp_path / "in" / f"{batch}.json").write_text(lines)
        sink = world.sink(attach="load", attach_rows=100)
        pipeline = ExactlyOnce("orders", sinks=[sink], log=f"sqlite:///{tmp_path}/txn.db")
        stream = spark.readStream.schema("id long, name string").json(str(tmp_path / "in"))
        query = stream.repartition(2).writeStream.foreachBatch(pipeline)
        query = query.option("checkpointLocation", str(tmp_path / "ckpt"))
        query.trigger(availableNow=True).start().awaitTermination()
    assert len(world.partitions()) == 2
    assert world.state() == (404, 2, 0, 0)
    kept = f"SELECT name, count(*), count(DISTINCT id) FROM {world.schema}.orders GROUP BY 1"
    assert sorted(world.run(kept)) == [("b0", 400, 400), ("b1", 4, 4)]
