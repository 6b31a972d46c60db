"""Filters for kafka-python's loggers.

    passwords and tokens  ──► never logged, not even at DEBUG
    a failed connection   ──► logged by us instead (see `outage`), unless its logger is at DEBUG

kafka-python retries a stopped broker several times a second, and logs five lines for each attempt.
Only records of our own clients are dropped: the name of their I/O thread contains our client id.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Final

from kafka.protocol.sasl import SaslAuthenticateRequest

_SENDING: Final = ("kafka.net.connection", "kafka.protocol.parser")
"""The loggers that show requests and their frames."""

_SENDS_CREDENTIALS: Final = SaslAuthenticateRequest.API_KEY.to_bytes(2, "big")
"""The key of the request that holds a password or a token."""

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
    # A logger adds a filter only if it has no equal one.
    for name in _SENDING:
        logging.getLogger(name).addFilter(_NoCredentials())
    for name in _REPEATED:
        logging.getLogger(name).addFilter(_NoConnectionErrors(client_id))


@dataclass(frozen=True)
class _NoConnectionErrors:
    """Drops warnings and errors of one client's connections."""

    client_id: str

    def filter(self, record: logging.LogRecord) -> bool:
        return (
            record.levelno < logging.WARNING
            or record.threadName != f"kafka-io-{self.client_id}"
            or _KEPT in str(record.msg)
            or logging.getLogger(record.name).isEnabledFor(logging.DEBUG)
        )


@dataclass(frozen=True)
class _NoCredentials:
    """Drops debug records that show passwords and tokens: requests and their frames."""

    def filter(self, record: logging.LogRecord) -> bool:
        args = record.args if isinstance(record.args, tuple) else ()
        return not any(self._holds_credentials(arg) for arg in args)

    def _holds_credentials(self, arg: object) -> bool:
        # A frame is its length in four bytes, then the key of its request.
        return isinstance(arg, SaslAuthenticateRequest) or (
            isinstance(arg, (bytes, bytearray)) and arg[4:6] == _SENDS_CREDENTIALS
        )
