"""SQL about rows by the transaction that inserted them; nothing here talks to a server.

The marker row of a branch has the same `xmin` as the rows.
"""

from __future__ import annotations

from collections.abc import Sequence

from psycopg import sql

from sparkonce.model import BranchId
from sparkonce.sinks.postgres.server.sql import MARKER_TABLE, qualified


def find_markers(schema: str, branches: Sequence[BranchId]) -> sql.Composed:
    """Lock the marker rows: branch, the transaction that wrote it and its rows, their number."""
    return sql.SQL(
        "SELECT branch, xmin::text, rows FROM {} WHERE branch IN ({}) FOR UPDATE"
    ).format(
        qualified(schema, MARKER_TABLE),
        sql.SQL(", ").join(sql.Literal(str(branch_id)) for branch_id in branches),
    )


def mark_taken_back(schema: str, branches: Sequence[str]) -> sql.Composed:
    """Set the rows of these markers to 0. They stay, so that nobody can commit the branch again."""
    return sql.SQL("UPDATE {} SET rows = 0 WHERE branch IN ({})").format(
        qualified(schema, MARKER_TABLE), sql.SQL(", ").join(map(sql.Literal, branches))
    )


def count_inserted(schema: str, table: str, transactions: Sequence[str]) -> sql.Composed:
    """The number of rows that each transaction has inserted, and that nobody has changed since."""
    return sql.SQL("SELECT xmin::text, count(*) FROM {} WHERE {} GROUP BY 1").format(
        qualified(schema, table), _inserted_by(transactions)
    )


def delete_inserted(schema: str, table: str, transactions: Sequence[str]) -> sql.Composed:
    return sql.SQL("DELETE FROM {} WHERE {}").format(
        qualified(schema, table), _inserted_by(transactions)
    )


def _inserted_by(transactions: Sequence[str]) -> sql.Composed:
    return sql.SQL("xmin = ANY ({}::xid[])").format(sql.Literal("{" + ",".join(transactions) + "}"))


def find_cascades(schema: str, table: str) -> sql.Composed:
    """Foreign keys that would delete or change rows of other tables with those of this one."""
    return sql.SQL(
        "SELECT conname FROM pg_catalog.pg_constraint WHERE contype = 'f' "
        "AND confdeltype IN ('c', 'n', 'd') AND confrelid IN (SELECT {0}::regclass "
        "UNION SELECT relid FROM pg_catalog.pg_partition_tree({0}::regclass)) ORDER BY 1"
    ).format(sql.Literal(qualified(schema, table).as_string()))


def find_rewriting_triggers(schema: str, table: str) -> sql.Composed:
    """Table and name of triggers that may update other rows in place of an inserted one.

    Only one that runs before a row is inserted can leave that row out (in tgtype 1 is a row's, 2 is
    BEFORE, 4 is INSERT). TimescaleDB's own one only raises an error.
    """
    return sql.SQL(
        "SELECT tgrelid::regclass::text, quote_ident(tgname) FROM pg_catalog.pg_trigger "
        "WHERE NOT tgisinternal AND tgenabled <> 'D' AND tgtype & 7 = 7 "
        "AND tgname <> 'ts_insert_blocker' AND tgrelid IN (SELECT {0}::regclass "
        "UNION SELECT relid FROM pg_catalog.pg_partition_tree({0}::regclass)) ORDER BY 1, 2"
    ).format(sql.Literal(qualified(schema, table).as_string()))
