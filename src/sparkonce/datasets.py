"""The names that OpenLineage gives to tables, topics and folders.

s3a://lake/orders/ ─► s3://lake, orders          /data/orders        ─► file, /data/orders
hdfs://nn:8020/o   ─► hdfs://nn:8020, /o         file:///data/orders ─► file, /data/orders

Lineage only connects two jobs if both give a dataset the same names:
https://openlineage.io/docs/spec/naming.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final, Self
from urllib.parse import unquote, urlsplit

_CREDENTIALS: Final = re.compile(r"(?<=//)[^/\s]*@")
_SECRET: Final = re.compile(
    r"\b(\w*(?:password|passwd|secret|token|credential|(?:access|api)_?key)\w*\s*[=:]\s*)"
    r"('[^']*'|\"[^\"]*\"|[^\s,;&'\"]+)",
    re.IGNORECASE,
)
_OBJECT_STORES: Final = {"s3": "s3", "s3a": "s3", "s3n": "s3", "gs": "gs"}


@dataclass(frozen=True, slots=True)
class Dataset:
    """A table, a topic or a folder.

    Attributes:
        namespace: the server or bucket that has it, such as ``postgres://db:5432``.
        name: its name there, such as ``shop.public.orders``.
        symlinks: its other names, such as the one in a catalog.
    """

    namespace: str
    name: str
    symlinks: tuple[Dataset, ...] = ()

    @classmethod
    def at(cls, location: str, *symlinks: Dataset) -> Self:
        """The folder or file at a path or a URL; credentials in the URL are left out."""
        parts = urlsplit(location)
        if parts.scheme in _OBJECT_STORES:
            bucket = parts.netloc.rpartition("@")[2]
            name = parts.path.strip("/") or "/"
            return cls(f"{_OBJECT_STORES[parts.scheme]}://{bucket}", name, symlinks)
        if "://" in location and parts.scheme != "file":
            host = parts.netloc.rpartition("@")[2]
            return cls(f"{parts.scheme}://{host}", parts.path.rstrip("/") or "/", symlinks)
        if location.startswith("file:"):
            namespace = f"file://{parts.netloc}" if parts.netloc else "file"
            return cls(namespace, unquote(parts.path).rstrip("/") or "/", symlinks)
        return cls("file", location.rstrip("/") or "/", symlinks)

    @classmethod
    def of_topic(cls, bootstrap_servers: str, topic: str) -> Self:
        """A topic of Kafka; the first of the servers stands for the cluster."""
        server = bootstrap_servers.split(",", maxsplit=1)[0].strip().rpartition("//")[2]
        has_port = re.search(r":\d+$", server) is not None
        return cls(f"kafka://{server}" if has_port else f"kafka://{server}:9092", topic)


def without_secrets(text: str) -> str:
    """The text without the credentials of URLs, and without values that follow `password=`."""
    return _SECRET.sub(r"\1***", _CREDENTIALS.sub("", text))
