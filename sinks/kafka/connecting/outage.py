"""One log line when the brokers stop responding, and one when they respond again.

    responding ──first failure──► outage: one warning ──first response──► responding: one warning

Further failures of an outage are not logged, nor is an outage that begins shortly after the last
warning: if one of several brokers is down, every second request may fail.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import Final

from kafka import errors

logger = logging.getLogger("sparkonce")

NOT_AGAIN_S: Final = 60.0
"""The shortest time between two warnings that brokers do not respond."""

_NO_RESPONSE: Final = (
    errors.KafkaConnectionError,
    errors.KafkaTimeoutError,
    errors.NodeNotReadyError,
    errors.RequestTimedOutError,
    OSError,
)


class Outage:
    """Whether the brokers at `servers` respond, as the log shows it. Safe in several threads."""

    def __init__(self, servers: str) -> None:
        self._servers = servers
        self._lock = threading.Lock()
        self._began_at: float | None = None
        self._warned_at: float | None = None

    def failed(self, error: BaseException, why: str) -> None:
        """A request failed; log `why`, without secrets, if it is the first without a response."""
        if isinstance(error, _NO_RESPONSE):
            self.begins(why)

    def begins(self, why: str) -> None:
        """Brokers do not respond; log it if that is new."""
        now = time.monotonic()
        with self._lock:
            is_noted = self._began_at is not None
            is_recent = self._warned_at is not None and now - self._warned_at < NOT_AGAIN_S
            if is_noted or is_recent:
                return
            self._began_at = self._warned_at = now
        logger.warning(
            "Kafka at %s does not respond: %s. Trying again; further connection errors of this "
            "outage are not logged",
            self._servers,
            why,
        )

    def ends(self) -> None:
        """A broker responded; log it if that is new."""
        if self._began_at is None:  # without the lock: nearly every response
            return
        with self._lock:
            began_at, self._began_at = self._began_at, None
        if began_at is not None:
            lasted_s = time.monotonic() - began_at
            logger.warning("Kafka at %s responds again, after %.0f s", self._servers, lasted_s)
