"""The target and the staging table of `SqliteSink`: how they are created and checked.

    ORDERS                      the target, with its own types, constraints and triggers
    sparkonce_staging_ORDERS    columns of the same names and no types, and the branch of each row

Only the target's types convert a value, when its branch is committed.
"""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Mapping, Sequence
from typing import Final

import pyarrow as pa

from sparkonce.errors import ConfigurationError

BRANCH: Final = "sparkonce_branch"
_EXACT_DIGITS: Final = 15
_AFFINITIES: Final = (  # by words in a declared type; the first match counts
    ("INT", "INTEGER"),
    ("CHAR|CLOB|TEXT", "TEXT"),
    ("BLOB|^$", "BLOB"),
    ("REAL|FLOA|DOUB", "REAL"),
)
_MAY_REFUSE = re.compile(
    r"\b(UNIQUE|PRIMARY|CHECK|NOT|REFERENCES|STRICT|TRIGGER)\b"
    r"|\bAS\b|\bWHERE\b|->|\bINDEX\b[^(]*\([^)]*\(",  # expressions, which can fail
    re.IGNORECASE,
)
_REPLACES = re.compile(r"\bON\s+CONFLICT\s+REPLACE\b", re.IGNORECASE)


def quoted(name: str) -> str:
    """Return the name as SQLite takes it in a statement."""
    return '"' + name.replace('"', '""') + '"'


def prepare_target(db: sqlite3.Connection, table: str, schema: pa.Schema, target: str) -> None:
    """Create the table if it does not exist; else check that it has the columns."""
    named = "SELECT type, sql FROM sqlite_master WHERE name = ? COLLATE NOCASE"
    kind, made = db.execute(named, [table]).fetchone() or (None, "")
    if kind is None:
        columns = ", ".join(f"{quoted(f.name)} {_column_type(f.type)}" for f in schema)
        db.execute(f"CREATE TABLE {quoted(table)} ({columns})")
    elif kind != "table":
        raise ConfigurationError(f"{target} is no table, but a {kind}: name a table")
    elif _REPLACES.search(made):
        raise ConfigurationError(
            f"{target} has ON CONFLICT REPLACE: without an error, a row would remove rows of "
            "earlier batches, or a default would replace a null; make the table without it"
        )
    existing = columns_of(db, table)
    if missing := [name for name in schema.names if folded(name) not in existing]:
        raise ConfigurationError(f"{target} has no column {missing}: create it, or use select=")
    types = {folded(name): kind for name, kind in _types_of(db, table).items()}
    for field in schema:
        declared = types[folded(field.name)]
        if (why := _changes(field.type, declared)) is not None:
            raise ConfigurationError(
                f"{target}: column {field.name!r} has the type {declared}, with which SQLite "
                f"{why}: declare it as {_column_type(field.type)}"
            )


def prepare_staging(db: sqlite3.Connection, staging: str, columns: Sequence[str]) -> None:
    """Create the staging table if it does not exist; add the columns that it does not have."""
    types = _types_of(db, staging)
    if not types:
        db.execute(f"CREATE TABLE {quoted(staging)} ({BRANCH})")
    elif any(types.values()):  # made by an older version, with the target's types of that day
        _remove_types(db, staging, types)
    existing = columns_of(db, staging)
    for column in columns:
        if folded(column) not in existing:
            db.execute(f"ALTER TABLE {quoted(staging)} ADD COLUMN {quoted(column)}")


def _remove_types(db: sqlite3.Connection, staging: str, types: Mapping[str, str]) -> None:
    """Make the staging table again, without types; its rows keep their values."""
    db.execute(f"CREATE TEMP TABLE sparkonce_staged AS SELECT * FROM {quoted(staging)}")
    db.execute(f"DROP TABLE {quoted(staging)}")
    db.execute(f"CREATE TABLE {quoted(staging)} ({', '.join(map(quoted, types))})")
    db.execute(f"INSERT INTO {quoted(staging)} SELECT * FROM sparkonce_staged")


def is_constrained(db: sqlite3.Connection, table: str) -> bool:
    """Whether a constraint, a trigger or an expression may refuse rows. A word in a name counts."""
    made = "SELECT sql FROM sqlite_master WHERE tbl_name = ? COLLATE NOCASE AND sql NOT NULL"
    return any(_MAY_REFUSE.search(sql) for (sql,) in db.execute(made, [table]))


def move(
    db: sqlite3.Connection, tables: tuple[str, str], names: Sequence[str], branch: str, rows: int
) -> int:
    """Copy a branch's rows from the first table into the second; return how many are staged.

    Raises:
        sqlite3.IntegrityError: all `rows` are staged, and the table refuses at least one of them,
            or leaves it out without an error.
    """
    (staging, table), columns = map(quoted, tables), ", ".join(map(quoted, names))
    found = f"FROM {staging} WHERE {BRANCH} = ?"
    insert = f"INSERT INTO {table} ({columns}) SELECT {columns} {found}"
    try:
        moved = db.execute(insert, [branch]).rowcount
    except sqlite3.OperationalError as error:
        if error.sqlite_errorcode != sqlite3.SQLITE_ERROR:  # such as a lock, or a full disk
            raise
        db.execute(f"EXPLAIN {insert}", [branch])  # raises where it is not about the rows
        raise sqlite3.IntegrityError(str(error)) from error
    if moved == rows:
        return moved
    left = int(db.execute(f"SELECT count(*) {found}", [branch]).fetchone()[0])
    if left == rows:
        raise sqlite3.IntegrityError(
            f"it takes {moved} of {left} rows: ON CONFLICT IGNORE or a trigger's RAISE(IGNORE) "
            "leaves the others out"
        )
    return left


def columns_of(db: sqlite3.Connection, table: str) -> set[str]:
    """The table's columns, `folded`; none if there is no such table."""
    return {folded(name) for name in _types_of(db, table)}


def folded(name: str) -> str:
    """The name as SQLite compares it: ID is id, but Ä is not ä."""
    return name.encode().lower().decode()


def _types_of(db: sqlite3.Connection, table: str) -> dict[str, str]:
    """The declared type of each column; empty where it has none."""
    return {row[1]: row[2] for row in db.execute(f"PRAGMA table_info({quoted(table)})")}


def _changes(kind: pa.DataType, declared: str) -> str | None:
    """What a column of the declared type would do to some values; None if it keeps all.

    By the rules of SQLite's type affinity (https://www.sqlite.org/datatype3.html).
    """
    affinities = (name for words, name in _AFFINITIES if re.search(words, declared, re.IGNORECASE))
    affinity = next(affinities, "NUMERIC")
    if affinity == "TEXT" and pa.types.is_floating(kind):
        return f"keeps {_EXACT_DIGITS} digits of a number"
    if affinity in {"TEXT", "BLOB"}:
        return None
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        return "turns text that looks like a number into one"
    if pa.types.is_decimal(kind) and kind.precision > _EXACT_DIGITS:
        return f"keeps {_EXACT_DIGITS} digits of a number"
    if affinity == "REAL" and (pa.types.is_int64(kind) or pa.types.is_uint64(kind)):
        return "rounds large numbers"
    return None


def _column_type(kind: pa.DataType) -> str:
    if pa.types.is_integer(kind) or pa.types.is_boolean(kind):
        return "INTEGER"
    if pa.types.is_floating(kind):
        return "REAL"
    return "BLOB" if pa.types.is_binary(kind) else "TEXT"
