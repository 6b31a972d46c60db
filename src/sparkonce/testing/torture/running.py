"""A query that is killed, frozen and cut off for hours, and compared with its source all the time.

    calm ─► fault ─► look ─► calm ─► fault ─► look … ─► the last driver ─► look
                       │
                       └─ every row that readers get, in every sink, against what was sent

It stops at the first anomaly, and keeps everything.
"""

from __future__ import annotations

import json
import random
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from sparkonce import ExactlyOnce
from sparkonce.errors import ConfigurationError, SparkOnceError
from sparkonce.testing.kills import crash_points
from sparkonce.testing.torture import records
from sparkonce.testing.torture.checking import Anomaly, Checker, Row
from sparkonce.testing.torture.drivers import Drivers, NotReachedError
from sparkonce.testing.torture.faults import (
    Fault,
    Freeze,
    KillAtAnyTime,
    KillAtPoint,
    KillWorker,
    Stage,
)
from sparkonce.testing.torture.query import Order, Writer
from sparkonce.words import counted

Reader = Callable[[], Iterable[Row]]
Unfinished = Callable[[], Collection[object]]

_SETTLE_S: Final = 30.0
_POLL_S: Final = 0.2


@dataclass(frozen=True)
class Event:
    """Something that happened, `at_s` seconds after the start."""

    at_s: float
    kind: str
    text: str


@dataclass
class History:
    """Everything that happened, also in `events.jsonl`."""

    path: Path
    progress: Callable[[str], None]
    events: list[Event] = field(default_factory=list)
    _start: float = field(default_factory=time.monotonic)

    @property
    def passed_s(self) -> float:
        return time.monotonic() - self._start

    def note(self, kind: str, text: str) -> None:
        event = Event(round(self.passed_s, 2), kind, text)
        self.events.append(event)
        with self.path.open("a") as file:
            file.write(json.dumps(vars(event)) + "\n")
        self.progress(f"{event.at_s:9.1f} s  {kind:8} {text}")


@dataclass
class Outcome:
    """What a torture has shown.

    Attributes:
        seed: of its choices.
        events: everything that happened.
        anomalies: what the look that ended it has found; empty if it was clean.
        batches: how many batches were complete.
        rows: by sink, how many rows its readers got.
        record: of the first anomaly's first batch in the transaction log, as JSON.
        failure: what ended it before its time: an error of a reader or of a command, or Ctrl-C.
    """

    seed: int
    events: Sequence[Event]
    anomalies: Sequence[Anomaly]
    batches: int
    rows: Mapping[str, int]
    record: Any = None
    failure: BaseException | None = None

    @property
    def is_clean(self) -> bool:
        return self.failure is None and not self.anomalies

    @property
    def verdict(self) -> str:
        """In one or two words."""
        if self.anomalies:
            number = len(self.anomalies)
            return "1 anomaly" if number == 1 else f"{number} anomalies"
        return "clean" if self.is_clean else "not finished"

    @property
    def faults(self) -> Counter[str]:
        """How many faults of each kind there were."""
        kinds = Counter(event.kind for event in self.events)
        return Counter({kind: kinds[kind] for kind in kinds if kind not in _NO_FAULTS})


_NO_FAULTS: Final = {"start", "end", "look", "thaw", "anomaly", "seed", "error"}


@dataclass
class Torture:
    """One query, its drivers, and what readers get.

    Args:
        writer: the pipeline, or any function for foreachBatch.
        order: what its drivers run.
        readers: by sink name, all rows that readers get: dictionaries with `id`, and if it is
            there `run` and `payload`. A `lane`, such as a partition, promises an order.
        folder: empty, or made here; for everything.
        seed: of all choices.
        more: faults of networks and servers.
        unfinished: by sink name, what is left open, prepared or staged.
        patience_s: seconds for a batch without a fault.
        progress: gets a line for each event.
    """

    writer: Writer
    order: Order
    readers: Mapping[str, Reader]
    folder: Path
    seed: int = 0
    more: Sequence[Fault] = ()
    unfinished: Mapping[str, Unfinished] = field(default_factory=dict)
    patience_s: float = 180.0
    progress: Callable[[str], None] = print

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)  # noqa: S311
        self.folder.mkdir(parents=True, exist_ok=True)
        self.history = History(self.folder / "events.jsonl", self.progress)
        self._checker = Checker(self.order.batch_rows)
        self._rows: dict[str, Sequence[Row]] = {}

    def run(self, most_s: float) -> Outcome:
        """Torture the query for that many seconds, or until the first anomaly, or Ctrl-C.

        There is at least one fault.

        Raises:
            ConfigurationError: the pipeline, or a sink, is not new.
        """
        self._check_new()
        self.history.note("seed", str(self.seed))
        with ExitStack() as stack:
            drivers = Drivers(self.folder, self.order, self.patience_s)
            stack.callback(drivers.close)
            stage = Stage(drivers, self._random, self.history.note, list(self.readers))
            anomalies: Sequence[Anomaly] = ()
            failure: BaseException | None = None
            try:
                anomalies = self._torture(stage, most_s) or self._finish(stage)
            except NotReachedError as error:
                anomalies = [Anomaly("stuck", "", str(error))]
            except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001 - of a reader, a command
                self.history.note("error", f"{type(error).__name__}: {error}".rstrip(": "))
                failure = error
            for anomaly in anomalies:
                self.history.note("anomaly", str(anomaly))
            return Outcome(
                self.seed,
                self.history.events,
                anomalies,
                drivers.progress.complete,
                {sink: len(rows) for sink, rows in self._rows.items()},
                self._record(anomalies),
                failure,
            )

    @property
    def _pipeline(self) -> ExactlyOnce | None:
        """The writer, unless it is a function."""
        return self.writer if isinstance(self.writer, ExactlyOnce) else None

    def _check_new(self) -> None:
        if (pipeline := self._pipeline) is not None:
            records.check_new(pipeline)
            names = {sink.name for sink in pipeline.sinks}
            if names != set(self.readers):
                raise ConfigurationError(
                    f"readers are of {', '.join(self.readers)}, and the pipeline's sinks are "
                    f"{', '.join(sorted(names))}: give each sink a reader, by its name"
                )
        for sink, read in self.readers.items():
            try:
                count = len(list(read()))
            except Exception as error:
                raise ConfigurationError(
                    f"the reader of {sink} failed before the first driver "
                    f"({type(error).__name__}: {error}): create the target, or let the reader "
                    "return no rows while there is none"
                ) from error
            if count:
                raise ConfigurationError(
                    f"readers of {sink} get {counted(count, 'row')} already: give the job an empty "
                    "table, topic or folder; rows are numbered from 0"
                )

    def _record(self, anomalies: Sequence[Anomaly]) -> Any:
        batches = [batch for anomaly in anomalies for batch in anomaly.batches]
        if not batches or self._pipeline is None:
            return None
        try:
            return records.record_of(self._pipeline, self.order.checkpoint, batches[0])
        except SparkOnceError as error:  # the report must come all the same
            return str(error)

    def _torture(self, stage: Stage, most_s: float) -> Sequence[Anomaly]:
        faults, weights = zip(*self._faults(stage.sinks), strict=True)
        while True:
            fault: Fault = self._random.choices(faults, weights)[0]
            fault.strike(stage)
            anomalies = self._look(stage.drivers)
            if anomalies or self.history.passed_s >= most_s:
                return anomalies

    def _faults(self, sinks: Sequence[str]) -> Iterable[tuple[Fault, int]]:
        yield KillAtAnyTime(), 3
        if self._pipeline is not None:
            points = crash_points(sinks, self._pipeline.settings.commit)
            yield KillAtPoint(points), 8
            yield Freeze(points), 2
            yield KillWorker(), 2
        for fault in self.more:
            yield fault, 3

    def _finish(self, stage: Stage) -> Sequence[Anomaly]:
        """Let the last driver end by itself; then nothing may be missing or left over."""
        stage.calm()
        stage.drivers.now.kill()
        stage.drivers.now.start(is_last=True)
        stage.note("start", f"driver {stage.drivers.now.run}, the last one")
        stage.drivers.wait(lambda: False)
        if stage.drivers.now.status != 0:
            raise NotReachedError(f"the last driver failed: {stage.drivers.now.last_lines()}")
        found = self._look(stage.drivers, is_last=True)
        deadline = time.monotonic() + _SETTLE_S
        while (left := self._left()) and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        return [*found, *(Anomaly("left over", sink, text) for sink, text in left.items())]

    def _left(self) -> dict[str, str]:
        """What is open, prepared, staged or undecided, by its place."""
        left: dict[str, Collection[object]]
        left = {sink: list(ask()) for sink, ask in self.unfinished.items()}
        if self._pipeline is not None:
            left["the log"] = records.unfinished(self._pipeline, self.order.checkpoint)
        return {sink: ", ".join(map(str, found)) for sink, found in left.items() if found}

    def _look(self, drivers: Drivers, *, is_last: bool = False) -> Sequence[Anomaly]:
        complete = drivers.progress.complete
        policy = None if self._pipeline is None else self._pipeline.settings.commit
        if policy == "after_checkpoint" and not is_last:
            complete = max(complete - 1, 0)  # its commit may be on the way
        deadline = time.monotonic() + _SETTLE_S
        while True:
            is_late = time.monotonic() > deadline
            self._rows = {sink: list(read()) for sink, read in self.readers.items()}
            planned = drivers.progress.planned
            found = list(self._checker.look(self._rows, complete=complete, planned=planned))
            if is_late or not found or any(anomaly.kind != "lost" for anomaly in found):
                break
            time.sleep(_POLL_S)  # what a server has committed may be on its way to readers
        shown = ", ".join(f"{sink} {len(rows):,}" for sink, rows in self._rows.items())
        done = f"{counted(complete, 'batch')} complete, {planned:,} planned"
        self.history.note("look", f"{done}; rows: {shown}")
        return found
