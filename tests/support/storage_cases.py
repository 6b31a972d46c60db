"""What every folder of a file system does, for the tests of each."""

from __future__ import annotations

from pathlib import Path

from sparkonce.storage import FileSystemFolder


def assert_reads_what_spark_writes(folder: FileSystemFolder, root: Path) -> None:
    """Files of a checkpoint, as Spark leaves them: numbered ones, hidden ones, large ones."""
    assert folder.files("commits") in ([], ())
    assert not folder.exists("commits")
    assert folder.read("commits/9") is None
    assert folder.read_end("commits/9", 10) is None
    (root / "commits" / "old").mkdir(parents=True)
    for name in ("9", "10", "10.tmp", "a,12", "b,c:d"):
        (root / "commits" / name).write_text("v1")
    (root / "commits" / "old" / "11").write_text("v1")
    (root / "commits" / ".12.crc").write_text("")
    found = set(folder.files("commits")) - {"old"}  # a folder, which Hadoop's lists too
    assert found - {".12.crc"} == {"9", "10", "10.tmp", "a,12", "b,c:d"}
    below = {f"commits/{name}" for name in ("9", "10", "10.tmp", "a,12", "b,c:d", "old/11")}
    assert set(folder.names("commits")) == below
    assert set(folder.names("")) == below
    assert folder.exists("commits")
    assert folder.exists("commits/10")
    assert folder.read("commits/10") == "v1"
    (root / "log").write_text("ä" * 1000 + "end")
    assert folder.read_end("log", 5) == "äend"
    assert (folder.read_end("log", 4) or "")[1:] == "end"
    assert folder.read_end("log", 1 << 20) == folder.read("log") == "ä" * 1000 + "end"
    assert folder.create("new/file.json", "1")
    assert not folder.create("new/file.json", "2")
    assert folder.read("new/file.json") == "1"
    for _ in range(2):
        folder.delete("new/file.json")
    assert not folder.exists("new/file.json")
