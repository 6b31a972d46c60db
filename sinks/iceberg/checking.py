"""Can the table take these rows? Asked before any data moves."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyiceberg.io.pyarrow import PyArrowFileIO, _check_pyarrow_schema_compatible

from sparkonce.errors import ConfigurationError
from sparkonce.sinks.arrow_types import in_zone, required
from sparkonce.sinks.iceberg.files import FORMAT_VERSION

if TYPE_CHECKING:
    import pyarrow as pa
    from pyiceberg.table import Table

    from sparkonce.sinks.iceberg.tables import Tables


def create(tables: Tables, schema: pa.Schema) -> Table:
    """Create the table, and its namespace, if nobody else did meanwhile."""
    namespace = tables.identifier.rpartition(".")[0]
    tables.catalog.create_namespace_if_not_exists(namespace)
    return tables.catalog.create_table_if_not_exists(tables.identifier, in_zone(schema, "UTC"))


def check_table(table: Table, schema: pa.Schema, where: str) -> None:
    """Compare the table with the rows.

    Raises:
        ConfigurationError: naming the column, or what else cannot work, and the fix.
    """
    if table.format_version != FORMAT_VERSION:
        raise ConfigurationError(
            f"{where} has format version {table.format_version}, and IcebergSink writes version "
            f"{FORMAT_VERSION}: set the table's property 'format-version' if it is lower"
        )
    if not isinstance(table.io, PyArrowFileIO):
        raise ConfigurationError(
            f"{where}: the catalog's py-io-impl is {type(table.io).__name__}: leave it out"
        )
    try:
        _check_pyarrow_schema_compatible(table.schema(), required(in_zone(schema, "UTC")))
    except ValueError as error:
        raise ConfigurationError(
            f"{where} does not take these columns; cast or leave them out (select=), or change the "
            f"table:\n{error}"
        ) from error
