"""Which objects are the committed batches of a place that `S3Sink` writes.

    list the manifests twice ─► read those that are needed ─► the objects that they name

Objects are visible one by one, and manifests move when they are merged; a reader that follows this
page sees a batch whole or not at all. Nothing here writes, and nothing asks the transaction log.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final, Protocol, TypeVar

import pyarrow as pa

from sparkonce.errors import ConfigurationError, SparkOnceError
from sparkonce.sinks.arrow_types import in_zone, loosened
from sparkonce.sinks.s3.manifest import FOLDER, Layout, Manifest, Span, decode_file, newest

_PARALLEL_READS: Final = 16
_TRIES: Final = 20

ResultT = TypeVar("ResultT")


class Files(Protocol):
    """Where the manifests are read."""

    def names(self, folder: str) -> list[str]:
        """All files below a folder of the place, named from the place on; none if it is absent."""

    def read(self, name: str) -> bytes:
        """The whole file.

        Raises:
            FileNotFoundError: there is none.
        """


@dataclass(frozen=True, slots=True)
class Committed:
    """What a reader may see: whole batches of one pipeline, or of all that write the place.

    Attributes:
        schema: of all batches: one that lacks a column has nulls there.
        format: of the files.
        partition_by: columns that are in the folders' names.
        keys_by_layout: of the objects, below the place.
    """

    schema: pa.Schema
    format: str
    partition_by: tuple[str, ...]
    keys_by_layout: Mapping[Layout, Sequence[str]]

    @property
    def keys(self) -> tuple[str, ...]:
        return tuple(key for keys in self.keys_by_layout.values() for key in keys)


def find_committed(
    files: Files,
    url: str,
    *,
    batch: int | None = None,
    after: int | None = None,
    source: str | None = None,
) -> Committed:
    """The objects of the committed batches; see `readers.committed_dataset` for the arguments."""

    # A manifest that is merged between the listing and its reading is gone: begin again.
    def read(begin: int | None) -> list[Manifest]:
        return _until(
            lambda: _read_once(files, url, batch=batch, after=begin, source=source),
            f"{url}: its manifests went on changing while they were read; read it again",
        )

    manifests = read(after)
    layouts = _layouts(manifests)
    if not layouts and after is not None:  # no rows since then: the columns are those from before
        layouts = _layouts(read(-1))[-1:]
    if not layouts:
        raise ConfigurationError(
            f"{url}: no committed batch has rows yet, so that their columns are not known"
        )
    keys_by_layout: dict[Layout, list[str]] = {}
    for manifest in manifests:
        if manifest.layout is not None:
            for file in manifest.files:
                keys_by_layout.setdefault(file.layout or manifest.layout, []).append(file.key)
    schema = _common(layouts, url)
    return Committed(schema, layouts[0].format, layouts[0].partition_by, keys_by_layout)


def _layouts(manifests: Iterable[Manifest]) -> list[Layout]:
    """One after another, as they were written with: one that came back is there again."""
    return [layout for manifest in manifests for layout in manifest.layouts]


def find_newest(files: Files, url: str, *, source: str | None = None) -> int:
    """The newest committed batch; see `readers.newest_committed`."""
    ((_, spans),) = _spans(files, url, source, counts=True).items()
    return max(span.last for span in spans)


def _spans(files: Files, url: str, source: str | None, *, counts: bool) -> dict[str, list[Span]]:
    """The manifests in each folder; of one source, where batches are to be counted."""
    by_source: dict[str, list[Span]] = {}
    for folder, span in _listed(files, FOLDER if source is None else f"{FOLDER}{source}/"):
        by_source.setdefault(folder, []).append(span)
    if not by_source:
        raise ConfigurationError(
            f"{url}: there is no manifest"
            f"{f' of source={source!r}' if source else ''}: nothing is committed yet, or it is "
            "not what an S3Sink writes to"
        )
    if len(by_source) > 1 and counts:
        names = ", ".join(repr(f.removeprefix(FOLDER).strip("/")) for f in sorted(by_source))
        raise ConfigurationError(
            f"{url}: {names} write here, each with batches of its own: say which with source="
        )
    return by_source


def _read_once(
    files: Files, url: str, *, batch: int | None, after: int | None, source: str | None
) -> list[Manifest] | None:
    counts = not (batch is None and after is None)
    by_source = _spans(files, url, source, counts=counts)
    first = 0 if after is None else after + 1
    begin = first if batch is None else min(first, batch)  # that one has to be there
    wanted = [
        f"{folder}{span.name}"
        for folder, spans in by_source.items()
        for span in sorted(spans, key=lambda span: span.size)
        if span.last >= begin and (batch is None or span.first <= batch)
    ]
    try:
        with ThreadPoolExecutor(_PARALLEL_READS) as pool:
            bodies = list(pool.map(files.read, wanted))
    except FileNotFoundError:
        return None
    found: dict[str, list[Manifest]] = {}
    for name, body in zip(wanted, bodies, strict=True):
        found.setdefault(name.rpartition("/")[0], []).extend(decode_file(body, f"{url}/{name}"))
    manifests = [manifest for some in found.values() for manifest in newest(some)]
    if batch is not None and all(manifest.batch_id != batch for manifest in manifests):
        newest_one = max(span.last for spans in by_source.values() for span in spans)
        raise ConfigurationError(
            f"{url}: batch {batch} is not committed here; the newest that is: {newest_one}"
        )
    return [m for m in manifests if m.batch_id >= first and (batch is None or m.batch_id <= batch)]


def _listed(files: Files, folder: str) -> list[tuple[str, Span]]:
    """The manifests, as they stood at one moment.

    A listing that runs while manifests are merged can miss both what is deleted and what takes its
    place. So one counts only when the next has the same, but for what was written behind its end.
    """

    def once() -> set[tuple[str, Span]]:
        found = set()
        for name in files.names(folder):
            parent, _, last = name.rpartition("/")
            if (span := Span.from_name(last)) is not None:
                found.add((f"{parent}/", span))
        return found

    before = once()

    def confirmed() -> list[tuple[str, Span]] | None:
        nonlocal before
        now, seen = once(), before
        ends: dict[str, int] = {}
        for parent, span in seen:
            ends[parent] = max(span.last, ends.get(parent, -1))
        same = {(f, span) for f, span in now if span.first <= ends.get(f, -1)} == seen
        before = now
        return sorted(seen) if same else None

    return _until(confirmed, "the manifests went on changing while they were listed; read again")


def _until(attempt: Callable[[], ResultT | None], otherwise: str) -> ResultT:
    for _ in range(_TRIES):
        if (result := attempt()) is not None:
            return result
    raise SparkOnceError(otherwise)


def _common(layouts: Sequence[Layout], url: str) -> pa.Schema:
    """One schema for all, with the newest session's zone: instants are the same in any."""
    kinds = {(layout.format, layout.partition_by) for layout in layouts}
    if len(kinds) > 1:
        told = " and ".join(f"format={f!r}, partition_by={list(p)}" for f, p in sorted(kinds))
        raise ConfigurationError(
            f"{url}: its batches were written with {told}: read them apart, with after= and "
            "batch=, or source=. One batch that has both, since lost branches of it were written "
            "again under other settings, takes a plain reader for the files of each"
        )
    newest_first = dict.fromkeys(reversed(layouts))
    zone = next((zone for layout in newest_first if (zone := layout.zone())), None)
    schemas = [in_zone(layout.arrow_schema(), zone) for layout in dict.fromkeys(layouts)]
    try:
        schema = pa.unify_schemas(schemas)
    except pa.ArrowException as error:
        raise ConfigurationError(
            f"{url}: a column changed its type between the batches ({error}): read them apart, "
            "with after= and batch=, or source="
        ) from error
    # Rows without the column have null there, and folders give back empty strings as null.
    always = set(schema.names).difference(layouts[0].partition_by)
    always.intersection_update(*(each.names for each in schemas))
    return loosened(pa.schema([f if f.name in always else f.with_nullable(True) for f in schema]))
