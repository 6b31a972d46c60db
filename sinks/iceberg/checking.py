"""Can the table take these rows? Asked before any data moves."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from pyiceberg.exceptions import NoSuchTableError
from pyiceberg.io.pyarrow import PyArrowFileIO, _check_pyarrow_schema_compatible

from sparkonce.errors import ConfigurationError
from sparkonce.finding import Finding, Level
from sparkonce.sinks.arrow_types import in_zone, required
from sparkonce.sinks.iceberg.files import FORMAT_VERSION
from sparkonce.sinks.iceberg.marks import Marks

if TYPE_CHECKING:
    import pyarrow as pa
    from pyiceberg.table import Table

    from sparkonce.sinks.iceberg.tables import Tables


def create(tables: Tables, schema: pa.Schema) -> Table:
    """Create the table, and its namespace, if nobody else did meanwhile."""
    namespace = tables.identifier.rpartition(".")[0]
    tables.catalog.create_namespace_if_not_exists(namespace)
    return tables.catalog.create_table_if_not_exists(tables.identifier, in_zone(schema, "UTC"))


def diagnose(tables: Tables, where: str, *, creates: bool) -> Iterator[Finding]:
    """Can the table be read, and files be written and listed there? For `sparkonce doctor`."""
    try:
        table = tables.load()
    except NoSuchTableError:
        level = Level.OK if creates else Level.ERROR
        yield Finding(
            level,
            f"{where} does not exist",
            "the start creates it" if creates else 'create it, or set create="if_missing"',
        )
        return
    try:
        _check_kind(table, where)
    except ConfigurationError as error:
        yield Finding(Level.ERROR, str(error))
        return
    marks = Marks(table)
    marks.try_out()
    yield Finding(Level.OK, f"{where} can be read, and its folders written to")


def check_table(table: Table, schema: pa.Schema, where: str) -> None:
    """Compare the table with the rows.

    Raises:
        ConfigurationError: naming the column, or what else cannot work, and the fix.
    """
    _check_kind(table, where)
    try:
        _check_pyarrow_schema_compatible(table.schema(), required(in_zone(schema, "UTC")))
    except ValueError as error:
        raise ConfigurationError(
            f"{where} does not take these columns; cast or leave them out (select=), or change the "
            f"table:\n{error}"
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
