"""docs/writing_a_sink.md runs as it stands."""

from __future__ import annotations

import doctest
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from sparkonce.model import BranchId, Owner

if TYPE_CHECKING:
    import pytest

GUIDE = Path(__file__).parent.parent / "docs" / "writing_a_sink.md"


def test_guide_runs() -> None:
    """Every example gives what the page shows, illegal orders too."""
    flags = doctest.ELLIPSIS
    done = doctest.testfile(str(GUIDE), module_relative=False, optionflags=flags, encoding="utf-8")
    assert done.attempted > 40
    assert done.failed == 0


def test_names_in_the_guides_folder_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a power loss a file of the guide's sink has the name that the log counts on."""
    shown: dict[str, Any] = {}
    for example in doctest.DocTestParser().get_examples(GUIDE.read_text(encoding="utf-8")):
        exec(example.source, shown)  # noqa: S102 - our own page
        if "JsonSink" in shown:
            break
    lasting: list[str] = []

    def fsync(descriptor: int) -> None:
        if os.fstat(descriptor).st_ino == tmp_path.stat().st_ino:
            lasting[:] = [path.name for path in tmp_path.iterdir()]

    monkeypatch.setattr(os, "fsync", fsync)
    sink = shown["JsonSink"](tmp_path)
    branch = BranchId(Owner("0" * 16, "5b1d"), 7, 4, "json", 0, 11)
    handle = sink.beginTransaction(branch)
    sink.write(handle, pa.record_batch({"id": [1]}))
    committable = sink.preCommit(handle)
    assert lasting == [f".{branch}json"]
    for _ in range(2):  # the first commit may have been killed before it made the name lasting
        sink.commit(committable)
        assert lasting == [f"{branch}json"]
        lasting.clear()
