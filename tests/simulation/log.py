"""The real rules of `TransactionLog` on a store in memory: atomic and ordered by definition."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from sparkonce.model import TransactionId
from sparkonce.txn_log.base import ResultT, Store, TransactionLog
from sparkonce.txn_log.record import Head, State, TransactionRecord
from tests.simulation.world import World


class Disk:
    """The stored state that all drivers' logs share."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.heads: dict[str, Head] = {}
        self.records: dict[TransactionId, TransactionRecord] = {}

    def unfinished(self) -> list[TransactionRecord]:
        found = [record for record in self.records.values() if record.state.is_unfinished]
        return sorted(found, key=_batch)


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
        del pipeline, query_id  # one query
        return max(self._disk.records.values(), key=_batch, default=None)

    def unfinished(self, pipeline: str) -> Sequence[TransactionRecord]:
        del pipeline
        return self._disk.unfinished()

    def history(self, pipeline: str, limit: int) -> Sequence[TransactionRecord]:
        del pipeline
        return sorted(self._disk.records.values(), key=_batch, reverse=True)[:limit]

    def put_head(self, head: Head) -> None:
        self._writes.append(lambda: self._put_head(head))

    def _put_head(self, head: Head) -> None:
        self._disk.world.ledger.begins(self._disk.heads.get(head.pipeline), head)
        self._disk.heads[head.pipeline] = head

    def put(self, record: TransactionRecord) -> None:
        self._writes.append(lambda: self._put(record))

    def _put(self, record: TransactionRecord) -> None:
        self._disk.world.ledger.writes(self._disk.records.get(record.id), record)
        self._disk.records[record.id] = record

    def forget(self, pipeline: str, query_id: str, below: int) -> None:
        del pipeline, query_id
        self._writes.append(lambda: self._forget(below))

    def _forget(self, below: int) -> None:
        for record in list(self._disk.records.values()):
            if record.id.batch_id < below and record.state is State.COMPLETE:
                self._disk.world.states.add("old records are forgotten")
                self._disk.world.ledger.forgets(record)
                del self._disk.records[record.id]

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
        return "0" * 16

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
    """The method of `TransactionLog` that made the function: "log.decide"."""
    return "log." + function.__qualname__.split(".")[1]


def _batch(record: TransactionRecord) -> int:
    return record.id.batch_id
