"""The catalog, the table as it is now, and the storage that holds its files."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pyiceberg.catalog import load_catalog
from pyiceberg.io.pyarrow import PyArrowFileIO

from sparkonce.datasets import Dataset, without_secrets
from sparkonce.errors import ConfigurationError
from sparkonce.sinks.lakehouse.storage import Storage

if TYPE_CHECKING:
    from pyarrow import fs
    from pyiceberg.catalog import Catalog
    from pyiceberg.table import Table

_IO = {"py-io-impl": "pyiceberg.io.pyarrow.PyArrowFileIO"}  # its file systems can list


class Tables:
    """Loads one table of a catalog, with one connection for each process.

    Args:
        catalog: pyiceberg's settings of the catalog, or its name in pyiceberg's configuration.
        identifier: ``NAMESPACE.TABLE``.
    """

    def __init__(self, catalog: str | Mapping[str, str], identifier: str) -> None:
        self.identifier = identifier
        self._settings = catalog
        self._lock = threading.Lock()
        self._catalog: Catalog | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_lock": None, "_catalog": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _lock=threading.Lock())

    @property
    def name(self) -> str:
        """The catalog's name, which its tables' names are unique in."""
        named = isinstance(self._settings, str)
        return str(self._settings if named else self._settings.get("name", "default"))  # type: ignore[union-attr]

    @property
    def catalog(self) -> Catalog:
        with self._lock:
            if self._catalog is None:
                more = {} if isinstance(self._settings, str) else dict(self._settings)
                self._catalog = _opened(more.pop("name", self.name), more)
            return self._catalog

    def load(self) -> Table:
        """Read the table's newest metadata from the catalog.

        Raises:
            NoSuchTableError: there is no such table.
        """
        return self.catalog.load_table(self.identifier)

    def dataset(self) -> Dataset:
        """The table's location, and its name in the catalog, over a connection of its own.

        Raises:
            Exception: the catalog does not respond, or has no such table.
        """
        with contextlib.closing(Tables(self._settings, self.identifier)) as own:
            location, properties = own.load().location(), own.catalog.properties
        place = properties.get("warehouse") or properties.get("uri") or self.name
        return Dataset.at(location, Dataset(without_secrets(place), self.identifier))

    def close(self) -> None:
        with self._lock:
            if self._catalog is not None:
                self._catalog.close()
                self._catalog = None


def _opened(name: str, settings: Mapping[str, str]) -> Catalog:
    try:
        return load_catalog(name, **_IO, **settings)
    except ValueError as error:
        # The error's text may show the uri or all settings, with passwords in them.
        raise ConfigurationError(
            f"IcebergSink: catalog {name!r} cannot be opened ({type(error).__name__}): set "
            "'type', such as 'rest', 'sql', 'hive' or 'glue', if its uri does not show one, and "
            "check its other settings"
        ) from None


class Folders:
    """Where a table's files are, and the storage that holds them."""

    def __init__(self, table: Table) -> None:
        io = table.io
        if not isinstance(io, PyArrowFileIO):
            raise TypeError(f"{type(io).__name__} cannot list files")
        root = table.location().rstrip("/")
        properties = table.properties
        self.marks = f"{root}/_sparkonce"
        self.data = properties.get("write.data.path", f"{root}/data").rstrip("/")
        self.metadata = properties.get("write.metadata.path", f"{root}/metadata").rstrip("/")

        def at(location: str) -> tuple[fs.FileSystem, str]:
            scheme, host, path = io.parse_location(location, io.properties)
            return io.fs_by_scheme(scheme, host), path

        self.storage = Storage(at)
