"""The statements that move a batch from its staging tables into the target.

    staging tables ─► last row of each key ─► DELETE from the target ─► INSERT … ON CONFLICT

Not MERGE: it looks for a key and then inserts, so it fails if another session inserts the key in
between. ON CONFLICT waits for that session and then updates. The two statements touch different
keys; deletions go first, since they may free a value that another row's unique column takes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import cast

from psycopg import sql

from sparkonce.model import BranchId
from sparkonce.sinks.postgres.merging.dead_letter import REJECTED, with_dead_letter
from sparkonce.sinks.postgres.merging.merge import Merge
from sparkonce.sinks.postgres.server.sql import SORT_IN_MEMORY, columns_of, qualified, script
from sparkonce.sinks.postgres.target.resolving import DELETED, has_null, last_of_each_key


def count_rows(merge: Merge) -> sql.Composed:
    """The number of rows in all staging tables."""
    counts = (
        sql.SQL("(SELECT count(*) FROM {})").format(qualified(merge.schema, name))
        for name in merge.staging
    )
    return sql.SQL("SELECT {}").format(sql.SQL(" + ").join(counts))


def statements(merge: Merge, branch_id: BranchId) -> Iterator[sql.Composable]:
    """The statements that move the rows from the staging tables into the target."""
    if merge.key is not None:
        yield SORT_IN_MEMORY
    if merge.is_checked_for_duplicates:
        # A subquery with two rows raises the same error as ON CONFLICT DO UPDATE.
        yield sql.SQL("SELECT (SELECT generate_series(1, 2)) FROM ({}) AS found").format(
            duplicate_key(merge)
        )
    rows = _resolved(merge)
    if merge.dead_letter is None:
        if merge.delete is not None:  # rows that refer to a deleted row may change in this batch
            yield sql.SQL("SET CONSTRAINTS ALL DEFERRED")
        yield from _moves(merge, rows)
        return
    yield with_dead_letter(
        branch_id,
        merge.schema,
        merge.dead_letter,
        rows=rows,
        moves=lambda source: script(*_moves(merge, source)),
    )
    yield sql.SQL("SELECT current_setting({}, true) AS {}").format(
        sql.Literal(REJECTED), sql.Identifier(REJECTED)
    )


def duplicate_key(merge: Merge) -> sql.Composed:
    """One key with two last rows in the batch, as text."""
    key = cast("tuple[str, ...]", merge.key)
    shown = sql.SQL(", ").join(
        sql.SQL("left({}::text, 100)").format(sql.Identifier(column)) for column in key
    )
    return sql.SQL(
        "SELECT {} FROM ({}) AS staged WHERE NOT ({}) GROUP BY {} HAVING count(*) > 1 LIMIT 1"
    ).format(shown, _resolved(merge), has_null(key), columns_of(key))


def duplicate_shown(merge: Merge, row: Sequence[object]) -> str:
    """The error text for a row of `duplicate_key`."""
    key = list(merge.key or ())
    values = (repr(str(value))[1:-1] for value in row)  # on one line, since it goes into logs
    example = ", ".join(f"{name} = {value}" for name, value in zip(key, values, strict=True))
    if merge.order_by:
        return (
            f"two rows are the last of their key={key} by order_by={list(merge.order_by)}, for "
            f"example those of {example}; add a column that tells them apart"
        )
    return (
        f"key={key} comes more than once in the batch, for example {example}; "
        f"write={merge.mode!r} needs one row for each key: choose the last one with order_by=, or "
        "aggregate with transform="
    )


def _resolved(merge: Merge) -> sql.Composed:
    names = (*merge.columns, *merge.helpers)
    staged = sql.SQL(" UNION ALL ").join(
        sql.SQL("SELECT {} FROM {}").format(columns_of(names), qualified(merge.schema, name))
        for name in sorted(merge.staging)
    )
    return last_of_each_key(staged, names, merge.key, merge.order_by, merge.delete)


def _moves(merge: Merge, rows: sql.Composable) -> Iterator[sql.Composed]:
    """At most one DELETE and one INSERT, so that Postgres itself finds a key that occurs twice."""
    table, key = qualified(merge.schema, merge.table), merge.key or ()
    if merge.delete is not None:
        same = sql.SQL(" AND ").join(
            sql.SQL("target.{0} = staged.{0}").format(sql.Identifier(column)) for column in key
        )
        yield sql.SQL(
            "DELETE FROM {} AS target USING ({}) AS staged WHERE staged.{} AND {}"
        ).format(table, rows, DELETED, same)
    filled = columns_of(merge.columns)
    insert = sql.SQL("INSERT INTO {} ({}) SELECT {} FROM ({}) AS staged").format(
        table, filled, filled, rows
    )
    if merge.delete is not None:
        insert += sql.SQL(" WHERE NOT {}").format(DELETED)
    if not key:
        yield insert
        return
    assignments = sql.SQL(", ").join(
        sql.SQL("{0} = EXCLUDED.{0}").format(sql.Identifier(column)) for column in merge.update
    )
    action = sql.SQL("UPDATE SET ") + assignments if merge.update else sql.SQL("NOTHING")
    # Every pipeline locks rows in the order of their keys, so that pipelines do not deadlock.
    # (DELETE locks rows in any order; the merge retries after a deadlock.)
    yield sql.SQL("{} ORDER BY {} ON CONFLICT ({}) DO {}").format(
        insert, columns_of(key), columns_of(key), action
    )
