"""What the page shows: a log, its pipelines, and what the command line gave besides."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sparkonce.facts import Facts
from sparkonce.txn_log import TransactionLog

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
    settle = f"sparkonce settle {job} {batch['batch']} --branch"
    branches = [b for sink in batch["sinks"] for b in sink["branches"] if b["ruling"] is None]
    return [
        ("It will be committed in every sink. Start the query, or recover:", recover),
        *(
            (
                "The last resort, if the outcome is lost and you know it:",
                f"{settle} {branch['branch']} --as committed|aborted|redo",
            )
            for branch in branches[:1]
        ),
    ]
