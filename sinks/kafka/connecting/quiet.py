"""Filters for kafka-python's loggers.

    passwords and tokens  ──► never logged, not even at DEBUG
    a failed connection   ──► logged by us instead (see `outage`), unless its logger is at DEBUG

kafka-python retries a stopped broker several times a second, and logs five lines for each attempt.
Only records of our own clients are dropped: the name of their I/O thread contains our client id.
"""

from __future__ import annotations

import logging
from typing import Final

from kafka.protocol.sasl import SaslAuthenticateRequest

_REPEATED: Final = (
    "kafka.cluster",
    "kafka.net.connection",
    "kafka.net.inet",
    "kafka.net.manager",
    "kafka.net.transport",
)
"""The loggers that report a broker that does not respond."""

_KEPT: Final = "throttled by broker"
"""The one warning of these loggers that we do not report ourselves."""


def quieten(client_id: str) -> None:
    """Install the filters for the client with this id; a second call changes nothing."""
    for name in _NoCredentials.NAMES:
        logging.getLogger(name).addFilter(_no_credentials)  # once: it is always the same object
    for name in _REPEATED:
        logger = logging.getLogger(name)
        if not any(
            isinstance(f, _NoConnectionErrors) and f.client_id == client_id for f in logger.filters
        ):
            logger.addFilter(_NoConnectionErrors(client_id))


class _NoConnectionErrors(logging.Filter):
    """Drops warnings and errors of one client's connections."""

    def __init__(self, client_id: str) -> None:
        super().__init__()
        self.client_id = client_id

    def filter(self, record: logging.LogRecord) -> bool:
        return (
            record.levelno < logging.WARNING
            or record.threadName != f"kafka-io-{self.client_id}"
            or _KEPT in str(record.msg)
            or logging.getLogger(record.name).isEnabledFor(logging.DEBUG)
        )


class _NoCredentials(logging.Filter):
    """Drops debug records that show passwords and tokens: requests and their frames."""

    NAMES = ("kafka.net.connection", "kafka.protocol.parser")
    KEY = SaslAuthenticateRequest.API_KEY.to_bytes(2, "big")

    def filter(self, record: logging.LogRecord) -> bool:
        args = record.args if isinstance(record.args, tuple) else ()
        return not any(self._holds_credentials(arg) for arg in args)

    def _holds_credentials(self, arg: object) -> bool:
        # A frame is its length in four bytes, then the key of its request.
        return isinstance(arg, SaslAuthenticateRequest) or (
            isinstance(arg, (bytes, bytearray)) and arg[4:6] == self.KEY
        )


_no_credentials = _NoCredentials()
