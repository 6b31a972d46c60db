"""A pipeline without Spark that delivers real files, and goes back to a savepoint."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq

from sparkonce.errors import ConfigurationError
from sparkonce.model import BranchId, Committable, Owner, TransactionId
from sparkonce.protocol.pipeline import by_name
from sparkonce.sinks import Delivered, FileSink
from sparkonce.sinks.base import AnySink
from sparkonce.spark_hooks.checkpoint import open_checkpoint
from sparkonce.spark_hooks.savepoints import Filling, Rewind, Savepoints, create, rewind
from sparkonce.storage import FileSystemFolder, LocalFolder
from sparkonce.txn_log import TransactionLog, open_log
from sparkonce.txn_log.claim import Claim
from sparkonce.txn_log.record import Fingerprint, Incarnation, Part, Share, State, TransactionRecord
from tests.support.savepoint_cases import QUERY, KilledError, Observed, checkpoint, write

if TYPE_CHECKING:
    import pytest

ROWS = 3
"""Rows of each branch; a batch has two."""

Note = Callable[[str], None]


class NotedSink(FileSink):
    """Calls `note` before and after the removal of each branch."""

    note: Note = staticmethod(lambda _: None)

    def take_back(self, branches: Sequence[Delivered]) -> None:
        for branch in branches:
            self.note(f"before removal {branch.committable.branch_id}")
            super().take_back([branch])
            self.note(f"after removal {branch.committable.branch_id}")


class RewindStage:
    """A pipeline with complete batches in one or more folders, and a savepoint of an older one."""

    def __init__(
        self,
        folder: Path,
        *,
        batches: int,
        savepoint: int,
        sinks: Sequence[str] = ("out",),
        offset_of: Callable[[int], object] = lambda batch: {"logOffset": batch},
    ) -> None:
        self.folder, self.offset_of = folder, offset_of
        self.root = folder / "savepoints"
        self.old = checkpoint(folder / "ckpt", batches)
        self.log = open_log(f"sqlite:///{folder}/txn.db")
        self.sinks: list[AnySink] = []
        for name in sinks:
            (folder / name).mkdir()
            sink = NotedSink(folder / name, name=name)
            sink.validate(pa.schema([("id", pa.int64())]))
            self.sinks.append(sink)
        self.incarnation = self.begin(self.old, QUERY, 0)
        self.bind(self.old)
        for batch in range(batches):
            self.deliver(batch)
        files = open_checkpoint(str(self.old), None)
        place = Savepoints(LocalFolder(self.root))
        self.manifest = create(place, self.log, "orders", files, name="good", batch=savepoint)
        self.place = place

    def bind(self, location: Path) -> None:
        marker = {"log_id": self.log.log_id, "pipeline": "orders"}
        write(location, [("sparkonce.json", json.dumps(marker))])

    def begin(
        self,
        location: Path,
        query_id: str,
        batch: int,
        *,
        pipeline: str = "orders",
        targets: Mapping[str, str] | None = None,
        replaces: str | None = None,
    ) -> Incarnation:
        """Start a query on the checkpoint; raises what the identity guard refuses."""
        binding = open_checkpoint(str(location), None).binding()
        claim = Claim(
            pipeline,
            query_id,
            f"run {location.name} {batch}",
            "driver",
            targets or {sink.name: sink.target for sink in self.sinks},
            batch,
            checkpoint=str(location),
            checkpoint_log_id=None if binding is None else binding.log_id,
            checkpoint_pipeline=None if binding is None else binding.pipeline,
            replaces=replaces,
        )
        return self.log.begin(claim)

    def is_refused(self, location: Path, query_id: str, batch: int, **more: Any) -> bool:
        try:
            self.begin(location, query_id, batch, **more)
        except ConfigurationError:
            return True
        return False

    def deliver(self, batch: int, *, rows: int = ROWS) -> TransactionRecord:
        """Write the batch into every folder, in two branches each."""
        owner = Owner(self.log.id_of("orders"), self.incarnation.owner.query_id)
        shares: dict[str, Share] = {}
        for sink in self.sinks:
            parts, committables = [], []
            for attempt in (0, 1):
                branch_id = BranchId(owner, batch, self.incarnation.token, sink.name, 0, attempt)
                handle = sink.beginTransaction(branch_id)
                values = [batch * 100 + attempt * 10 + n for n in range(rows)]
                sink.write(handle, pa.record_batch({"id": values}))
                committables.append(self._as_logged(sink.preCommit(handle)))
                parts.append(Part(attempt, branch_id.name, 8 * rows, Fingerprint.counted(rows)))
            shares[sink.name] = Share(sink.target, tuple(parts), tuple(committables))
        record = TransactionRecord(
            TransactionId("orders", owner.query_id, batch),
            self.incarnation.token,
            State.DECIDED,
            (json.dumps(self.offset_of(batch)),),
            shares,
        )
        decided = self.log.decide(record)
        for sink in self.sinks:
            for committable in shares[sink.name].committables:
                sink.commit(committable)
        return self.log.complete(decided, self.incarnation.token)

    @staticmethod
    def _as_logged(committable: Committable) -> Committable:
        return Committable.from_json(json.loads(json.dumps(committable.to_json())))

    def look(self, *kept: str) -> Rewind:
        sinks = by_name(self.sinks)
        return Rewind.of(self.manifest, self.log, pipeline="orders", sinks=sinks, kept=kept)

    def rewind(self, into: FileSystemFolder, *kept: str, log: TransactionLog | None = None) -> str:
        log = log or self.log
        filling = Filling(self.place, self.manifest, into, "orders", lambda: log)
        query_id, _ = rewind(filling, log, by_name(self.sinks), kept)
        return query_id

    def delivered(self, name: str = "out") -> list[int]:
        """The rows that readers see, sorted."""
        files = (self.folder / name).glob("*.parquet")
        return sorted(v for path in files for v in pq.read_table(path)["id"].to_pylist())

    @staticmethod
    def rows_of(*batches: int) -> list[int]:
        return sorted(b * 100 + a * 10 + n for b in batches for a in (0, 1) for n in range(ROWS))

    def everything(self) -> dict[str, bytes]:
        """Every file below the folder but the log's, and the log's records."""
        files = {
            str(path.relative_to(self.folder)): path.read_bytes()
            for path in self.folder.rglob("*")
            if path.is_file() and not path.name.startswith("txn.db")
        }
        head = self.log.head("orders")
        records = [record.encode() for record in self.log.history("orders", 10**6)]
        encoded = "" if head is None else head.encode()
        return {**files, "log": "\n".join([encoded, *records]).encode()}


CHANGES = frozenset({"create", "store", "delete", "write", "removal"})


def killed_at_each_moment(
    make: Callable[[], RewindStage],
    into: str,
    monkeypatch: pytest.MonkeyPatch,
    changes: Collection[str] = CHANGES,
) -> Iterator[tuple[str, RewindStage]]:
    """Kill a rewind before and after each change of the checkpoint, the log and a sink.

    Yields the moment, and a stage of its own; the last one has not been killed.
    """
    moment = 0
    while True:
        stage, reached = make(), []

        def note(what: str, moment: int = moment, reached: list[str] = reached) -> None:
            if what.split()[1] in changes:
                reached.append(what)
                if len(reached) == moment + 1:
                    raise KilledError(what)

        write_log = stage.log._write

        def noted_write(step: Any, note: Note = note, write_log: Any = write_log) -> Any:
            note("before write of the log")
            result = write_log(step)
            note("after write of the log")
            return result

        with monkeypatch.context() as patch:
            patch.setattr(NotedSink, "note", staticmethod(note))
            patch.setattr(stage.log, "_write", noted_write)
            try:
                stage.rewind(Observed(stage.folder / into, note))
            except KilledError as killed:
                what = str(killed)
            else:
                what = ""
        yield what, stage
        if not what:
            return
        moment += 1
