"""The error messages of the identity guard: what failed, why, and the next step.

`sparkonce.txn_log.identity` decides; each function here makes the error of one refusal. In every
message, "pass adopt=…" and "pass replaces=…" name arguments of `ExactlyOnce`.
"""

from __future__ import annotations

from typing import Final

from sparkonce.errors import ConfigurationError, FencedError
from sparkonce.txn_log.claim import RESTORING, Claim, Known
from sparkonce.txn_log.record import Head, Share, State, TransactionRecord

_IF_LOST: Final = (
    "If that checkpoint is lost, restore a savepoint of it, or rewind to one (`sparkonce "
    "savepoint`). Without one, a new one must begin right after the last delivered batch: run "
    "`sparkonce recover JOB`, which delivers what is decided; then `sparkonce log list JOB` shows "
    "the last batch that is complete or settled, and `sparkonce log show JOB BATCH` its source "
    "offsets. If the new checkpoint begins earlier, delivered rows would be written again."
)

MOVED_FROM: Final = "moved from "
CHANGED_STATE: Final = "changed state"

_ADOPT_FORMS: Final = (
    'adopt="batch 12" (the checkpoint is at batch 12, and every batch below is delivered), '
    'adopt="0123456789abcdef" (the id of a lost transaction log), '
    f'adopt="{MOVED_FROM}/old/checkpoint" (a checkpoint that was moved with the log inside it), or '
    f'adopt="{CHANGED_STATE}" (the state of other aggregates is right for the query)'
)


def unknown_form(form: object) -> ConfigurationError:
    """adopt= has an unknown form."""
    return ConfigurationError(
        f"adopt={form!r} is unknown: pass one of these forms, or a list of them: {_ADOPT_FORMS}"
    )


# -- another driver --------------------------------------------------------------------------------


def overtaken(claim: Claim, head: Head | None) -> FencedError:
    """The run had a token before, and another run has taken the next one."""
    return FencedError(
        f"pipeline {claim.pipeline!r} was taken over by {_holder(head)} while the run "
        f"{claim.run_id} was paused: let that driver run, or stop it and start this query again"
    )


def late(claim: Claim, head: Head) -> FencedError:
    """Another run has taken a token since this one looked at the log."""
    return FencedError(
        f"{_holder(head)} took a fencing token of pipeline {claim.pipeline!r} after the run "
        f"{claim.run_id} had looked at the log and before it had a token of its own. This run is "
        "the older one: it takes no token and has written nothing. Let that driver run, or stop "
        "it and start this query again (if this is an operator's command, run it again)"
    )


def not_needed(claim: Claim, head: Head) -> FencedError:
    """Another object already holds the token of the run that this one was about to recover."""
    return FencedError(
        f"another ExactlyOnce of this process already holds token {head.token} for the run "
        f"{claim.run_id} of pipeline {claim.pipeline!r}, and recovers it: there is nothing to do"
    )


def _holder(head: Head | None) -> str:
    return "an unknown driver" if head is None else f"{head.driver} (run {head.run_id})"


# -- the wrong log, checkpoint or name -------------------------------------------------------------


def other_log(claim: Claim, known: Known) -> ConfigurationError:
    """The checkpoint names another transaction log."""
    if claim.checkpoint_log_id == RESTORING:
        return ConfigurationError(
            f"a savepoint is being restored into the checkpoint {claim.checkpoint}, or that was "
            "interrupted: run the same `sparkonce savepoint` command again (restore, fork or "
            "rewind), into an empty folder if this start has written into this one"
        )
    return ConfigurationError(
        f"the checkpoint {claim.checkpoint} belongs to the transaction log with id "
        f"{claim.checkpoint_log_id}, but log= is {known.log} with id {known.log_id}. Without its "
        "own log, batches that are already delivered would be written again. Point log= to the "
        "first log (a relative path depends on the working directory), or, if that log is lost, "
        f'pass adopt="{claim.checkpoint_log_id}" if {_you_know(claim)}.'
    )


def other_name(claim: Claim) -> ConfigurationError:
    """The checkpoint names another pipeline."""
    return ConfigurationError(
        f"the checkpoint {claim.checkpoint} belongs to the pipeline {claim.checkpoint_pipeline!r}, "
        f"not to {claim.pipeline!r}: keep the old name. A query has one pipeline, which can give "
        "each sink rows of its own with transform=. A fresh checkpoint under the new name would "
        "read the sources from their start, and delivered rows would be written again."
    )


def copied_or_moved(claim: Claim, head: Head) -> ConfigurationError:
    """The log is inside the checkpoint, and both have another location than at the last run."""
    return ConfigurationError(
        f"the checkpoint {claim.checkpoint}, with the transaction log of pipeline "
        f"{claim.pipeline!r} inside it, is a copy, or was moved: its last run used it at "
        f"{head.checkpoint}. If both places were run, their branches would have equal names, and "
        "each would overwrite or abort what the other has written. No driver was fenced. Start the "
        f"query at {head.checkpoint}. If the checkpoint was moved, and the old place is never run "
        f'again (delete it first), pass adopt="{MOVED_FROM}{head.checkpoint}". To run both, give '
        "the copy a new checkpoint and targets of its own."
    )


def namesake(claim: Claim) -> ConfigurationError:
    """Another pipeline of the log has the same query id."""
    return ConfigurationError(
        f"the checkpoint {claim.checkpoint} has the query id of the pipeline {claim.namesake!r}: "
        "it is a copy of that pipeline's checkpoint, or the same one. The branches of the two "
        "would have equal names in every system, and each would overwrite or abort what the other "
        f"has written. Give {claim.pipeline!r} a new checkpoint that begins right after the last "
        "delivered batch; or, if both continue from copies of an old checkpoint, a transaction "
        f"log of its own. If {claim.namesake!r} never delivered anything, start under that name"
    )


def fresh_checkpoint(claim: Claim, head: Head) -> ConfigurationError:
    """The pipeline is bound to another query."""
    return ConfigurationError(
        f"the pipeline {claim.pipeline!r} is bound to the checkpoint of query {head.query_id}, "
        f"but {claim.checkpoint} is of query {claim.query_id}. A fresh checkpoint reads its "
        "sources from the start, so delivered rows would be written again. Use the old checkpoint. "
        f'{_IF_LOST} Pass replaces="{head.query_id}" only for one that begins right after that '
        "batch, and never for a full refresh. Use another name only for a job with targets of its "
        "own."
    )


def rewound(claim: Claim, head: Head) -> ConfigurationError:
    """A savepoint was restored, or rewound to; replaces= cannot bring the query back."""
    return ConfigurationError(
        f"the checkpoint {claim.checkpoint} never runs again: a savepoint was restored, or rewound "
        f"to, and {claim.pipeline!r} goes on after batch {head.rewound[claim.query_id]} of it as "
        f"the query of {head.checkpoint}. Start that one; if the command was interrupted, run it "
        "again first"
    )


def rewinding(head: Head) -> ConfigurationError:
    """Some sinks have given the later rows back, and others have not."""
    return ConfigurationError(
        f"a rewind of {head.pipeline!r} to the savepoint {head.rewinding_to} has not ended: run "
        "the same `sparkonce savepoint rewind` command again"
    )


def prepared_by_replaced(record: TransactionRecord) -> ConfigurationError:
    """Only the checkpoint that is being replaced shows whether the batch commits."""
    return ConfigurationError(
        f"{record.id} is prepared, and only its own checkpoint shows whether it commits: start "
        "once with that checkpoint, then with the new one; or finish the batch without Spark: "
        "sparkonce recover JOB --checkpoint LOCATION. If that checkpoint is lost, add "
        f"--abandon {record.id.batch_id}: the batch is then in no sink, and the new checkpoint "
        "must read its rows"
    )


def log_lost_its_records(claim: Claim, known: Known) -> ConfigurationError:
    """The checkpoint ran with this log, which does not know the pipeline."""
    return ConfigurationError(
        f"{_unknown_here(claim, known)}, though it ran with this log: the log's records are lost. "
        "Restore the log from a copy that has the newest batch (docs/reference/errors/log.md, "
        f'Restore a log), or pass adopt="batch {claim.batch_id}" if {_you_know(claim)}.'
    )


def ran_without_a_log(claim: Claim, known: Known) -> ConfigurationError:
    """The checkpoint has batches that no log knows."""
    return ConfigurationError(
        f"{_unknown_here(claim, known)}. If it ran with another log, point log= to that one. If it "
        f'ran without sparkonce until now, pass adopt="batch {claim.batch_id}" if '
        f"{_you_know(claim)} (docs/howto/adopting.md)."
    )


def _unknown_here(claim: Claim, known: Known) -> str:
    return (
        f"the checkpoint {claim.checkpoint} is at batch {claim.batch_id}, and the transaction log "
        f"{known.log} has no record of its batches"
    )


# -- sinks -----------------------------------------------------------------------------------------


def sink_is_missing(
    claim: Claim, record: TransactionRecord, name: str, share: Share
) -> ConfigurationError:
    """An unfinished batch has branches in a sink that the pipeline lacks, or has elsewhere."""
    now = claim.sinks.get(name, "not among the pipeline's sinks")
    return ConfigurationError(
        f"{record.id} is {record.state} and not finished. It has branches of the sink {name!r} in "
        f"{share.target}, but that sink is now {now}. Start once with the old sinks and let the "
        "batch finish, or pass the old sink in removed=[…]."
    )


# -- batches ---------------------------------------------------------------------------------------


def not_begun(claim: Claim, record: TransactionRecord) -> ConfigurationError:
    """The checkpoint is older than what is prepared."""
    batch_id = record.id.batch_id
    return ConfigurationError(
        f"{record.id} is prepared, and the checkpoint {claim.checkpoint}, which is at batch "
        f"{claim.batch_id}, has not begun it: it was rolled back, copied before, or lost its last "
        "files in a power cut. Only the checkpoint that has begun the batch shows whether it "
        "commits: start with that one. If it is lost, abort what is prepared, and Spark runs the "
        f"batch again: sparkonce recover JOB --abandon {batch_id}"
    )


def other_offsets(
    record: TransactionRecord, shown: tuple[str, ...], checkpoint: str
) -> ConfigurationError:
    """The batch is known with other source offsets."""
    made_again = (
        " If Spark planned that batch again because its files were deleted here, abort what is "
        "prepared of it: sparkonce recover JOB --checkpoint LOCATION"
    )
    return ConfigurationError(
        f"{record.id} was made with source offsets {list(record.offsets)}, but the checkpoint "
        f"{checkpoint} now shows {list(shown)} for it: the checkpoint was rolled back, or copied "
        "from another run. Rows would be lost or written twice. Start with the checkpoint that "
        f"wrote batch {record.id.batch_id}. {_IF_LOST}"
        f"{made_again if record.state is State.PREPARED else ''}"
    )


def rolled_back_too_far(claim: Claim, known: Known, expected: int) -> ConfigurationError:
    """The log has forgotten the batch that Spark is about to run."""
    return ConfigurationError(
        f"the checkpoint {claim.checkpoint} is at batch {claim.batch_id}, but the transaction log "
        f"{known.log} has delivered up to batch {expected - 1} and no longer remembers batch "
        f"{claim.batch_id}: the checkpoint was rolled back too far. Start with the newest "
        f"checkpoint. {_IF_LOST}"
    )


def abandoned_gap(claim: Claim, known: Known, expected: int) -> ConfigurationError:
    """Spark has moved on past a batch that was abandoned."""
    return ConfigurationError(
        f"{_gap(claim, known, expected)}it was abandoned and aborted, and Spark has moved on past "
        "it. If this log is an older copy that was restored, the sinks may have this batch and "
        "later ones: delete nothing, and put a newer copy in place (docs/reference/errors/log.md, "
        "Restore a log). Otherwise another driver's Spark has moved on, the batch is in no sink, "
        f"and adopt= does not help. Delete {_files_from(expected)} from the checkpoint, so that "
        "Spark replays the batch."
    )


def gap(claim: Claim, known: Known, expected: int) -> ConfigurationError:
    """Spark has moved on past batches that the log does not know."""
    return ConfigurationError(
        f"{_gap(claim, known, expected)}the batches between ran without it. Either this log is an "
        "older copy; or the query ran with another log; or the function returned without calling "
        "the pipeline, as with `if df.isEmpty(): return` (call it for each batch, empty ones too); "
        "or Spark's state was repartitioned offline, which adds a batch of its own without rows. "
        "Put the newest copy of the log in place, or point log= to the log that was in use; else "
        f'pass adopt="batch {claim.batch_id}" if {_you_know(claim)}. '
        f"If the log and its targets were restored to an earlier time, and nothing of batch "
        f"{expected} and the later ones is in any sink, delete {_files_from(expected)} from the "
        "checkpoint, so that Spark runs them again."
    )


def _gap(claim: Claim, known: Known, expected: int) -> str:
    return (
        f"the checkpoint {claim.checkpoint} is at batch {claim.batch_id}, but the next batch of "
        f"the transaction log {known.log} is {expected}: "
    )


def _files_from(batch_id: int) -> str:
    """The files to delete so that Spark runs the batch, and all later ones, again.

    offsets/N of the batch itself stays: without it, Spark would run the batch with other rows. An
    old snapshot of a state version would hide the new state once Spark writes that version again.
    Spark does not write a file while the hidden checksum of one with that name is left.
    """
    return (
        f"commits/{batch_id} and all later files of commits/, the files after offsets/{batch_id} "
        "of offsets/ and, of a query with state, each N.delta, N.snapshot, N.changelog and N.zip "
        f"below state/ with N above {batch_id} (on a local disk each with its hidden .crc file)"
    )


def _you_know(claim: Claim) -> str:
    return (
        f"you know that every batch below {claim.batch_id} is complete in every sink, and that "
        f"nothing of batch {claim.batch_id}, which Spark runs next, is in any"
    )
