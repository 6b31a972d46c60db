"""The branches of one batch between prepare and commit: their clocks, and which are fresh.

A branch is fresh for 30 seconds in the process that received it from its tasks. In that time nobody
finds its open transaction and aborts it manually, so `Outcome` does not examine it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from typing import Final

from sparkonce.errors import PrepareRejectedError
from sparkonce.model import BranchId
from sparkonce.sinks.kafka.branch import TIMEOUT, KafkaBranch

logger = logging.getLogger("sparkonce")

FRESH_S: Final = 30.0

_LONG_WRITE: Final = 0.5
"""A batch whose write takes more than this share of the transaction timeout gets a warning."""


def check_clocks(branches: Iterable[KafkaBranch], where: str, branch_id: BranchId) -> None:
    """Refuse a batch's branches if their timeout is unknown; warn if it is near.

    Raises:
        PrepareRejectedError: see `KafkaSink.vote`.
    """
    by_age = sorted(branches, key=lambda branch: branch.began_at)
    if not by_age:
        return
    oldest, newest = by_age[0], by_age[-1]
    if (ahead_s := newest.began_at - time.time()) > newest.margin_s:
        raise PrepareRejectedError(
            f"{where}: the transaction {newest.transactional_id} begins {ahead_s:.0f} s in the "
            "future by the driver's clock: the clocks of executors and driver differ. Keep them "
            f"within {newest.margin_s:.0f} s of each other (NTP)",
            branch_id,
        )
    took_s, timeout_s = time.time() - oldest.began_at, oldest.timeout_ms / 1000
    if took_s > timeout_s * _LONG_WRITE:
        logger.warning(
            "%s: writing batch %s took %.0f s of the %.0f s after which the brokers abort its "
            "transactions: make the batches smaller, or %s longer",
            where,
            branch_id.batch_id,
            took_s,
            timeout_s,
            TIMEOUT,
        )


class FreshBranches:
    """The branches that this process received last. They stay in their process."""

    def __init__(self) -> None:
        self._names: frozenset[str] = frozenset()
        self._began_at = 0.0
        self._received_at = 0.0

    def receive(self, branches: Iterable[KafkaBranch]) -> None:
        """Remember these branches in place of those of the previous batch."""
        found = list(branches)
        if found:
            self._names = frozenset(branch.transactional_id for branch in found)
            self._began_at = min(branch.began_at for branch in found)
            self._received_at = time.monotonic()

    @property
    def names(self) -> frozenset[str]:
        """The transactional ids that are still fresh.

        Both clocks must agree: one stops while the machine is suspended, the other may be wrong.
        """
        is_fresh = (
            abs(time.time() - self._began_at) < FRESH_S
            and time.monotonic() - self._received_at < FRESH_S
        )
        return self._names if is_fresh else frozenset()
