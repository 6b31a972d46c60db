"""The target table as a sink sees it at the start: `resolve` checks it and returns a `Target`.

find it ─► kind and rights ─► columns ─► key ─► marker table ─► dead letter table ─► Target
(or create it)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

from sparkonce.errors import ConfigurationError
from sparkonce.sinks.postgres.server.connections import PgConnection
from sparkonce.sinks.postgres.server.identity import system_identifier
from sparkonce.sinks.postgres.target.catalog import (
    find_table,
    similar_table,
    table_columns,
    unique_keys,
)
from sparkonce.sinks.postgres.target.checks import (
    check_key,
    check_marker,
    check_nulls,
    check_rights,
    check_spellings,
    check_table,
    resolve_dead_letter,
)
from sparkonce.sinks.postgres.target.columns import match
from sparkonce.sinks.postgres.target.creating import create_target, name_parts
from sparkonce.sinks.postgres.target.fitness import unfit
from sparkonce.sinks.postgres.target.shape import Shape
from sparkonce.sinks.postgres.target.types import ColumnPlan
from sparkonce.sinks.postgres.target.writing import Writing

if TYPE_CHECKING:
    import pyarrow as pa


@dataclass(frozen=True, slots=True)
class Request:
    """The table that the sink's settings ask for.

    Attributes:
        table: its name, as written in SQL.
        writing: what happens to a row whose key is in the table.
        creates: whether to create a missing table.
        dead_letter: a table for rejected rows, as written in SQL; created if it is missing.
        copies: whether tasks COPY into the table itself.
        is_dealt: whether several tasks write at the same time, each the rows of its keys.
    """

    table: str
    writing: Writing
    creates: bool = False
    dead_letter: str | None = None
    copies: bool = False
    is_dealt: bool = False

    def refuse(self, text: str) -> NoReturn:
        raise ConfigurationError(f"PostgresSink: table {self.table}: {text}")


@dataclass(frozen=True, slots=True)
class Target:
    """The table and the columns that a batch fills.

    Attributes:
        schema: without quotes, like all names here.
        table: its name.
        shown: both, quoted as in SQL.
        columns: the batch's columns, in its order, and so those of a staging table.
        shape: of the table's columns that the batch fills, read at the same time.
        database: of the connection.
        system: the server's identifier; empty if the role may not read it.
        why_open: why a merge waits in an open transaction; None if it waits in a prepared one.
        helpers: columns of the batch that the table does not have, for order_by= and delete=.
        updated: columns that an update sets.
        delete: SQL that says whether a row of the batch is a deletion.
        dead_letter: schema and name of the table for rows that the target refuses.
    """

    schema: str
    table: str
    shown: str
    columns: tuple[ColumnPlan, ...]
    shape: Shape
    database: str
    system: str
    why_open: str | None
    helpers: tuple[str, ...] = ()
    updated: tuple[str, ...] = ()
    delete: str | None = None
    dead_letter: tuple[str, str] | None = None

    @property
    def place(self) -> tuple[str, str]:
        """The server and the database."""
        return self.system, self.database

    @property
    def can_prepare(self) -> bool:
        return self.why_open is None

    @property
    def filled(self) -> tuple[str, ...]:
        """The columns of the batch that the table has."""
        return tuple(name for name in self.names if name not in self.helpers)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(column.name for column in self.columns)

    @property
    def is_binary(self) -> bool:
        return all(column.binary for column in self.columns)


def resolve(connection: PgConnection, request: Request, schema: pa.Schema) -> Target:
    """Check that rows of `schema` can go into the table, and plan how.

    Raises:
        ConfigurationError: names what is at fault, and the fix.
    """
    writing, refuse = request.writing, request.refuse
    found = find(connection, request)
    if found is None:
        parts = name_parts(connection, request.table, refuse)
        create_target(connection, parts, writing, schema, refuse)
        found = find(connection, request)
    columns = table_columns(connection, found.oid)
    is_lax = request.dead_letter is not None
    batch = match(connection, columns, writing, schema, refuse, is_lax=is_lax)
    check_rights(columns, schema.names, writing, batch.updated, refuse)
    if writing.key is not None:
        unique = unique_keys(connection, found.oid)
        check_key(writing.key, unique, found.shown, refuse)
        _check_equality(request, writing.key, columns, unique, schema)
    check_marker(connection, found.schema, refuse)
    dead_letter = resolve_dead_letter(connection, found, request.dead_letter, refuse)
    why_open: str | None = "max_prepared_transactions is 0"
    if found.can_prepare:
        why_open = unfit(connection, found.shown, writing.mode, prepares=True)
    return Target(
        schema=found.schema,
        table=found.name,
        shown=found.shown,
        columns=batch.plans,
        shape=_shape(columns, schema.names),
        database=found.database,
        system=system_identifier(connection),
        why_open=why_open,
        helpers=batch.helpers,
        updated=batch.updated,
        delete=batch.delete,
        dead_letter=dead_letter,
    )


def find(connection: PgConnection, request: Request) -> Any:
    """The table's row of the catalog, with its kind and rights checked.

    Returns:
        None where the table is missing and the start creates it.

    Raises:
        ConfigurationError: the table is missing, or cannot be used.
    """
    found = find_table(connection, request.table, request.refuse)
    if found is not None:
        check_table(connection, found, request.writing, request.refuse, copies=request.copies)
    elif not request.creates:
        similar = similar_table(connection, request.table)
        hint = f" (there is {similar}; write it like this)" if similar else ""
        request.refuse(
            f"it does not exist{hint}; correct table=, which is read as SQL, or create the table, "
            'as create="if_missing" does'
        )
    return found


def _check_equality(
    request: Request,
    key: Sequence[str],
    columns: Sequence[Any],
    unique: Sequence[Any],
    schema: pa.Schema,
) -> None:
    """Keys must be equal in the batch, and to Spark, exactly when they are equal in the table."""
    writing = request.writing
    if writing.mode != "upsert" or writing.order_by or request.dead_letter is not None:
        check_nulls(key, columns, unique, request.refuse)
    if request.is_dealt and writing.delete is not None:
        check_spellings(key, columns, schema, request.refuse)


def _shape(columns: Sequence[Any], names: Sequence[str]) -> Shape:
    return Shape(
        tuple(
            (column.name, column.declared_type, column.declared_modifier, column.declared)
            for column in columns
            if column.name in names
        )
    )
