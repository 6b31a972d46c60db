"""The sink under test of `SinkContract`, and its target as an outsider sees it.

SinkWorld   defined by the user: how to make the sink, and what an outsider sees
Stage       takes branches through the verbs as the driver does
"""

from __future__ import annotations

import contextlib
import datetime as dt
import json
import time
import uuid
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import pyarrow as pa

from sparkonce.errors import CommitUnresolvedError, SparkOnceError
from sparkonce.model import DRIVER_ATTEMPT, BranchId, Committable, CommittedBatch, Owner
from sparkonce.sinks import verbs
from sparkonce.sinks.base import AnySink, check_attributes
from sparkonce.sinks.capabilities import FindsBranches
from sparkonce.sinks.committables import check_committable, check_rows
from sparkonce.testing.proxy import Proxy

Row: TypeAlias = "Mapping[str, Any]"

OWNER = Owner("0123456789abcdef", "11111111-2222-3333-4444-555555555555")
"""The owner of the tests' branches. Each `Stage` puts in a query id of its own, since some stores
have one namespace for the whole server."""

_FIELDS: list[pa.Field[Any]] = [pa.field("id", pa.int64()), pa.field("name", pa.string())]
SCHEMA = pa.schema(_FIELDS)
_POLL_S = 0.02

GUIDE = "docs/howto/proving-a-sink.md"
"""The page that messages name, with the section that says what a sink must do."""


@dataclass(frozen=True)
class SinkWorld:
    """How to make a sink, and what an outsider sees in its target.

    Attributes:
        sink: makes the sink; each call returns a new object for the same target, as each process
            has its own.
        visible: returns every row that a reader gets now, through its own client, never through the
            sink.
        unfinished: lists everything that is open, prepared or staged in the target now.
        expected: maps a written row to the row that a reader gets, if the target changes it (such
            as decimals to text); default: the row.
        selected: maps a batch to the batch that `write` gets, as Spark would by `select` or
            `columns`; default: the batch.
        lose: destroys a prepared branch as an accident would; its commit must report the loss.
        proxy: in front of the sink's server. The tests of the network let it lose and delay
            requests and answers. `sink` must read the proxy's `address` in each call.
        away: a context in which the target is unreachable, or answers every request with an
            error. Give it also with a `proxy`, which only ends connections.
        stalled: a context in which the server begins a commit and does not end it, such as under a
            global lock or without its synchronous standby. Reads go on.
        refused: rows that the target must refuse, each by itself: too long, of a wrong kind,
            against a constraint. Silent truncation and lax modes lose data.
        secrets: texts that must show nowhere, such as the password that `sink` uses: not in the
            sink's name, target and `repr`, in a committable, or in an error.
        one_branch_a_batch: the target accepts one branch of each batch, in the order of the
            batches, such as a store that keeps the number of its last batch. Tests that need more
            are skipped.
        reads_in_order: readers get nothing that was written after the rows of a branch that is
            still open, as in Kafka.
        refresh: makes everything written so far visible to readers, such as the refresh of a search
            index; called before each look.
        settle_s: the most seconds that readers lag, if nothing can refresh them. Each look waits
            that long; otherwise duplicates and early rows would appear after the look.
    """

    sink: Callable[[], AnySink]
    visible: Callable[[], Iterable[Row]]
    unfinished: Callable[[], Collection[object]]
    expected: Callable[[Row], Row] = lambda row: row
    selected: Callable[[pa.RecordBatch], pa.RecordBatch] = lambda batch: batch
    lose: Callable[[Committable], None] | None = None
    proxy: Proxy | None = None
    away: Callable[[], contextlib.AbstractContextManager[object]] | None = None
    stalled: Callable[[], contextlib.AbstractContextManager[object]] | None = None
    refused: pa.RecordBatch | None = None
    secrets: Collection[str] = ()
    one_branch_a_batch: bool = False
    reads_in_order: bool = False
    refresh: Callable[[], object] = lambda: None
    settle_s: float = 0.0


def rows_of(ids: Iterable[int]) -> pa.RecordBatch:
    """Make rows of `SCHEMA`; every seventh has no name, and the names are not ASCII."""
    numbers = list(ids)
    names = [None if n % 7 == 0 else f"名前 {n}" for n in numbers]
    return pa.record_batch([pa.array(numbers, pa.int64()), pa.array(names)], schema=SCHEMA)


def branch(attempt: int = 1, **changes: Any) -> BranchId:
    """Make the id of a branch; `Stage` fills in the sink's name."""
    return replace(BranchId(OWNER, 1, 3, "", 0, attempt), **changes)


@dataclass
class Stage:
    """Takes branches of one world through the verbs, in the driver's order.

    Attributes:
        world: the sink and its target.
        schema: the schema of the rows.
        patience_s: how long to retry a commit whose outcome is unknown.
    """

    world: SinkWorld
    schema: pa.Schema = SCHEMA
    patience_s: float = 60.0
    _query_id: str = field(default_factory=lambda: str(uuid.uuid4()))
    _made: list[AnySink] = field(default_factory=list)
    _committed: set[BranchId] = field(default_factory=set)

    def sink(self, name: str | None = None) -> AnySink:
        """Make and validate a new object of the sink, or of another sink called `name`."""
        sink = self.bare_sink()
        if name:
            sink.name = name
        sink.validate(self.world.selected(pa.RecordBatch.from_pylist([], self.schema)).schema)
        return sink

    def bare_sink(self) -> AnySink:
        """Make a new object of the sink that knows no schema, as a recovery does."""
        sink = self.world.sink()
        check_attributes(sink)
        self._made.append(sink)
        return sink

    def write(self, sink: AnySink, branch_id: BranchId, *batches: pa.RecordBatch) -> Any:
        """Begin a branch, idle once, and write the batches; return the handle.

        If a write fails, the branch is discarded, as the task does it.
        """
        handle = sink.beginTransaction(self.named(sink, branch_id))
        try:
            sink.idle(handle)
            for batch in batches:
                sink.write(handle, self.world.selected(batch))
        except Exception:
            with contextlib.suppress(Exception):
                sink.discard(handle)
            raise
        return handle

    def task(self, sink: AnySink, branch_id: BranchId, *batches: pa.RecordBatch) -> Committable:
        """Run one task: begin, write, preCommit."""
        handle = self.write(sink, branch_id, *batches)
        return self.checked(sink, branch_id, sink.preCommit(handle), *batches)

    def checked(
        self, sink: AnySink, branch_id: BranchId, committable: object, *batches: pa.RecordBatch
    ) -> Committable:
        """Check what preCommit returned, as the task does; return it as the log returns it."""
        checked = check_committable(sink, committable, self.named(sink, branch_id))
        check_rows(sink, checked, sum(self.world.selected(batch).num_rows for batch in batches))
        return stored(checked)

    def vote(self, sink: AnySink, *tasks: Committable) -> list[Committable]:
        """Vote on the tasks' committables as the driver does; return those of the decision."""
        first = tasks[0].branch_id if tasks else self.named(sink, branch())
        by_driver = replace(first, attempt=DRIVER_ATTEMPT)
        voted = verbs.vote(sink, by_driver, tasks)
        return [stored(check_committable(sink, committable, by_driver)) for committable in voted]

    def prepare(
        self, sink: AnySink, branch_id: BranchId, *batches: pa.RecordBatch
    ) -> list[Committable]:
        """Run a batch of one task up to the decision."""
        return self.vote(sink, self.task(sink, branch_id, *batches))

    def commit(self, sink: AnySink, committables: Sequence[Committable]) -> None:
        """Commit all branches of a batch, and publish it twice, as after a crash."""
        self.commit_all(sink, committables)
        first = committables[0].branch_id if committables else self.named(sink, branch())
        whole = CommittedBatch(
            "contract", first.owner, first.batch_id or 0, 0, (), tuple(committables)
        )
        for _ in range(2):
            verbs.publish(sink, whole)

    def commit_all(self, sink: AnySink, committables: Sequence[Committable]) -> None:
        """Commit all branches; retry those whose outcome is unknown, as the driver does."""
        deadline = time.monotonic() + self.patience_s
        left = list(committables)
        while left:
            said = list(verbs.commit_many(sink, left))
            check_number(said, left, "commit_many")
            outcomes = list(zip(left, said, strict=True))
            unsure = [e for _, e in outcomes if isinstance(e, CommitUnresolvedError)]
            for _, error in outcomes:
                if error is not None and not isinstance(error, CommitUnresolvedError):
                    error.add_note(self._must_return(left))
                    raise error
            if unsure and time.monotonic() > deadline:
                raise AssertionError(
                    f"commit raised only CommitUnresolvedError for {self.patience_s:.0f} s: "
                    f"{unsure[0]}"
                ) from unsure[0]
            self._committed.update(c.branch_id for c, error in outcomes if error is None)
            left = [c for c, error in outcomes if error is not None]
            if left:
                time.sleep(_POLL_S)

    def _must_return(self, committables: Sequence[Committable]) -> str:
        """Say what a commit that failed should have done."""
        if all(c.branch_id in self._committed for c in committables):
            return (
                "commit raised it for a branch that is committed already: it must find the proof, "
                f"change nothing and return ({GUIDE}#checklist): {committables}"
            )
        return (
            "commit raised it for a branch that is prepared: it must need nothing but the "
            f"committable, show the rows and return ({GUIDE}#checklist): {committables}"
        )

    def outcome(self, sink: AnySink, committables: Sequence[Committable]) -> Exception | None:
        """Commit all branches as `commit_all` does; return the error instead of raising it."""
        try:
            self.commit_all(sink, committables)
        except (SparkOnceError, AssertionError) as error:
            return error
        return None

    def abort(self, sink: AnySink, committables: Iterable[Committable]) -> None:
        for committable in committables:
            sink.abort(committable)

    def sweep(self, sink: AnySink, owner: Owner = OWNER) -> list[BranchId]:
        """Abort every branch that `find_branches` lists, as after each batch; return their ids."""
        found = self.found(sink, owner)
        errors = list(verbs.abort_many(sink, found)) if found else []
        check_number(errors, found, "abort_many")
        for _, error in zip(found, errors, strict=True):
            if error is not None:
                raise error
        return [committable.branch_id for committable in found]

    def found(self, sink: AnySink, owner: Owner = OWNER) -> list[Committable]:
        """What `find_branches` lists."""
        return list(verbs.find_branches(sink, self._own(owner)))

    def named(self, sink: AnySink, branch_id: BranchId) -> BranchId:
        """The branch id with the sink's name, and with this stage's query id."""
        return replace(branch_id, sink=sink.name, owner=self._own(branch_id.owner))

    def _own(self, owner: Owner) -> Owner:
        return replace(owner, query_id=owner.query_id.replace(OWNER.query_id, self._query_id))

    def close(self) -> None:
        """Remove what a test that failed has left, and close every sink."""
        for sink in self._made[-1:]:
            with contextlib.suppress(Exception):
                self.sweep(sink)
        for sink in self._made:
            sink.close()

    # -- from outside ------------------------------------------------------------------------------

    def sees(self, *batches: pa.RecordBatch, why: str = "") -> None:
        """Assert that readers get exactly the rows of these batches; `why` begins the message."""
        rows = [row for batch in batches for row in batch.to_pylist()]
        wanted = Counter(map(canonical, map(self.world.expected, rows)))
        self.let_readers_see()
        found = Counter(map(canonical, self.world.visible()))
        assert found == wanted, (
            f"{why}readers should get {wanted.total()} rows and get {found.total()}:\n"
            f"  missing: {shown(wanted - found)}\n  too much: {shown(found - wanted)}\n"
            f"  see {GUIDE}#checklist"
        )

    def count(self) -> int:
        """How many rows readers get."""
        self.let_readers_see()
        return len(list(self.world.visible()))

    def sees_beside_open(self, *batches: pa.RecordBatch) -> None:
        """The same while an older branch is open; skipped if readers wait for that branch."""
        if not self.world.reads_in_order:
            self.sees(*batches)

    def nothing_unfinished(self, why: str = "") -> None:
        """Assert that nothing is open, prepared or staged; `why` begins the message."""
        self.let_readers_see()
        unfinished = self.world.unfinished()
        assert not unfinished, (
            f"{why}something is still open, prepared or staged: {list(unfinished)[:10]} "
            f"(see {GUIDE}#checklist)"
        )

    def let_readers_see(self) -> None:
        """Wait until everything written so far is visible to readers."""
        self.world.refresh()
        time.sleep(self.world.settle_s)

    def nothing_left_by_sweep(self, sink: AnySink) -> None:
        """Assert that a sweep leaves nothing, if the sink can list its branches."""
        if lists_branches(sink):
            self.sweep(sink)
            self.nothing_unfinished()

    def something_unfinished(self) -> None:
        assert self.world.unfinished(), (
            "world.unfinished() lists nothing while a branch is prepared: it must list everything "
            "that the sink holds in its target before commit"
        )


def check_number(outcomes: Sequence[object], branches: Sequence[object], verb: str) -> None:
    """Assert that a verb of many branches returned an outcome for each."""
    assert len(outcomes) == len(branches), (
        f"{verb} returned {len(outcomes)} outcomes for {len(branches)} branches: it must return "
        "one for each, in their order"
    )


def lists_branches(sink: AnySink) -> bool:
    """Whether the sink can list its branches in the target."""
    return isinstance(sink, FindsBranches)


def stored(committable: Committable) -> Committable:
    """Return the committable as the transaction log returns it."""
    return Committable.from_json(json.loads(json.dumps(committable.to_json(), allow_nan=False)))


def canonical(row: Row) -> str:
    """Turn a row into text; equal rows have equal texts, so multisets hold these."""
    return repr({name: _plain(row[name]) for name in sorted(row)})


def _plain(value: object) -> object:
    if isinstance(value, Mapping):
        return {str(key): _plain(value[key]) for key in sorted(value, key=str)}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, dt.datetime) and value.tzinfo is not None:
        return value.astimezone(dt.UTC)
    return value


def shortened(value: object, most: int = 200) -> str:
    """Show a value, without the middle of a long one."""
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= most else f"{text[: most // 2]} … {text[-most // 2 :]}"


def shown(rows: Counter[str], most: int = 5) -> str:
    """Show the first few rows of a difference, with their counts."""
    listed = [f"{shortened(row)} x{count}" for row, count in rows.most_common(most)]
    return ", ".join(listed) + (" …" if len(rows) > most else "") if listed else "nothing"
