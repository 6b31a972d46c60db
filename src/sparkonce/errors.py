"""Every error of sparkonce, by what the caller must do next.

    SparkOnceError
    ├── ConfigurationError            fix the settings; no new rows are visible
    ├── ProtocolError                 fix the calling code: a verb out of order
    ├── BatchInterruptedError         start again: Spark lost executors while it wrote the batch
    ├── SavepointError                the savepoint cannot be made or used; the error says why
    ├── FencedError                   stop and touch nothing: a newer driver owns the pipeline
    ├── SinkError(branch_id)
    │   ├── SinkUnavailableError      try again: the target cannot be reached now
    │   ├── PrepareRejectedError      abort the batch
    │   ├── CommitUnresolvedError     commit again: it may or may not have landed
    │   ├── CommitRejectedError       `sparkonce settle`: decided, and the target refuses it
    │   ├── PreparedBranchLostError   rewrite from the replay, or `sparkonce settle`
    │   └── TakeBackRefusedError      `savepoint rewind`: not exactly the branch's rows are there
    └── LogError
        ├── DecisionUnknownError      read the log again
        ├── LogUnavailableError       retry: this call wrote nothing
        └── LogCorruptError           an operator restores the log

Each error pickles (an executor's error reaches the driver), names what is at fault and the next
step, and never holds a secret.
"""

from __future__ import annotations

from sparkonce.model import BranchId

__all__ = [
    "BatchInterruptedError",
    "CommitRejectedError",
    "CommitUnresolvedError",
    "ConfigurationError",
    "DecisionUnknownError",
    "FencedError",
    "LogCorruptError",
    "LogError",
    "LogUnavailableError",
    "PrepareRejectedError",
    "PreparedBranchLostError",
    "ProtocolError",
    "SavepointError",
    "SinkError",
    "SinkUnavailableError",
    "SparkOnceError",
    "TakeBackRefusedError",
]


def settle_command(branch_id: BranchId, ruling: str = "committed|aborted|redo") -> str:
    """The command that an operator runs to settle the branch; see docs/howto/in-doubt.md."""
    batch_id, branch = branch_id.batch_id, branch_id.short
    return f"`sparkonce settle JOB {batch_id} --branch {branch} --as {ruling}`"


class SparkOnceError(Exception):
    """Base of all errors that sparkonce raises."""


class ConfigurationError(SparkOnceError):
    """A setting, a schema or a server cannot work. No new rows are visible; fix it, start again."""


class ProtocolError(SparkOnceError):
    """A verb was called out of order, or a sink broke its contract. Fix the calling code."""


class BatchInterruptedError(SparkOnceError):
    """Spark lost executors, or rows that they kept, while a batch was written.

    Nothing of that write becomes visible. The batch was written again several times, with the same
    result; the query's next start replays it.
    """


class SavepointError(SparkOnceError):
    """A savepoint cannot be made, read or used. The query and its sinks are unchanged."""


class FencedError(SparkOnceError):
    """A newer incarnation owns the pipeline. Stop; write nothing more."""


class SinkError(SparkOnceError):
    """Something went wrong with one branch, or with the sink as a whole.

    Attributes:
        branch_id: the branch; None when the error concerns the whole sink.
    """

    def __init__(self, message: str, branch_id: BranchId | None = None) -> None:
        super().__init__(message)
        self.branch_id = branch_id

    def __reduce__(self) -> tuple[type[SinkError], tuple[str, BranchId | None]]:
        return type(self), (str(self), self.branch_id)


class SinkUnavailableError(SinkError):
    """The target cannot be reached now, and nothing was written. Try again."""


class PrepareRejectedError(SinkError):
    """The target does not take these rows now. An undecided batch is aborted in every sink.

    A decided batch, whose lost branches were being rewritten, stays decided.
    """


class CommitUnresolvedError(SinkError):
    """The commit may or may not have landed. Call `commit` again."""


class CommitRejectedError(SinkError):
    """The batch is decided and its target refuses it for good. See `sparkonce settle`."""


class PreparedBranchLostError(SinkError):
    """A decided branch is proven to be gone from its external system without being committed."""


class TakeBackRefusedError(SinkError):
    """A sink cannot prove that it would remove exactly a committed branch's rows; it removes none.

    Only `sparkonce savepoint rewind` meets it. Do what the message says, or keep the sink's rows.
    """


class LogError(SparkOnceError):
    """Something went wrong with the transaction log."""


class DecisionUnknownError(LogError):
    """The write may or may not have landed. Read the log again: only the log says what holds."""


class LogUnavailableError(LogError):
    """The log cannot be reached; this call wrote nothing. Try again."""


class LogCorruptError(LogError):
    """A record is not what was written. Nothing is guessed: an operator restores the log."""
