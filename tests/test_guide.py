"""docs/writing_a_sink.md runs as it stands."""

from __future__ import annotations

import doctest
import errno
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from sparkonce.errors import CommitUnresolvedError
from sparkonce.model import BranchId, Owner
from tests.test_sink_contracts import outcome

GUIDE = Path(__file__).parent.parent / "docs" / "writing_a_sink.md"


SCHEMA = pa.schema({"id": pa.int64()})
BRANCH = BranchId(Owner("0" * 16, "5b1d"), 7, 4, "json", 0, 11)


def sink_of_the_guide() -> Iterator[str]:
    """The source of `JsonSink`, up to its end."""
    for example in doctest.DocTestParser().get_examples(GUIDE.read_text(encoding="utf-8")):
        yield example.source
        if example.source.startswith("class JsonSink"):
            return


def shown() -> dict[str, Any]:
    names: dict[str, Any] = {}
    exec("".join(sink_of_the_guide()), names)  # noqa: S102 - our own page
    return names


def write_the_guides_files(folder: Path) -> None:
    """Write `JsonSink` as a module, and the tests of it that the page shows."""
    (folder / "json_sink.py").write_text("".join(sink_of_the_guide()))
    _, _, page = GUIDE.read_text(encoding="utf-8").partition("## Prove it")
    blocks = re.findall(r"^```python\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    (folder / "test_json_sink.py").write_text("\n\n".join(blocks[:2]))


def test_guide_runs() -> None:
    """Every example gives what the page shows, illegal orders too."""
    flags = doctest.ELLIPSIS
    done = doctest.testfile(str(GUIDE), module_relative=False, optionflags=flags, encoding="utf-8")
    assert done.attempted > 40
    assert done.failed == 0


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
