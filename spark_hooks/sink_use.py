"""Which driver uses a sink's object: one at a time, since it keeps connections and schemas."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import TypeAlias

from sparkonce.errors import ConfigurationError
from sparkonce.sinks.base import AnySink
from sparkonce.spark_hooks.running_query import RunningQuery

logger = logging.getLogger("sparkonce")

User: TypeAlias = tuple[str, int]
"""A query's id, and the token of the driver."""


def check_are_free(sinks: Iterable[AnySink], query: RunningQuery) -> None:
    """Refuse a sink that another running query uses: the sink keeps what `validate` found.

    Raises:
        ConfigurationError: naming the sink.
    """
    for sink in sinks:
        other = query.run.query_id if sink.used_by is None else sink.used_by[0]
        if other != query.run.query_id and query.is_running(other):
            raise ConfigurationError(
                f"{sink!r} is in use by the query {other}, which is running: make a sink for "
                "each pipeline"
            )


def take(sinks: Iterable[AnySink], query: RunningQuery, token: int) -> User:
    """Note that the driver with this token uses the sinks from now on."""
    user = query.run.query_id, token
    for sink in sinks:
        sink.used_by = user
    return user


def free(sinks: Iterable[AnySink], user: User) -> None:
    """Close what the sinks hold open for a fenced driver: only its own process can."""
    for sink in sinks:
        if sink.used_by != user:
            continue  # another driver of this process uses it
        try:
            sink.close()
        except Exception:
            logger.warning("%r could not be closed", sink, exc_info=True)
