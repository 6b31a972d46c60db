"""The transaction log; `open_log` opens the one that ``log=`` names."""

from __future__ import annotations

from sparkonce.txn_log.base import TransactionLog
from sparkonce.txn_log.moving import copy
from sparkonce.txn_log.opening import IN_CHECKPOINT, checkpoint_log, open_log, without_making

__all__ = [
    "IN_CHECKPOINT",
    "TransactionLog",
    "checkpoint_log",
    "copy",
    "open_log",
    "without_making",
]
