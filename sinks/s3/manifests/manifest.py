"""The objects of a committed batch: one manifest for each batch, merged as they age.

    s3://lake/orders/_sparkonce/orders/0a1b2c3d4e5f.s3/     one pipeline, query and sink
        000000000000-000000009999.json.gz                    batches 0 to 9,999
        000000010000-000000010099.json.gz                    batches 10,000 to 10,099
        000000010100.json                                    batch 10,100

A file holds one line of JSON for each batch. Its name gives the batches that it may hold, so that
readers open only the files they need. If two files hold one batch, the line with the highest
revision counts; of equal revisions, the line in the smaller file: the batch was written again after
the larger file was merged, as happens after log and targets are restored. Merging keeps fewer than
100 files of each size, so a hundred thousand batches need about two hundred files.

Spark, Hive and Arrow hide names that begin with `_`.
"""

from __future__ import annotations

import base64
import gzip
import io
import json
import re
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple, Self

import pyarrow as pa
import pyarrow.types as pat

from sparkonce.errors import ConfigurationError
from sparkonce.model import CommittedBatch, JsonValue
from sparkonce.sinks.s3.writing.columns import kinds

FOLDER = "_sparkonce/"
FANOUT = 100
"""The number of files that are merged into one."""

SPAN_SIZES = (FANOUT, FANOUT**2)
"""The numbers of batches in merged files."""

FORMAT_VERSION = 2
"""Version of lines whose objects differ in their layout; all other lines have version 1."""

_NAME = re.compile(r"(?P<first>[0-9]{12})(?:\.json|-(?P<last>[0-9]{12})\.json\.gz)")


class Span(NamedTuple):
    """The batches of one file, both ends included."""

    first: int
    last: int

    @property
    def size(self) -> int:
        return self.last - self.first + 1

    @property
    def name(self) -> str:
        """The file's name."""
        if self.first == self.last:
            return f"{self.first:012}.json"
        return f"{self.first:012}-{self.last:012}.json.gz"

    @classmethod
    def from_name(cls, name: str) -> Span | None:
        match = _NAME.fullmatch(name)
        return match and cls(int(match["first"]), int(match["last"] or match["first"]))


@dataclass(frozen=True, slots=True)
class Layout:
    """How the rows of a batch were written.

    Attributes:
        format: of the files.
        partition_by: columns that are in the folders' names.
        schema: of all columns, in Arrow's encoding.
    """

    format: str
    partition_by: tuple[str, ...]
    schema: str

    @classmethod
    def of(cls, file_format: str, partition_by: tuple[str, ...], schema: pa.Schema) -> Self:
        # Spark's own metadata of the columns would double the size, and nothing here reads it.
        packed = zlib.compress(schema.remove_metadata().serialize().to_pybytes())
        return cls(file_format, partition_by, base64.b64encode(packed).decode())

    @classmethod
    def from_json(cls, value: Any) -> Self:
        return cls(value["format"], tuple(value["partition_by"]), value["schema"])

    def to_json(self) -> dict[str, JsonValue]:
        return {**asdict(self), "partition_by": list(self.partition_by)}

    def is_like(self, other: Layout) -> bool:
        """Whether readers treat the files alike; Arrow may encode one schema in two ways."""
        return self == other or (
            (self.format, self.partition_by) == (other.format, other.partition_by)
            and self.arrow_schema().equals(other.arrow_schema())
        )

    def arrow_schema(self) -> pa.Schema:
        packed = base64.b64decode(self.schema)
        return pa.ipc.read_schema(pa.py_buffer(zlib.decompress(packed)))

    def zone(self) -> str | None:
        """The session zone that names the folders of instants; None if there are no instants."""
        all_kinds = (kind for column in self.arrow_schema() for kind in kinds(column.type))
        zones = (kind.tz for kind in all_kinds if pat.is_timestamp(kind))
        return next((zone for zone in zones if zone is not None), None)


@dataclass(frozen=True, slots=True)
class CommittedFile:
    """An object of a committed batch.

    Attributes:
        key: below the sink's url.
        rows: in it.
        bytes: its size.
        layout: how its rows were written, if it differs from the manifest's layout.
    """

    key: str
    rows: int
    bytes: int
    layout: Layout | None = None


@dataclass(frozen=True, slots=True)
class Manifest:
    """The objects that one batch wrote into one place.

    Attributes:
        pipeline: the pipeline's name.
        query_id: Spark's id of the query.
        sink: the sink's name.
        batch_id: the micro-batch.
        revision: the number of amendments of the decision.
        offsets: source offsets of the batch, one per source, as Spark's checkpoint shows them.
        layout: how the rows were written; None without rows. Lost branches may have been rewritten
            under other settings: their objects then have layouts of their own.
        files: the objects.
    """

    pipeline: str
    query_id: str
    sink: str
    batch_id: int
    revision: int
    offsets: tuple[str, ...] = ()
    layout: Layout | None = None
    files: tuple[CommittedFile, ...] = field(default=())

    @classmethod
    def of(cls, batch: CommittedBatch, sink: str, prefix: str) -> Self:
        """The manifest of a batch of this sink; `prefix` is where the sink writes."""
        payloads: list[Any] = [committable.payload for committable in batch.committables]
        layouts = [Layout.from_json(p["layout"]) if p.get("layout") else None for p in payloads]
        layout = next((layout for layout in layouts if layout is not None), None)
        others = [
            None if own is None or layout is None or own.is_like(layout) else own for own in layouts
        ]
        files = sorted(
            (
                CommittedFile(file["key"].removeprefix(prefix), file["rows"], file["bytes"], other)
                for payload, other in zip(payloads, others, strict=True)
                for file in payload["files"]
            ),
            key=lambda file: file.key,
        )
        return cls(
            pipeline=batch.pipeline,
            query_id=batch.owner.query_id,
            sink=sink,
            batch_id=batch.batch_id,
            revision=batch.revision,
            offsets=batch.offsets,
            layout=layout,
            files=tuple(files),
        )

    @property
    def layouts(self) -> list[Layout]:
        """The layout of the manifest first, then those of objects that differ."""
        found = [self.layout, *(file.layout for file in self.files)]
        return list(dict.fromkeys(layout for layout in found if layout is not None))

    def encode(self) -> bytes:
        """One line, without its end."""
        others = self.layouts[1:]
        value: dict[str, Any] = {
            "v": FORMAT_VERSION if others else 1,
            "pipeline": self.pipeline,
            "query": self.query_id,
            "sink": self.sink,
            "batch": self.batch_id,
            "revision": self.revision,
            "rows": sum(file.rows for file in self.files),
            "bytes": sum(file.bytes for file in self.files),
            "offsets": list(self.offsets),
            "layout": None if self.layout is None else self.layout.to_json(),
            **({"other_layouts": [layout.to_json() for layout in others]} if others else {}),
            "objects": [
                {
                    "key": file.key,
                    "rows": file.rows,
                    "bytes": file.bytes,
                    **({"layout": others.index(file.layout)} if file.layout else {}),
                }
                for file in self.files
            ],
        }
        return json.dumps(value, separators=(",", ":")).encode()

    @classmethod
    def decode(cls, line: bytes, where: str) -> Self:
        value = json.loads(line)
        if value["v"] not in range(1, FORMAT_VERSION + 1):
            raise ConfigurationError(
                f"{where} has format {value['v']}, but this version reads up to {FORMAT_VERSION}: "
                "use a newer sparkonce"
            )
        others = [Layout.from_json(layout) for layout in value.get("other_layouts", ())]
        return cls(
            pipeline=value["pipeline"],
            query_id=value["query"],
            sink=value["sink"],
            batch_id=value["batch"],
            revision=value["revision"],
            offsets=tuple(value["offsets"]),
            layout=Layout.from_json(value["layout"]) if value["layout"] else None,
            files=tuple(
                CommittedFile(**{**file, "layout": others[file["layout"]]})
                if "layout" in file
                else CommittedFile(**file)
                for file in value["objects"]
            ),
        )


def encode_file(manifests: Iterable[Manifest], span: Span) -> bytes:
    """The contents of the file of a span."""
    body = b"".join(manifest.encode() + b"\n" for manifest in manifests)
    return body if span.size == 1 else gzip.compress(body, compresslevel=6, mtime=0)


def decode_file(body: bytes, name: str) -> list[Manifest]:
    """The manifests in a file.

    Raises:
        ConfigurationError: a newer version wrote it, or it is no manifest.
    """
    return [manifest for _, manifest in manifests_in(body, name)]


def manifests_in(body: bytes, name: str) -> Iterator[tuple[bytes, Manifest]]:
    """Each line, with its end, and its manifest; see `decode_file`."""
    try:
        lines = io.BytesIO(body)
        for line in gzip.GzipFile(fileobj=lines) if name.endswith(".gz") else lines:
            yield line, Manifest.decode(line, name)
    except (ValueError, LookupError, TypeError, OSError, EOFError, zlib.error) as error:
        raise ConfigurationError(
            f"{name} is no manifest of sparkonce ({type(error).__name__}: {error}): restore it"
        ) from error


def newest(manifests: Iterable[Manifest]) -> list[Manifest]:
    """Each batch once and in order: its highest revision, and the first of equal ones."""
    by_batch: dict[int, Manifest] = {}
    for manifest in sorted(manifests, key=lambda manifest: -manifest.revision):
        by_batch.setdefault(manifest.batch_id, manifest)
    return [by_batch[batch_id] for batch_id in sorted(by_batch)]


def source_folder(pipeline: str, digest: str, sink: str) -> str:
    """The folder of the manifests of one pipeline, query and sink, below the sink's url."""
    return f"{FOLDER}{pipeline}/{digest}.{sink}/"
