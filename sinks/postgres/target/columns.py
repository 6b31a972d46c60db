"""Where each column of the batch goes: into the table, into staging only, into an update."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NoReturn

import psycopg
from psycopg import sql

from sparkonce.sinks.postgres.server.advice import is_transient
from sparkonce.sinks.postgres.server.connections import PgConnection
from sparkonce.sinks.postgres.target.creating import default_type
from sparkonce.sinks.postgres.target.resolving import last_of_each_key
from sparkonce.sinks.postgres.target.types import (
    ColumnPlan,
    PostgresType,
    UnmappableError,
    plan,
    spark_name,
)

if TYPE_CHECKING:
    import pyarrow as pa

    from sparkonce.sinks.postgres.target.writing import Writing

_WITH_A_LENGTH = frozenset({"varchar", "bpchar", "numeric"})
"""The merge checks these lengths too, and knows which row is at fault."""


@dataclass(frozen=True, slots=True)
class BatchColumns:
    """Attributes as in `sparkonce.sinks.postgres.target.table.Target`."""

    plans: tuple[ColumnPlan, ...]
    helpers: tuple[str, ...]
    updated: tuple[str, ...]
    delete: str | None


def match(
    connection: PgConnection,
    columns: Sequence[Any],
    writing: Writing,
    schema: pa.Schema,
    refuse: Callable[[str], NoReturn],
    *,
    is_lax: bool,
) -> BatchColumns:
    """Match the columns of the batch's `schema` with the table's; the server checks the user's SQL.

    With `is_lax`, the staging table takes values that are too long, and the merge checks them.
    """
    names = schema.names
    _check_names(names, writing, refuse, has_own=writing.key is not None or is_lax)
    known = {column.name: column for column in columns}

    def refuse_unknown(name: str) -> NoReturn:
        similar = next((other for other in known if other.lower() == name.lower()), None)
        hint = f" (it has {similar!r}: case counts)" if similar else ""
        refuse(f"it has no column {name!r}{hint}; leave it out or rename it with select=")

    for name in names:
        if name not in known and name not in writing.order_by and writing.delete is None:
            refuse_unknown(name)
    plans = tuple(_plans(known, schema, refuse, is_lax=is_lax))
    delete = _quoted_if_column(writing.delete, names)
    _check_sql(connection, plans, writing, delete, refuse)
    helpers = tuple(name for name in names if name not in known)
    for name in helpers:
        is_used = name in writing.order_by or _uses(connection, plans, delete, name)
        if not is_used or name in (*(writing.key or ()), *(writing.update or ())):
            refuse_unknown(name)
    changing = [name for name in names if name not in (*(writing.key or ()), *helpers)]
    updated = tuple(writing.update or changing) if writing.mode in {"upsert", "merge"} else ()
    return BatchColumns(plans, helpers, updated, delete)


def _check_names(
    names: Sequence[str], writing: Writing, refuse: Callable[[str], NoReturn], *, has_own: bool
) -> None:
    """With `has_own`, the merge adds its own columns to those of the batch."""
    if not names:
        refuse("the batch has no columns")
    for name in names:
        if names.count(name) > 1:
            refuse(f"the batch has two columns {name!r}; rename one of them with select=")
        if has_own and name.startswith("sparkonce_"):
            refuse(f"the column {name!r} has a name that the merge uses; rename it with select=")
    for setting in ("key", "update", "order_by"):
        for name in getattr(writing, setting) or ():
            if name not in names:
                refuse(f"{setting}= names {name!r}, which the batch does not have")


def _plans(
    known: Mapping[str, Any],
    schema: pa.Schema,
    refuse: Callable[[str], NoReturn],
    *,
    is_lax: bool,
) -> Iterator[ColumnPlan]:
    for field in schema:
        name = field.name
        column = known.get(name)
        if column is None:
            try:
                yield plan(name, field.type, default_type(field.type))
            except UnmappableError as error:
                refuse(f"it has no column {name!r}, and {error}; leave it out or cast it")
            continue
        if column.is_generated or column.identity == "a":
            refuse(f"column {name!r} is GENERATED ALWAYS; leave it out with select=")
        if column.is_composite:
            refuse(f"column {name!r} has a composite type, which is not supported")
        if column.is_of_arrays:
            refuse(f"column {name!r}: arrays of arrays, or of array domains, are not supported")
        try:
            yield plan(name, field.type, _type_of(column, is_lax=is_lax))
        except UnmappableError as error:
            refuse(
                f"column {name!r}: Spark's {spark_name(field.type)} (Arrow {field.type}) does not "
                f"go into Postgres' {column.declared} without loss: {error}"
            )


def _type_of(column: Any, *, is_lax: bool) -> PostgresType:
    found = PostgresType(
        column.ddl,
        column.type_name,
        column.modifier,
        bool(column.is_array),
        bool(column.is_enum),
        has_domains=bool(column.is_of_domains),
    )
    if is_lax and found.name in _WITH_A_LENGTH:
        ddl = f"{found.name}[]" if found.is_array else found.name
        found = replace(found, ddl=ddl, is_staged_longer=True)
    return replace(found, ddl=found.ddl + column.collation)


def _quoted_if_column(delete: str | None, names: Sequence[str]) -> str | None:
    return sql.Identifier(delete).as_string() if delete in names and delete else delete


def _check_sql(
    connection: PgConnection,
    plans: Sequence[ColumnPlan],
    writing: Writing,
    delete: str | None,
    refuse: Callable[[str], NoReturn],
) -> None:
    def check(query: sql.Composed, refusal: str) -> None:
        try:
            connection.execute(query)
        except psycopg.Error as error:
            if is_transient(error):
                raise
            refuse(f"{refusal}: {error.diag.message_primary}")

    if writing.order_by:
        query = _of_nothing(plans, writing.key, writing.order_by, None)
        check(query, f"order_by={list(writing.order_by)}")
    if delete is not None:
        query = _of_nothing(plans, None, (), delete)
        check(query, f"delete={writing.delete!r} is no condition over the batch's columns")


def _uses(
    connection: PgConnection, plans: Sequence[ColumnPlan], delete: str | None, name: str
) -> bool:
    """Whether the condition uses this column."""
    if delete is None:
        return False
    others = [column for column in plans if column.name != name]
    try:
        connection.execute(_of_nothing(others, None, (), delete))
    except psycopg.errors.UndefinedColumn:
        return True
    return False


def _of_nothing(
    plans: Sequence[ColumnPlan],
    key: Sequence[str] | None,
    order_by: Sequence[str],
    delete: str | None,
) -> sql.Composed:
    """The merge's query over no rows, for the server to check."""
    empty = sql.SQL("SELECT {}").format(
        sql.SQL(", ").join(
            sql.SQL("NULL::{} AS {}").format(sql.SQL(column.type.ddl), sql.Identifier(column.name))
            for column in plans
        )
    )
    names = [column.name for column in plans]
    return last_of_each_key(empty, names, key, order_by, delete) + sql.SQL(" LIMIT 0")
