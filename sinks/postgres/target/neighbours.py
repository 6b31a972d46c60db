"""Whether the other tables of a pipeline leave a sink free to reject rows.

Every sink of a pipeline prepares before any commits. So neither sink sees what the other one has
written of the same batch, and a row may violate a foreign key although its parent is in the batch.
"""

from __future__ import annotations

from collections.abc import Iterable

from sparkonce.sinks.postgres.server.connections import PgConnection
from sparkonce.sinks.postgres.target.table import Request, Target

# A partition may have foreign keys of its own.
_FOREIGN_KEY = """
    WITH tables AS (
        SELECT t.shown = %(one)s AS is_one, part.oid
        FROM unnest(ARRAY[%(one)s, %(other)s]) AS t(shown),
            LATERAL (
                SELECT to_regclass(t.shown)::oid
                UNION SELECT relid FROM pg_partition_tree(to_regclass(t.shown))
            ) AS part(oid)
    )
    SELECT min(k.conname) FROM pg_catalog.pg_constraint k
    JOIN tables a ON a.oid = k.conrelid JOIN tables b ON b.oid = k.confrelid
    WHERE k.contype = 'f' AND a.is_one <> b.is_one
"""


def check_neighbours(
    connection: PgConnection,
    request: Request,
    target: Target | None,
    others: Iterable[Target | None],
) -> None:
    """Refuse `dead_letter=` if a foreign key joins the table with another sink's.

    Raises:
        ConfigurationError: it is.
    """
    for other in others:
        if target is None or other is None or other.place != target.place:
            continue
        tables = {"one": target.shown, "other": other.shown}
        row = connection.execute(_FOREIGN_KEY, tables).fetchone()
        if row is not None and row[0] is not None:
            request.refuse(
                f"dead_letter= would reject valid rows, because the foreign key {row[0]} joins it "
                f"with {other.shown}, another sink's table, and neither sink sees the other's rows "
                "before the decision: give each table its own pipeline, or drop the foreign key"
            )
