"""A pipeline in a notebook: its sinks and newest batches, over a real log."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from contextlib import closing
from html.parser import HTMLParser
from pathlib import Path

import pytest

from sparkonce import ExactlyOnce
from sparkonce.sinks import FileSink, SqliteSink
from sparkonce.txn_log.sqlite import SqliteLog
from tests.support.page_cases import fill


class Balanced(HTMLParser):
    """Fails on a tag that is not closed where it should be."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.cells: list[str] = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.cells.append(data)


@pytest.fixture
def pipeline(tmp_path: Path) -> Iterator[ExactlyOnce]:
    sinks = [FileSink(tmp_path / "out"), SqliteSink(tmp_path / "a <b>.db", "orders")]
    with closing(SqliteLog(tmp_path / "log.db")) as log:
        yield ExactlyOnce("orders", sinks=sinks, log=log)


def html_of(pipeline: ExactlyOnce) -> str:
    text = pipeline._repr_html_()
    Balanced(text)
    return text


def test_shows_sinks_and_batches_with_the_newest_first(pipeline: ExactlyOnce) -> None:
    fill(pipeline.log)
    text = html_of(pipeline)
    assert "a &lt;b&gt;.db" in text
    header, *rows = re.findall(r"<tr>(.*?)</tr>", text)
    columns = ["batch", "state", "since (UTC)", "rows in files", "rows in kafka"]
    assert Balanced(header).cells == columns
    found = [Balanced(row).cells for row in rows]
    assert [(cells[0], cells[1]) for cells in found] == [
        ("4", "decided"),
        ("3", "complete"),
        ("2", "settled"),
        ("1", "complete"),
        ("0", "complete"),
    ]
    assert found[0][3:] == ["1,234", "8"]
    assert found[0][2] == time.strftime(
        "%Y-%m-%d %H:%M:%S", time.gmtime(max(pipeline.log.history("orders")[0].times.values()))
    )


def test_before_the_first_batch(pipeline: ExactlyOnce, tmp_path: Path) -> None:
    assert "No batch yet" in html_of(pipeline)
    inside = ExactlyOnce("orders", sinks=[FileSink(tmp_path / "out")])
    assert "no query has started yet" in html_of(inside)
    assert "log checkpoint>" in repr(inside)


def test_log_that_cannot_be_read_is_an_error_on_the_page(
    pipeline: ExactlyOnce, tmp_path: Path
) -> None:
    fill(pipeline.log)
    pipeline.log.close()
    (tmp_path / "log.db").write_bytes(b"no database at all" * 100)
    assert "The log cannot be read now" in html_of(pipeline)
