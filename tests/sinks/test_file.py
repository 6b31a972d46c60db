"""FileSink: each verb, looked at from outside."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sparkonce.errors import (
    CommitRejectedError,
    CommitUnresolvedError,
    ConfigurationError,
    PreparedBranchLostError,
    SinkUnavailableError,
)
from sparkonce.finding import Level
from sparkonce.model import BranchId, Committable, Owner
from sparkonce.protocol.rulings import End, end_ruled
from sparkonce.sinks import FileSink
from tests.support.disk import Disk

OWNER = Owner("0" * 16, "5b1d")
BRANCH = BranchId(OWNER, 7, 4, "file", 0, 11)
ROWS = pa.record_batch({"id": [1, 2], "name": ["ü", None]})


@pytest.fixture
def sink(tmp_path: Path) -> FileSink:
    sink = FileSink(tmp_path)
    sink.validate(ROWS.schema)
    return sink


def visible(folder: Path) -> int:
    return sum(pq.read_table(path).num_rows for path in folder.glob("*.parquet"))


def hidden(folder: Path) -> int:
    return len(list((folder / "_sparkonce").iterdir()))


def prepare(sink: FileSink, branch_id: BranchId = BRANCH) -> Committable:
    handle = sink.beginTransaction(branch_id)
    sink.write(handle, ROWS)
    return sink.preCommit(handle)


def test_rows_are_visible_after_commit_and_not_before(sink: FileSink, tmp_path: Path) -> None:
    committable = prepare(sink)
    assert (hidden(tmp_path), visible(tmp_path)) == (1, 0)
    sink.commit(committable)
    assert (hidden(tmp_path), visible(tmp_path)) == (0, 2)
    sink.commit(committable)
    FileSink(tmp_path).commit(committable)
    assert (hidden(tmp_path), visible(tmp_path)) == (0, 2)


def test_what_is_promised_is_on_the_disk(
    sink: FileSink, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prepared: bytes and name; committed: the new name, also where another commit gave it."""
    disk, name = Disk(monkeypatch), f"{BRANCH}parquet"
    committable = prepare(sink)
    assert disk.done == [f"sync {name}", "sync _sparkonce"]
    assert disk.holds(tmp_path / "_sparkonce" / name)
    disk.done.clear()
    sink.commit(committable)
    assert disk.done == [f"name {name}", f"sync {tmp_path.name}"]
    disk.done.clear()
    sink.commit(committable)
    assert disk.done == [f"sync {tmp_path.name}"]


def test_operators_read_where_the_rows_are(sink: FileSink, tmp_path: Path) -> None:
    assert prepare(sink).text == f"file {tmp_path}/{BRANCH}parquet"


@pytest.mark.parametrize("is_new", [True, False])
def test_hidden_folder_is_on_the_disk_before_anything_is_in_it(
    sink: FileSink, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_new: bool
) -> None:
    """Also where somebody has removed the empty one, and the folder has its id already."""
    (tmp_path / "_sparkonce").rmdir()
    if is_new:
        next(tmp_path.glob("_sparkonce_folder.*")).unlink()
    disk = Disk(monkeypatch)
    sink.validate(ROWS.schema)
    assert disk.done[:1] + disk.done[-1:] == ["name _sparkonce", f"sync {tmp_path.name}"]


def test_abort_removes_what_is_prepared_and_never_what_is_committed(
    sink: FileSink, tmp_path: Path
) -> None:
    committable = prepare(sink)
    sink.abort(committable)
    sink.abort(BRANCH)
    assert (hidden(tmp_path), visible(tmp_path)) == (0, 0)
    committable = prepare(sink)
    sink.commit(committable)
    sink.abort(committable)
    assert visible(tmp_path) == 2


def test_rows_without_columns_are_refused(tmp_path: Path) -> None:
    """Parquet would not even count them."""
    with pytest.raises(ConfigurationError, match="no columns"):
        FileSink(tmp_path).validate(pa.schema([]))


TWICE = pa.struct([pa.field("a", pa.int64()), pa.field("a", pa.int64())])


@pytest.mark.parametrize(
    ("columns", "told"),
    [
        ([("id", pa.int64()), ("id", pa.int64())], r"\['id'\] more than once"),
        ([("id", pa.int64()), ("x", pa.null())], "'x' is null, and readers refuse"),
        ([("x", pa.list_(TWICE))], "'x' is list.*two fields of one name"),
    ],
)
def test_columns_that_no_reader_takes_are_refused(
    tmp_path: Path, columns: list[tuple[str, pa.DataType]], told: str
) -> None:
    """Spark would refuse the whole folder, with the rows of every batch in it."""
    with pytest.raises(ConfigurationError, match=told):
        FileSink(tmp_path).validate(pa.schema(columns))


def test_home_of_a_user_that_is_not_there() -> None:
    with pytest.raises(ConfigurationError, match="knows no home of ~nobody-here"):
        FileSink("~nobody-here/out")


def test_folder_that_sparks_file_sink_has_written(tmp_path: Path) -> None:
    """Spark's readers would see none of the rows; nothing is made there."""
    (tmp_path / "_spark_metadata").mkdir()
    told = "was written by Spark's file sink.*another folder.*first remove.*then"
    with pytest.raises(ConfigurationError, match=told):
        FileSink(tmp_path).validate(ROWS.schema)
    assert [path.name for path in tmp_path.iterdir()] == ["_spark_metadata"]


def test_discard_removes_an_open_file(sink: FileSink, tmp_path: Path) -> None:
    handle = sink.beginTransaction(BRANCH)
    sink.write(handle, ROWS)
    sink.discard(handle)
    assert (hidden(tmp_path), visible(tmp_path)) == (0, 0)


def test_prepared_file_that_somebody_deleted_is_lost(sink: FileSink, tmp_path: Path) -> None:
    committable = prepare(sink)
    for path in (tmp_path / "_sparkonce").iterdir():
        path.unlink()
    with pytest.raises(PreparedBranchLostError, match="batch 7"):
        sink.commit(committable)


@pytest.mark.parametrize("was_committed", [True, False])
def test_empty_folder_below_a_mount_proves_nothing(tmp_path: Path, *, was_committed: bool) -> None:
    """While the file system is away no branch is lost, also where a start has written below it."""
    folder, away = tmp_path / "mount", tmp_path / "away"
    folder.mkdir()
    sink = FileSink(folder)
    sink.validate(ROWS.schema)
    committable = prepare(sink)
    if was_committed:
        sink.commit(committable)
    folder.rename(away)
    for below in (lambda: None, folder.mkdir, lambda: FileSink(folder).validate(ROWS.schema)):
        below()
        with pytest.raises(CommitUnresolvedError, match="mount"):
            FileSink(folder).commit(committable)
    shutil.rmtree(folder)
    away.rename(folder)
    FileSink(folder).commit(committable)
    assert (hidden(folder), visible(folder)) == (0, 2)


def test_folder_that_is_mounted_during_the_commit(tmp_path: Path) -> None:
    """A branch that was not there a moment ago, and is now, is not lost."""
    folder, away = tmp_path / "mount", tmp_path / "away"
    folder.mkdir()
    sink = FileSink(folder)
    sink.validate(ROWS.schema)
    committable = prepare(sink)
    folder.rename(away)

    class MountedNow(FileSink):
        def _is_here(self, committable: Committable) -> bool:
            away.rename(folder)
            return super()._is_here(committable)

    with pytest.raises(CommitUnresolvedError):
        MountedNow(folder).commit(committable)
    FileSink(folder).commit(committable)
    assert visible(folder) == 2


def test_abort_below_a_mount_is_none(tmp_path: Path) -> None:
    """An operator's word ends a branch; mounted a moment later, its proof would show it."""
    folder, away = tmp_path / "mount", tmp_path / "away"
    folder.mkdir()
    sink = FileSink(folder)
    sink.validate(ROWS.schema)
    committable = prepare(sink)
    folder.rename(away)
    folder.mkdir()

    class MountedNow(FileSink):
        def commit(self, committable: Committable) -> None:
            folder.rmdir()
            away.rename(folder)
            super().commit(committable)

    ended = end_ruled(MountedNow(folder), committable, sink.target)
    assert ended.how is End.UNKNOWN
    assert "mount that one again" in ended.why
    FileSink(folder).abort_decided(committable)  # where it is gone for good
    folder.rmdir()
    away.rename(folder)
    assert (hidden(folder), visible(folder)) == (1, 0)
    assert end_ruled(FileSink(folder), committable, sink.target).how is End.ENDED


def test_file_that_is_visible_is_not_written_again(tmp_path: Path) -> None:
    """Its rename came through, and what makes it last failed: `commit` proves nothing."""
    sink = FileSink(tmp_path)
    sink.validate(ROWS.schema)
    committable = prepare(sink)
    sink.commit(committable)
    with pytest.raises(CommitRejectedError, match="exists, and a rewrite would duplicate its rows"):
        sink.abort_decided(committable)


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.EACCES, errno.ENOTDIR])
def test_disk_that_fails_proves_nothing(
    sink: FileSink, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """Python 3.14's `Path.exists` and `glob` call what they cannot look at absent."""
    committable = prepare(sink)
    sink.commit(committable)
    stat, listdir, scandir = os.stat, os.listdir, os.scandir

    def fails(path: Any) -> None:
        if str(path) in {f"{tmp_path}/{BRANCH}parquet", f"{tmp_path}/_sparkonce"}:
            raise OSError(number, os.strerror(number), str(path))

    with monkeypatch.context() as broken:
        broken.setattr(Path, "exists", os.path.exists)  # as from 3.14 on
        broken.setattr(os, "stat", lambda path, **more: fails(path) or stat(path, **more))
        broken.setattr(os, "listdir", lambda path: fails(path) or listdir(path))
        broken.setattr(os, "scandir", lambda path: fails(path) or scandir(path))
        with pytest.raises(OSError, match=os.strerror(number)):
            sink.commit(committable)
        with pytest.raises(OSError, match=os.strerror(number)):
            list(sink.find_branches(OWNER))
    sink.commit(committable)
    assert (hidden(tmp_path), visible(tmp_path)) == (0, 2)


def test_branch_of_a_version_that_did_not_mark_its_folder(sink: FileSink, tmp_path: Path) -> None:
    """It is committed as ever; where it is gone nothing tells its folder from another one."""
    older = Committable(prepare(sink).branch_id)
    FileSink(tmp_path).commit(older)
    FileSink(tmp_path).commit(older)
    assert visible(tmp_path) == 2
    for path in tmp_path.glob("*.parquet"):
        path.unlink()
    with pytest.raises(CommitUnresolvedError, match="mount"):
        FileSink(tmp_path).commit(older)


def test_branches_are_found_by_owner(sink: FileSink) -> None:
    """Open and prepared files of this owner, and of no other."""
    prepare(sink)
    prepare(sink, BranchId(Owner("0" * 16, "5b1d0"), 7, 4, "file", 0, 11))
    sink.beginTransaction(BranchId(OWNER, 8, 4, "file", 0, 12)).file.close()
    found = {str(committable.branch_id) for committable in sink.find_branches(OWNER)}
    assert found == {str(BRANCH), str(BranchId(OWNER, 8, 4, "file", 0, 12))}


def test_missing_folder_is_named_before_data_moves(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="nowhere does not exist"):
        FileSink(tmp_path / "nowhere").validate(ROWS.schema)


@pytest.mark.parametrize("name", ["", "a.b", "x" * 33])
def test_sink_name_with_other_characters_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigurationError, match="name="):
        FileSink(tmp_path, name=name)


def other_file(sink: FileSink, tmp_path: Path) -> tuple[Committable, Path]:
    """A prepared branch, and a file of other rows that has its name already."""
    committable = prepare(sink)
    path = tmp_path / f"{BRANCH}parquet"
    pq.write_table(pa.table({"id": [7, 8, 9]}), path)
    return committable, path


def test_commit_replaces_no_file(sink: FileSink, tmp_path: Path) -> None:
    """A copied checkpoint makes equal names: what the other run has committed stays."""
    committable, path = other_file(sink, tmp_path)
    for _ in range(2):
        with pytest.raises(CommitRejectedError, match=f"{path} .*{tmp_path}/_sparkonce/"):
            sink.commit(committable)
        assert pq.read_table(path)["id"].to_pylist() == [7, 8, 9]
        assert hidden(tmp_path) == 1


def test_file_of_another_run_is_no_proof(sink: FileSink, tmp_path: Path) -> None:
    """The prepared file is gone too: what is there is not what was prepared."""
    committable, path = other_file(sink, tmp_path)
    (tmp_path / "_sparkonce" / path.name).unlink()
    with pytest.raises(CommitRejectedError, match=str(path)):
        sink.commit(committable)
    assert pq.read_table(path)["id"].to_pylist() == [7, 8, 9]


def test_commit_that_was_cut_between_its_names(sink: FileSink, tmp_path: Path) -> None:
    """Both names are of one file."""
    committable = prepare(sink)
    name = f"{BRANCH}parquet"
    os.link(tmp_path / "_sparkonce" / name, tmp_path / name)
    sink.commit(committable)
    assert (hidden(tmp_path), visible(tmp_path)) == (0, 2)


def test_committed_file_that_was_restored_is_the_same(sink: FileSink, tmp_path: Path) -> None:
    """A backup has another inode; what was prepared before sizes were kept has no digest."""
    committable = prepare(sink)
    sink.commit(committable)
    path = tmp_path / f"{BRANCH}parquet"
    shutil.copy(path, tmp_path / "restored")
    (tmp_path / "restored").replace(path)
    sink.commit(committable)
    sink.commit(Committable(BRANCH, {"folder": committable.payload["folder"]}, 2))
    assert visible(tmp_path) == 2


def test_folder_that_is_missing_is_no_empty_folder(sink: FileSink, tmp_path: Path) -> None:
    """`doctor` and `orphans` report it: nobody can look for orphans on an unmounted disk."""
    prepare(sink)
    (found,) = sink.diagnose()
    assert found.level is Level.OK
    assert len(list(sink.find_branches(OWNER))) == 1
    shutil.rmtree(tmp_path)
    (found,) = sink.diagnose()
    assert (found.level, found.fix) == (Level.ERROR, "mount its disk, or create it")
    with pytest.raises(SinkUnavailableError, match="does not exist"):
        sink.find_branches(OWNER)


def test_doctor_sees_a_folder_of_sparks_file_sink(tmp_path: Path) -> None:
    """The start refuses it, and the doctor said ok."""
    (tmp_path / "_spark_metadata").mkdir()
    sink = FileSink(tmp_path)
    (finding,) = sink.diagnose()
    assert finding.level is Level.ERROR
    with pytest.raises(ConfigurationError) as refusal:
        sink.validate(pa.schema({"id": pa.int64()}))
    assert str(refusal.value) == finding.what
