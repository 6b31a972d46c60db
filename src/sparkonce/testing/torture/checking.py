"""What readers get, compared with what was sent: pure, so that each rule has its test.

A batch is *complete* when Spark's checkpoint says so: each of its rows must be in every sink, once.
A batch that is only *planned* has an unknown outcome: each of its rows may be there, once. No other
row may be there.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

Row: TypeAlias = Mapping[str, Any]

_MOST_EXAMPLES: Final = 5


@dataclass(frozen=True)
class Anomaly:
    """A promise that was broken.

    Attributes:
        kind: "lost", "doubled", "foreign", "torn", "aborted", "reordered", "left over" or "stuck".
        sink: which sink shows it; empty if it is none.
        what: a sentence.
        batches: the batches of the rows.
    """

    kind: str
    sink: str
    what: str
    batches: Sequence[int] = ()

    def __str__(self) -> str:
        return f"{self.kind}{f' in {self.sink}' if self.sink else ''}: {self.what}"


@dataclass
class Checker:
    """Compares looks, one after the other.

    Attributes:
        batch_rows: the number of rows of each batch.
    """

    batch_rows: int
    _runs: dict[int, dict[str, set[int]]] = field(default_factory=dict)
    _seen: dict[str, set[int]] = field(default_factory=dict)

    def look(
        self, rows: Mapping[str, Sequence[Row]], *, complete: int, planned: int
    ) -> Iterator[Anomaly]:
        """What is wrong with these rows.

        Args:
            rows: by sink, all rows that its readers get, in the order of the reader.
            complete: how many batches Spark had completed before the readers were asked.
            planned: how many it had planned after they had answered.
        """
        for sink, got in rows.items():
            counts = Counter(row["id"] for row in got)
            yield from self._lost(sink, counts, complete)
            yield from self._surplus(sink, counts, planned)
            yield from self._torn(sink, got)
            yield from self._reordered(sink, got)
        yield from self._aborted(rows)

    def batch_of(self, row_id: int) -> int:
        return row_id // self.batch_rows

    def _lost(self, sink: str, counts: Counter[int], complete: int) -> Iterator[Anomaly]:
        before = self._seen.setdefault(sink, set())
        wanted = set(range(complete * self.batch_rows))
        if vanished := before - counts.keys():
            yield self._anomaly("lost", sink, vanished, "readers had {} already")
        elif lost := wanted - counts.keys():
            yield self._anomaly(
                "lost", sink, lost, f"{complete} batches are complete, without {{}}"
            )
        before.update(counts)

    def _surplus(self, sink: str, counts: Counter[int], planned: int) -> Iterator[Anomaly]:
        foreign = {found for found in counts if not 0 <= found < planned * self.batch_rows}
        if foreign:
            yield self._anomaly("foreign", sink, foreign, "{} were never sent")
        if doubled := {found for found, count in counts.items() if count > 1}:
            yield self._anomaly("doubled", sink, doubled, "{} are there more than once")

    def _torn(self, sink: str, got: Iterable[Row]) -> Iterator[Anomaly]:
        torn = {
            row["id"] for row in got if "payload" in row and row["payload"] != payload(row["id"])
        }
        if torn:
            yield self._anomaly("torn", sink, torn, "{} have other values than were sent")

    def _aborted(self, rows: Mapping[str, Sequence[Row]]) -> Iterator[Anomaly]:
        """All rows of a batch, in all sinks and at all times, come from one driver."""
        for sink, got in rows.items():
            for row in got:
                if "run" in row:
                    of_batch = self._runs.setdefault(self.batch_of(row["id"]), {})
                    of_batch.setdefault(sink, set()).add(row["run"])
        for batch, of_batch in sorted(self._runs.items()):
            if len(set().union(*of_batch.values())) > 1:
                yield _mixed(batch, of_batch)
                return

    def _reordered(self, sink: str, got: Iterable[Row]) -> Iterator[Anomaly]:
        """In a lane, such as a partition, no batch comes after a later one."""
        highest: dict[Any, int] = {}
        for row in got:
            if "lane" not in row:
                return
            lane, batch = row["lane"], self.batch_of(row["id"])
            if batch < highest.get(lane, batch):
                what = f"in {lane}, batch {batch} comes after batch {highest[lane]}"
                yield Anomaly("reordered", sink, what, [batch, highest[lane]])
                return
            highest[lane] = batch

    def _anomaly(self, kind: str, sink: str, ids: set[int], what: str) -> Anomaly:
        first = sorted(ids)[:_MOST_EXAMPLES]
        more = f" and {len(ids) - len(first):,} more" if len(ids) > len(first) else ""
        named = f"rows {', '.join(map(str, first))}{more}"
        return Anomaly(kind, sink, what.format(named), sorted(set(map(self.batch_of, ids))))


def _mixed(batch: int, of_batch: Mapping[str, set[int]]) -> Anomaly:
    wrong = [sink for sink, runs in of_batch.items() if len(runs) > 1]
    shown = "; ".join(
        f"{sink} has rows of driver {', '.join(map(str, sorted(runs)))}"
        for sink, runs in of_batch.items()
    )
    what = f"batch {batch} was written by more than one driver: {shown}"
    return Anomaly("aborted", wrong[0] if len(wrong) == 1 else "", what, [batch])


def payload(row_id: int) -> str:
    """What the source puts into the column `payload`."""
    return hashlib.sha256(str(row_id).encode()).hexdigest()
