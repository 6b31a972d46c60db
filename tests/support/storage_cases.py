"""What every folder of a file system does, for the tests of each."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sparkonce.errors import SavepointError
from sparkonce.storage import FileSystemFolder
from sparkonce.storage.base import PIECE_BYTES


def put_below(root: Path) -> Callable[[str, str], None]:
    """A function that writes a file, with its folders."""

    def put(name: str, text: str) -> None:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)

    return put


def assert_reads_what_spark_writes(
    folder: FileSystemFolder, put: Callable[[str, str], None]
) -> None:
    """Files of a checkpoint, as Spark leaves them: numbered ones, hidden ones, large ones."""
    assert folder.files("commits") in ([], ())
    assert not folder.exists("commits")
    assert folder.read("commits/9") is None
    assert folder.read_end("commits/9", 10) is None
    for name in ("9", "10", "10.tmp", "a,12", "b,c:d", "old/11"):
        put(f"commits/{name}", "v1")
    put("commits/.12.crc", "")
    found = set(folder.files("commits")) - {"old"}  # a folder, which Hadoop's lists too
    assert found - {".12.crc"} == {"9", "10", "10.tmp", "a,12", "b,c:d"}
    below = {f"commits/{name}" for name in ("9", "10", "10.tmp", "a,12", "b,c:d", "old/11")}
    assert set(folder.names("commits")) == below
    assert set(folder.names("")) == below
    assert not {*folder.files("")} & {"10", "file"}
    put("at the top", "")
    assert "at the top" in folder.files("")
    folder.delete("at the top")
    assert folder.exists("commits")
    assert folder.exists("commits/10")
    assert folder.read("commits/10") == "v1"
    assert not folder.exists("commits/1")  # the beginning of another name
    assert not folder.exists("commit")
    put("log", "ä" * 1000 + "end")
    assert folder.read_end("log", 5) == "äend"
    assert (folder.read_end("log", 4) or "")[1:] == "end"
    assert folder.read_end("log", 1 << 20) == folder.read("log") == "ä" * 1000 + "end"
    put("empty", "")
    assert folder.read_end("empty", 5) == folder.read("empty") == ""
    assert folder.create("new/file.json", "1")
    assert not folder.create("new/file.json", "2")
    assert folder.read("new/file.json") == "1"
    for _ in range(2):
        folder.delete("new/file.json")
    assert not folder.exists("new/file.json")
    assert_stores_bytes(folder)


def assert_stores_bytes(folder: FileSystemFolder) -> None:
    """Whole or not at all, in several pieces, and once."""
    content = os.urandom(2 * PIECE_BYTES + 17)
    for _ in range(2):
        folder.store("bytes/file", lambda: [content[:5], content[5:]])
    folder.store("bytes/empty", list)
    for name, expected in (("file", content), ("empty", b"")):
        pieces = folder.pieces(f"bytes/{name}")
        assert pieces is not None
        assert b"".join(pieces) == expected
    assert folder.pieces("bytes/none") is None

    def broken() -> Iterator[bytes]:
        yield content
        raise SavepointError("the source is damaged")

    with pytest.raises(SavepointError, match="the source is damaged"):
        folder.store("bytes/broken", broken)
    assert set(folder.names("bytes")) == {"bytes/file", "bytes/empty"}
