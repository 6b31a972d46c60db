"""Folders on a local disk, the way to others, and what the room may import."""

from __future__ import annotations

import subprocess
import sys
from errno import EIO
from pathlib import Path

import pytest

from sparkonce.errors import ConfigurationError, LogCorruptError, LogUnavailableError
from sparkonce.storage import LocalFolder, local_path, open_folder
from tests.support.storage_cases import assert_reads_what_spark_writes, put_below


def test_local_folder_reads_what_spark_writes(tmp_path: Path) -> None:
    assert_reads_what_spark_writes(LocalFolder(tmp_path), put_below(tmp_path))


def test_folder_is_opened_by_its_location(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Relative to the working directory of now; nothing is made unless it is asked for."""
    monkeypatch.chdir(tmp_path)
    for location in ("ck", f"{tmp_path}/ck", f"file:{tmp_path}/ck", f"file://{tmp_path}/ck"):
        folder = open_folder(location, scheme="checkpoint:")
        assert folder.address == f"checkpoint:{tmp_path}/ck"
    assert not (tmp_path / "ck").exists()
    open_folder("ck", inside="log", create=True).create("a.json", "1")
    assert open_folder("ck").read("log/a.json") == "1"


def test_home_of_nobody_is_named() -> None:
    with pytest.raises(ConfigurationError, match="no home of ~nobody-here"):
        local_path("~nobody-here/ck")


def test_hidden_file_that_cannot_be_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file itself is there by then."""

    def fail(*_: object, **__: object) -> None:
        raise OSError(EIO, "Input/output error")

    folder = LocalFolder(tmp_path)
    monkeypatch.setattr(Path, "unlink", fail)
    assert folder.create("head/1.json", "{}")
    assert not folder.create("head/1.json", "other")
    assert folder.names("") == ["head/1.json"]


def test_file_that_is_not_text(tmp_path: Path) -> None:
    """It is damaged, and not absent; what is read from its end may begin in a character."""
    (tmp_path / "1.json").write_bytes(b"\xff{}")
    folder = LocalFolder(tmp_path)
    with pytest.raises(LogCorruptError, match=r"1\.json is not text"):
        folder.read("1.json")
    assert folder.read_end("1.json", 2) == "{}"


@pytest.mark.parametrize("ask", ["exists", "files", "read"])
def test_folder_that_is_no_folder_is_not_empty(tmp_path: Path, ask: str) -> None:
    """Such as a mount point of another kind: nothing is known of the files then."""
    (tmp_path / "ck").write_text("")
    with pytest.raises(LogUnavailableError, match="cannot be used now"):
        getattr(LocalFolder(tmp_path / "ck", create=False), ask)("commits")


def test_checkpoint_on_a_local_disk_needs_no_spark(tmp_path: Path) -> None:
    """Neither its log nor its readers: an operator's machine may have no Java."""
    code = (
        "import sys\n"
        "from sparkonce.spark_hooks.checkpoint import checkpoint_folder, CheckpointFiles\n"
        "from sparkonce.txn_log import open_log\n"
        "open_log('checkpoint:ck').close()\n"
        "assert CheckpointFiles(checkpoint_folder('ck'), 'ck').committed() is None\n"
        "found = {'pyspark', 'py4j', 'psycopg', 'boto3'} & set(sys.modules)\n"
        "assert not found, found"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path)
