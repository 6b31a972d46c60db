"""What every question to the brokers needs: the connection, and small helpers.

A question is an async function that gets kafka-python's client. It either returns the brokers'
answer or raises the `kafka.errors` class of what went wrong; `outcome` decides what that proves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from kafka import errors

from sparkonce.sinks.kafka.connecting.connection import Connection
from sparkonce.sinks.kafka.connecting.settings import KafkaSettings

Partitions: TypeAlias = "Mapping[str, Sequence[int]]"
"""Partition numbers by topic."""


class Questions:
    """Asks over one connection per process. Safe to use from several threads."""

    def __init__(self, settings: KafkaSettings) -> None:
        self._connection = Connection(settings)

    def close(self) -> None:
        self._connection.close()


def send(admin: Any, request: Any, node: int | None = None) -> Any:
    """Send a request to the broker `node`, or to any; await the result for the response."""
    return admin._manager.send(request, node_id=node)  # noqa: SLF001


def raise_for(code: int) -> None:
    """Raise the error with this code, unless the code is 0."""
    if code:
        raise errors.for_code(code)
