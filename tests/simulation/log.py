"""The real rules of `TransactionLog` on a store in memory: atomic and ordered by definition."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from sparkonce.model import TransactionId
from sparkonce.txn_log.base import ResultT, Store, TransactionLog
from sparkonce.txn_log.record import Head, State, TransactionRecord
from tests.simulation.world import World

if TYPE_CHECKING:
    from tests.simulation.ledger import Ledger


class Disk:
    """The stored state of one log, which all its drivers share."""

    def __init__(self, world: World, log_id: str = "0" * 16) -> None:
        self.world = world
        self.log_id = log_id
        self.heads: dict[str, Head] = {}
        self.records: dict[TransactionId, TransactionRecord] = {}

    def of(self, pipeline: str) -> list[TransactionRecord]:
        """The records of a pipeline, lowest batch first."""
        found = [record for record in self.records.values() if record.id.pipeline == pipeline]
        return sorted(found, key=_batch)

    def unfinished(self, pipeline: str) -> list[TransactionRecord]:
        return [record for record in self.of(pipeline) if record.state.is_unfinished]


class View:
    """One atomic step: it reads the disk and keeps what it writes until `apply`."""

    def __init__(self, disk: Disk) -> None:
        self._disk = disk
        self._writes: list[Callable[[], None]] = []

    def pipelines(self) -> Sequence[str]:
        return sorted(self._disk.heads)

    def head(self, pipeline: str) -> Head | None:
        return self._disk.heads.get(pipeline)

    def find(self, transaction_id: TransactionId) -> TransactionRecord | None:
        return self._disk.records.get(transaction_id)

    def newest(self, pipeline: str, query_id: str) -> TransactionRecord | None:
        found = [r for r in self._disk.of(pipeline) if r.id.query_id == query_id]
        return max(found, key=_batch, default=None)

    def unfinished(self, pipeline: str) -> Sequence[TransactionRecord]:
        return self._disk.unfinished(pipeline)

    def history(
        self, pipeline: str, limit: int, query_id: str | None = None, before: int | None = None
    ) -> Sequence[TransactionRecord]:
        found = [r for r in self._disk.of(pipeline) if query_id in {None, r.id.query_id}]
        found = [r for r in found if before is None or r.id.batch_id < before]
        return found[::-1][:limit]

    def put_head(self, head: Head) -> None:
        self._writes.append(lambda: self._put_head(head))

    def _put_head(self, head: Head) -> None:
        self._ledger(head.pipeline).begins(self._disk.heads.get(head.pipeline), head)
        self._disk.heads[head.pipeline] = head

    def put(self, record: TransactionRecord) -> None:
        self._writes.append(lambda: self._put(record))

    def _put(self, record: TransactionRecord) -> None:
        self._ledger(record.id.pipeline).writes(self._disk.records.get(record.id), record)
        self._disk.records[record.id] = record

    def forget(self, pipeline: str, query_id: str, below: int) -> None:
        self._writes.append(lambda: self._forget(pipeline, query_id, below))

    def _forget(self, pipeline: str, query_id: str, below: int) -> None:
        for record in self._disk.of(pipeline):
            is_old = record.id.query_id == query_id and record.id.batch_id < below
            if is_old and record.state is State.COMPLETE:
                self._disk.world.states.add("old records are forgotten")
                self._ledger(pipeline).forgets(record)
                del self._disk.records[record.id]

    def _ledger(self, pipeline: str) -> Ledger:
        return self._disk.world.pipelines[pipeline].ledger

    def apply(self) -> None:
        for write in self._writes:
            write()


class SimLog(TransactionLog):
    """The log of one driver."""

    def __init__(self, disk: Disk) -> None:
        self.disk = disk
        self.world = disk.world

    @property
    def log_id(self) -> str:
        return self.disk.log_id

    @property
    def address(self) -> str:
        return "memory:"

    def close(self) -> None:
        pass

    def _read(self, question: Callable[[Store], ResultT]) -> ResultT:
        return self.world.call(_verb(question), lambda: question(View(self.disk)))

    def _write(self, step: Callable[[Store], ResultT]) -> ResultT:
        def effect() -> ResultT:
            view = View(self.disk)
            result = step(view)
            view.apply()
            return result

        return self.world.call(_verb(step), effect)


def _verb(function: Callable[..., object]) -> str:
    """The method of `TransactionLog` that made the function, or the function: "log.decide"."""
    outer, inner, *_ = function.__qualname__.split(".")
    return f"log.{outer if inner == '<locals>' else inner}"


def _batch(record: TransactionRecord) -> int:
    return record.id.batch_id
