"""What the pipeline's transaction log says, for the report and the end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sparkonce import ExactlyOnce
from sparkonce.errors import ConfigurationError
from sparkonce.facts import record
from sparkonce.txn_log import TransactionLog


def _log(pipeline: ExactlyOnce, checkpoint: str) -> TransactionLog:
    if pipeline.settings.is_log_in_checkpoint:
        pipeline.open_log_in(checkpoint)
    return pipeline.log


def check_new(pipeline: ExactlyOnce) -> None:
    """Check that no query has used the pipeline's name.

    Raises:
        ConfigurationError: one has.
    """
    if pipeline.settings.is_log_in_checkpoint or pipeline.log.head(pipeline.name) is None:
        return
    raise ConfigurationError(
        f"{pipeline.log.address} has a pipeline {pipeline.name!r} already: torture starts a new "
        "query, so give it a log of its own, such as log='checkpoint'"
    )


def unfinished(pipeline: ExactlyOnce, checkpoint: str) -> Sequence[str]:
    """Batches that are decided or prepared, and not complete."""
    found = _log(pipeline, checkpoint).unfinished(pipeline.name)
    return [f"batch {one.id.batch_id} ({one.state})" for one in found]


def record_of(pipeline: ExactlyOnce, checkpoint: str, batch: int) -> Any:
    """The batch's record as JSON; None if it has none."""
    log = _log(pipeline, checkpoint)
    for found in log.history(pipeline.name, 1, before=batch + 1):
        if found.id.batch_id == batch:
            return record(found, log.head(pipeline.name))
    return None
