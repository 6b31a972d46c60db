"""What a pipeline's driver has shown so far: its unfinished batches, its token, its last commit.

begin ─► token    look ─► the unfinished records    decide, hold, amend ─► one more of them
complete, abandon ─► one less                       fenced ─► none: they are another driver's
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from sparkonce.model import Committable, TransactionId
from sparkonce.txn_log.record import State, TransactionRecord


@dataclass
class Standing:
    """Of one pipeline, as the steps of its driver have shown it.

    Attributes:
        began: Unix time in seconds at which this process began to follow it.
        token: the fencing token; None before the driver has one.
        is_fenced: whether a newer driver has replaced it.
        completed: Unix time in seconds of the last complete batch; None before the first one.
        unfinished: the records that are prepared or decided.
        newest: the highest batch that the log has a record of, as far as this driver has seen.
    """

    began: float
    token: int | None = None
    is_fenced: bool = False
    completed: float | None = None
    unfinished: dict[TransactionId, TransactionRecord] = field(default_factory=dict)
    newest: int = -1

    def start(self, token: int) -> None:
        """A driver of this process has taken a token."""
        self.token = token
        self.is_fenced = False
        self.newest = -1

    def fence(self) -> bool:
        """A newer driver has taken over; returns whether that is news."""
        is_news = not self.is_fenced
        self.is_fenced = True
        self.unfinished = {}
        return is_news

    def found(self, records: Iterable[TransactionRecord]) -> None:
        """These are all of the log's unfinished records."""
        self.unfinished = {record.id: record for record in records if record.state.is_unfinished}
        self.newest = max([self.newest, *(key.batch_id for key in self.unfinished)])

    def reached(self, record: TransactionRecord) -> TransactionRecord | None:
        """The log holds this record now; returns the one that was known before."""
        before = self.unfinished.get(record.id)
        if record.state is not State.ABANDONED:
            self.newest = max(self.newest, record.id.batch_id)
        if record.state.is_unfinished:
            self.unfinished = {**self.unfinished, record.id: record}
            return before
        self.unfinished = {key: r for key, r in self.unfinished.items() if key != record.id}
        if record.state.is_finished:
            self.completed = max(self.completed or 0.0, record.times[record.state])
        return before

    def oldest(self) -> float | None:
        """Unix time in seconds at which the oldest unfinished batch was prepared or decided."""
        return min((min(r.times.values()) for r in self.unfinished.values()), default=None)

    def in_doubt(self) -> Iterator[Committable]:
        """Every branch of the unfinished batches that no operator has ruled out."""
        for record in self.unfinished.values():
            yield from (c for c in record.committables() if not record.is_ruled_out(c))
