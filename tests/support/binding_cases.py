"""How a checkpoint is bound to a log, on any folder."""

from __future__ import annotations

import json

import pytest

from sparkonce.errors import ConfigurationError
from sparkonce.spark_hooks.binding import (
    Binding,
    bind,
    enter,
    is_newest_entry,
    last_entry,
    read_binding,
)
from sparkonce.storage import Folder


def assert_bound_once(checkpoint: Folder) -> None:
    """Two drivers that look at the same time and bind one after the other, fresh and adopting."""
    assert read_binding(checkpoint) is None
    bind(checkpoint, None, "log-a", "orders")
    with pytest.raises(ConfigurationError, match=r"log with id log-a now, and log= has id log-b"):
        bind(checkpoint, None, "log-b", "orders")
    seen = read_binding(checkpoint)
    assert seen == Binding("log-a", "orders")
    bind(checkpoint, seen, "log-b", "orders")
    with pytest.raises(ConfigurationError, match=r"log with id log-b now, and log= has id log-c"):
        bind(checkpoint, seen, "log-c", "orders")
    assert read_binding(checkpoint) == Binding("log-b", "orders", 1)
    first = json.loads(checkpoint.read("sparkonce.json") or "")
    assert first == {"log_id": "log-b", "pipeline": "orders"}
    assert last_entry(checkpoint) is None
    first = enter(checkpoint, None, "host:1", "run-1")
    assert first is not None
    assert enter(checkpoint, None, "host:2", "run-2") is None
    assert is_newest_entry(checkpoint, first)
    second = enter(checkpoint, last_entry(checkpoint), "host:2", "run-2")
    assert second is not None
    assert is_newest_entry(checkpoint, second)
    assert not is_newest_entry(checkpoint, first)
