"""Which settings for writing go together, and what follows from those that are left out."""

from __future__ import annotations

import re
from typing import Any

import pytest
from psycopg import errors as pg

from sparkonce.errors import ConfigurationError
from sparkonce.sinks import PostgresSink
from sparkonce.sinks.postgres.server.advice import next_step
from sparkonce.sinks.postgres.server.sql import Timeouts
from sparkonce.sinks.postgres.target.writing import Writing

DSN = "postgresql://localhost/shop"


@pytest.mark.parametrize(
    ("settings", "mode"),
    [
        ({}, "append"),
        ({"key": ["id"]}, "upsert"),
        ({"key": ["id"], "order_by": "at", "update": ["a"]}, "upsert"),
        ({"key": ["id"], "delete": "gone"}, "merge"),
        ({"key": ["id"], "write": "ignore"}, "ignore"),
    ],
)
def test_mode_follows_from_the_other_settings(settings: dict[str, Any], mode: str) -> None:
    nothing = dict.fromkeys(("write", "key", "update", "order_by", "delete"))
    assert Writing.of("postgres", **{**nothing, **settings}).mode == mode


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"write": "replace"}, "write='replace' must be one of 'append', 'ignore'"),
        ({"write": "upsert"}, "'upsert' needs key="),
        ({"write": "ignore"}, "'ignore' needs key="),
        ({"write": "merge", "key": ["id"]}, "'merge' needs delete="),
        ({"write": "append", "key": ["id"]}, r"key=\['id'\] has no meaning for write='append'"),
        ({"order_by": "at"}, "order_by='at' has no meaning for write='append'; it goes with key="),
        ({"delete": "gone"}, "delete='gone' has no meaning for write='append'"),
        ({"write": "upsert", "key": ["id"], "delete": "gone"}, "delete='gone' has no meaning"),
        ({"write": "ignore", "key": ["id"], "update": ["a"]}, "update=.* has no meaning"),
        ({"key": ""}, r"key=\[''\] must be a list"),
        ({"key": ["id"], "update": "a"}, "update='a' must be a list"),
        ({"key": []}, r"key=\[\] must be a list"),
        ({"key": ["id"], "update": []}, r"update=\[\] must be a list"),
        ({"key": ["id"], "update": ["a", "a"]}, "different columns"),
        ({"key": ["id"], "update": ["id"]}, "update= names 'id', which is part of key="),
        ({"key": ["id"], "delete": " "}, "delete=' ' must be a boolean column or a condition"),
        ({"create": "always"}, "create='always' must be"),
    ],
)
def test_settings_that_do_not_go_together(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        PostgresSink(DSN, table="orders", **settings)


@pytest.mark.parametrize("setting", ["lock_timeout_s", "statement_timeout_s"])
@pytest.mark.parametrize("seconds", [0, -1, 0.0001, 3_000_000, float("inf"), float("nan")])
def test_timeout_that_no_server_takes(setting: Any, seconds: float) -> None:
    with pytest.raises(ConfigurationError, match=f"{setting}={seconds} .*0.001 to 2147483 seconds"):
        PostgresSink(DSN, table="orders", **{setting: seconds})


@pytest.mark.parametrize(
    ("limit_s", "told"),
    [
        (600.0, "statement_timeout_s=600.*or somebody canceled it"),
        (0.0, r"^ \(somebody canceled it"),
    ],
)
def test_statement_that_was_canceled(limit_s: float, told: str) -> None:
    """A timeout and pg_cancel_backend look alike; a limit that is off was not reached."""
    assert re.search(told, next_step(pg.QueryCanceled(), Timeouts(30.0, limit_s)))
