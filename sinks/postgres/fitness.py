"""Whether what is written into a table is in it afterwards, and stays.

Asked at the start, and again in each transaction that has written, when its locks let none of this
change any more: partitions, rules and row security come and go while a query runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Any

from psycopg.rows import namedtuple_row

from sparkonce.sinks.postgres.connections import PgConnection
from sparkonce.sinks.postgres.writing import Write

# Not by pg_partition_tree, which would lock every partition.
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

# What inherits from TimescaleDB's hypertables is its own, and it takes upserts to each of them.
_KNOWS_HYPERTABLES = "SELECT to_regclass('_timescaledb_catalog.hypertable') IS NOT NULL AS so"
_IS_HYPERTABLE = """
    SELECT EXISTS (
        SELECT FROM _timescaledb_catalog.hypertable h
        JOIN pg_catalog.pg_class c ON c.relname = h.table_name
        JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace AND n.nspname = h.schema_name
        WHERE c.oid = to_regclass(%(table)s)
    ) AS so
"""

# At PREPARE TRANSACTION TimescaleDB notes which buckets changed, and none that no refresh has
# reached yet; one that does before COMMIT PREPARED passes over the rows for good.
_HAS_AGGREGATES = _IS_HYPERTABLE.replace(
    "WHERE",
    "JOIN _timescaledb_catalog.continuous_agg a ON a.raw_hypertable_id = h.id WHERE",
)

_IS_DISTRIBUTED = """
    SELECT EXISTS (
        SELECT FROM pg_catalog.pg_dist_partition WHERE logicalrelid = to_regclass(%(table)s)
    ) AS so
"""

# Of which a deletion in the table may delete rows of the table itself.
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
    """Why the table does not serve, and the fix; None if it does.

    Args:
        connection: to the server, as the role that writes.
        table: as SQL writes it.
        mode: what becomes of a row whose key is there.
        must_see: what the role is not shown would be missed, as by a deletion, or COPY be refused.
        prepares: its rows are left in a prepared transaction.
    """
    # The index by which rows are told apart has those of this table alone.
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
    return next(chain(_passing(found), misled, _cascading(cascade), unprepared), None)


def _passing(found: Any) -> Iterator[str]:
    """A crash, or another server, would take committed rows."""
    if found.persistence != "p":
        yield (
            "it is temporary or UNLOGGED, so a crash of the server would take committed rows; "
            "ALTER TABLE … SET LOGGED"
        )
    if found.partition is not None and found.is_foreign:
        yield (
            f"its partition {found.partition} is a foreign table, so another server would commit "
            "its rows by itself; ALTER TABLE … DETACH PARTITION, or name another table"
        )
    elif found.partition is not None:
        yield (
            f"its partition {found.partition} is UNLOGGED, so a crash of the server would take "
            "committed rows; ALTER TABLE … SET LOGGED"
        )


def _ask(cursor: Any, query: str, table: str) -> bool:
    return bool(cursor.execute(query, {"table": table}).fetchone().so)


def _misled(found: Any, *, inherited: bool, must_see: bool) -> Iterator[str]:
    """Statements would mean something else, without an error."""
    if found.rule is not None:
        yield (
            f"its rule {found.rule!r} changes what a write means; make it a trigger, or write into "
            "the table that it leads to"
        )
    if inherited:
        yield (
            "other tables inherit from it, and its unique index does not have their rows, so that "
            "a key could be there twice; partition it, or write into one of them"
        )
    if must_see and found.has_row_security:
        yield (
            "row security would hide rows of it from the role without an error; ALTER ROLE … "
            "BYPASSRLS, or connect as the table's owner"
        )


def _cascading(cascade: Any) -> Iterator[str]:
    if cascade is not None and cascade.name is not None:
        yield (
            f"with its foreign key {cascade.name!r} (ON DELETE CASCADE) a deletion would take rows "
            "of the table that the batch moves elsewhere, since deletions go first; make it NO "
            "ACTION DEFERRABLE INITIALLY DEFERRED: what the source deleted by a cascade comes as "
            "deletions anyway"
        )


def _unprepared(*, is_aggregated: bool, is_distributed: bool) -> Iterator[str]:
    if is_aggregated:
        yield (
            "TimescaleDB's continuous aggregates over it could miss for good what is prepared "
            "while they are refreshed"
        )
    if is_distributed:
        yield "Citus distributes it, and prepares no transaction in such a table"
