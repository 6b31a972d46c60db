"""Where the batch after a savepoint reads from Kafka, as the log's offsets show it."""

from __future__ import annotations

import pytest

from sparkonce.spark_hooks.savepoints.retention import positions


@pytest.mark.parametrize(
    ("offsets", "expected"),
    [
        (('{"orders":{"1":25,"0":24}}',), [("orders", 0, 24), ("orders", 1, 25)]),
        (('clicks:{"a":{"0":1}}', 'orders:{"b":{"0":2}}'), [("a", 0, 1), ("b", 0, 2)]),
        (('{"a":{"0":7}}', '{"a":{"0":5}}'), [("a", 0, 5)]),  # one source, used twice
        (('{"logOffset":3,"files":"ab"}', "12", '"x"', "-"), []),  # files, rate, others
        (('{"shard-0":{"iteratorType":"LATEST"}}', "name:12"), []),
        ((), []),
    ],
)
def test_positions(offsets: tuple[str, ...], expected: list[tuple[str, int, int]]) -> None:
    assert positions(offsets) == expected
