"""Which partitions are examined: all but those that are known to hold nothing open.

The broker is a table of error codes and ends.
"""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from kafka import errors
from kafka.protocol.admin.transactions import DescribeProducersRequest

from sparkonce.sinks.kafka.finishing.open_partitions import GONE, open_producers

MOVED = errors.NotLeaderForPartitionError.errno
UNKNOWN = errors.OffsetNotAvailableError.errno


class Broker:
    """A broker of one partition, in which DescribeProducers finds an open one of producer 7.

    Args:
        end: the error code and offset that a reader of all rows gets.
        stable: the same for a reader of committed rows.
    """

    def __init__(self, end: tuple[int, int], stable: tuple[int, int]) -> None:
        self._ends = [end, stable]
        self._manager = self

    async def send(self, request: Any, *, node_id: int) -> Any:
        assert node_id == 1
        if isinstance(request, DescribeProducersRequest):
            producer = {"producer_id": 7, "coordinator_epoch": 0, "current_txn_start_offset": 3}
            found = {"error_code": 0, "active_producers": [SimpleNamespace(**producer)]}
        else:
            code, offset = self._ends[request.isolation_level]
            found = {"error_code": code, "offset": offset}
        partition = SimpleNamespace(partition_index=0, **found)
        return SimpleNamespace(topics=[SimpleNamespace(name="orders", partitions=[partition])])


@pytest.mark.parametrize(
    ("end", "stable", "is_looked_at"),
    [
        ((0, 5), (0, 5), False),
        ((0, 5), (0, 6), False),  # asked a moment later
        ((0, 5), (0, 3), True),
        ((MOVED, -1), (MOVED, -1), True),
        ((UNKNOWN, -1), (UNKNOWN, -1), True),
        ((UNKNOWN, -1), (0, 5), True),
        ((0, 5), (UNKNOWN, -1), True),
        ((GONE, -1), (GONE, -1), False),
    ],
)
def test_partition_whose_end_is_not_known_is_looked_at(
    end: tuple[int, int], stable: tuple[int, int], is_looked_at: bool
) -> None:
    """An end of -1 with an error is not an end: it would hide an open transaction."""
    found = asyncio.run(open_producers(Broker(end, stable), {1: {"orders": [0]}}))
    assert found == ({("orders", 0, 7)} if is_looked_at else set())
