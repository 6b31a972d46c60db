"""The keys of batch jobs, as the log keeps them.

All jobs of a pipeline are batches of one query without a checkpoint, whose id follows from the
pipeline's name. The key of a job stands where the source offsets of a stream stand.
"""

from __future__ import annotations

import json
import uuid
from typing import Final

from sparkonce.txn_log.record import TransactionRecord

_QUERIES: Final = uuid.UUID("6e1c5b0e-3f0b-5d0a-9d5a-2b8f3c1a7e42")


def query_of(pipeline: str) -> str:
    """The query id that stands for the batch jobs of a pipeline."""
    return str(uuid.uuid5(_QUERIES, pipeline))


def offsets_of(key: str) -> tuple[str, ...]:
    """What stands for the source offsets of the job with this key."""
    return (json.dumps({"key": key}),)


def key_of(record: TransactionRecord) -> str | None:
    """The key of a batch job; None when the record is of a stream."""
    if record.id.query_id != query_of(record.id.pipeline):
        return None
    key: str = json.loads(record.offsets[0])["key"]
    return key
