"""A part of `SinkContract`: rows of every type, in batches of any size."""

from __future__ import annotations

import datetime as dt
import math
from collections.abc import Callable, Mapping
from contextlib import closing
from decimal import Decimal
from itertools import product
from typing import Any

import pyarrow as pa
import pytest

from sparkonce.errors import ConfigurationError, PrepareRejectedError
from sparkonce.sinks.base import AnySink
from sparkonce.testing.sink_case import BRANCH, A, B, SinkCase
from sparkonce.testing.sink_world import (
    GUIDE,
    SCHEMA,
    SinkWorld,
    Stage,
    branch,
    rows_of,
    shortened,
)

_UTC = dt.UTC
_NOT_FINITE = [math.nan, math.inf, -math.inf]
_LONG_TEXT = 100_000

TYPES: Mapping[str, tuple[pa.DataType, list[Any]]] = {
    "boolean": (pa.bool_(), [True, False]),
    "byte": (pa.int8(), [-128, 127]),
    "short": (pa.int16(), [-(1 << 15), (1 << 15) - 1]),
    "integer": (pa.int32(), [-(1 << 31), (1 << 31) - 1]),
    "long": (pa.int64(), [-(1 << 63), (1 << 63) - 1]),
    "float": (pa.float32(), [0.5, -1.25, *_NOT_FINITE]),
    "double": (pa.float64(), [0.1, 1 / 3, 1e300, *_NOT_FINITE]),
    "decimal": (pa.decimal128(20, 4), [Decimal("1234567890123456.7890"), Decimal("-0.0001")]),
    "string": (pa.string(), ["", "ü 名前 🎉", "a'b\"c\\d\n\te,f;g"]),
    "binary": (pa.binary(), [b"", b"\x00\xff\n"]),
    "date": (pa.date32(), [dt.date(1969, 12, 31), dt.date(2026, 2, 28)]),
    "timestamp": (
        pa.timestamp("us", tz="UTC"),
        [
            dt.datetime(1969, 12, 31, 23, 59, 59, 999999, _UTC),
            dt.datetime(2026, 1, 1, tzinfo=_UTC),
        ],
    ),
    "timestamp of a zone": (
        pa.timestamp("us", tz="America/New_York"),
        [  # both at 01:30 local time
            dt.datetime(2026, 11, 1, 5, 30, tzinfo=_UTC),
            dt.datetime(2026, 11, 1, 6, 30, tzinfo=_UTC),
        ],
    ),
    "timestamp_ntz": (pa.timestamp("us"), [dt.datetime(2026, 1, 1, 1, 2, 3, 4)]),  # noqa: DTZ001
    "array": (pa.list_(pa.string()), [[], ["a", None, "b"]]),
    "struct": (
        pa.struct([("a", pa.int64()), ("b", pa.string())]),
        [{"a": 1, "b": None}, {"a": None, "b": "x"}],
    ),
}
"""By Spark's name: the Arrow type that reaches a sink, and values; each test adds a null."""

TEXTS = ["007", "1e3", "NULL", "\\N", "None", "nan", "true", " x ", "a\rb\r\nc", "2026-01-01"]
"""Texts that an untyped format confuses with numbers, nulls, booleans, line ends or dates."""


class SinkRows(SinkCase):
    """What `SinkContract` inherits; see there."""

    # -- how rows arrive ---------------------------------------------------------------------------

    def test_uneven_record_batches(self, stage: Stage, sink: AnySink) -> None:
        """Record batches of any length, sliced from a longer one, lose no row."""
        sizes = (1, 1023, 4099, 7, 997, 10_000)  # Spark sends up to 10,000; 16,127 is a prime
        rows = rows_of(range(sum(sizes)))
        starts = [sum(sizes[:n]) for n in range(len(sizes))]
        parts = [rows.slice(*part) for part in zip(starts, sizes, strict=True)]
        stage.commit(sink, stage.prepare(sink, BRANCH, *parts))
        stage.sees(
            rows,
            why=f"write got record batches of {sizes} rows: does preCommit flush what write keeps "
            "back? ",
        )

    def test_rows_come_slowly(self, stage: Stage, sink: AnySink) -> None:
        """`idle` between writes and before preCommit keeps the rows written so far."""
        handle = stage.write(sink, BRANCH, A)
        sink.idle(handle)
        sink.write(handle, stage.world.selected(B))
        sink.idle(handle)
        stage.sees()
        stage.commit(sink, stage.vote(sink, sink.preCommit(handle)))
        stage.sees(A, B)

    def test_empty_record_batches(self, stage: Stage, sink: AnySink) -> None:
        """Record batches without rows change nothing."""
        none = A.slice(0, 0)
        stage.commit(sink, stage.prepare(sink, BRANCH, none, A, none))
        stage.sees(A)

    def test_branch_without_rows(self, stage: Stage, sink: AnySink) -> None:
        """It is prepared and committed like any other branch, and adds no rows."""
        stage.commit(sink, stage.prepare(sink, BRANCH, A.slice(0, 0)))
        stage.sees()
        stage.nothing_left_by_sweep(sink)

    def test_large_branch(self, stage: Stage, sink: AnySink) -> None:
        """Many rows in many record batches appear once each, and none before the commit."""
        step = max(self.large_rows // 10, 1)
        parts = [rows_of(range(n, n + step)) for n in range(0, self.large_rows, step)]
        committables = stage.prepare(sink, BRANCH, *parts)
        stage.sees()
        stage.commit(sink, committables)
        stage.sees(*parts)

    # -- refused rows ------------------------------------------------------------------------------

    def test_refused_rows(self, stage: Stage, sink: AnySink) -> None:
        """A row that the target refuses fails its task: after the decision it would be too late."""
        refused = stage.world.refused
        if refused is None:
            pytest.skip("the world has no refused=")
        for n, before in product(range(refused.num_rows), ([], [A])):
            row = refused.slice(n, 1)
            try:
                stage.prepare(sink, branch(n), *before, row)
            except Exception:  # noqa: BLE001 - Spark would fail the batch
                stage.sees(why="the target refused a row of the task; ")
            else:
                raise AssertionError(
                    "write, preCommit or vote must raise an error for a row that the target "
                    f"refuses, and they took {shortened(row.to_pylist()[0])}: is it cut, changed "
                    "or left out? Use the target's strict mode, and compare the number of rows "
                    f"({GUIDE}#write-the-test-class)"
                )
        stage.nothing_left_by_sweep(sink)

    # -- columns and values ------------------------------------------------------------------------

    def test_columns_in_another_order(self, make_world: Callable[[pa.Schema], SinkWorld]) -> None:
        """The sink finds columns by name, or validate refuses their order."""
        turned = pa.schema([SCHEMA.field(name) for name in reversed(SCHEMA.names)])
        with closing(Stage(make_world(SCHEMA), turned)) as stage:
            try:
                sink = stage.sink()
            except ConfigurationError as refusal:
                pytest.skip(f"validate refuses it: {refusal}")
            stage.commit(sink, stage.prepare(sink, BRANCH, A.select(turned.names)))
            stage.sees(A)

    def test_text_that_looks_like_something_else(self, stage: Stage, sink: AnySink) -> None:
        """Text stays text, even if no other row shows the type of its column."""
        texts = pa.array([*TEXTS, None])
        rows = pa.record_batch([pa.array(range(len(texts)), pa.int64()), texts], schema=SCHEMA)
        each = [rows.slice(n, 1) for n in range(rows.num_rows)]
        for n, part in enumerate([rows, *each]):
            stage.commit(sink, stage.prepare(sink, branch(n, batch_id=n), part))
        stage.sees(rows, rows)

    def test_long_text(self, stage: Stage, sink: AnySink) -> None:
        """A text of 100,000 characters reaches readers whole, or the task refuses it."""
        text = "".join(f"{n:05d}-名前" for n in range(_LONG_TEXT // 8))
        rows = pa.record_batch([pa.array([0], pa.int64()), pa.array([text])], schema=SCHEMA)
        size = f"a text of {len(text):,} characters"
        try:
            committables = stage.prepare(sink, BRANCH, rows)
        except Exception as refusal:  # noqa: BLE001 - Spark would fail the batch
            stage.sees(why=f"the task refused {size}; ")
            pytest.skip(f"the task refuses {size}: {shortened(refusal)}")
        stage.commit(sink, committables)
        stage.sees(rows, why=f"{size} was committed: the task may refuse it, but never cut it; ")

    @pytest.mark.parametrize("name", TYPES)
    def test_rows_of_type(self, make_world: Callable[[pa.Schema], SinkWorld], name: str) -> None:
        """Each value, and a null, reaches readers as the world expects, or it is refused."""
        kind, values = TYPES[name]
        rows = pa.record_batch(
            {
                "id": pa.array(range(len(values) + 1), pa.int64()),
                "value": pa.array([*values, None], kind),
            }
        )
        with closing(Stage(make_world(rows.schema), rows.schema)) as stage:
            try:
                sink = stage.sink()
            except ConfigurationError as refusal:
                pytest.skip(f"validate refuses it: {refusal}")
            reason = _refusal(stage, sink, 0, rows)
            if reason is None:
                stage.sees(rows)
                return
            each = [rows.slice(n, 1) for n in range(rows.num_rows)]
            refusals = {n: _refusal(stage, sink, n, row) for n, row in enumerate(each, 1)}
            kept = [row for n, row in enumerate(each, 1) if refusals[n] is None]
            stage.sees(*kept, why="the task refused other values of the type, and not these; ")
            refused = [row["value"][0].as_py() for n, row in enumerate(each, 1) if refusals[n]]
            others = "the others reach readers" if kept else "and so all of them"
            pytest.skip(f"the task refuses {shortened(refused)}, {others}: {reason}")


def _refusal(
    stage: Stage, sink: AnySink, n: int, rows: pa.RecordBatch
) -> PrepareRejectedError | None:
    """Commit the rows as batch `n`; return the error if the task refuses them, as it may."""
    try:
        committables = stage.prepare(sink, branch(n, batch_id=n), rows)
    except PrepareRejectedError as refusal:
        return refusal
    except Exception as error:
        raise AssertionError(
            f"the task raised {type(error).__name__} for {shortened(rows['value'].to_pylist())}: "
            f"{shortened(error)}. If the target cannot hold the type, validate must raise "
            "ConfigurationError; if it cannot hold one of the values, write or preCommit must "
            f"raise PrepareRejectedError ({GUIDE}#what-it-tests)"
        ) from error
    stage.commit(sink, committables)
    return None
