"""The address of a table, and the storage behind it: a folder or S3."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from deltalake import DeltaTable
from deltalake.exceptions import TableNotFoundError
from pyarrow import fs

from sparkonce.errors import ConfigurationError
from sparkonce.sinks.lakehouse.storage import Storage

_S3 = {
    "access_key_id": "access_key",
    "secret_access_key": "secret_key",
    "session_token": "session_token",
    "region": "region",
    "default_region": "region",
    "endpoint": "endpoint_override",
    "endpoint_url": "endpoint_override",
}


class Place:
    """Where a table is.

    Args:
        uri: a path, or ``file://…``, ``s3://BUCKET/…`` or ``s3a://BUCKET/…``.
        options: deltalake's storage options. Those that are not given are read from the
            environment, as ``AWS_…``.

    Raises:
        ConfigurationError: the address is of another kind.
    """

    def __init__(self, uri: str, options: Mapping[str, str]) -> None:
        parts = urlsplit(uri)
        path = uri.partition("://")[2] if "://" in uri else uri
        if set(path) & set("#?%") or "//" in path or uri.startswith("~"):
            raise ConfigurationError(
                f"DeltaSink: uri={uri!r} holds one of # ? % // or ~, which Delta's clients read in "
                "different ways: give another address"
            )
        if parts.scheme == "file" and parts.netloc:
            raise ConfigurationError(f"DeltaSink: uri={uri!r} names a host: write file:///PATH")
        if parts.scheme not in {"", "file", "s3", "s3a"}:
            raise ConfigurationError(
                f"DeltaSink: uri={uri!r} is neither a folder nor s3://BUCKET/PATH: use one of these"
            )
        self.is_s3 = parts.scheme in {"s3", "s3a"}
        self.uri = (
            f"s3://{parts.netloc}{parts.path}" if self.is_s3 else str(Path(parts.path).absolute())
        )
        self.uri = self.uri.rstrip("/")
        self._options = dict(options)

    def load(self) -> DeltaTable | None:
        """The table's newest version, or None if there is no table."""
        try:
            return DeltaTable(self.uri, storage_options=self._options)
        except TableNotFoundError:
            return None

    def below(self, path: str) -> Place:
        """A place within this one."""
        return Place(f"{self.uri}/{path}", self._options)

    def create(self, schema: Any) -> None:
        """Create a table without partitions, if there is none."""
        DeltaTable.create(self.uri, schema, mode="ignore", storage_options=self._options)

    def storage(self) -> Storage:
        """The files below this place; locations are relative to it."""
        system = self._s3() if self.is_s3 else _Folders()
        root = self.uri.removeprefix("s3://")
        return Storage(lambda location: (system, f"{root}/{location}"))

    def _s3(self) -> fs.FileSystem:
        names = [name for name in os.environ if name.startswith("AWS_")]
        given = {name: os.environ[name] for name in names} | self._options
        plain = {name.lower().removeprefix("aws_"): value for name, value in given.items()}
        settings: dict[str, Any] = {_S3[name]: plain[name] for name in plain if name in _S3}
        # A small file is one request, and no upload that a killed task leaves incomplete.
        settings["allow_delayed_open"] = True
        return fs.S3FileSystem(**settings)


class _Folders(fs.LocalFileSystem):
    """A local file system that makes the folders of a new file, as object stores do."""

    def open_output_stream(self, path: str, *args: Any, **settings: Any) -> Any:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        return super().open_output_stream(path, *args, **settings)
