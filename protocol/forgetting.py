"""Drop old records of the log now and then, and afterwards the proofs that only they needed.

A proof lives at least as long as the record of its batch: a driver that commits a branch again has
its record.
"""

from __future__ import annotations

import logging
from dataclasses import replace

from sparkonce.errors import DecisionUnknownError, LogUnavailableError
from sparkonce.protocol.lease import Lease
from sparkonce.sinks import verbs
from sparkonce.txn_log.record import TransactionRecord

logger = logging.getLogger("sparkonce")

EVERY_BATCHES = 64
"""How often this happens."""


def forget_old(done: TransactionRecord, lease: Lease) -> None:
    """Drop what is `retain` or more batches older than a complete batch; a failure only delays it.

    Raises:
        FencedError: a newer driver holds the pipeline.
    """
    pipeline, batch_id = lease.pipeline, done.id.batch_id
    if batch_id % EVERY_BATCHES:
        return
    try:
        pipeline.log.forget(done, lease.token, retain=pipeline.retain)
    except (LogUnavailableError, DecisionUnknownError):
        logger.warning("old records could not be dropped now; tried later", exc_info=True)
        return
    below = batch_id - pipeline.retain + 1
    owner = replace(lease.owner, query_id=done.id.query_id)
    for sink in pipeline.sinks.values() if below > 0 else ():
        try:
            verbs.forget_proofs(sink, owner, below)
        except Exception as error:  # noqa: BLE001 - the next call removes them
            logger.warning("%r: old proofs could not be removed now; tried later: %s", sink, error)
