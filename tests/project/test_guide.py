"""The guides for authors of sinks run as they stand: every `>>>`, the sink, and its tests."""

from __future__ import annotations

import doctest
import errno
import os
import re
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from sparkonce.errors import CommitUnresolvedError, ConfigurationError, ProtocolError
from sparkonce.model import BranchId, Owner
from sparkonce.sinks import Payload
from sparkonce.sinks.committables import check_committable
from tests.support.guides import (
    GUIDE,
    HOWTO,
    PROOF,
    WHOLE_PROOF,
    sink_of_the_guide,
    text_of,
    write_the_guides_files,
)
from tests.support.sink_worlds import outcome

PAGES = {GUIDE: 20, HOWTO / "idempotent-sinks.md": 20, WHOLE_PROOF: 4}
"""Pages with examples, and the least number of these."""


SCHEMA = pa.schema({"id": pa.int64()})
BRANCH = BranchId(Owner("0" * 16, "5b1d"), 7, 4, "json", 0, 11)


def shown() -> dict[str, Any]:
    names: dict[str, Any] = {}
    exec(sink_of_the_guide(), names)  # noqa: S102 - our own page
    return names


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_guide_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every example gives what the page shows, refusals too."""
    write_the_guides_files(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "json_sink", raising=False)
    test = doctest.DocTestParser().get_doctest(text_of(page), {}, page.name, str(page), 0)
    report: list[str] = []
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    done = runner.run(test, out=report.append)
    assert done.attempted >= PAGES[page]
    assert done.failed == 0, "".join(report)


@dataclass(frozen=True)
class Wrong(Payload):
    path: Path


def commit_of_a_handle(sink: Any) -> None:
    handle = sink.beginTransaction(BRANCH)
    try:
        sink.commit(handle)
    finally:
        sink.discard(handle)


def field_that_no_record_holds(_: Any) -> None:
    Wrong(Path("orders")).committable(BRANCH)


def task_without_a_committable(sink: Any) -> None:
    check_committable(sink, None, BRANCH)


def method_without_its_mixin(sink: Any) -> None:
    class Telling(type(sink)):  # type: ignore[misc]
        def publish(self, batch: object) -> None: ...


def sink_without_a_name(sink: Any) -> None:
    class Nameless(type(sink)):  # type: ignore[misc]
        kind = ""

    Nameless("orders")


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        (
            commit_of_a_handle,
            ProtocolError,
            (
                "commit of JsonSink got a Handle: call preCommit(handle) first, and commit what it "
                "returns"
            ),
        ),
        (
            field_that_no_record_holds,
            ProtocolError,
            (
                "Wrong.path holds a PosixPath, which a record cannot hold: make it text, a number, "
                "bytes, or a list, tuple or dictionary (with text as keys) of these"
            ),
        ),
        (
            task_without_a_committable,
            ProtocolError,
            (
                "JsonSink 'json' returned None instead of a Committable: end preCommit with return "
                "Committable(handle.branch_id, {…})"
            ),
        ),
        (
            method_without_its_mixin,
            ProtocolError,
            (
                "Telling defines publish but is no Publishes, so nothing would use it: let the "
                "class also inherit Publishes (from sparkonce.sinks)"
            ),
        ),
        (
            sink_without_a_name,
            ConfigurationError,
            (
                "Nameless has no permanent name, and every name in its target is made from it: "
                'give the class a kind, such as kind = "redis", or pass name='
            ),
        ),
    ],
)
def test_mistake_says_what_to_change(
    tmp_path: Path, wrong: Callable[[Any], None], error: type[Exception], message: str
) -> None:
    """The message is this one, and the guide's table quotes it beside the error."""
    with pytest.raises(error) as raised:
        wrong(shown()["JsonSink"](tmp_path))
    assert str(raised.value) == message
    rows = re.findall(
        r"^\| `(\w+Error)`: `(.*?)` \|", PROOF.read_text(encoding="utf-8"), re.MULTILINE
    )
    quoted = [text for name, text in rows if name == error.__name__]
    assert any(text in message for text in quoted), quoted


def test_names_in_the_guides_folder_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a power loss a file of the guide's sink has the name that the log counts on."""
    lasting: list[str] = []

    def fsync(descriptor: int) -> None:
        if os.fstat(descriptor).st_ino == tmp_path.stat().st_ino:
            lasting[:] = [path.name for path in tmp_path.glob("*json")]

    monkeypatch.setattr(os, "fsync", fsync)
    sink = shown()["JsonSink"](tmp_path)
    sink.validate(SCHEMA)
    handle = sink.beginTransaction(BRANCH)
    sink.write(handle, pa.record_batch({"id": [1]}))
    committable = sink.preCommit(handle)
    assert lasting == [f".{BRANCH}json"]
    for _ in range(2):  # the first commit may have been killed before it made the name lasting
        sink.commit(committable)
        assert lasting == [f"{BRANCH}json"]
        lasting.clear()


def test_sink_of_the_guide_passes_its_test(tmp_path: Path) -> None:
    """The sink and its test are as the page shows them."""
    write_the_guides_files(tmp_path)
    failed, said = outcome(tmp_path, "TestJsonSink")
    assert not failed, said[-3000:]
    assert re.match(r"9\d passed", said.splitlines()[-1])  # some ninety tests


def test_empty_folder_below_a_mount_proves_nothing_in_the_guide(tmp_path: Path) -> None:
    folder, away = tmp_path / "mount", tmp_path / "away"
    folder.mkdir()
    sink = shown()["JsonSink"](folder)
    sink.validate(SCHEMA)
    handle = sink.beginTransaction(BRANCH)
    sink.write(handle, pa.record_batch({"id": [1]}))
    committable = sink.preCommit(handle)
    sink.commit(committable)
    folder.rename(away)
    for below in (lambda: None, folder.mkdir, lambda: sink.validate(SCHEMA)):
        below()
        with pytest.raises(CommitUnresolvedError, match="mount"):
            sink.commit(committable)
    shutil.rmtree(folder)
    away.rename(folder)
    sink.commit(committable)


def test_disk_that_fails_proves_nothing_in_the_guide(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python 3.14's `Path.exists` calls what it cannot look at absent."""
    sink = shown()["JsonSink"](tmp_path)
    sink.validate(SCHEMA)
    handle = sink.beginTransaction(BRANCH)
    sink.write(handle, pa.record_batch({"id": [1]}))
    committable = sink.preCommit(handle)
    sink.commit(committable)
    stat = os.stat

    def failing(path: Any, **more: Any) -> os.stat_result:
        if str(path) == f"{tmp_path}/{BRANCH}json":
            raise OSError(errno.EIO, "the disk fails")
        return stat(path, **more)

    monkeypatch.setattr(Path, "exists", os.path.exists)  # as from 3.14 on
    monkeypatch.setattr(os, "stat", failing)
    with pytest.raises(OSError, match="the disk fails"):
        sink.commit(committable)
