"""What stands around a target, and would make its rows others than those that were written."""

from __future__ import annotations

import contextlib
import re
from typing import TYPE_CHECKING, Any

import psycopg
import pyarrow as pa
import pytest

from integration_tests.support.postgres import ROWS, deliver, prepare, stage, task
from sparkonce.errors import (
    CommitUnresolvedError,
    ConfigurationError,
    PrepareRejectedError,
)
from sparkonce.finding import Level
from sparkonce.sinks import verbs

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

    from integration_tests.support.postgres import World
    from sparkonce.model import Committable
    from sparkonce.sinks import PostgresSink

MERGE = {"key": ["id"], "delete": "gone"}
CHANGES = pa.schema([("id", pa.int64()), ("parent", pa.int64()), ("gone", pa.bool_())])
TREE = "id bigint PRIMARY KEY, parent bigint REFERENCES {s}.orders"
HIDDEN = (
    "ALTER TABLE {s}.sparkonce_commits ENABLE ROW LEVEL SECURITY; "
    "CREATE POLICY p ON {s}.sparkonce_commits FOR INSERT WITH CHECK (true)"
)
RULE = "CREATE RULE lead AS ON INSERT TO {s}.orders DO INSTEAD NOTHING"


def changes(*rows: tuple[int, int | None, bool]) -> pa.Table:
    return pa.Table.from_pylist(
        [dict(zip(CHANGES.names, row, strict=True)) for row in rows], CHANGES
    )


def vote(sink: PostgresSink, load: str, rows: pa.Table, batch: int = 0) -> Committable:
    """What a batch of one task leaves to be committed."""
    if load == "staged":
        return prepare(sink, rows, batch)
    return stage(sink, rows, task(batch=batch))


@pytest.mark.parametrize(
    ("spoil", "options", "message"),
    [
        (RULE, {}, "its rule 'lead'"),
        (RULE, {"load": "direct"}, "its rule 'lead'"),
        (RULE.replace("INSTEAD NOTHING", "ALSO NOTIFY x"), {"key": ["id"]}, "its rule 'lead'"),
        ("CREATE TABLE {s}.child () INHERITS ({s}.orders)", {"key": ["id"]}, "inherit from it"),
        (
            HIDDEN,
            {},
            'sparkonce_commits": row security would silently hide rows',
        ),
        (
            "ALTER TABLE {s}.orders ENABLE ROW LEVEL SECURITY",
            MERGE,
            "row security would silently hide",
        ),
        (
            "ALTER TABLE {s}.orders ENABLE ROW LEVEL SECURITY",
            {"load": "direct"},
            "row security would silently hide",
        ),
        (
            "ALTER TABLE {s}.orders ADD parent bigint REFERENCES {s}.orders ON DELETE CASCADE",
            MERGE,
            "foreign key 'orders_parent_fkey' .*NO ACTION DEFERRABLE",
        ),
        (
            (
                "CREATE TABLE {s}.lines (id bigint PRIMARY KEY, of bigint REFERENCES {s}.orders "
                "ON DELETE CASCADE); "
                "ALTER TABLE {s}.orders ADD line bigint REFERENCES {s}.lines ON DELETE CASCADE"
            ),
            MERGE,
            "foreign key 'lines_of_fkey'",
        ),
        ("ALTER TABLE {s}.orders ADD nr serial", {}, r"sequence \S*orders_nr_seq.*'nr'"),
        (
            "ALTER TABLE {s}.bad ADD who text NOT NULL",
            {"dead_letter": "bad"},
            r"needs a value for \['who'\]",
        ),
    ],
)
def test_target_with_which_rows_would_not_arrive_is_refused(
    prepared: World, spoil: str, options: dict[str, Any], message: str
) -> None:
    prepared.table("id bigint PRIMARY KEY, name text")
    prepared.ready()  # makes the table of markers
    with prepared.role("SELECT, INSERT, UPDATE, DELETE, REFERENCES") as (role, dsn):
        at = prepared.schema
        prepared.run(f"GRANT SELECT, INSERT ON {at}.sparkonce_commits TO {role}")
        schema = ROWS.schema.append(CHANGES.field("gone")) if "delete" in options else ROWS.schema
        prepared.ready(schema, dsn=dsn, **options)
        prepared.run(spoil.format(s=at, r=role))
        with pytest.raises(ConfigurationError, match=message):
            prepared.ready(schema, dsn=dsn, **options)


def test_what_only_looks_alike_is_taken(prepared: World) -> None:
    """A cascade into other tables, a rule that is switched off, row security that is not ours."""
    at = prepared.schema
    prepared.table(TREE.format(s=at))
    prepared.run(
        f"CREATE TABLE {at}.lines (of bigint REFERENCES {at}.orders ON DELETE CASCADE); "
        f"{RULE.format(s=at)}; ALTER TABLE {at}.orders DISABLE RULE lead; "
        f"ALTER TABLE {at}.orders ENABLE ROW LEVEL SECURITY"
    )
    if prepared.run("SHOW server_version_num")[0][0] >= "180000":
        prepared.run(
            f"ALTER TABLE {at}.orders ADD FOREIGN KEY (parent) REFERENCES {at}.orders "
            "ON DELETE CASCADE NOT ENFORCED"
        )
    deliver(prepared.ready(CHANGES, **MERGE), changes((1, None, False)))
    assert prepared.rows() == [(1, None)]


@pytest.mark.parametrize("load", ["staged", "direct"])
def test_rule_on_what_is_never_done_is_taken(prepared: World, load: str) -> None:
    """As of a table to which rows are only added, and of the markers."""
    at = prepared.schema
    prepared.table("id bigint, name text, sparkonce_loaded bool")
    prepared.ready()
    for table in ("orders", "sparkonce_commits"):
        prepared.run(
            f"CREATE RULE stays AS ON DELETE TO {at}.{table} DO INSTEAD NOTHING; "
            f"CREATE RULE same AS ON UPDATE TO {at}.{table} DO INSTEAD NOTHING"
        )
    rows = ROWS.append_column("sparkonce_loaded", [[True] * len(ROWS)])
    sink = prepared.ready(rows.schema, load=load)
    sink.commit(vote(sink, load, rows))
    assert len(prepared.rows()) == len(ROWS)


@contextlib.contextmanager
def timescaledb(world: World) -> Iterator[None]:
    """The part of TimescaleDB's catalog that is looked at; nothing else of it runs here."""
    world.run(
        "CREATE SCHEMA _timescaledb_catalog; "
        "CREATE TABLE _timescaledb_catalog.hypertable (id int, schema_name name, table_name name); "
        "CREATE TABLE _timescaledb_catalog.continuous_agg (raw_hypertable_id int)"
    )
    try:
        yield
    finally:
        world.run("DROP SCHEMA _timescaledb_catalog CASCADE")


@contextlib.contextmanager
def citus(world: World) -> Iterator[None]:
    """The same of Citus'."""
    world.run(
        f"CREATE TABLE {world.schema}.pg_dist_partition (logicalrelid regclass); "
        f"ALTER TABLE {world.schema}.pg_dist_partition SET SCHEMA pg_catalog"
    )
    try:
        yield
    finally:
        world.run("DROP TABLE pg_catalog.pg_dist_partition")


AGGREGATED = (
    "INSERT INTO _timescaledb_catalog.hypertable VALUES (1, '{s}', 'orders'); "
    "INSERT INTO _timescaledb_catalog.continuous_agg VALUES (1)"
)
DISTRIBUTED = "INSERT INTO pg_catalog.pg_dist_partition VALUES ('{s}.orders')"

needs_no_prepare = pytest.mark.parametrize(
    ("extension", "change", "reason"),
    [(timescaledb, AGGREGATED, "continuous aggregates"), (citus, DISTRIBUTED, "Citus")],
)


def test_upserts_go_into_a_hypertable(prepared: World) -> None:
    """TimescaleDB's chunks inherit from it, and its own code takes an upsert to each of them."""
    at = prepared.schema
    prepared.table("id bigint PRIMARY KEY, name text")
    prepared.run(f"CREATE TABLE {at}.chunk () INHERITS ({at}.orders)")
    with timescaledb(prepared):
        with pytest.raises(ConfigurationError, match="inherit from it"):
            prepared.ready(key=["id"])
        prepared.run(f"INSERT INTO _timescaledb_catalog.hypertable VALUES (1, '{at}', 'orders')")
        sink = prepared.ready(key=["id"])
        deliver(sink)
    assert len(prepared.rows()) == len(ROWS)


@needs_no_prepare
def test_target_whose_rows_must_not_be_prepared(
    prepared: World,
    caplog: pytest.LogCaptureFixture,
    extension: Callable[[World], AbstractContextManager[None]],
    change: str,
    reason: str,
) -> None:
    """What they add would miss rows, or refuse: the merge waits in an open transaction."""
    prepared.table()
    with extension(prepared):
        prepared.ready(load="direct")
        prepared.run(change.format(s=prepared.schema))
        with pytest.raises(ConfigurationError, match=f'{reason}.*load="staged"'):
            prepared.ready(load="direct")
        with caplog.at_level("INFO", "sparkonce"):
            sink = prepared.ready()
        assert re.search(f"as an open transaction, since .*{reason}", caplog.text)
        branch = prepare(sink)
        assert (prepared.gids(), prepared.open_merges()) == ([], 1)
        sink.commit(branch)
    assert len(prepared.rows()) == len(ROWS)


@needs_no_prepare
@pytest.mark.parametrize("load", ["staged", "direct"])
def test_target_whose_rows_must_not_be_prepared_any_more(
    prepared: World,
    extension: Callable[[World], AbstractContextManager[None]],
    change: str,
    reason: str,
    load: str,
) -> None:
    """A continuous aggregate, or a distribution, that comes while the query runs."""
    prepared.table()
    with extension(prepared):
        sink = prepared.ready(load=load)
        prepared.run(change.format(s=prepared.schema))
        with pytest.raises(PrepareRejectedError, match=f"changed since .*{reason}"):
            vote(sink, load, ROWS)
    assert prepared.gids() == []


def test_merge_that_was_lost_may_have_got_an_aggregate(prepared: World) -> None:
    """It is merged again and committed at once, so the aggregate sees its rows."""
    prepared.table()
    with timescaledb(prepared):
        sink = prepared.ready()
        branch = prepare(sink)
        prepared.run(AGGREGATED.format(s=prepared.schema))
        prepared.run(f"ROLLBACK PREPARED '{prepared.gids()[0]}'")
        sink.commit(branch)
    assert len(prepared.rows()) == len(ROWS)


@pytest.mark.parametrize("with_dead_letter", [False, True])
def test_row_whose_parent_goes_may_move_in_the_same_batch(
    prepared: World, with_dead_letter: bool
) -> None:
    """Deletions go first, so a foreign key that may be deferred is looked at behind them."""
    at = prepared.schema
    prepared.table(f"{TREE.format(s=at)} DEFERRABLE")
    options = {**MERGE, "dead_letter": "rejected"} if with_dead_letter else MERGE
    sink = prepared.ready(CHANGES, **options)
    deliver(sink, changes((1, None, False), (2, 1, False)))
    deliver(sink, changes((2, None, False), (1, None, True)), batch=1)
    assert prepared.rows() == [(2, None)]
    with pytest.raises(PrepareRejectedError, match="orders_parent_fkey"):
        deliver(prepared.ready(CHANGES, **MERGE), changes((3, 9, False)), batch=2)


@pytest.mark.parametrize("load", ["staged", "direct"])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (RULE, "its rule 'lead'"),
        ("CREATE UNLOGGED TABLE {s}.two PARTITION OF {s}.orders FOR VALUES IN (2)", "SET LOGGED"),
        (
            "ALTER TABLE {s}.orders RENAME TO old; CREATE VIEW {s}.orders AS SELECT * FROM {s}.old",
            "it is no table|cannot copy to view",
        ),
    ],
)
def test_target_that_changes_while_the_query_runs(
    prepared: World, load: str, change: str, message: str
) -> None:
    """The next batch is refused, and nothing of it stands."""
    at = prepared.schema
    prepared.run(
        f"CREATE TABLE {at}.orders (id bigint, name text) PARTITION BY LIST (id); "
        f"CREATE TABLE {at}.rest PARTITION OF {at}.orders FOR VALUES IN (1, 3)"
    )
    one = ROWS.slice(0, 1)
    sink = prepared.ready(load=load)
    sink.commit(vote(sink, load, one))
    prepared.run(change.format(s=at))
    with pytest.raises(PrepareRejectedError, match=message):
        vote(sink, load, one, batch=1)
    assert prepared.gids() == []
    assert prepared.markers() == [0]


@pytest.mark.parametrize("load", ["staged", "direct"])
def test_marker_that_is_hidden_proves_nothing(prepared: World, load: str) -> None:
    """Row security came behind the start: the absence of what it hides is no proof."""
    at = prepared.schema
    prepared.table()
    prepared.ready()
    with prepared.role("SELECT, INSERT") as (role, dsn):
        prepared.run(f"GRANT SELECT, INSERT ON {at}.sparkonce_commits TO {role}")
        sink = prepared.ready(load=load, dsn=dsn)
        branch = vote(sink, load, ROWS)
        sink.commit(branch)
        prepared.run(HIDDEN.format(s=at))
        for end in (sink.commit, sink.abort_decided):
            with pytest.raises(CommitUnresolvedError, match="row security may hide rows"):
                end(branch)
        prepared.run(f"ALTER TABLE {at}.sparkonce_commits DISABLE ROW LEVEL SECURITY")
        sink.commit(branch)
        assert len(prepared.rows()) == len(ROWS)
        sink.close()


def test_key_that_is_unique_only_without_overlaps_is_none(prepared: World) -> None:
    """Postgres 18's temporal keys arbitrate no ON CONFLICT."""
    if prepared.run("SHOW server_version_num")[0][0] < "180000":
        pytest.skip("the server has no temporal keys")
    prepared.table("id int4range, span int4range, PRIMARY KEY (id, span WITHOUT OVERLAPS)")
    schema = pa.schema([("id", pa.string()), ("span", pa.string())])
    with pytest.raises(ConfigurationError, match="no unique index covers"):
        prepared.ready(schema, key=["id", "span"])


def test_names_that_the_merge_needs_are_refused(prepared: World) -> None:
    prepared.table("id bigint PRIMARY KEY, sparkonce_deleted bool")
    schema = pa.schema([("id", pa.int64()), ("sparkonce_deleted", pa.bool_())])
    with pytest.raises(ConfigurationError, match="'sparkonce_deleted'.*rename"):
        prepared.ready(schema, key=["id"])


@pytest.mark.parametrize(
    ("rights", "options", "missing"),
    [
        ("SELECT, INSERT", {"key": ["id"], "write": "ignore"}, None),
        ("SELECT, INSERT", {"key": ["id"]}, "UPDATE"),
        ("INSERT (id, name)", {}, None),
        ("SELECT", {}, "INSERT"),
        ("SELECT (name), INSERT, UPDATE", {"key": ["id"]}, "SELECT"),
        ("SELECT, INSERT, UPDATE", MERGE, "DELETE"),
        ("SELECT, INSERT, UPDATE, DELETE", MERGE, None),
    ],
)
def test_doctor_asks_for_the_rights_of_a_start(
    prepared: World, rights: str, options: dict[str, Any], missing: str | None
) -> None:
    prepared.table("id bigint PRIMARY KEY, name text")
    with prepared.role(rights) as (_, dsn):
        found = list(prepared.sink(dsn=dsn, **options).diagnose())
        told = [one for one in found if one.level is Level.ERROR]
        assert len(told) == (missing is not None), found
        assert all(f"GRANT {missing}" in f"{one.what} {one.fix}" for one in told)


def test_doctor_looks_into_the_schema(prepared: World) -> None:
    """At the rights on the schema, and on the table of commit markers."""
    prepared.table("id bigint PRIMARY KEY, name text")
    prepared.ready(key=["id"])
    with prepared.role("SELECT, INSERT, UPDATE") as (role, dsn):
        marker = f"{prepared.schema}.sparkonce_commits"
        for change, fix in (
            ("SELECT 1", f'GRANT SELECT, INSERT ON {marker} TO "{role}"'),
            (f"GRANT SELECT, INSERT ON {marker} TO {role}", ""),
            (f"REVOKE USAGE ON SCHEMA {prepared.schema} FROM {role}", "GRANT USAGE ON SCHEMA"),
        ):
            prepared.run(change)
            found = list(prepared.sink(dsn=dsn, key=["id"]).diagnose())
            told = [one.fix for one in found if one.level is Level.ERROR]
            assert len(told) == bool(fix), found
            assert all(fix in one for one in told)


@pytest.mark.parametrize("limit", [1, 6, 50])
def test_doctor_counts_the_room_for_connections(prepared: World, limit: int) -> None:
    """Its own connection is one of them."""
    prepared.table("id bigint PRIMARY KEY, name text")
    with prepared.role("SELECT, INSERT") as (role, dsn):
        prepared.run(f"ALTER ROLE {role} CONNECTION LIMIT {limit}")
        (found,) = (f for f in prepared.sink(dsn=dsn).diagnose() if "connections" in f.what)
        lacking = verbs.lacks_room(prepared.sink(dsn=dsn), 40)
        assert verbs.lacks_room(prepared.sink(dsn=dsn, writers=1), 40) is None or limit < 6
    assert found.what.startswith(f"room for {limit - 1} more connections")
    assert (found.level is Level.OK) == (limit > 6)
    assert (lacking is None) == (limit == 50)


def test_doctor_before_the_start_that_makes_the_table(prepared: World) -> None:
    def errors(**options: Any) -> list[str]:
        found = prepared.sink(key=["id"], **options).diagnose()
        return [one.what for one in found if one.level is Level.ERROR]

    assert errors(create="if_missing") == []
    assert "it does not exist" in errors()[0]
    prepared.run(f"CREATE UNLOGGED TABLE {prepared.schema}.orders (id bigint PRIMARY KEY)")
    assert "UNLOGGED" in errors(create="if_missing")[0]


@pytest.mark.parametrize(("mode", "is_told"), [("SHARE UPDATE EXCLUSIVE", False), ("SHARE", True)])
def test_doctor_names_who_holds_a_lock_that_a_write_waits_for(
    prepared: World, mode: str, is_told: bool
) -> None:
    """A merge does not wait for what autovacuum and CREATE INDEX CONCURRENTLY take."""
    table = prepared.table()
    with psycopg.connect(prepared.dsn) as holder:
        holder.execute(f"LOCK TABLE {table} IN {mode} MODE")  # type: ignore[arg-type]
        found = list(prepared.sink(lock_timeout_s=0.001).diagnose())
        holds = f"process {holder.info.backend_pid} "
        assert any(one.what.startswith(holds) for one in found) is is_told
