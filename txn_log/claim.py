"""What a start claims, and what the log knows when it does; `identity` compares the two."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from sparkonce.txn_log.record import Head, TransactionRecord

RESTORING: Final = "restoring"
"""The log id in a checkpoint while a savepoint is being restored into it; no log has it."""


@dataclass(frozen=True, slots=True)
class Claim:
    """What a starting driver knows about itself and about Spark's checkpoint.

    Attributes:
        pipeline: the pipeline's name.
        query_id: of the checkpoint.
        run_id: of this run of the query.
        driver: host and process, for messages.
        sinks: targets by sink name, including sinks that get no more rows.
        batch_id: the batch that Spark is about to run.
        offsets: source offsets in the checkpoint, by batch id: of `batch_id` and, if Spark still
            has it, of the batch before.
        checkpoint: the checkpoint's location; empty if it is not known.
        checkpoint_log_id: the log id found in the checkpoint, if any.
        checkpoint_pipeline: the pipeline name found in the checkpoint, if any.
        replaces: the query id that this one takes over from.
        adopt: the user's adopt=, as `sparkonce.txn_log.identity.adopted` returns it. A form admits
            only the start that it describes, so it may stay in the settings.
        had_token: whether this run has held a token before. If so, it gets no other token once
            another run has taken one.
        has_begun: whether Spark has planned the batch in this checkpoint.
        namesake: another pipeline of the log with the same query id; see
            `TransactionLog.namesake`.
        seen_run: the run that held the pipeline when this run first looked at the log, before it
            read the checkpoint; empty if there was none; None if it did not look.
        has_batch: whether Spark has called with a batch. A start that only recovers gets no token
            if another object of the same run has one, because it would abandon that object's batch.
        is_repeated: whether an earlier try of this claim may have taken a token.
        repartitions: how many batches just before `batch_id` have only repartitioned Spark's state,
            as the checkpoint proves.
    """

    pipeline: str
    query_id: str
    run_id: str
    driver: str
    sinks: Mapping[str, str]
    batch_id: int
    offsets: Mapping[int, Sequence[str]] = field(default_factory=dict)
    checkpoint: str = ""
    checkpoint_log_id: str | None = None
    checkpoint_pipeline: str | None = None
    replaces: str | None = None
    adopt: tuple[str, ...] = ()
    had_token: bool = False
    has_begun: bool = True
    namesake: str | None = None
    seen_run: str | None = None
    has_batch: bool = True
    is_repeated: bool = False
    repartitions: int = 0


@dataclass(frozen=True, slots=True)
class Known:
    """What the log knows when a driver claims the pipeline.

    Attributes:
        log_id: the log's random id, or that of the log in which the pipeline began.
        log: the log's resolved address.
        head: of the pipeline; None when the name is new.
        newest: the record of the claimed query's highest batch, in any state.
        records: those of the claimed batch and of the batch before, by batch id, where known.
        unfinished: prepared and decided transactions of the pipeline that are not complete.
    """

    log_id: str
    log: str
    head: Head | None
    newest: TransactionRecord | None
    records: Mapping[int, TransactionRecord]
    unfinished: Sequence[TransactionRecord]
