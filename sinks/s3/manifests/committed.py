"""Finds the objects of the committed batches of a place that `S3Sink` writes.

    list the manifests twice ─► read those that are needed ─► the objects that they name

Objects become visible one by one, and merging moves manifests; a reader that uses this module sees
a batch whole or not at all. Nothing here writes, and nothing asks the transaction log.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final, Protocol, TypeVar

import pyarrow as pa

from sparkonce.errors import ConfigurationError, SparkOnceError
from sparkonce.sinks.arrow_types import in_zone, loosened
from sparkonce.sinks.s3.manifests.manifest import (
    FOLDER,
    Layout,
    Manifest,
    Span,
    decode_file,
    newest,
)

_PARALLEL_READS: Final = 16
_TRIES: Final = 20

ResultT = TypeVar("ResultT")


class Files(Protocol):
    """The file system that holds the manifests."""

    def names(self, folder: str) -> list[str]:
        """All files below a folder, as paths below the place; none if the folder is absent."""

    def read(self, name: str) -> bytes:
        """The whole file.

        Raises:
            FileNotFoundError: it does not exist.
        """


@dataclass(frozen=True, slots=True)
class Committed:
    """What a reader may see: whole batches of one pipeline, or of all pipelines of the place.

    Attributes:
        schema: of all batches; a batch without a column has nulls there.
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

    # A manifest that is merged after the listing is gone when it is read. Then start again.
    def read(begin: int | None) -> list[Manifest]:
        return _until(
            lambda: _read_once(files, url, batch=batch, after=begin, source=source),
            f"{url}: its manifests kept changing while they were read; read it again",
        )

    manifests = read(after)
    layouts = _layouts(manifests)
    if not layouts and after is not None:  # no rows since then: use the earlier columns
        layouts = _layouts(read(-1))[-1:]
    if not layouts:
        raise ConfigurationError(
            f"{url}: no committed batch has rows yet, so their columns are unknown"
        )
    keys_by_layout: dict[Layout, list[str]] = {}
    for manifest in manifests:
        if manifest.layout is not None:
            for file in manifest.files:
                keys_by_layout.setdefault(file.layout or manifest.layout, []).append(file.key)
    schema = _common(layouts, url)
    return Committed(schema, layouts[0].format, layouts[0].partition_by, keys_by_layout)


def _layouts(manifests: Iterable[Manifest]) -> list[Layout]:
    """The layouts in the order of writing; a layout that was used again appears again."""
    return [layout for manifest in manifests for layout in manifest.layouts]


def find_newest(files: Files, url: str, *, source: str | None = None) -> int:
    """The newest committed batch; see `readers.newest_committed`."""
    ((_, spans),) = _spans(files, url, source, counts=True).items()
    return max(span.last for span in spans)


def _spans(files: Files, url: str, source: str | None, *, counts: bool) -> dict[str, list[Span]]:
    """The manifests in each folder; refuses several folders if the caller counts batches."""
    by_source: dict[str, list[Span]] = {}
    for folder, span in _listed(files, FOLDER if source is None else f"{FOLDER}{source}/"):
        by_source.setdefault(folder, []).append(span)
    if not by_source:
        raise ConfigurationError(
            f"{url}: there is no manifest"
            f"{f' of source={source!r}' if source else ''}: nothing is committed yet, or no "
            "S3Sink writes here"
        )
    if len(by_source) > 1 and counts:
        names = ", ".join(repr(f.removeprefix(FOLDER).strip("/")) for f in sorted(by_source))
        raise ConfigurationError(
            f"{url}: {names} write here, each with batches of its own: choose one with source="
        )
    return by_source


def _read_once(
    files: Files, url: str, *, batch: int | None, after: int | None, source: str | None
) -> list[Manifest] | None:
    counts = not (batch is None and after is None)
    by_source = _spans(files, url, source, counts=counts)
    first = 0 if after is None else after + 1
    begin = first if batch is None else min(first, batch)  # the batch itself must exist
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
            f"{url}: batch {batch} is not committed here; the newest committed one is {newest_one}"
        )
    return [m for m in manifests if m.batch_id >= first and (batch is None or m.batch_id <= batch)]


def _listed(files: Files, folder: str) -> list[tuple[str, Span]]:
    """The manifests that existed at one moment.

    A listing that runs while manifests are merged can miss both a deleted file and its replacement.
    So a listing counts only if the next one is the same, except for files added at the end.
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

    return _until(confirmed, "the manifests kept changing while they were listed; read again")


def _until(attempt: Callable[[], ResultT | None], otherwise: str) -> ResultT:
    for _ in range(_TRIES):
        if (result := attempt()) is not None:
            return result
    raise SparkOnceError(otherwise)


def _common(layouts: Sequence[Layout], url: str) -> pa.Schema:
    """One schema for all, with the newest session's zone, which changes no instant."""
    kinds = {(layout.format, layout.partition_by) for layout in layouts}
    if len(kinds) > 1:
        used = " and ".join(f"format={f!r}, partition_by={list(p)}" for f, p in sorted(kinds))
        raise ConfigurationError(
            f"{url}: its batches were written with {used}: read them separately, with after= and "
            "batch=, or source=. If one batch has both, because its lost branches were rewritten "
            "under other settings, use a plain reader for the files of each"
        )
    newest_first = dict.fromkeys(reversed(layouts))
    zone = next((zone for layout in newest_first if (zone := layout.zone())), None)
    schemas = [in_zone(layout.arrow_schema(), zone) for layout in dict.fromkeys(layouts)]
    try:
        schema = pa.unify_schemas(schemas)
    except pa.ArrowException as error:
        raise ConfigurationError(
            f"{url}: a column changed its type between the batches ({error}): read them "
            "separately, with after= and batch=, or source="
        ) from error
    # Rows without the column have null there, and folders return empty strings as null.
    always = set(schema.names).difference(layouts[0].partition_by)
    always.intersection_update(*(each.names for each in schemas))
    return loosened(pa.schema([f if f.name in always else f.with_nullable(True) for f in schema]))
