"""The catalog, the table as it is now, and the storage that holds its files."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pyarrow import fs
from pyiceberg.catalog import load_catalog
from pyiceberg.io.pyarrow import PyArrowFileIO

if TYPE_CHECKING:
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
                self._catalog = load_catalog(more.pop("name", self.name), **_IO, **more)
            return self._catalog

    def load(self) -> Table:
        """Read the table's newest metadata from the catalog.

        Raises:
            NoSuchTableError: there is no such table.
        """
        return self.catalog.load_table(self.identifier)

    def close(self) -> None:
        with self._lock:
            if self._catalog is not None:
                self._catalog.close()
                self._catalog = None


@dataclass(frozen=True)
class Stored:
    """A file in a folder."""

    name: str
    bytes: int


class Storage:
    """The files below a table's location."""

    def __init__(self, table: Table) -> None:
        if not isinstance(table.io, PyArrowFileIO):
            raise TypeError(f"{type(table.io).__name__} cannot list files")
        self.io = table.io
        root = table.location().rstrip("/")
        properties = table.properties
        self.data = properties.get("write.data.path", f"{root}/data").rstrip("/")
        self.metadata = properties.get("write.metadata.path", f"{root}/metadata").rstrip("/")

    def files(self, folder: str) -> Iterator[Stored]:
        """List the files of a folder; none if it does not exist."""
        system, path = self._at(folder)
        for info in system.get_file_info(fs.FileSelector(path, allow_not_found=True)):
            if info.type == fs.FileType.File:
                yield Stored(info.base_name, info.size)

    def exists(self, location: str) -> bool:
        system, path = self._at(location)
        return bool(system.get_file_info(path).type == fs.FileType.File)

    def read(self, location: str) -> bytes:
        """Read a file.

        Raises:
            FileNotFoundError: it does not exist.
        """
        with self.io.new_input(location).open() as file:
            return bytes(file.read())

    def write(self, location: str, content: bytes) -> None:
        """Write a file; one of that name is replaced."""
        with self.io.new_output(location).create(overwrite=True) as file:
            file.write(content)

    def remove(self, location: str) -> None:
        """Delete a file that may be gone already."""
        try:
            self.io.delete(location)
        except FileNotFoundError:
            return

    def _at(self, location: str) -> tuple[fs.FileSystem, str]:
        scheme, host, path = self.io.parse_location(location, self.io.properties)
        return self.io.fs_by_scheme(scheme, host), path
