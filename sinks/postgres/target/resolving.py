"""SQL for the last row of each key in a batch, and whether that row deletes.

As in a unique index, a key with a NULL equals no other key: each such row is the last of its key.
"""

from __future__ import annotations

from collections.abc import Sequence

from psycopg import sql

from sparkonce.sinks.postgres.server.sql import columns_of

DELETED = sql.Identifier("sparkonce_deleted")
_PLACE = sql.Identifier("sparkonce_place")


def last_of_each_key(
    rows: sql.Composable,
    columns: Sequence[str],
    key: Sequence[str] | None,
    order_by: Sequence[str],
    delete: str | None,
) -> sql.Composed:
    """Select the last row of each key, with the column `DELETED` if there is a `delete`.

    A tie for the last place selects both rows; the caller refuses them.
    """
    where: sql.Composable = sql.SQL("")
    if key and order_by:
        latest = sql.SQL(", ").join(
            sql.SQL("{} DESC NULLS LAST").format(sql.Identifier(column)) for column in order_by
        )
        rows = sql.SQL(
            "SELECT *, rank() OVER (PARTITION BY {} ORDER BY {}) AS {} FROM ({}) AS staged"
        ).format(columns_of(key), latest, _PLACE, rows)
        where = sql.SQL(" WHERE {} = 1 OR {}").format(_PLACE, has_null(key))
    selected: sql.Composable = columns_of(columns)
    if delete is not None:
        # The line break ends a comment at the end of the user's SQL.
        selected = sql.SQL("{}, coalesce(({}\n), false) AS {}").format(
            selected,
            sql.SQL(delete),  # the user's own SQL, checked at the start
            DELETED,
        )
    return sql.SQL("SELECT {} FROM ({}) AS staged").format(selected, rows) + where


def has_null(columns: Sequence[str]) -> sql.Composed:
    return sql.SQL(" OR ").join(
        sql.SQL("{} IS NULL").format(sql.Identifier(column)) for column in columns
    )
