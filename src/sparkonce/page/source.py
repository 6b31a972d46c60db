"""What the page shows: a log, its pipelines, and what the command line gave besides."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sparkonce.facts import Facts
from sparkonce.txn_log import TransactionLog
from sparkonce.words import has_passed

if TYPE_CHECKING:
    from sparkonce.spark_hooks.savepoints import Savepoints


@dataclass(frozen=True, slots=True)
class Source:
    """What one page shows.

    Attributes:
        log: the transaction log.
        names: returns the pipelines to show; a log may get new ones while the page runs.
        job: the JOB in commands that the reader copies, quoted for a shell; or the word JOB.
        doctor: returns what `sparkonce doctor` finds; it opens connections.
        savepoints: where savepoints are kept; None if no place was given.
        has_sinks: whether a JOB was given, so that the doctor asks its sinks.
    """

    log: TransactionLog
    names: Callable[[], Sequence[str]]
    job: str
    doctor: Callable[[], list[Facts]]
    savepoints: Savepoints | None = None
    has_sinks: bool = False


def ways_out(batch: Facts, job: str) -> list[tuple[str, str]]:
    """How an unfinished batch is finished: pairs of an explanation and a command."""
    recover = f"sparkonce recover {job}"
    if batch["state"] == "prepared":
        return [
            ("Spark's checkpoint decides. Start the query, or recover without Spark:", recover),
            (
                "Only if the checkpoint is lost for good, abort the batch:",
                f"{recover} --abandon {batch['batch']}",
            ),
        ]
    if batch["state"] != "decided":
        return []
    branches = [branch for sink in batch["sinks"] for branch in sink["branches"]]
    if any(branch["ruling"] for branch in branches):
        return [("Operators have ruled on it. Start the query, or recover, to finish it:", recover)]
    late = [branch["branch"] for branch in branches if has_passed(branch["safe_until"])]
    if not late:
        will = (
            "It will be committed in every sink. A driver that runs does it by itself, once each "
            "server can be reached. Otherwise start the query, or recover:"
        )
        return [(will, recover)]
    settle = f"sparkonce settle {job} {batch['batch']} --branch {late[0]} --as committed|aborted"
    may_be_lost = (
        f"A server may have dropped {late[0]}: its time has passed. Start the query, which can "
        "rewrite it. Without Spark, this commits what is still there:"
    )
    is_lost = (
        "Only if the start says that the branch is lost and cannot be rewritten, rule on it. Read "
        "Finish a batch that is in doubt or lost before you enter its rows:"
    )
    return [(may_be_lost, recover), (is_lost, settle)]
