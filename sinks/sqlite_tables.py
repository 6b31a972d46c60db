"""The target and the staging table of `SqliteSink`: how they are created and checked.

    ORDERS                      the target, with its own types, constraints and triggers
    sparkonce_staging_ORDERS    columns of the same names and no types, and the branch of each row

Only the target's types convert a value, when its branch is committed.
"""

from __future__ import annotations

import re
import sqlite3
from typing import Final

import pyarrow as pa

from sparkonce.errors import ConfigurationError

BRANCH: Final = "sparkonce_branch"
_CONSTRAINT = re.compile(r"\b(UNIQUE|PRIMARY|CHECK|NOT|REFERENCES|STRICT|TRIGGER)\b", re.IGNORECASE)


def quoted(name: str) -> str:
    """Return the name as SQLite takes it in a statement."""
    return '"' + name.replace('"', '""') + '"'


def prepare_target(db: sqlite3.Connection, table: str, schema: pa.Schema, target: str) -> None:
    """Create the table if it does not exist; else check that it has the columns."""
    kinds = "SELECT type FROM sqlite_master WHERE name = ? COLLATE NOCASE"
    kind = db.execute(kinds, [table]).fetchone()
    if kind is None:
        columns = ", ".join(f"{quoted(f.name)} {_column_type(f.type)}" for f in schema)
        db.execute(f"CREATE TABLE {quoted(table)} ({columns})")
    elif kind != ("table",):
        raise ConfigurationError(f"{target} is no table, but a {kind[0]}: name a table")
    existing = columns_of(db, table)
    if missing := [name for name in schema.names if name.lower() not in existing]:
        raise ConfigurationError(f"{target} has no column {missing}: create it, or use select=")


def is_constrained(db: sqlite3.Connection, table: str) -> bool:
    """Whether a constraint or a trigger may refuse rows. A word in a name counts, too."""
    made = "SELECT sql FROM sqlite_master WHERE tbl_name = ? COLLATE NOCASE AND sql NOT NULL"
    return any(_CONSTRAINT.search(sql) for (sql,) in db.execute(made, [table]))


def columns_of(db: sqlite3.Connection, table: str) -> set[str]:
    """The table's columns, in lower case; none if there is no such table."""
    return {row[1].lower() for row in db.execute(f"PRAGMA table_info({quoted(table)})")}


def _column_type(kind: pa.DataType) -> str:
    if pa.types.is_integer(kind) or pa.types.is_boolean(kind):
        return "INTEGER"
    if pa.types.is_floating(kind):
        return "REAL"
    return "BLOB" if pa.types.is_binary(kind) else "TEXT"
