"""The contract between the protocol and a store that takes part in a transaction.

    executor   beginTransaction ─► write* ─► preCommit ─► Committable ─┐   (else: discard)
    driver     validate                vote ◄──────────────────┘ ─► commit | abort

| verb | called by | may fail | called twice |
|---|---|---|---|
| `validate` | the driver, once a run, before any data moves | yes: the query fails | yes |
| `beginTransaction` | a Spark task, or the driver (small batch) | yes: the batch is aborted | no |
| `write` | the same task, any number of times | yes: the batch is aborted | no |
| `idle` | the same task, while no rows come | yes: the batch is aborted | yes |
| `preCommit` | the same task, after its last row | yes, the last chance: as above | no |
| `discard` | the same task, after a failure, or where no row came | must not raise | no |
| `vote` | the driver, after every task has prepared | yes: the batch is aborted | no |
| `commit` | any driver, maybe days later | unresolved: repeated; lost: with proof | yes |
| `publish` | any driver, after every commit | yes: repeated | yes |
| `abort` | any driver, maybe days later | yes: a sweep repeats it | yes |
| `find_branches` | any driver, after each start and batch | yes: repeated | yes |
| `close` | the driver, at the end | yes | yes |

The verbs of one task share a handle. It never leaves its process and need not pickle.

`commit` and `abort` take durable values only, so that normal operation and recovery share one path.
They may run in another process, days later, and twice. They must be thread-safe, because they may
run at the same time for different branches. They may also run in two processes for the same branch,
because a paused driver may continue in the middle of a call after its successor has begun. A sink
that was never validated must be able to `commit`, `abort`, `find_branches` and `publish`.

A sink promises:

* after `preCommit` has returned, `commit` can succeed whatever happens to the process;
* readers see nothing before `commit`;
* `commit` and `abort` are idempotent, `abort` never undoes a commit, and after an abort a commit
  shows nothing;
* every name in the external system is made from the branch id, so that `find_branches` can
  recognise it; a name that outlives the commit, such as its proof, contains the full branch id, so
  that it is unique forever.

A sink implements five abstract methods. The optional verbs, such as `vote`, `publish` and
`find_branches`, are mixins in `sparkonce.sinks.capabilities`. docs/howto/writing-a-sink.md is the
guide, and `sparkonce.testing.SinkContract` tests a sink.

`beginTransaction`, `preCommit`, `commit` and `abort` keep their names from Apache Flink's
`TwoPhaseCommitSinkFunction`, where this protocol comes from.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeAlias, TypeVar

from sparkonce.errors import ConfigurationError
from sparkonce.model import BranchId, Committable, is_label
from sparkonce.sinks.capabilities import check_capabilities
from sparkonce.sinks.committables import takes_committables
from sparkonce.sinks.spark_sql import check_select

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame

HandleT = TypeVar("HandleT")
"""What a sink keeps open while one task writes: a producer, a connection, an upload."""

Transform: TypeAlias = "Callable[[DataFrame], DataFrame]"

Columns: TypeAlias = "Callable[[pa.Schema, str], Sequence[str]]"
"""Takes the schema of a sink's columns and the name of a struct that holds them; returns SQL."""


class TwoPhaseCommitSink(ABC, Generic[HandleT]):
    """A store that can prepare rows and then, from any process, commit or abort them.

    Spark pickles the instance to the executors: keep settings in it, and open connections in
    `beginTransaction` or at first use. Drop what does not pickle in ``__getstate__``.

    Args:
        name: the sink's permanent name in its pipeline; default: the class's `kind`. It is part of
            every name in the external system and of every record.
        select: SQL expressions that make this sink's columns from the batch's, one row from each
            row, such as ``["id", "to_json(struct(*)) AS value"]``; default: the batch's columns.
            The columns get the names that ``df.selectExpr(*select)`` gives them. Functions such as
            ``input_file_name()`` work only in the query itself. Sinks with different `select` are
            still written in one pass over the batch.
        transform: any function from DataFrame to DataFrame, applied before `select`, so that this
            sink can get other rows. It costs a snapshot of the batch and a separate pass. It is
            called several times for a batch, first to see its columns.
        writers: the number of Spark tasks that write a batch; default: one for each of its
            partitions. 1 shuffles the whole batch to one task. A higher number needs columns that
            determine which task gets a row (`distribute_by`). Alongside sinks with more tasks, it
            costs a snapshot of the batch.

    Attributes:
        why_kept: why the sink is no `TakesBack`; a message puts the class's name before it.
        columns: a function that a sink may set to turn the columns after `select` into those that
            `write` gets. Spark evaluates the SQL that it returns in the same pass. Sinks whose
            `columns` are equal share that work.
        distribute_by: a sink may name some of the columns that `write` gets, on the class or before
            it calls this constructor. Rows with equal values in them reach the same one of
            `writers` tasks, in every replay. The sink then gets a separate pass.

    Raises:
        ConfigurationError: a setting cannot work; the message names it and the fix.
        ProtocolError: the class defines an optional verb without the mixin that it belongs to.
    """

    kind: ClassVar[str] = ""
    why_kept: ClassVar[str] = "cannot take back what it has committed"
    columns: Columns | None = None
    distribute_by: tuple[str, ...] | None = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        check_capabilities(cls)
        if "commit" in cls.__dict__:
            cls.commit = takes_committables(cls.commit)  # type: ignore[method-assign,assignment]

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
                f"{type(self).__name__} has no permanent name, and every name in its target is "
                f'made from it: give the class a kind, such as kind = "redis", or pass name='
            )
        if not is_label(self.name):
            raise ConfigurationError(
                f"name={self.name!r}: a sink's name has 1 to 32 of the characters A-Z a-z 0-9 _ "
                "and -"
            )
        self.select = check_select(self.name, select)
        self.transform = transform
        self.writers = writers
        self.used_by: tuple[str, int] | None = None  # query id and token of its driver
        self._check_writers()

    def _check_writers(self) -> None:
        writers, distribute_by = self.writers, self.distribute_by
        if writers is not None and (type(writers) is not int or writers < 1):
            raise ConfigurationError(
                f"{self.name}: writers={writers!r} must be a whole number from 1, or be left out"
            )
        # Spark distributes rows in an order that a replay need not repeat. Only chosen columns
        # bring each row to the same task again.
        if writers is not None and writers > 1 and not distribute_by:
            raise ConfigurationError(
                f"{self.name}: writers={writers} needs columns that determine which task gets a "
                f"row (distribute_by), and this {type(self).__name__} has none: set writers=1, or "
                "leave it out"
            )
        if distribute_by and writers is None:
            raise ConfigurationError(
                f"{self.name}: {type(self).__name__} distributes its rows by "
                f"{list(distribute_by)}: set writers= to the number of tasks that get them"
            )

    # -- in a Spark task; for a small batch in the driver ------------------------------------------

    @abstractmethod
    def beginTransaction(self, branch_id: BranchId) -> HandleT:
        """Open a branch. A task calls it once, at its first row.

        A small batch has no tasks: the driver itself calls it, before it has rows. If none come, it
        calls `discard`.
        """

    @abstractmethod
    def write(self, handle: HandleT, batch: pa.RecordBatch) -> None:
        """Write rows into the open branch. Called any number of times, from one thread.

        Raises:
            PrepareRejectedError: the target does not take these rows; the batch is aborted.
        """

    @abstractmethod
    def preCommit(self, handle: HandleT) -> Committable:
        """Make the branch durable but not visible, and free the handle.

        After it has returned, `commit` must be able to succeed, also from another process after
        this one was killed.

        Raises:
            PrepareRejectedError: a row failed; the batch is aborted.
        """

    def idle(self, handle: HandleT) -> None:
        """Keep the handle alive; called about once a second while no rows come.

        For clients that must be polled, and servers that drop idle connections.
        """

    def discard(self, handle: HandleT) -> None:
        """Free a handle whose task failed before `preCommit` returned, or got no row. Best effort.

        It must not raise. A later `find_branches` lists what it leaves in the external system.
        """

    # -- on the driver, in any process -------------------------------------------------------------

    @abstractmethod
    def commit(self, committable: Committable) -> None:
        """Make the branch visible. Idempotent: a second call changes nothing.

        The next start commits what is decided before it calls `validate`.

        Raises:
            CommitUnresolvedError: the outcome is unknown; the driver calls `commit` again.
            CommitRejectedError: the target refuses the decided branch; an operator settles it.
            PreparedBranchLostError: proven: the branch is gone and was never committed.
        """

    @abstractmethod
    def abort(self, branch: BranchId | Committable) -> None:
        """End a branch that must not become visible, and free what it holds. Idempotent.

        The driver calls it for branches that no decision names; and, once every branch of a
        transaction is committed, for what `find_branches` still lists of it. So it must never undo
        a commit. The driver passes committables; a bare `BranchId` comes from tests and from sinks
        themselves. Abort what has the identity that the committable holds, never "whatever has
        that name now".
        """

    def validate(self, schema: pa.Schema) -> None:
        """Check settings, rights, server and schema; called before any data moves.

        Called at a run's first batch, and again before a batch with other columns than the last.
        The tasks get the sink with what this stores in it. A recovery does not call it, so `commit`
        must find all it needs in the committable.

        Args:
            schema: of the rows that `write` will get.

        Raises:
            ConfigurationError: naming the setting, topic, table, column or bucket, and the fix.
            SinkUnavailableError: the target cannot be reached now; the driver tries again.
        """

    def close(self) -> None:
        """Free the connections that this process holds. The sink can be used again afterwards."""

    @property
    def target(self) -> str:
        """Where the rows go, without secrets; every record stores it.

        A start is refused while an unfinished record has branches in another target than the
        sink's. So name what is permanent, such as a topic or a table, and leave out what may
        change, such as a server's address.
        """
        return self.kind

    @property
    def where(self) -> str:
        """`target` with the server's current address, for messages."""
        return self.target

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name!r} -> {self.where}>"


AnySink: TypeAlias = "TwoPhaseCommitSink[Any]"


def check_attributes(sink: AnySink) -> None:
    """Refuse a sink that uses a name of the contract for something of its own.

    Raises:
        ConfigurationError: naming the attribute; or the sink never called ``super().__init__``.
    """
    name = type(sink).__name__
    if not hasattr(sink, "used_by"):
        raise ConfigurationError(
            f"{name} has no name: call super().__init__(name=name) in its __init__"
        )
    for attribute, fits in _RESERVED.items():
        value = getattr(sink, attribute)
        if value is not None and not fits(value):
            raise ConfigurationError(
                f"{name}.{attribute} is {value!r}, but {attribute!r} has a meaning of its own in "
                f"TwoPhaseCommitSink: give your attribute another name, such as _{attribute}"
            )


def _is_texts(value: object) -> bool:
    return isinstance(value, tuple) and all(isinstance(text, str) for text in value)


_RESERVED: Mapping[str, Callable[[Any], bool]] = {
    "columns": callable,
    "transform": callable,
    "select": _is_texts,
    "distribute_by": _is_texts,
    "writers": lambda value: type(value) is int,
}
"""Attributes that a subclass could take for its own, and whether a value is the contract's."""
