"""Clocks that differ between two commits: readers in Java refuse a table whose times go back."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable

import pyarrow as pa
import pytest

from sparkonce.errors import ConfigurationError
from sparkonce.sinks import Delivered
from tests.iceberg.conftest import SCHEMA, Lake, prepared, rows

DAY_S = 24 * 3600.0
MINUTE_MS = 60_000
"""How far a time may go back, in Iceberg's `TableMetadata` of Java."""


def ends_after(times: Iterable[int]) -> bool:
    return all(after - before >= -MINUTE_MS for before, after in itertools.pairwise(times))


def check_readable_in_java(lake: Lake) -> None:
    metadata = lake.table().metadata
    snapshots = [entry.timestamp_ms for entry in metadata.snapshot_log]
    versions = [entry.timestamp_ms for entry in metadata.metadata_log]
    assert ends_after([*snapshots, metadata.last_updated_ms])
    assert ends_after([*versions, metadata.last_updated_ms])


@pytest.fixture
def ahead(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """How far this process is ahead, in seconds."""
    real, shift_s = time.time, [0.0]
    monkeypatch.setattr(time, "time", lambda: real() + shift_s[0])
    return shift_s


def test_table_stays_readable_when_the_clock_is_set_back(lake: Lake, ahead: list[float]) -> None:
    """Commits, an abort, and a batch that is taken back, each by another clock."""
    lake.create()
    sink = lake.sink()
    sink.validate(SCHEMA)
    done = []
    for batch_id, ahead_s in enumerate([DAY_S, 0.0, -DAY_S]):
        ahead[0] = ahead_s
        done.append(prepared(sink, batch_id, [rows(batch_id)]))
        sink.commit(done[-1])
        check_readable_in_java(lake)
    sink.abort(prepared(sink, 3, [rows(3)]))
    check_readable_in_java(lake)
    sink.take_back([Delivered(done[2], 1)])
    check_readable_in_java(lake)
    assert lake.ids() == [0, 1]


def test_no_column_is_added_by_a_clock_that_is_behind(lake: Lake, ahead: list[float]) -> None:
    """pyiceberg gives that change this machine's time, so the start is refused."""
    lake.create()
    sink, wider = lake.sink(new_columns="add"), pa.schema([*SCHEMA, ("note", pa.string())])
    sink.validate(SCHEMA)
    ahead[0] = DAY_S
    sink.commit(prepared(sink, 0, [rows(0)]))
    ahead[0] = 0.0
    with pytest.raises(
        ConfigurationError, match=r"86\d{3} s in the future by this machine's clock"
    ):
        sink.validate(wider)
    check_readable_in_java(lake)
    ahead[0] = DAY_S
    sink.validate(wider)
    assert "note" in lake.table().schema().column_names
