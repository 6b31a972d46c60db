"""A log made of documents, for storage that is not a database.

    PLACE/log.json                            the log's id
         /orders/head                         pipeline "orders": head, unfinished and newest records
         /orders/archive/QUERY/0-31-….json    complete records moved out of the head

Each pipeline has one small document, the head, with everything that a write must check. A write
swaps the whole head, conditional on the version that was read, so `decide` and `complete` are one
request each. When the head has grown too large, the log first copies its complete records to an
archive document; the archive's name contains its range of batches and a digest. After a crash
between the two writes, both documents hold the same records.
"""

from __future__ import annotations

import hashlib
import logging
import re
import secrets
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from sparkonce.errors import LogCorruptError, LogError, LogUnavailableError
from sparkonce.model import TransactionId, is_label
from sparkonce.txn_log.base import ResultT, Store, no_log
from sparkonce.txn_log.forks import closed_at_forks
from sparkonce.txn_log.optimistic import OptimisticLog
from sparkonce.txn_log.place import Place, Version
from sparkonce.txn_log.record import Head, State, TransactionRecord
from sparkonce.txn_log.sealing import seal, unseal

logger = logging.getLogger("sparkonce")

_MOST_IN_HEAD = 32
_LARGE_HEAD_BYTES = 1 << 19
_ARCHIVE = re.compile(
    r".*/(?P<query_id>[^/]+)/(?P<first>[0-9]+)-(?P<last>[0-9]+)-[0-9a-f]{8}\.json", re.DOTALL
)


@dataclass(frozen=True, slots=True)
class _Pipeline:
    """The content of a pipeline's head document.

    Attributes:
        number: counts the writes, so that no two documents are ever equal.
        head: of the pipeline; None when the name is new.
        records: by id, all that are not in an archive; the newest of each query never is.
        floors: by query id, the batch below which complete records are forgotten.
    """

    number: int = 0
    head: Head | None = None
    records: dict[TransactionId, TransactionRecord] = field(default_factory=dict)
    floors: Mapping[str, int] = field(default_factory=dict)

    def encode(self) -> str:
        return seal(
            {
                "number": self.number,
                "head": None if self.head is None else self.head.to_json(),
                "records": [record.to_json() for record in self.records.values()],
                "floors": dict(self.floors),
            }
        )

    @classmethod
    def decode(cls, text: str, where: str) -> _Pipeline:
        body = unseal(text, where)
        records = [TransactionRecord.from_json(record) for record in body["records"]]
        head = None if body["head"] is None else Head.from_json(body["head"])
        return cls(body["number"], head, {record.id: record for record in records}, body["floors"])

    def archivable(self) -> list[TransactionRecord]:
        """Complete records, except the newest record of each query."""
        newest: dict[str, int] = {}
        for tid in self.records:
            newest[tid.query_id] = max(tid.batch_id, newest.get(tid.query_id, -1))
        return [
            record
            for tid, record in self.records.items()
            if record.state is State.COMPLETE and tid.batch_id < newest[tid.query_id]
        ]


class _CopyError(LogCorruptError):
    """A document is stored under the name of another pipeline."""


class _Seen(NamedTuple):
    version: Version | None
    pipeline: _Pipeline


class DocumentLog(OptimisticLog):
    """A transaction log made of documents.

    Args:
        place: where they are kept.
        create: make the log when the place has none.

    Raises:
        ConfigurationError: the log does not exist and `create` is False.
        LogUnavailableError: log.json is gone, but the log's pipelines are still there.
    """

    def __init__(self, place: Place, *, create: bool = True) -> None:
        self._place = place
        self._lock = threading.RLock()
        closed_at_forks(self)
        self._cache: dict[str, _Seen] = {}
        self._met: set[str] = set()  # pipelines whose head was found; the log never removes one
        self._log_id = self._read_or_make_id(create=create)

    @property
    def log_id(self) -> str:
        return self._log_id

    @property
    def address(self) -> str:
        return self._place.address

    def close(self) -> None:
        with self._lock:
            self._place.close()

    def _read_or_make_id(self, *, create: bool) -> str:
        text = self._place.read("log.json")
        if text is None and (pipelines := self._heads()):
            text = self._place.read("log.json")  # another driver may have just created it
            if text is None:
                raise LogUnavailableError(
                    f"{self.address}: log.json is gone, but these pipelines are still there: "
                    f"{', '.join(pipelines)}; nothing was written. Under a new id no driver would "
                    "sweep the branches that carry the old one. Restore the file from a copy of "
                    "any age: it holds only the log's id, which is also in the sparkonce.json of "
                    "each checkpoint that began in this log (docs/reference/errors/log.md, "
                    "LogUnavailableError)"
                )
        if text is None and not create:
            raise no_log(self.address)
        if text is None:
            self._place.create("log.json", seal({"log_id": secrets.token_hex(8)}))
            text = self._place.read("log.json") or ""
        return str(unseal(text, f"log.json in {self.address}")["log_id"])

    def _named(self) -> list[str]:
        """The folders whose names may be those of pipelines."""
        paths = (name.split("/") for name in self._place.names(""))
        return sorted({p[0] for p in paths if p[1:2] == ["head"] and is_label(p[0])})

    def _heads(self) -> list[str]:
        """The pipelines whose head exists."""
        return [name for name in self._named() if self._place.load(f"{name}/head", None)]

    def _view(self) -> _DocumentView:
        return _DocumentView(self, is_fresh=False)

    def _read(self, question: Callable[[Store], ResultT]) -> ResultT:
        with self._lock:
            return question(_DocumentView(self, is_fresh=True))

    def _write(self, step: Callable[[Store], ResultT]) -> ResultT:
        with self._lock:
            return super()._write(step)

    def _pipelines(self) -> list[str]:
        return [name for name in self._named() if not self._is_copy(name)]

    def _is_copy(self, name: str) -> bool:
        try:
            self._load(name, is_fresh=True)
        except _CopyError as error:
            logger.warning("%s; it is not listed", error)
            return True
        except LogCorruptError:  # the next read of the pipeline reports it
            return False
        return False

    # -- one pipeline's documents, for its view ----------------------------------------------------

    def _load(self, pipeline: str, *, is_fresh: bool) -> _Seen:
        cached = self._cache.get(pipeline)
        if cached is not None and not is_fresh:
            return cached
        found = self._place.load(f"{pipeline}/head", cached.version if cached else None)
        if found is None:
            if pipeline in self._met:
                raise LogUnavailableError(
                    f"{self.address}: the document {pipeline}/head was there and is gone; nothing "
                    "was written. Check that the place is mounted and complete. If the document is "
                    "lost, stop the query and restore it from a copy that has the newest batch "
                    "(docs/reference/errors/log.md, Restore a log); without it, the next "
                    "start would abort batches that are decided"
                )
            seen = _Seen(None, _Pipeline())
        elif found.text is None and cached is not None:
            seen = cached
        else:
            where = f"the head of pipeline {pipeline!r} in {self.address}"
            state = _Pipeline.decode(found.text or "", where)
            if state.head is not None and state.head.pipeline != pipeline:
                raise _CopyError(
                    f"{where} is that of {state.head.pipeline!r}: remove the folder if it is a "
                    "copy that somebody made; otherwise restore the transaction log from a copy"
                )
            seen = _Seen(found.version, state)
            self._met.add(pipeline)
        self._cache[pipeline] = seen
        return seen

    def _swap(self, pipeline: str, seen: _Seen, new: _Pipeline) -> bool:
        new, text = self._archived(pipeline, new)
        self._cache.pop(pipeline, None)  # what is stored is unknown until the answer arrives
        version = self._place.swap(f"{pipeline}/head", seen.version, text)
        if version is None:
            return False
        self._cache[pipeline] = _Seen(version, new)
        self._met.add(pipeline)
        if new.floors != seen.pipeline.floors:
            self._drop_archives(pipeline, new.floors)
        return True

    def _archived(self, pipeline: str, new: _Pipeline) -> tuple[_Pipeline, str]:
        """The head and its text; if it has grown too large, its old records are archived first."""
        text = new.encode()
        old = new.archivable()
        if not old or (len(new.records) <= _MOST_IN_HEAD and len(text) < _LARGE_HEAD_BYTES):
            return new, text
        by_query: dict[str, list[TransactionRecord]] = {}
        for record in sorted(old, key=_batch):
            by_query.setdefault(record.id.query_id, []).append(record)
        for query_id, records in by_query.items():
            body = seal({"records": [record.to_json() for record in records]})
            digest = hashlib.sha256(body.encode()).hexdigest()[:8]
            name = f"{records[0].id.batch_id:012d}-{records[-1].id.batch_id:012d}-{digest}"
            self._place.create(f"{pipeline}/archive/{query_id}/{name}.json", body)
        gone = {record.id for record in old}
        kept = {tid: record for tid, record in new.records.items() if tid not in gone}
        lean = replace(new, records=kept)
        return lean, lean.encode()

    def _drop_archives(self, pipeline: str, floors: Mapping[str, int]) -> None:
        """Delete archives below the floors. If that fails, a later call deletes them."""
        try:
            found = self._archives(pipeline)
            self._place.delete([a.name for a in found if a.last < floors.get(a.query_id, 0)])
        except LogError:
            logger.warning("old records could not be deleted; trying again later", exc_info=True)

    def _archives(self, pipeline: str, query_id: str | None = None) -> list[_Archive]:
        folder = f"{pipeline}/archive" + ("" if query_id is None else f"/{query_id}")
        found = filter(None, map(_Archive.of, self._place.names(folder)))
        return sorted(found, key=lambda archive: archive.last, reverse=True)

    def _read_archive(self, archive: _Archive, pipeline: str) -> Iterator[TransactionRecord]:
        text = self._place.read(archive.name)
        if text is None:
            return  # another driver has just forgotten it
        where = f"{archive.name} in {self.address}"
        for body in unseal(text, where)["records"]:
            record = TransactionRecord.from_json(body)
            if (record.id.pipeline, record.id.query_id) != (pipeline, archive.query_id):
                raise LogCorruptError(
                    f"{where} holds {record.id}; restore the transaction log from a copy"
                )
            yield record


class _Archive(NamedTuple):
    name: str
    query_id: str
    first: int
    last: int

    @classmethod
    def of(cls, name: str) -> _Archive | None:
        """None for a foreign name, such as that of an object that a tool made for a folder."""
        match = _ARCHIVE.fullmatch(name)
        if match is None:
            return None
        return cls(name, match["query_id"], int(match["first"]), int(match["last"]))


class _DocumentView:
    """The documents of one pipeline; see `sparkonce.txn_log.optimistic.View`."""

    def __init__(self, log: DocumentLog, *, is_fresh: bool) -> None:
        self._log = log
        self._is_fresh = is_fresh
        self._name = ""
        self._seen = _Seen(None, _Pipeline())
        self._new: _Pipeline | None = None

    def _load(self, pipeline: str) -> _Pipeline:
        if not self._name:
            self._name = pipeline
            self._seen = self._log._load(pipeline, is_fresh=self._is_fresh)  # noqa: SLF001
        return self._seen.pipeline

    def pipelines(self) -> Sequence[str]:
        return self._log._pipelines()  # noqa: SLF001

    def head(self, pipeline: str) -> Head | None:
        return self._load(pipeline).head

    def find(self, transaction_id: TransactionId) -> TransactionRecord | None:
        pipeline, query_id = transaction_id.pipeline, transaction_id.query_id
        batch_id = transaction_id.batch_id
        state = self._load(pipeline)
        newest = self.newest(pipeline, query_id)
        if transaction_id in state.records:
            return state.records[transaction_id]
        if newest is None or not state.floors.get(query_id, 0) <= batch_id < newest.id.batch_id:
            return None
        for archive in self._log._archives(pipeline, query_id):  # noqa: SLF001
            if archive.first <= batch_id <= archive.last:
                for record in self._log._read_archive(archive, pipeline):  # noqa: SLF001
                    if record.id == transaction_id:
                        return record
        return None

    def newest(self, pipeline: str, query_id: str) -> TransactionRecord | None:
        records = self._load(pipeline).records.values()
        return max((r for r in records if r.id.query_id == query_id), key=_batch, default=None)

    def unfinished(self, pipeline: str) -> Sequence[TransactionRecord]:
        records = self._load(pipeline).records.values()
        return sorted((record for record in records if record.state.is_unfinished), key=_batch)

    def history(
        self, pipeline: str, limit: int, query_id: str | None = None, before: int | None = None
    ) -> Sequence[TransactionRecord]:
        state = self._load(pipeline)
        found = {
            tid: record
            for tid, record in state.records.items()
            if query_id in {None, tid.query_id} and (before is None or tid.batch_id < before)
        }
        for archive in self._log._archives(pipeline, query_id):  # noqa: SLF001
            if before is not None and archive.first >= before:
                continue
            lowest = sorted(tid.batch_id for tid in found)[-limit:]
            if len(lowest) == limit and archive.last < lowest[0]:
                break
            for record in self._log._read_archive(archive, pipeline):  # noqa: SLF001
                floor = state.floors.get(record.id.query_id, 0)
                if record.id.batch_id >= floor and (before is None or record.id.batch_id < before):
                    found.setdefault(record.id, record)
        return sorted(found.values(), key=_batch, reverse=True)[:limit]

    def put_head(self, head: Head) -> None:
        self._change(head.pipeline, head=head)

    def put(self, record: TransactionRecord) -> None:
        self._change(record.id.pipeline).records[record.id] = record

    def forget(self, pipeline: str, query_id: str, below: int) -> None:
        state = self._change(pipeline)
        kept = {
            tid: record
            for tid, record in state.records.items()
            if tid.query_id != query_id
            or tid.batch_id >= below
            or record.state is not State.COMPLETE
        }
        floor = max(below, state.floors.get(query_id, 0))
        self._change(pipeline, records=kept, floors={**state.floors, query_id: floor})

    def _change(self, pipeline: str, **values: object) -> _Pipeline:
        seen = self._load(pipeline)
        state = self._new or replace(seen, number=seen.number + 1, records=dict(seen.records))
        self._new = replace(state, **values)  # type: ignore[arg-type]
        return self._new

    @property
    def is_changed(self) -> bool:
        return self._new is not None

    def is_current(self) -> bool:
        if not self._name:
            return True
        now = self._log._load(self._name, is_fresh=True)  # noqa: SLF001
        return now.version == self._seen.version

    def swap(self) -> bool:
        return self._new is None or self._log._swap(self._name, self._seen, self._new)  # noqa: SLF001


def _batch(record: TransactionRecord) -> int:
    return record.id.batch_id
