"""The contract between the coordinator and a store that takes part in a transaction.

    executor   beginTransaction ─► write* ─► preCommit ─► Committable ─┐   (else: discard)
    driver     validate                vote ◄──────────────────┘ ─► commit | abort

| verb | called by, in which process | may fail | called twice |
|---|---|---|---|
| `validate` | driver, before any data moves, once a run | yes: the query fails | yes |
| `beginTransaction` | a Spark task, at its first row | yes: the batch is aborted | no |
| `write` | the same task, any number of times | yes: the same | no |
| `preCommit` | the same task, at its last row | yes: the same. Last chance | no |
| `idle` | the same task, while no rows come | yes: the batch is aborted | yes |
| `discard` | the same task, after a failure | must not raise | no |
| `vote` | driver, when every task has prepared | yes: the same | no |
| `commit` | any driver, also days later | unresolved: repeated; lost: proven | yes: idempotent |
| `abort` | any driver, also days later | yes: it is repeated by a sweep | yes: idempotent |
| `find_branches` | driver, after each start and batch | yes: it is repeated | yes |
| `close` | driver, at the end | yes | yes |

The verbs of one task share a handle, which never leaves that process and never has to pickle.
`commit` and `abort` take lasting values only, so that normal running and recovery share one path:
they may run in another process, days later, twice, or at the same time: for different branches (so
they must be safe to call from several threads), and in another process for the same one, of which
a driver that stood still may go on from the middle. They, `find_branches` and `publish` may be
called in a sink that was never validated.

What a sink promises:

* after `preCommit` returned, `commit` must be able to succeed whatever happens to the process;
* nothing is visible to readers before `commit`;
* `commit` and `abort` are idempotent, and `abort` never undoes a commit;
* every name in the external system is made from the branch id, so that `find_branches` sees it
  again; what outlives the commit, such as its proof, from all of it, so that it is unique for ever.

Five abstract methods make a sink; all others have safe defaults, and only without `find_branches`
does something stay behind: what dead processes left, until somebody removes it by hand.
docs/writing_a_sink.md is the guide, and `sparkonce.testing.SinkContract` proves a sink.

The four verbs keep the names that they have in Apache Flink's `TwoPhaseCommitSinkFunction`, where
this protocol comes from.
"""

from __future__ import annotations

import functools
import json
import logging
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeAlias, TypeVar

from sparkonce.errors import (
    CommitUnresolvedError,
    ConfigurationError,
    ProtocolError,
    SparkOnceError,
)
from sparkonce.model import (
    DRIVER_ATTEMPT,
    BranchId,
    Committable,
    CommittedBatch,
    Owner,
    is_label,
)
from sparkonce.sinks.arrow_types import for_python
from sparkonce.sinks.finding import Finding

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame

logger = logging.getLogger("sparkonce")

PARALLEL_BRANCHES = 16

_INPUT_FILE = re.compile(r"(?i)(?<!\w)input_file_(?:name|block_start|block_length)(?=`?\s*\()")
"""Calls that Spark answers with '' or -1 where the rows come from a snapshot."""

SPARK_METADATA = "_spark_metadata"
"""The folder in which Spark's own file sink names its files, in the one that it writes to."""

_SQL_TEXT = re.compile(r"""'(?:\\.|[^'\\])*'|["](?:\\.|[^"\\])*["]""")

ItemT = TypeVar("ItemT")
OutcomeT = TypeVar("OutcomeT")
HandleT = TypeVar("HandleT")
"""What a sink holds open while one task writes: a producer, a connection, an upload."""

Transform: TypeAlias = "Callable[[DataFrame], DataFrame]"

Columns: TypeAlias = "Callable[[pa.Schema, str], Sequence[str]]"
"""From the schema of a sink's columns and the name of a struct that holds them to SQL."""


def quoted(name: str) -> str:
    """A column's name as Spark's SQL takes it, whatever characters it has."""
    return "`" + name.replace("`", "``") + "`"


def at_once(
    action: Callable[[ItemT], OutcomeT], items: Iterable[ItemT], most: int = PARALLEL_BRANCHES
) -> list[OutcomeT]:
    """What the action gives for each item, in their order; so many at a time.

    Every one that began comes to its end before the first error of any, or Ctrl-C, is raised: who
    catches that goes on with something else.
    """
    work = list(items)
    if len(work) <= 1:
        return [action(item) for item in work]
    interrupts: list[BaseException] = []
    with ThreadPoolExecutor(min(most, len(work))) as pool:
        futures = [_submitted(pool, action, item) for item in work]
        while running := [future for future in futures if not future.done()]:
            try:
                wait(running)
            except BaseException as interrupt:  # noqa: BLE001 - raised below
                interrupts.append(interrupt)
                logger.warning(
                    "interrupted; waiting for what has begun (SIGKILL is safe: the next start "
                    "goes on from there)"
                )
                for future in running:
                    future.cancel()
    if interrupts:
        raise interrupts[0]
    return [future.result() for future in futures]


def _submitted(
    pool: ThreadPoolExecutor, action: Callable[[ItemT], OutcomeT], item: ItemT
) -> Future[OutcomeT]:
    """The item's work in the pool; in this thread once the main one has ended, as a script's."""
    try:
        return pool.submit(action, item)
    except RuntimeError as error:
        if "shutdown" not in str(error):
            raise
    future: Future[OutcomeT] = Future()
    try:
        future.set_result(action(item))
    except Exception as error:  # noqa: BLE001 - the future's, as in a pool
        future.set_exception(error)
    return future


class TwoPhaseCommitSink(ABC, Generic[HandleT]):
    """A store that can prepare rows and then, from any process, commit or abort them.

    The instance is pickled to the executors: keep settings in it, and open connections in
    `beginTransaction` or on first use. Drop what does not pickle in ``__getstate__``.

    Args:
        name: the sink's lasting name in its pipeline; default: the class's `kind`. It is part of
            every name in the external system and of every record.
        select: SQL expressions that make this sink's columns from the batch's, one row from each
            row, such as ``["id", "to_json(struct(*)) AS value"]``; default: the batch's columns.
            They are named as ``df.selectExpr(*select)`` names them, also without AS. What file a
            row is from (``input_file_name()`` and the like) only the query itself can ask.
            Sinks with different `select` are still written in one pass over the batch.
        transform: any function from DataFrame to DataFrame, applied before `select`, so that this
            sink can get other rows. It costs a snapshot of the batch and a pass of its own.
        writers: 1 brings a whole batch to one Spark task, by a shuffle; default: a task for each
            of its partitions. Beside sinks with more tasks it costs a snapshot of the batch. A
            sink with `dealt_by` may allow a higher number.

    Attributes:
        columns: a sink may set it to make, of the columns that `select` leaves, those that `write`
            gets: Spark evaluates what it returns in the same pass. It is called with the schema
            and the name of the struct that holds the columns, and two that are equal share work.
        dealt_by: a sink may name columns, of those that `write` gets: rows with equal values in
            them reach the same one of `writers` tasks, in every replay. The sink then gets a pass
            of its own.
        lists_uncommitted_only: a sink may say that `find_branches` shows no committable of its own
            that was ever committed. Where one of a complete batch is found all the same, the server
            went back in time, and the sweep commits it again in place of an abort.

    Raises:
        ConfigurationError: there is no name, or it has other characters than A-Z a-z 0-9 _ and -,
            or is longer than 32; `select` is empty, or asks for the input file; or `writers` is not
            1, nor a number with `dealt_by`.
    """

    kind: ClassVar[str] = ""
    columns: Columns | None = None
    dealt_by: tuple[str, ...] | None = None
    lists_uncommitted_only: ClassVar[bool] = False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "commit" in cls.__dict__:
            # A handle that is committed is the one mistake that no sink could tell from a loss.
            cls.commit = _takes_committables(cls.commit)  # type: ignore[method-assign,assignment]

    def __init__(
        self,
        *,
        name: str | None = None,
        select: Sequence[str] | None = None,
        transform: Transform | None = None,
        writers: int | None = None,
    ) -> None:
        self.name = self.kind if name is None else name
        if not self.name:
            raise ConfigurationError(
                f"{type(self).__name__} has no lasting name, and every name in its target is made "
                f'from it: give the class a kind, such as kind = "redis", or pass name='
            )
        if not is_label(self.name):
            raise ConfigurationError(
                f"name={name!r}: a sink's name has 1 to 32 of the characters A-Z a-z 0-9 _ and -"
            )
        if select is not None and (isinstance(select, str) or not select):
            raise ConfigurationError(
                f"{self.name}: select={select!r} must be a list of SQL expressions, or be left out"
            )
        self.select = None if select is None else tuple(select)
        for expression in self.select or ():
            if call := _INPUT_FILE.search(_SQL_TEXT.sub("''", expression)):
                raise ConfigurationError(
                    f"{self.name}: select= cannot ask for {call[0]}(), which a snapshot of the "
                    "batch does not know, as it is taken beside a sink with transform= or "
                    "writers=1: make the column in the query"
                )
        if writers is not None and self.dealt_by is not None:
            if writers < 1:
                raise ConfigurationError(f"{self.name}: writers={writers!r} must be 1 or more")
        elif writers not in {None, 1}:
            # Spark deals whole rows out in an order that another replay need not have; only by
            # chosen columns does each row find its task again.
            raise ConfigurationError(f"{self.name}: writers={writers!r} must be 1, or be left out")
        self.transform = transform
        self.writers = writers

    # -- on the executors, or for a small batch in the driver ----------------------------------

    @abstractmethod
    def beginTransaction(self, branch_id: BranchId) -> HandleT:
        """Open a branch; called once per task, at its first row.

        Of a small batch the driver is the task, and calls it before there are rows. If none come,
        it calls `discard`.
        """

    @abstractmethod
    def write(self, handle: HandleT, batch: pa.RecordBatch) -> None:
        """Write rows into the open branch. Called any number of times, from one thread.

        Raises:
            PrepareRejectedError: the target does not take these rows; the batch is aborted.
        """

    @abstractmethod
    def preCommit(self, handle: HandleT) -> Committable:
        """Make the branch lasting but not visible, and free the handle.

        After it returns `commit` must be able to succeed, also from another process after this one
        was killed.

        Raises:
            PrepareRejectedError: a row failed; the batch is aborted.
        """

    def idle(self, handle: HandleT) -> None:
        """Keep the handle alive while no rows come; called about once a second until some do.

        For clients that have to be polled, or servers that hang up.
        """

    def discard(self, handle: HandleT) -> None:
        """Free a handle whose task failed before `preCommit` returned. Best effort.

        It must not raise. Whatever it leaves behind in the external system is found by
        `find_branches` later.
        """

    # -- on the driver, or in any process ------------------------------------------------------

    @abstractmethod
    def commit(self, committable: Committable) -> None:
        """Make the branch visible. Idempotent: a second call changes nothing.

        What is decided is committed by the next start before it calls `validate`.

        Raises:
            CommitUnresolvedError: the outcome is unknown; the coordinator calls `commit` again.
            CommitRejectedError: the target refuses the decided branch; an operator settles it.
            PreparedBranchLostError: proven: the branch is gone and was never committed.
        """

    def commit_many(self, committables: Sequence[Committable]) -> Sequence[SparkOnceError | None]:
        """Commit all of this sink's branches of one transaction; for sinks that can do so cheaper.

        As many `commit`s, each with its own outcome: an error is returned in the branch's place
        and keeps no other branch back. By default `commit` is called for each, several at once.

        Returns:
            For each committable, in order: None when it is committed, or the error that `commit`
            would raise. The coordinator calls again with those that are a CommitUnresolvedError.
        """
        return at_once(self._outcome_of, committables)

    def _outcome_of(
        self, committable: Committable, commit: Callable[[Committable], None] | None = None
    ) -> SparkOnceError | None:
        try:
            (commit or self.commit)(committable)
        except SparkOnceError as error:
            return error
        except Exception as error:  # noqa: BLE001 - the coordinator raises it
            # An error that the sink does not name says nothing about the outcome.
            unresolved = CommitUnresolvedError(
                f"{self!r} raised {type(error).__name__} from commit: {error}",
                committable.branch_id,
            )
            unresolved.__cause__ = error
            return unresolved
        return None

    def publish(self, batch: CommittedBatch) -> None:
        """Tell readers that a batch is whole; for sinks whose branches appear one by one.

        Called on the driver once every branch of every sink is committed, and before the log knows
        it, for batches without rows too. So after a crash it is called again, maybe while a paused
        driver still calls it, and must leave the same.

        Raises:
            CommitUnresolvedError: the coordinator calls it again.
        """

    @abstractmethod
    def abort(self, branch: BranchId | Committable) -> None:
        """End a branch that is not to become visible, and free what it holds. Idempotent.

        Called for branches that no decision names, and, after every branch of a transaction is
        committed, for what `find_branches` still shows of it; so it never undoes a commit.
        A `Committable` is aborted by the identity it holds, never by "whatever has that name now".
        """

    def abort_decided(self, committable: Committable) -> None:
        """End a decided branch that an operator wants written again (`settle --as redo`).

        For sinks whose branches may be visible in part, or committed while `commit` cannot prove
        it: an error keeps the batch unresolved.

        Raises:
            CommitRejectedError: rows of it are committed, and would come twice; it says which.
        """
        self.abort(committable)

    def abort_many(self, found: Sequence[Committable]) -> Sequence[Exception | None]:
        """Abort what `find_branches` has shown, in its order; for sinks that can do so cheaper.

        As many `abort`s, each with its own outcome: one that fails keeps no other alive.

        Returns:
            For each branch, in order: None when it has ended, or the error that `abort` raised.
        """
        return [self._abort_outcome(committable) for committable in found]

    def _abort_outcome(
        self, committable: Committable, abort: Callable[[Committable], None] | None = None
    ) -> Exception | None:
        try:
            (abort or self.abort)(committable)
        except Exception as error:  # noqa: BLE001 - the coordinator says it, and tries again
            return error
        return None

    def validate(self, schema: pa.Schema) -> None:
        """Check settings, rights, server and schema; called before any data moves.

        What it stores in the sink travels to the tasks. A recovery runs without it: what `commit`
        needs belongs into the committable.

        Args:
            schema: of the rows that `write` will get.

        Raises:
            ConfigurationError: naming the setting, topic, table, column or bucket, and the fix.
        """

    def check_log(self, address: str) -> None:
        """Refuse a transaction log at this address, where its files would be among the rows.

        Raises:
            ConfigurationError: naming both places.
        """

    def diagnose(self) -> Iterable[Finding]:
        """Ask the server, without a schema, what would bite later; for `sparkonce doctor`.

        An error that it raises is shown as a finding. Rows and targets stay as they are.
        """
        return ()

    def vote(
        self,
        branch_id: BranchId,  # noqa: ARG002 - for sinks that override this
        committables: Sequence[Committable],
    ) -> Sequence[Committable]:
        """Vote over the whole batch; for sinks whose executors alone cannot promise the commit.

        Called on the driver after every task has prepared and before the decision, with the
        sink's committables of this batch (maybe none).

        Args:
            branch_id: names a branch that the driver may make for this batch.
            committables: what the tasks prepared.

        Returns:
            What the decision shall name for this sink; by default the tasks' committables.

        Raises:
            PrepareRejectedError: the batch is aborted in every sink.
        """
        return committables

    def find_branches(self, owner: Owner) -> Iterable[Committable]:  # noqa: ARG002 - optional
        """List what stands in the owner's name: open, prepared, or left over after a commit.

        The coordinator decides which of them are orphans and calls `abort` with them. A
        committable found this way holds what `abort` needs; its `batch_id` is None where the
        external system does not carry it.
        """
        return ()

    def close(self) -> None:
        """Free the connections that this process holds. The sink can be used again after it."""

    @property
    def target(self) -> str:
        """Where the rows go, without secrets, kept in every record.

        A start is refused while a record that is not finished holds branches of another target
        than the sink has now. So it names what stays, such as a topic or a table, and leaves out
        what may change, such as a server's address.
        """
        return self.kind

    @property
    def where(self) -> str:
        """`target` with the server's address as it is now, for messages."""
        return self.target

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name!r} -> {self.where}>"


AnySink: TypeAlias = "TwoPhaseCommitSink[Any]"


class OnePhaseSink(TwoPhaseCommitSink[HandleT]):
    """A sink in a database that may hold the transaction log too.

    Where it does, and the sink is the pipeline's only one, rows and record are committed in one
    transaction: by these verbs, in place of `vote`, `commit` and `publish`. What older
    starts have decided is still finished by those.
    """

    @abstractmethod
    def why_two_phases(self, why_apart: Callable[[object], str | None]) -> str | None:
        """Why a transaction of this sink cannot hold the log's write; None where it can.

        Args:
            why_apart: the log's answer for the sink's database, in a form that sinks and logs of
                one vendor share (`sparkonce.clients`); see `SharedTransactions.why_apart`.
        """

    @abstractmethod
    def prepare_one_phase(
        self, branch_id: BranchId, committables: Sequence[Committable]
    ) -> Sequence[Committable]:
        """As `vote`, and leave the transaction open in this process.

        It ends by `commit_one_phase`, by `abort`, or with its connection; the server must end it
        too, after a while, where this process stands still.

        Returns:
            The driver's one branch; nothing for a batch without rows.
        """

    @abstractmethod
    def commit_one_phase(self, committable: Committable, log_write: object) -> None:
        """Run `SharedWrite.statement` in the open transaction and commit, in one message.

        So no lock that it takes in the log waits for this process. What the tasks have left over is
        shown by `find_branches`, and aborted next.

        Raises:
            CommitUnresolvedError: it is not committed, or that is not known: the log tells.
        """


class RowSink(TwoPhaseCommitSink[HandleT]):
    """A sink for stores that take rows one by one: `write_rows` instead of `write`."""

    rows_at_once: ClassVar[int] = 1000
    """How many rows `write_rows` gets at most."""

    @abstractmethod
    def write_rows(self, handle: HandleT, rows: Sequence[Mapping[str, Any]]) -> None:
        """Write rows into the open branch, each a mapping from column to Python value.

        An instant is a `datetime` in the session's time zone, or in UTC where only Spark knows
        that zone (`GMT+8`).

        Raises:
            PrepareRejectedError: the target does not take these rows; the batch is aborted.
        """

    def write(self, handle: HandleT, batch: pa.RecordBatch) -> None:
        rows = for_python(batch)
        for start in range(0, rows.num_rows, self.rows_at_once):
            self.write_rows(handle, rows.slice(start, self.rows_at_once).to_pylist())


# -- what a sink hands over ----------------------------------------------------------------------


def check_version(committable: Committable, newest: int) -> None:
    """Refuse what a newer version of a sink has prepared: its proofs may be others.

    Raises:
        ConfigurationError: the payload's version is above `newest`.
    """
    if committable.version > newest:
        raise ConfigurationError(
            f"{committable.branch_id}: written by a newer sparkonce (payload version "
            f"{committable.version}, this one knows {newest}): use that one"
        )


def written_by_spark(target: str, other: str) -> ConfigurationError:
    """The refusal of a target with that folder: Spark's readers would see none of our files.

    Args:
        target: the sink's class, and where it writes.
        other: what to give in the place of it.
    """
    return ConfigurationError(
        f"{target} was written by Spark's file sink: Spark's readers of it see only the files that "
        f"{SPARK_METADATA} names, and no row of this sink. Give {other}. Or first remove the files "
        "that it does not name, since some are of failed attempts, and then "
        f"{SPARK_METADATA} itself"
    )


def check_committable(sink: AnySink, committable: object, branch_id: BranchId) -> Committable:
    """What `preCommit` or `vote` returned, as it comes out of a decision again.

    JSON turns numbers among a dictionary's keys into text, and tuples into lists.

    Args:
        sink: whose it is.
        committable: as it came back.
        branch_id: of the task, or of the driver where `vote` returned it.

    Raises:
        ProtocolError: it is none, or of another branch, or its payload is no JSON.
    """
    where = f"{type(sink).__name__} {sink.name!r}"
    if not isinstance(committable, Committable):
        raise ProtocolError(
            f"{where} returned {_told(committable)} where a Committable is due: end preCommit with "
            "return Committable(handle.branch_id, {…})"
        )
    found = committable.branch_id
    by_driver = branch_id.attempt == DRIVER_ATTEMPT  # it passes the tasks' on, or makes its own
    wanted = branch_id if not by_driver else replace(branch_id, attempt=found.attempt)
    if found != wanted:
        raise ProtocolError(
            f"{where} returned a committable of another branch, {found}, for {branch_id}: "
            "keep the branch id of beginTransaction in the handle, and put that one in"
        )
    try:
        payload = json.loads(json.dumps(dict(committable.payload), allow_nan=False))
    except (TypeError, ValueError) as error:
        raise ProtocolError(
            f"{where}: the payload of {found} is not JSON ({_not_json(committable.payload)}"
            f"{error}): put text, numbers, lists and dictionaries in, or make it a Payload "
            "(sparkonce.sinks), which also holds bytes"
        ) from error
    return replace(committable, payload=payload)


def _not_json(payload: Mapping[str, Any]) -> str:
    for key, value in payload.items():
        try:
            json.dumps(value, allow_nan=False)
        except (TypeError, ValueError):
            return f"{key!r} holds {_told(value)}; "
    return ""


def _told(value: object) -> str:
    return "None" if value is None else f"a {type(value).__name__}"


def _takes_committables(
    commit: Callable[[Any, Committable], None],
) -> Callable[[Any, Committable], None]:
    @functools.wraps(commit)
    def checked(self: Any, committable: Committable) -> None:
        if not isinstance(committable, Committable):
            raise ProtocolError(
                f"commit of {type(self).__name__} got {_told(committable)}: call preCommit(handle) "
                "first, and commit what it returns"
            )
        commit(self, committable)

    return checked
