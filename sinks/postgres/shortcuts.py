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

from sparkonce.sinks.postgres.sql import columns_of, same_key

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
    same = same_key(key)
    parts = {
        "table": table,
        "oid": sql.Literal(table.as_string()) + sql.SQL("::regclass"),
        "leading": sql.Identifier(leading),
        "key": columns_of(key),
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
    parts |= {"look": _LOOK.format(**parts), "ends": _ENDS.format(**parts)}
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

# ON CONFLICT would make a row to insert first, fire the triggers of an INSERT and check that row:
# so not where there are triggers, or checks of columns that are at their default in that row.
# Between the ends of the keys, since a merge join would read the index from its start. Rows are
# locked in the order of their keys here, too.
_UPDATE = sql.SQL(
    """
    ELSIF NOT EXISTS (SELECT FROM ({some}) AS staged WHERE NOT {is_there})
        AND NOT EXISTS (
            SELECT FROM pg_catalog.pg_trigger WHERE tgrelid = {oid} AND NOT tgisinternal
        )
        AND NOT EXISTS (
            SELECT FROM pg_catalog.pg_constraint k JOIN pg_catalog.pg_attribute a
                ON a.attrelid = k.conrelid AND a.attnum = ANY (k.conkey)
            WHERE k.conrelid = {oid} AND k.contype = 'c' AND a.attname <> ALL ({names}::name[])
        )
    THEN
        BEGIN
            {ends};
            UPDATE {table} AS target SET {assignments}
                FROM (SELECT * FROM ({rows}) AS staged ORDER BY {key}) AS staged
                WHERE {same} AND target.{leading} >= sparkonce.low
                    AND target.{leading} <= sparkonce.high;
            GET DIAGNOSTICS updated = ROW_COUNT;
            IF updated < {count} THEN
                INSERT INTO {table} ({columns})
                    SELECT {columns} FROM ({rows}) AS staged WHERE NOT {is_there} ORDER BY {key}
                    {on_conflict};
                GET DIAGNOSTICS inserted = ROW_COUNT;
            END IF;
            IF updated + inserted = {count} THEN
                RETURN;
            END IF;
            RAISE cardinality_violation;
        EXCEPTION WHEN cardinality_violation THEN
            NULL;
        END;
"""
)
