"""Checks whether the target still has the types that the rows of a batch were encoded for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sparkonce.sinks.postgres.server.connections import PgConnection


@dataclass(frozen=True, slots=True)
class Shape:
    """The types of the columns that a batch fills, read when the query began.

    Rows are encoded for these types. Another type may take the same bytes for another value (a
    bigint is as long as a double), and a cast may round. So the sink writes nothing into a table
    that has changed.
    """

    columns: tuple[tuple[str, str, int, str], ...]

    @classmethod
    def read(cls, connection: PgConnection, table: str, names: Sequence[str]) -> Shape:
        """Read the columns `names`, without quotes, of `table`, as SQL writes it."""
        rows = connection.execute(_COLUMNS, (table, list(names))).fetchall()
        return cls(tuple(rows))

    def difference(self, now: Shape) -> str | None:
        """The first change since then; None if there is none."""
        there = {name: rest for name, *rest in now.columns}
        for name, *rest in self.columns:
            if name not in there:
                return f"column {name!r} is gone"
            if there[name][:2] != rest[:2]:
                return f"column {name!r} was {rest[2]} and is {there[name][2]}"
        return None


def table_changed(change: str) -> str:
    """The message for a change of the target while the query runs, with the next step."""
    return f"the table has changed since the query began: {change}; start the query again"


_COLUMNS = """
    SELECT attname::text, atttypid::text, atttypmod, format_type(atttypid, atttypmod)
    FROM pg_catalog.pg_attribute
    WHERE attrelid = to_regclass(%s) AND attnum > 0 AND NOT attisdropped AND attname = ANY (%s)
    ORDER BY attname
"""
