"""A plain INSERT for a batch whose keys are all new, a plain UPDATE for one whose keys are there.

    table      … 7  8  9 |                         | 30  31 …
    batch                |  12  14  15  20  27     |             INSERT, about twice as fast
    batch   7     8  9                                30         UPDATE, about a fifth faster
    batch          8     |  12  14                 |             INSERT … ON CONFLICT

Keys that grow (numbers of a sequence, times, UUIDs of version 7) lie in a gap of the table's in
nearly every batch; the look for it is a few steps in the key's index. That all keys are there is
guessed from the first of each task, and what is not there after all is inserted with ON CONFLICT.

Both are only guesses: another session may take a key meanwhile, and a key may come twice. A
shortcut that did not place each row, as ON CONFLICT does, is taken back, and ON CONFLICT decides as
ever. So the index has to be there: to explain ON CONFLICT, Postgres looks for it, and from then on
its lock keeps it, and no trigger or constraint can be added.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from psycopg import sql

from sparkonce.sinks.postgres.sql import columns_of

WORTH_A_LOOK: Final = 10_000
"""Rows from which on the look costs next to nothing."""

SAMPLE: Final = 100
"""So many keys of each task are looked for before the UPDATE."""


def with_shortcuts(
    insert: sql.Composable,
    on_conflict: sql.Composable,
    *,
    table: sql.Composable,
    leading: str,
    key: Sequence[str],
    tasks: Sequence[sql.Composable],
    updates: Sequence[str],
    count: int,
) -> sql.Composed:
    """One statement that does what `insert` with `on_conflict` does.

    Args:
        insert: INSERT INTO … SELECT …, which raises unique_violation for any key that is there.
        on_conflict: to be put behind it.
        table: the target.
        leading: the first column of the key's index, of a type with Postgres' own order.
        key: its columns.
        tasks: for each task, a query that gives its rows.
        updates: the columns that an UPDATE sets, which with the key are all that the rows have;
            none where some staged row would not count, or would not update all that it has.
        count: of the rows.
    """
    columns = (*key, *updates)
    same = sql.SQL(" AND ").join(
        sql.SQL("target.{0} OPERATOR(pg_catalog.=) staged.{0}").format(sql.Identifier(column))
        for column in key
    )
    parts = {
        "table": table,
        "oid": sql.Literal(table.as_string()) + sql.SQL("::regclass"),
        "leading": sql.Identifier(leading),
        "key": columns_of(key),
        "key_names": sql.Literal(list(key)),
        "columns": columns_of(columns),
        "names": sql.Literal(list(columns)),
        "rows": sql.SQL(" UNION ALL ").join(tasks),
        "some": sql.SQL(" UNION ALL ").join(
            sql.SQL("({} LIMIT {})").format(task, sql.Literal(SAMPLE)) for task in tasks
        ),
        "same": same,
        "is_there": sql.SQL("EXISTS (SELECT FROM {} AS target WHERE {})").format(table, same),
        "assignments": sql.SQL(", ").join(
            sql.SQL("{0} = staged.{0}").format(sql.Identifier(column)) for column in updates
        ),
        "count": sql.Literal(count),
        "insert": insert,
        "on_conflict": on_conflict,
        "explained": sql.Literal(sql.SQL("EXPLAIN {} {}").format(insert, on_conflict).as_string()),
    }
    for name, part in (("look", _LOOK), ("ends", _ENDS), ("fits", _FITS)):
        parts[name] = part.format(**parts)
    update = _UPDATE.format(**parts) if updates else sql.SQL("")
    return sql.SQL("DO {}").format(sql.Literal(_BLOCK.format(update=update, **parts).as_string()))


# By its order, so that Postgres reads the index and never the table.
_LOOK = sql.SQL(
    "SELECT target.{leading} INTO above FROM {table} AS target "
    "WHERE target.{leading} >= sparkonce.low ORDER BY target.{leading} LIMIT 1"
)

# Not min() and max(), which some types lack.
_ENDS = sql.SQL(
    "SELECT {leading} INTO low FROM ({rows}) AS staged "
    "WHERE {leading} IS NOT NULL ORDER BY {leading} LIMIT 1; "
    "SELECT {leading} INTO high FROM ({rows}) AS staged "
    "WHERE {leading} IS NOT NULL ORDER BY {leading} DESC LIMIT 1"
)

# The first look, for any one of the keys, spares the sorting where it is there.
_BLOCK = sql.SQL(
    """
#variable_conflict use_column
<<sparkonce>>
DECLARE
    low {table}.{leading}%TYPE;
    high {table}.{leading}%TYPE;
    above {table}.{leading}%TYPE;
    updated bigint;
    inserted bigint := 0;
BEGIN
    EXECUTE {explained};
    SELECT {leading} INTO low FROM ({rows}) AS staged WHERE {leading} IS NOT NULL LIMIT 1;
    {look};
    IF above IS NULL OR above > low THEN
        {ends};
        {look};
        IF above IS NULL OR above > high THEN
            BEGIN
                {insert};
                RETURN;
            EXCEPTION WHEN unique_violation THEN
                NULL;
            END;
        END IF;
    {update}
    END IF;
    {insert} {on_conflict};
END
"""
)

# An UPDATE with an INSERT of the rest does what ON CONFLICT does only where
#   * keys are equal when the index finds them so: of built-in types, by their own operators;
#   * the row that ON CONFLICT makes to insert first would pass: its triggers, policies and CHECKs,
#     where columns that the batch does not have are at their defaults;
#   * no row refers to another one of the table, which one statement looks at in the end only.
_FITS = sql.SQL(
    """
    EXISTS (
        SELECT FROM pg_catalog.pg_class c
        WHERE c.oid = {oid} AND c.relkind = 'r' AND NOT c.relhassubclass AND NOT c.relrowsecurity
            AND NOT c.relispartition  -- whose triggers look internal before Postgres 15
    ) AND NOT EXISTS (
        SELECT FROM pg_catalog.pg_trigger WHERE tgrelid = {oid} AND NOT tgisinternal
    ) AND NOT EXISTS (
        SELECT FROM pg_catalog.pg_constraint
        WHERE conrelid = {oid} AND (
            contype = 'f' AND confrelid = conrelid
            OR contype = 'c' AND NOT coalesce(conkey OPERATOR(pg_catalog.<@) ARRAY(
                SELECT attnum FROM pg_catalog.pg_attribute
                WHERE attrelid = {oid} AND attname = ANY ({names}::name[])
            ), false)
        )
    ) AND NOT EXISTS (
        SELECT FROM pg_catalog.pg_attribute a JOIN pg_catalog.pg_type t ON t.oid = a.atttypid
        WHERE a.attrelid = {oid} AND a.attnum > 0 AND NOT a.attisdropped
            AND a.attname <> ALL ({names}::name[])
            AND (a.attgenerated <> '' OR t.typtype = 'd'
                OR a.attnotnull AND NOT a.atthasdef AND a.attidentity = '')
    ) AND NOT EXISTS (
        SELECT FROM pg_catalog.pg_index i
            CROSS JOIN LATERAL generate_series(0, i.indnkeyatts - 1) AS n
            JOIN pg_catalog.pg_attribute a ON a.attrelid = i.indrelid AND a.attnum = i.indkey[n]
            JOIN pg_catalog.pg_type t ON t.oid = a.atttypid
            JOIN pg_catalog.pg_opclass o ON o.oid = i.indclass[n]
            LEFT JOIN pg_catalog.pg_collation k ON k.oid = a.attcollation
        WHERE i.indrelid = {oid} AND i.indisunique AND a.attname = ANY ({key_names}::name[])
            AND NOT (t.typnamespace = 'pg_catalog'::regnamespace AND o.opcdefault
                AND (o.opcintype = t.oid
                    OR t.typname = 'varchar' AND o.opcintype = 'text'::regtype)
                AND i.indcollation[n] = a.attcollation AND coalesce(k.collisdeterministic, true))
    )
    """
)

# Between the ends of the keys, since a merge join would read the index from its start. As with ON
# CONFLICT, rows are locked in the order of their keys: a hash join may take another.
_UPDATE = sql.SQL(
    """
    ELSIF {fits} THEN
        BEGIN
            IF NOT EXISTS (SELECT FROM ({some}) AS staged WHERE NOT {is_there}) THEN
                {ends};
                SET LOCAL enable_hashjoin = off;
                UPDATE {table} AS target SET {assignments}
                    FROM (SELECT * FROM ({rows}) AS staged ORDER BY {key}) AS staged
                    WHERE {same} AND target.{leading} OPERATOR(pg_catalog.>=) sparkonce.low
                        AND target.{leading} OPERATOR(pg_catalog.<=) sparkonce.high;
                GET DIAGNOSTICS updated = ROW_COUNT;
                IF updated < {count} THEN
                    INSERT INTO {table} ({columns})
                        SELECT {columns} FROM ({rows}) AS staged WHERE NOT {is_there}
                        ORDER BY {key} {on_conflict};
                    GET DIAGNOSTICS inserted = ROW_COUNT;
                END IF;
                IF updated + inserted = {count} THEN
                    RETURN;
                END IF;
                RAISE cardinality_violation;
            END IF;
        EXCEPTION
            WHEN lock_not_available THEN
                RAISE;  -- its class is that of a missing replica identity
            WHEN cardinality_violation
                OR integrity_constraint_violation  -- a foreign key, behind the first of the two
                OR object_not_in_prerequisite_state OR invalid_column_reference  -- a publication
                OR feature_not_supported  -- where Citus distributes the table
            THEN
                NULL;
        END;
"""
)
