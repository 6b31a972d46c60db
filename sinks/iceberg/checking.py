"""Can the table take these rows? Asked before any data moves."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import TYPE_CHECKING

import pyarrow as pa
from pyiceberg.exceptions import CommitFailedException, NoSuchTableError
from pyiceberg.io.pyarrow import (
    PyArrowFileIO,
    UnsupportedPyArrowTypeException,
    _check_pyarrow_schema_compatible,
)
from pyiceberg.types import DoubleType, FloatType

from sparkonce.errors import ConfigurationError
from sparkonce.finding import Finding, Level
from sparkonce.sinks.arrow_types import in_zone, required
from sparkonce.sinks.iceberg.appending import ahead_s
from sparkonce.sinks.iceberg.files import FORMAT_VERSION
from sparkonce.sinks.iceberg.table import IcebergTable
from sparkonce.sinks.lakehouse import missing
from sparkonce.sinks.lakehouse.columns import MOST_TRIES, lacking
from sparkonce.sinks.lakehouse.outages import is_outage

if TYPE_CHECKING:
    from pyiceberg.table import Table

    from sparkonce.sinks.iceberg.tables import Tables

_MOST_AHEAD_S = 60.0


def create(tables: Tables, schema: pa.Schema) -> Table:
    """Create the table, and its namespace, if nobody else did meanwhile."""
    namespace = tables.identifier.rpartition(".")[0]
    tables.catalog.create_namespace_if_not_exists(namespace)
    return tables.catalog.create_table_if_not_exists(tables.identifier, in_zone(schema, "UTC"))


def add_columns(tables: Tables, rows: pa.Schema, where: str) -> Table:
    """Add the columns that the table lacks; return it as it is then.

    Raises:
        ConfigurationError: Iceberg has no type for a column, or this machine's clock is behind.
    """
    table = tables.load()
    for _ in range(MOST_TRIES):
        if not (new := lacking(rows, (field.name for field in table.schema().fields))):
            break
        if (ahead := ahead_s(table)) > _MOST_AHEAD_S:
            raise ConfigurationError(
                f"{where} cannot get the columns {', '.join(new.names)} now: it was changed "
                f"{ahead:.0f} s in the future by this machine's clock, and Iceberg's readers in "
                "Java refuse a table whose times go back: correct the clock, or wait"
            )
        try:
            with suppress(CommitFailedException), table.update_schema() as update:
                update.union_by_name(new)
        except (ValueError, UnsupportedPyArrowTypeException) as error:
            raise ConfigurationError(
                f"{where} cannot get the columns {', '.join(new.names)} ({error}): cast or leave "
                "them out (select=)"
            ) from error
        table = tables.load()
    return table


def diagnose(tables: Tables, where: str, *, creates: bool) -> Iterator[Finding]:
    """Can the table be read, and files be written and listed there? For `sparkonce doctor`."""
    try:
        table = tables.load()
    except NoSuchTableError:
        yield missing.finding(where, creates=creates)
        return
    try:
        _check_kind(table, where)
    except ConfigurationError as error:
        yield Finding(Level.ERROR, str(error))
        return
    IcebergTable(table).try_out()
    yield Finding(Level.OK, f"{where} can be read, and its folders written to")


def check_table(table: Table, schema: pa.Schema, where: str) -> None:
    """Compare the table with the rows, and try out its folders.

    Raises:
        ConfigurationError: naming the column, or what else cannot work, and the fix.
    """
    _check_kind(table, where)
    columns = table.schema().column_names
    if unknown := [name for name in schema.names if name not in columns]:
        raise ConfigurationError(
            f"{where} does not take these columns: {', '.join(unknown)} is not in the table; leave "
            'it out (select=), or let new_columns="add" add it'
        )
    try:
        _check_pyarrow_schema_compatible(table.schema(), required(in_zone(schema, "UTC")))
    except ValueError as error:
        raise ConfigurationError(
            f"{where} does not take these columns; cast or leave them out (select=), or change the "
            f"table:\n{error}"
        ) from error
    try:
        IcebergTable(table).try_out()
    except (OSError, pa.ArrowException) as error:
        if is_outage(error):
            raise
        raise ConfigurationError(
            f"{where}: a file cannot be written, listed and deleted below {table.location()} "
            f"({error}): give the driver these rights, or catalog= its credentials (s3.…)"
        ) from error


def _check_kind(table: Table, where: str) -> None:
    if table.format_version != FORMAT_VERSION:
        raise ConfigurationError(
            f"{where} has format version {table.format_version}, and IcebergSink writes version "
            f"{FORMAT_VERSION}: set the table's property 'format-version' if it is lower"
        )
    if not isinstance(table.io, PyArrowFileIO):
        raise ConfigurationError(
            f"{where}: the catalog's py-io-impl is {type(table.io).__name__}: leave it out"
        )
    sources = [field.source_id for field in table.spec().fields]
    names = [table.schema().find_column_name(source) for source in sources]
    kinds = [table.schema().find_type(source) for source in sources]
    if floats := [n for n, k in zip(names, kinds, strict=True) if k in {FloatType(), DoubleType()}]:
        raise ConfigurationError(
            f"{where} is partitioned by {floats[0]}, which is no exact number (NaN, -0.0): "
            "partition it by another column"
        )
    if twice := {str(name) for name in names if names.count(name) > 1}:
        raise ConfigurationError(
            f"{where} has two partition fields of {min(twice)}, which pyiceberg cannot write: "
            "remove one"
        )
