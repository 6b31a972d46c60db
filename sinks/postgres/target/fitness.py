"""Checks whether rows that are written into a table are in it afterwards, and stay there.

Partitions, rules and row security may change while a query runs. So this is checked at the start,
and again in each transaction after it has written, when its locks prevent further changes.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Any

from psycopg.rows import namedtuple_row

from sparkonce.sinks.postgres.server.connections import PgConnection
from sparkonce.sinks.postgres.target.writing import Write

# pg_partition_tree would lock every partition.
_AROUND = """
    SELECT c.relkind AS kind, c.relpersistence AS persistence,
        row_security_active(c.oid) AS has_row_security,
        c.relkind = 'r' AND EXISTS (
            SELECT FROM pg_catalog.pg_inherits WHERE inhparent = c.oid
        ) AS has_children,
        (
            SELECT min(rulename) FROM pg_catalog.pg_rewrite
            WHERE ev_class = c.oid AND ev_enabled <> 'D'
                AND ev_type::text = ANY (%(events)s)
        ) AS rule,
        to_regclass('_timescaledb_catalog.continuous_agg') IS NOT NULL AS knows_aggregates,
        to_regclass('pg_catalog.pg_dist_partition') IS NOT NULL AS knows_shards,
        p.shown AS partition, p.is_foreign
    FROM pg_catalog.pg_class c
    LEFT JOIN LATERAL (
        SELECT k.oid::regclass::text AS shown, k.relkind = 'f' AS is_foreign
        FROM pg_catalog.pg_class k
        WHERE c.relkind = 'p' AND k.relispartition
            AND (k.relkind = 'f' OR k.relkind = 'r' AND k.relpersistence <> 'p')
            AND c.oid IN (SELECT relid FROM pg_partition_ancestors(k.oid))
        ORDER BY 1 LIMIT 1
    ) p ON true
    WHERE c.oid = to_regclass(%(table)s)
"""

_INSERT, _UPDATE, _DELETE = "3", "2", "4"
"""In pg_rewrite.ev_type."""

# A TimescaleDB hypertable has child tables of its own, and applies upserts to each of them.
_KNOWS_HYPERTABLES = "SELECT to_regclass('_timescaledb_catalog.hypertable') IS NOT NULL AS so"
_IS_HYPERTABLE = """
    SELECT EXISTS (
        SELECT FROM _timescaledb_catalog.hypertable h
        JOIN pg_catalog.pg_class c ON c.relname = h.table_name
        JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace AND n.nspname = h.schema_name
        WHERE c.oid = to_regclass(%(table)s)
    ) AS so
"""

# TimescaleDB notes the changed buckets at PREPARE TRANSACTION, but only those that were refreshed
# before. A bucket whose first refresh runs before COMMIT PREPARED misses the rows permanently.
_HAS_AGGREGATES = _IS_HYPERTABLE.replace(
    "WHERE",
    "JOIN _timescaledb_catalog.continuous_agg a ON a.raw_hypertable_id = h.id WHERE",
)

_IS_DISTRIBUTED = """
    SELECT EXISTS (
        SELECT FROM pg_catalog.pg_dist_partition WHERE logicalrelid = to_regclass(%(table)s)
    ) AS so
"""

# Foreign keys through which a deletion in the table may delete further rows of the same table.
_OWN_CASCADE = """
    WITH RECURSIVE cascades AS (
        SELECT conname, conrelid, confrelid FROM pg_catalog.pg_constraint k
        WHERE contype = 'f' AND confdeltype = 'c'
            AND coalesce((to_jsonb(k) ->> 'conenforced')::boolean, true)
    ), deletes AS (
        SELECT conname, conrelid FROM cascades WHERE confrelid = to_regclass(%(table)s)
      UNION
        SELECT d.conname, k.conrelid
        FROM deletes d JOIN cascades k ON k.confrelid = d.conrelid
    )
    SELECT min(conname) AS name FROM deletes WHERE conrelid = to_regclass(%(table)s)
"""


def unfit(
    connection: PgConnection,
    table: str,
    mode: Write = "append",
    *,
    must_see: bool = False,
    prepares: bool = False,
) -> str | None:
    """Why the sink cannot use the table, and the fix; None if it can.

    Args:
        connection: to the server, as the role that writes.
        table: as SQL writes it.
        mode: what happens to a row whose key is in the table.
        must_see: row security must not hide rows from the role: a deletion would miss them, and
            COPY refuses such a table.
        prepares: the rows are left in a prepared transaction.
    """
    # The key's unique index covers only the rows of this table, not those of its children.
    has_key, deletes = mode != "append", mode == "merge"
    with connection.cursor(row_factory=namedtuple_row) as cursor:
        events = [_INSERT, *[_UPDATE] * has_key, *[_DELETE] * deletes]
        found: Any = cursor.execute(_AROUND, {"table": table, "events": events}).fetchone()
        cascade: Any = None
        if deletes and found is not None:
            cascade = cursor.execute(_OWN_CASCADE, {"table": table}).fetchone()
        inherited = has_key and found is not None and found.has_children
        if inherited and _ask(cursor, _KNOWS_HYPERTABLES, table):
            inherited = not _ask(cursor, _IS_HYPERTABLE, table)
        prepares = prepares and found is not None
        is_aggregated = prepares and found.knows_aggregates and _ask(cursor, _HAS_AGGREGATES, table)
        is_distributed = prepares and found.knows_shards and _ask(cursor, _IS_DISTRIBUTED, table)
    if found is None or found.kind not in {"r", "p"}:
        return "it is no table (rows go into ordinary and partitioned tables only)"
    misled = _misled(found, inherited=inherited, must_see=must_see or deletes)
    unprepared = _unprepared(is_aggregated=is_aggregated, is_distributed=is_distributed)
    return next(chain(_not_durable(found), misled, _cascading(cascade), unprepared), None)


def _not_durable(found: Any) -> Iterator[str]:
    """A crash could lose committed rows, or another server commits them."""
    if found.persistence != "p":
        yield (
            "it is temporary or UNLOGGED, so a crash of the server would lose committed rows; "
            "ALTER TABLE … SET LOGGED"
        )
    if found.partition is not None and found.is_foreign:
        yield (
            f"its partition {found.partition} is a foreign table, so another server would commit "
            "its rows separately; ALTER TABLE … DETACH PARTITION, or name another table"
        )
    elif found.partition is not None:
        yield (
            f"its partition {found.partition} is UNLOGGED, so a crash of the server would lose "
            "committed rows; ALTER TABLE … SET LOGGED"
        )


def _ask(cursor: Any, query: str, table: str) -> bool:
    return bool(cursor.execute(query, {"table": table}).fetchone().so)


def _misled(found: Any, *, inherited: bool, must_see: bool) -> Iterator[str]:
    """Statements would silently do something else than the sink means."""
    if found.rule is not None:
        yield (
            f"its rule {found.rule!r} changes what a write means; make it a trigger, or write into "
            "the table that it leads to"
        )
    if inherited:
        yield (
            "other tables inherit from it, and its unique index does not cover their rows, so a "
            "key could exist twice; partition it, or write into one of them"
        )
    if must_see and found.has_row_security:
        yield (
            "row security would silently hide rows of it from the role; ALTER ROLE … "
            "BYPASSRLS, or connect as the table's owner"
        )


def _cascading(cascade: Any) -> Iterator[str]:
    if cascade is not None and cascade.name is not None:
        yield (
            f"through its foreign key {cascade.name!r} (ON DELETE CASCADE) a deletion would delete "
            "rows that the batch moves to another parent, since deletions run first; make it NO "
            "ACTION DEFERRABLE INITIALLY DEFERRED: rows that the source deleted by a cascade "
            "arrive as deletions anyway"
        )


def _unprepared(*, is_aggregated: bool, is_distributed: bool) -> Iterator[str]:
    if is_aggregated:
        yield (
            "TimescaleDB's continuous aggregates over it could permanently miss rows that are "
            "prepared during a refresh"
        )
    if is_distributed:
        yield "Citus distributes it, and cannot prepare transactions on such a table"
