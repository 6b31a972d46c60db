"""Bytes that come from outside, damaged or made up: they raise the named errors, and no others.

FUZZ_EXAMPLES=100000 runs more of them.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sparkonce.errors import ConfigurationError, LogCorruptError, SavepointError, SparkOnceError
from sparkonce.model import BranchId, Owner
from sparkonce.observe.lineage.inputs import reads
from sparkonce.observing import Source
from sparkonce.page.provenance import numbers, search
from sparkonce.page.source import Source as PageSource
from sparkonce.protocol.operating import head_of
from sparkonce.spark_hooks.binding import read_binding
from sparkonce.spark_hooks.checkpoint import CheckpointFiles
from sparkonce.spark_hooks.described import load_described, sinks_for_columns
from sparkonce.spark_hooks.savepoints import Manifest
from sparkonce.spark_hooks.source_offsets import shown_offsets
from sparkonce.storage import open_folder
from sparkonce.txn_log.record import Head, TransactionRecord
from sparkonce.txn_log.sqlite import SqliteLog
from tests.support.page_cases import browser, fill

GOLDEN = Path(__file__).parents[1] / "golden"

EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "50"))

fuzzed = settings(
    max_examples=EXAMPLES,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=10,
)


def damaged(*whole: str) -> st.SearchStrategy[str]:
    """One of the texts with a part cut out, or replaced; or a text, or JSON, that is made up."""

    def damage(text: str, ends: tuple[int, int], by: str) -> str:
        first, last = sorted(end % (len(text) + 1) for end in ends)
        return text[:first] + by + text[last:]

    ends = st.tuples(st.integers(min_value=0), st.integers(min_value=0))
    by = st.sampled_from(["", "0", "null", "{}", "[]", '"', "1e999", "-1"]) | st.text(max_size=5)
    return (
        st.builds(damage, st.sampled_from(whole), ends, by)
        | st.text()
        | st.builds(json.dumps, JSON)
    )


def torn(*whole: str) -> st.SearchStrategy[str]:
    """The beginning of one of the texts."""
    ends = st.integers(min_value=0)
    return st.builds(lambda text, n: text[: n % (len(text) + 1)], st.sampled_from(whole), ends)


def golden(*kinds: str) -> list[str]:
    found = [path for kind in kinds for path in sorted(GOLDEN.glob(f"{kind}-*.json"))]
    assert found
    return [path.read_text() for path in found]


@pytest.mark.parametrize(
    ("decode", "kinds", "error"),
    [
        (TransactionRecord.decode, ("record", "packed", "settled"), LogCorruptError),
        (Head.decode, ("head",), LogCorruptError),
        (Manifest.decode, ("savepoint",), SavepointError),
    ],
)
def test_record(decode: Callable[[str, str], object], kinds: Any, error: type[Exception]) -> None:
    whole = golden(*kinds)
    written = [decode(each, "it") for each in whole]

    @fuzzed
    @given(damaged(*whole))
    def check(text: str) -> None:
        """The checksum is of the content, not of the bytes: base64 ignores a brace among them."""
        try:
            found = decode(text, "it")
        except error:
            return
        assert found in written

    check()


BRANCH = BranchId(
    Owner("0123456789abcdef", "5a4ae0c8-9c3e-4a0e-8f06-1d0b6a1c7b11"), 7, 3, "s", 0, 1
)


@fuzzed
@given(damaged(str(BRANCH), BRANCH.name))
def test_name_of_a_branch(text: str) -> None:
    """Names are found in external systems, where anybody may write."""
    found = BranchId.from_name(text)
    assert found is None or text in {str(found), found.name}


@pytest.mark.parametrize("number", ["07", "٣", "+7", "1" * 5000])
@pytest.mark.parametrize("part", ["t3", "p0", "a1", "b7"])
def test_number_in_a_name_has_one_spelling(part: str, number: str) -> None:
    name = str(BRANCH)
    assert BranchId.from_name(name) == BRANCH
    assert BranchId.from_name(name.replace(f".{part}.", f".{part[0]}{number}.")) is None


OFFSETS = (
    'v1\n{"batchWatermarkMs":0,"conf":{}}\n{"logOffset":3}\n{"orders":{"0":120}}\n17',
    'v2\n{"batchWatermarkMs":0}\norders:{"logOffset":3}\n',
)


@fuzzed
@given(damaged(*OFFSETS, '{"logOffset":3}', '{"orders":{"0":120}}'), st.text(max_size=30))
def test_offsets_of_a_source(text: str, described: str) -> None:
    numbers(text)
    reads([text], [text], [Source(described)])


@fuzzed
@given(text=damaged('{"id":"5a4ae0c8-9c3e-4a0e-8f06-1d0b6a1c7b11"}'))
def test_metadata_of_a_checkpoint(tmp_path: Path, text: str) -> None:
    write(tmp_path / "metadata", text)
    try:
        CheckpointFiles(open_folder(str(tmp_path)), str(tmp_path)).query_id()
    except ConfigurationError:
        return


@fuzzed
@given(text=damaged('{"log_id": "0123456789abcdef", "pipeline": "orders", "number": 1}'))
def test_binding_of_a_checkpoint(tmp_path: Path, text: str) -> None:
    write(tmp_path / "sparkonce.json", text)
    try:
        read_binding(open_folder(str(tmp_path)))
    except SparkOnceError:
        return


SINKS = json.dumps(
    [
        {"type": "file", "path": "/data/out", "select": ["id"]},
        {"type": "kafka", "topic": "orders", "bootstrap_servers": "a:1", "config": {"acks": "all"}},
        {"type": "postgres", "conninfo": {"env": "HOME"}, "table": "a.b", "key": ["id"]},
        {"type": "s3", "location": "s3://b/x", "connection": {"region_name": "x"}},
        {"type": "sqlite", "path": "shop.db", "table": "orders"},
        {"type": "delta", "path": "/data/t", "storage_options": {}},
        {"type": "iceberg", "table": "a.b", "catalog": {"type": "sql"}},
    ]
)


@fuzzed
@given(text=damaged(SINKS))
def test_sinks_in_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.chdir(tmp_path)
    try:
        sinks_for_columns(text)
    except ConfigurationError:
        return


@fuzzed
@given(text=damaged('{"name": "orders", "sinks": {"type": "file", "path": "out"}, "retain": 7}'))
def test_pipeline_in_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.chdir(tmp_path)
    try:
        load_described(text)
    except ConfigurationError:
        return


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SqliteLog]:
    with closing(SqliteLog(tmp_path_factory.mktemp("log") / "log.db")) as log:
        fill(log)
        yield log


@fuzzed
@given(text=damaged("orders:0:250", '{"orders":{"0":300}}', "7", str(BRANCH)))
def test_search_of_the_page(log: SqliteLog, text: str) -> None:
    search(log, head_of(log, "orders"), text)
    source = PageSource(log=log, names=log.pipelines, job="j:p", doctor=list)
    client = browser(source)
    answer = client.get("/pipelines/orders/search", params={"q": text})
    assert answer.status_code < 500


PARTS = ["pipelines", "orders", "batches", "search", "0", "x"]


@fuzzed
@given(path=st.lists(st.sampled_from(PARTS) | st.text()))
def test_address_of_the_page(log: SqliteLog, path: list[str]) -> None:
    source = PageSource(log=log, names=log.pipelines, job="j:p", doctor=list)
    client = browser(source)
    # In full: a client takes what follows a // at the beginning for the name of a host.
    parts = "/".join(quote(part, safe="") for part in path)
    answer = client.get(f"{client.base_url}/{parts}")
    assert answer.status_code < 500


FILES = 'v1\n{"path":"/in/a","timestamp":1,"batchId":3}\n{"path":"/in/b","timestamp":2,"batchId":3}'


@fuzzed
@given(offsets=torn(*OFFSETS), log=torn(FILES), is_compacted=st.booleans())
def test_offsets_of_a_checkpoint(
    tmp_path: Path, offsets: str, log: str, *, is_compacted: bool
) -> None:
    """Spark wrote them, and a power cut may have cut them off."""
    shutil.rmtree(tmp_path / "sources", ignore_errors=True)
    write(tmp_path / "offsets" / "7", offsets)
    write(tmp_path / "sources" / "0" / ("3.compact" if is_compacted else "3"), log)
    shown_offsets(open_folder(str(tmp_path)), 7, lambda uses: dict.fromkeys(uses, "0"))


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8", errors="surrogatepass")
