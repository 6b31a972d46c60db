"""Tables that the sink creates: markers and, on request, the target and a dead letter table.

| Spark                           | Postgres           |
|---------------------------------|--------------------|
| tinyint, smallint               | smallint           |
| int, bigint                     | integer, bigint    |
| float, double                   | real, double precision |
| decimal(p,s)                    | numeric(p,s)       |
| string, binary                  | text, bytea        |
| boolean, date                   | boolean, date      |
| timestamp, timestamp_ntz        | timestamptz, timestamp |
| time, interval day to second    | time, interval     |
| array of one of these           | array of it        |
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import psycopg
import pyarrow as pa
from psycopg import sql

from sparkonce.sinks.postgres.server.connections import PgConnection, roll_back
from sparkonce.sinks.postgres.server.sql import COMMIT, TO_WRITE, columns_of, script
from sparkonce.sinks.postgres.target.types import (
    PostgresType,
    UnmappableError,
    is_list,
    spark_name,
    value_type,
)

if TYPE_CHECKING:
    from sparkonce.sinks.postgres.target.writing import Writing

logger = logging.getLogger("sparkonce")

DEAD_LETTER_COLUMNS: Mapping[str, str] = {
    "branch": "text NOT NULL",
    "batch_id": "bigint NOT NULL",
    "rejected_at": "timestamptz NOT NULL DEFAULT now()",
    "reason": "text NOT NULL",
    "sqlstate": "text NOT NULL",
    "constraint_name": "text",
    "record": "jsonb NOT NULL",
}
"""`branch` is the same as in the marker row."""

_DEFAULTS: tuple[tuple[Callable[[Any], bool], str, str], ...] = (
    (pa.types.is_int8, "smallint", "int2"),
    (pa.types.is_int16, "smallint", "int2"),
    (pa.types.is_int32, "integer", "int4"),
    (pa.types.is_int64, "bigint", "int8"),
    (pa.types.is_float32, "real", "float4"),
    (pa.types.is_float64, "double precision", "float8"),
    (pa.types.is_string, "text", "text"),
    (pa.types.is_large_string, "text", "text"),
    (pa.types.is_binary, "bytea", "bytea"),
    (pa.types.is_large_binary, "bytea", "bytea"),
    (pa.types.is_boolean, "boolean", "bool"),
    (pa.types.is_date32, "date", "date"),
    (pa.types.is_time, "time", "time"),
    (pa.types.is_duration, "interval", "interval"),
)


def default_type(arrow: Any) -> PostgresType:
    """The Postgres type that holds every value of the Arrow type unchanged.

    Raises:
        UnmappableError: no type is the obvious choice.
    """
    if is_list(arrow) and not is_list(value_type(arrow)):
        element = default_type(value_type(arrow))
        return PostgresType(f"{element.ddl}[]", element.name, element.modifier, is_array=True)
    if pa.types.is_timestamp(arrow):
        name = "timestamp" if arrow.tz is None else "timestamptz"
        return PostgresType(name, name)
    if pa.types.is_decimal128(arrow):
        modifier = (arrow.precision << 16 | arrow.scale) + 4
        return PostgresType(f"numeric({arrow.precision},{arrow.scale})", "numeric", modifier)
    for is_one, ddl, name in _DEFAULTS:
        if is_one(arrow):
            return PostgresType(ddl, name)
    raise UnmappableError(
        f"Spark's {spark_name(arrow)} (Arrow {arrow}) has no Postgres type by default"
    )


def create_target(
    connection: PgConnection,
    table: Sequence[str],
    writing: Writing,
    schema: pa.Schema,
    refuse: Callable[[str], NoReturn],
) -> None:
    """Create the table for rows of `schema`, unless another session creates it first.

    The key becomes the primary key. A boolean column that `delete` names is left out: it would be
    false in every row.
    """
    types: dict[str, str] = {}
    for field in schema:
        if field.name == writing.delete:
            continue
        try:
            types[field.name] = default_type(field.type).ddl
        except UnmappableError as error:
            refuse(
                f"it does not exist, and create= cannot choose a type for column {field.name!r}: "
                f"{error}. Cast it with select=, such as to_json(), or create the table yourself"
            )
    for name in writing.key or ():
        if name not in types:
            refuse(f"key= names {name!r}, which the batch does not have")
    create_table(connection, table, types, writing.key)


def create_dead_letter(connection: PgConnection, table: Sequence[str]) -> None:
    """Create the table for rejected rows if it is missing."""
    shown = sql.Identifier(*table).as_string()
    found = connection.execute("SELECT to_regclass(%s)", (shown,)).fetchone()
    if found is not None and found[0] is not None:
        return
    create_table(connection, table, DEAD_LETTER_COLUMNS)


def create_table(
    connection: PgConnection,
    table: Sequence[str],
    columns: Mapping[str, str],
    key: Sequence[str] | None = None,
) -> None:
    """Create a table, unless another session creates it first.

    `columns` gives the SQL of each column's type and constraints.
    """
    parts = [sql.SQL("{} {}").format(sql.Identifier(n), sql.SQL(d)) for n, d in columns.items()]
    if key is not None:
        parts.append(sql.SQL("PRIMARY KEY ({})").format(columns_of(key)))
    name = sql.Identifier(*table)
    statement = sql.SQL("CREATE TABLE IF NOT EXISTS {} ({})").format(
        name, sql.SQL(", ").join(parts)
    )
    logger.info("PostgresSink: creating a missing table: %s", statement.as_string())
    # IF NOT EXISTS is not enough: if two sessions create the table at once, one gets an error.
    lock = sql.SQL("SELECT pg_advisory_xact_lock(hashtextextended({}, 0))").format(
        sql.Literal(f"sparkonce {name.as_string()}")
    )
    try:
        connection.execute(script(TO_WRITE, lock, statement, COMMIT))
    finally:
        roll_back(connection)


def name_parts(
    connection: PgConnection, table: str, refuse: Callable[[str], NoReturn]
) -> list[str]:
    """The parts of a name as written in SQL; refused if Postgres would truncate one."""
    rows = connection.execute(
        "SELECT part, part::name::text FROM unnest(parse_ident(%s)) WITH ORDINALITY AS p (part, n)"
        " ORDER BY n",
        (table,),
    ).fetchall()
    for part, cut in rows:
        if part != cut:
            refuse(
                f"{part!r} has over 63 bytes, and Postgres would truncate it to {cut!r}, which "
                "other names share: shorten it"
            )
    return [part for part, _ in rows]


def check_dead_letter(
    connection: psycopg.Connection[Any], table: Sequence[str], refuse: Callable[[str], NoReturn]
) -> None:
    """Check that the sink can write rejected rows into the table."""
    shown = sql.Identifier(*table).as_string()
    row = connection.execute(
        "SELECT c.relpersistence = 'p', has_table_privilege(c.oid, 'INSERT'), "
        "ARRAY(SELECT attname::text FROM pg_catalog.pg_attribute "
        "WHERE attrelid = c.oid AND attnum > 0 AND NOT attisdropped), "
        "ARRAY(SELECT attname::text FROM pg_catalog.pg_attribute WHERE attrelid = c.oid "
        "AND attnum > 0 AND NOT attisdropped AND attnotnull AND NOT atthasdef "
        "AND attidentity = '') "
        "FROM pg_catalog.pg_class c WHERE c.oid = to_regclass(%s) AND c.relkind IN ('r', 'p')",
        (shown,),
    ).fetchone()
    if row is None or set(DEAD_LETTER_COLUMNS) - set(row[2]):
        columns = ", ".join(DEAD_LETTER_COLUMNS)
        refuse(f"dead_letter={shown} is not a table with the columns {columns}; name another one")
    is_logged, may_insert, _, needed = row
    if missing := sorted(set(needed) - set(DEAD_LETTER_COLUMNS)):
        refuse(f"dead_letter={shown} needs a value for {missing}, which rejected rows do not have")
    if not is_logged:
        refuse(f"{shown} is UNLOGGED, so a crash would empty it; ALTER TABLE … SET LOGGED")
    if not may_insert:
        refuse(f"the role may not write {shown}; GRANT INSERT on it")
