"""The optional abilities of a sink; each is an abstract mixin.

    class ShopSink(TwoPhaseCommitSink[Handle], FindsBranches, Publishes): ...

| mixin | verb | the driver calls it | without it |
|---|---|---|---|
| `Votes` | `vote` | after every task has prepared | the tasks' committables are decided |
| `CommitsMany` | `commit_many` | instead of each `commit` | each `commit`, in threads |
| `AbortsMany` | `abort_many` | instead of each `abort` of a sweep | each `abort`, in order |
| `AbortsDecided` | `abort_decided` | when an operator wants a rewrite | `abort` |
| `Publishes` | `publish` | after every branch of every sink is committed | nothing |
| `FindsBranches` | `find_branches` | after each start and batch | left-over branches stay |
| `ForgetsProofs` | `forget_proofs` | when the log drops old records | proofs stay |
| `TakesBack` | `find_delivered`, `take_back` | never; `savepoint rewind` does | its rows stay |
| `CommitsOnePhase` | three verbs | where the sink's database holds the log | two phases |
| `ChecksLog` | `check_log` | before it opens the log | every log is accepted |
| `ChecksOthers` | `check_others` | after every sink is validated | every other sink is accepted |
| `Diagnoses` | `diagnose`, `room_for_tasks` | in `sparkonce doctor` | the doctor asks nothing |
| `NamesDatasets` | `dataset` | never; `OpenLineage` does | `target` is the name in lineage |

`sparkonce.sinks.verbs` calls these verbs and holds the defaults. Only the choice of a decider and
an operator's rulings look for a mixin themselves.
A sink that defines a verb without its mixin is refused when its class is created.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import ClassVar, Final, NamedTuple

from sparkonce.datasets import Dataset
from sparkonce.errors import ProtocolError, SparkOnceError
from sparkonce.finding import Finding
from sparkonce.model import BranchId, Committable, CommittedBatch, Owner


class Votes(ABC):
    """A sink whose tasks cannot promise on their own that `commit` will succeed."""

    @abstractmethod
    def vote(
        self, branch_id: BranchId, committables: Sequence[Committable]
    ) -> Sequence[Committable]:
        """Vote on the whole batch.

        The driver calls it after every task has prepared and before the decision.

        Args:
            branch_id: names a branch that the driver may make for this batch.
            committables: what the sink's tasks prepared; may be empty.

        Returns:
            What the decision names for this sink: `committables`, or the driver's own branch.

        Raises:
            PrepareRejectedError: the batch is aborted in every sink.
        """


class CommitsMany(ABC):
    """A sink for which committing many branches together is cheaper than one by one."""

    @abstractmethod
    def commit_many(self, committables: Sequence[Committable]) -> Sequence[SparkOnceError | None]:
        """Commit all of this sink's branches of one transaction.

        Each branch has its own outcome: return an error in the branch's place, and do not let it
        delay another branch.

        Returns:
            For each committable, in order: None when it is committed, or the error that `commit`
            would raise. The driver calls again for those with a CommitUnresolvedError.
        """


class AbortsMany(ABC):
    """A sink for which aborting many left-over branches together is cheaper than one by one."""

    @abstractmethod
    def abort_many(self, found: Sequence[Committable]) -> Sequence[Exception | None]:
        """Abort what `find_branches` listed, in its order.

        Each branch has its own outcome: the failure of one must not keep another from its abort.

        Returns:
            For each branch, in order: None when it is aborted, or the error that `abort` raised.
        """


class AbortsDecided(ABC):
    """A sink with branches that may be partly visible, or committed without a proof.

    Without it `settle --as redo` aborts the branch. That says nothing of an earlier commit: unless
    the sink proves that one, the operator's ruling counts.
    """

    @abstractmethod
    def abort_decided(self, committable: Committable) -> None:
        """Abort a decided branch that an operator wants rewritten (`settle --as redo`).

        An error keeps the batch unresolved.

        Raises:
            CommitRejectedError: some of its rows are committed, and a rewrite would duplicate
                them; the message says which.
        """


class Publishes(ABC):
    """A sink whose branches appear one by one, and whose readers can learn when all are there."""

    @abstractmethod
    def publish(self, batch: CommittedBatch) -> None:
        """Show readers that a batch is complete.

        The driver calls it when every branch of every sink is committed, also for batches without
        rows, and before the log records that. So it is called again after a crash, perhaps while a
        paused driver still runs it, and must leave the same result.

        Raises:
            CommitUnresolvedError: the driver calls it again.
        """


class FindsBranches(ABC):
    """A sink that can list branches that are open, prepared or left over.

    Attributes:
        lists_uncommitted_only: True if `find_branches` never lists a committable that was once
            committed. If it lists one of a complete batch nevertheless, the server went back in
            time, and the sweep commits the branch again instead of aborting it.
    """

    lists_uncommitted_only: ClassVar[bool] = False

    @abstractmethod
    def find_branches(self, owner: Owner) -> Iterable[Committable]:
        """List what the owner has: prepared, left over of a commit, and open if it can be listed.

        The driver decides which of them are orphans and aborts those. A committable found this way
        holds what `abort` needs; its `batch_id` is None where the external system does not carry
        it.
        """


class ForgetsProofs(ABC):
    """A sink whose proofs of commits are of use to nobody once the log has dropped the records."""

    @abstractmethod
    def forget_proofs(self, owner: Owner, below: int) -> None:
        """Remove the owner's proofs of all batches below `below`, and nothing else.

        The driver calls it now and then, after the log has dropped the records of those batches:
        by default, when 10,000 newer ones are complete. An error is logged, and a later call has a
        higher `below`.

        A driver that was frozen in a commit since then may still continue it. Do not inherit this
        if only the proof would keep it from showing the rows again, as in a store that knows
        batches by a key. If a commit also consumes the prepared branch, the late one finds neither
        and fails.
        """


class Delivered(NamedTuple):
    """A committed branch, and how many rows the transaction log says that it has."""

    committable: Committable
    rows: int


class Visible(NamedTuple):
    """What the target has of a branch: rows, and the files or objects that hold nothing else."""

    rows: int
    names: tuple[str, ...] = ()


class TakesBack(ABC):
    """A sink that can remove committed branches again, and prove that only their rows go.

    `sparkonce savepoint rewind` calls the verbs, in any process, for a sink that was never
    validated. No driver commits such a branch any more, but a paused one may still try: it must
    not show the rows again.
    """

    @abstractmethod
    def find_delivered(self, branches: Sequence[Delivered]) -> Sequence[Visible]:
        """Look for each branch, and change nothing.

        Returns:
            For each branch, in order, what the target has of it; no rows if it is gone.

        Raises:
            TakeBackRefusedError: the branch's rows cannot be distinguished from others, or were
                changed.
            SinkError: the target cannot be asked now.
        """

    @abstractmethod
    def take_back(self, branches: Sequence[Delivered]) -> None:
        """Remove the rows of the branches. Idempotent: a branch that is gone stays so.

        Raises:
            TakeBackRefusedError: a branch has other rows than `Delivered.rows`; those stay.
            SinkError: call it again.
        """


class CommitsOnePhase(ABC):
    """A sink in a database that may also hold the transaction log.

    If it does, and the sink is the pipeline's only one, these verbs replace `vote` and `commit` and
    commit rows and record in one transaction. `commit` still finishes what earlier starts decided.
    """

    @abstractmethod
    def why_two_phases(self, why_apart: Callable[[object], str | None]) -> str | None:
        """Return why this sink's transaction cannot include the log's write; None if it can.

        Args:
            why_apart: the log's answer for the sink's database, in a form that sinks and logs of
                one vendor share (`sparkonce.clients`); see `SharedTransactions.why_apart`.
        """

    @abstractmethod
    def prepare_one_phase(
        self, branch_id: BranchId, committables: Sequence[Committable]
    ) -> Sequence[Committable]:
        """As `Votes.vote`, but leave the transaction open in this process.

        `commit_one_phase`, `abort` or the loss of its connection ends the transaction. If this
        process is paused, the server must also end it, after some time.

        Returns:
            The driver's one branch; nothing for a batch without rows.
        """

    @abstractmethod
    def commit_one_phase(self, committable: Committable, log_write: object) -> None:
        """Run `SharedWrite.statement` in the open transaction and commit, in one message.

        One message, so that the transaction never holds a lock in the log while it waits for this
        process. `find_branches` lists what the tasks left over; the sweep aborts that next.

        Raises:
            CommitUnresolvedError: it did not commit, or the outcome is unknown: read the log.
        """


class ChecksLog(ABC):
    """A sink whose target could also contain a transaction log's files."""

    @abstractmethod
    def check_log(self, address: str) -> None:
        """Refuse a transaction log at this address if its files would be among the rows.

        Raises:
            ConfigurationError: naming both places.
        """


class ChecksOthers(ABC):
    """A sink that some other sink of the same pipeline could not be committed with."""

    @abstractmethod
    def check_others(self, others: Sequence[object]) -> None:
        """Refuse another sink of the pipeline; called when all of them are validated.

        Args:
            others: the pipeline's other sinks.

        Raises:
            ConfigurationError: naming both.
        """


class Diagnoses(ABC):
    """A sink that can find problems before a query does."""

    @abstractmethod
    def diagnose(self) -> Iterable[Finding]:
        """Check, without a schema, what could fail later; for `sparkonce doctor`.

        The doctor shows an error that it raises as a finding. It must change neither rows nor
        targets.
        """

    def room_for_tasks(self) -> int | None:
        """Count the tasks that the server would let connect now; None if there is no limit.

        A start on a cluster, and the doctor, warn if the executors have more cores than that.
        """
        return None


class NamesDatasets(ABC):
    """A sink whose target has a name by OpenLineage's conventions."""

    @abstractmethod
    def dataset(self) -> Dataset:
        """Name the target as every other job names it that reads or writes it.

        Called in the driver, in a thread of its own that no batch waits for, perhaps before
        `validate`. It may ask a server, over a connection of its own. After an error the sink has
        its default name in this event, and the next event asks again.
        """


_OWNERS: Final = {
    "vote": Votes,
    "commit_many": CommitsMany,
    "abort_many": AbortsMany,
    "abort_decided": AbortsDecided,
    "publish": Publishes,
    "find_branches": FindsBranches,
    "lists_uncommitted_only": FindsBranches,
    "forget_proofs": ForgetsProofs,
    "find_delivered": TakesBack,
    "take_back": TakesBack,
    "why_two_phases": CommitsOnePhase,
    "prepare_one_phase": CommitsOnePhase,
    "commit_one_phase": CommitsOnePhase,
    "check_log": ChecksLog,
    "check_others": ChecksOthers,
    "diagnose": Diagnoses,
    "room_for_tasks": Diagnoses,
    "dataset": NamesDatasets,
}


def check_capabilities(sink: type) -> None:
    """Refuse a sink class that defines a verb without its mixin: nothing would call it.

    Raises:
        ProtocolError: naming the verb and the mixin.
    """
    for verb, mixin in _OWNERS.items():
        if hasattr(sink, verb) and not issubclass(sink, mixin):
            raise ProtocolError(
                f"{sink.__name__} defines {verb} but is no {mixin.__name__}, so nothing would use "
                f"it: let the class also inherit {mixin.__name__} (from sparkonce.sinks)"
            )
