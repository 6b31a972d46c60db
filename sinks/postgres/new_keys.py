"""A plain INSERT for a batch whose keys all lie in a gap of those in the table.

    table      … 7  8  9 |                         | 30  31 …
    batch                |  12  14  15  20  27     |             INSERT, about twice as fast
    batch          8     |  12  14                 |             INSERT … ON CONFLICT

Keys that grow (numbers of a sequence, times, UUIDs of version 7) come like this in nearly every
batch. The look is a few steps in the key's index and is only a guess: another session may take a
key meanwhile. Then the INSERT fails, and ON CONFLICT decides as ever. So the index has to be there:
to explain ON CONFLICT, Postgres looks for it, and from then on its lock keeps it.
"""

from __future__ import annotations

from typing import Final

from psycopg import sql

WORTH_A_LOOK: Final = 10_000
"""Rows from which on the look costs next to nothing."""


def insert_into_gap(
    table: sql.Composable,
    leading: str,
    keys: sql.Composable,
    insert: sql.Composable,
    on_conflict: sql.Composable,
) -> sql.Composed:
    """One statement that does what `insert` with `on_conflict` does.

    Args:
        table: the target.
        leading: the first column of the key's index, of a type with Postgres' own order.
        keys: a query that gives the batch's values of that column, under its name.
        insert: INSERT INTO … SELECT …, which raises unique_violation for any key that is there.
        on_conflict: to be put behind it.
    """
    column = sql.Identifier(leading)
    explained = sql.SQL("EXPLAIN {} {}").format(insert, on_conflict)
    block = _BLOCK.format(
        type=table + sql.SQL(".") + column + sql.SQL("%TYPE"),
        column=column,
        keys=keys,
        # By its order, so that Postgres reads its index and never the table.
        look=sql.SQL(
            "SELECT target.{column} INTO above FROM {table} AS target "
            "WHERE target.{column} >= sparkonce.low ORDER BY target.{column} LIMIT 1"
        ).format(column=column, table=table),
        explained=sql.Literal(explained.as_string()),
        insert=insert,
        on_conflict=on_conflict,
    )
    return sql.SQL("DO {}").format(sql.Literal(block.as_string()))


# The first look, for any one of the keys, spares the sorting where it is there.
_BLOCK = sql.SQL(
    """
#variable_conflict use_column
<<sparkonce>>
DECLARE
    low {type};
    high {type};
    above {type};
BEGIN
    SELECT staged.{column} INTO low FROM ({keys}) AS staged
        WHERE staged.{column} IS NOT NULL LIMIT 1;
    {look};
    IF above IS NULL OR above > low THEN
        SELECT staged.{column} INTO low FROM ({keys}) AS staged
            WHERE staged.{column} IS NOT NULL ORDER BY staged.{column} LIMIT 1;
        SELECT staged.{column} INTO high FROM ({keys}) AS staged
            WHERE staged.{column} IS NOT NULL ORDER BY staged.{column} DESC LIMIT 1;
        {look};
        IF above IS NULL OR above > high THEN
            EXECUTE {explained};
            BEGIN
                {insert};
                RETURN;
            EXCEPTION WHEN unique_violation THEN
                NULL;
            END;
        END IF;
    END IF;
    {insert} {on_conflict};
END
"""
)
