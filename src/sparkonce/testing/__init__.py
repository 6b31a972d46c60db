"""A pytest kit that proves sinks and transaction logs; each part is imported at its first use.

SinkContract, SinkWorld       tests of every verb of a sink; a test class inherits them
Proxy                         loses and delays requests between a sink and its server
LogContract                   the same for a transaction log
assert_exactly_once           a real streaming query, killed at every point of the protocol
crash_points, Kill            those points
sparkonce.testing.plugin      fixtures: real Kafka, Postgres and S3 servers, a Spark session
sparkonce.testing.services    the same servers, without pytest
sparkonce.testing.crash       kills a driver program at a named point
sparkonce.testing.checks      what an outsider sees in Kafka, Postgres and S3
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sparkonce.testing.exactly_once import assert_exactly_once
    from sparkonce.testing.kills import Kill, crash_points
    from sparkonce.testing.log_contract import LogContract
    from sparkonce.testing.proxy import Proxy
    from sparkonce.testing.sink_contract import SinkContract
    from sparkonce.testing.sink_world import SinkWorld

__all__ = [
    "Kill",
    "LogContract",
    "Proxy",
    "SinkContract",
    "SinkWorld",
    "assert_exactly_once",
    "crash_points",
]

_MODULES = {
    "Kill": "kills",
    "LogContract": "log_contract",
    "Proxy": "proxy",
    "SinkContract": "sink_contract",
    "SinkWorld": "sink_world",
    "assert_exactly_once": "exactly_once",
    "crash_points": "kills",
}
_PARTS = (
    "verbs",
    "faults",
    "rows",
    "branches",
    "promises",
    "network",
    "race",
    "crashes",
    "contract",
)


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name == "SinkContract" and "pytest" in sys.modules:
        # Before the import: a failing assert then shows its values, as in a test file.
        sys.modules["pytest"].register_assert_rewrite(
            *(f"sparkonce.testing.sink_{part}" for part in _PARTS)
        )
    return getattr(import_module(f"sparkonce.testing.{_MODULES[name]}"), name)
