"""`IcebergSink.take_back`: exactly a batch's data files leave the table, or none."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from pyiceberg.exceptions import CommitFailedException, CommitStateUnknownException
from pyiceberg.manifest import ManifestEntryStatus, ManifestFile
from pyiceberg.partitioning import PartitionField, PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.transforms import BucketTransform, IdentityTransform
from pyiceberg.types import LongType, NestedField, StringType

from sparkonce.errors import (
    CommitRejectedError,
    CommitUnresolvedError,
    SinkUnavailableError,
    TakeBackRefusedError,
)
from sparkonce.model import DRIVER_ATTEMPT
from sparkonce.sinks import Delivered, IcebergSink, Visible
from sparkonce.sinks.lakehouse import finishing, proofs, ranges
from tests.iceberg.conftest import (
    NAME,
    SCHEMA,
    Intruder,
    Lake,
    add_a_column,
    another_writer,
    branch,
    drop_a_column,
    partition_by_id,
    prepared,
    raising,
    rename_a_column,
    rewrite_the_table,
    rows,
    task,
)
from tests.iceberg.delete_files import delete_id, delete_position

if TYPE_CHECKING:
    from pyiceberg.table import Table

IDENTITY = PartitionSpec(PartitionField(1, 1000, IdentityTransform(), "part"))


def delivered(sink: IcebergSink, *batches: int) -> list[Delivered]:
    """Deliver the batches, each by two tasks with three rows; their branches, newest first."""
    found: list[Delivered] = []
    for batch in batches:
        first, *rest = ids_of(batch)
        committable = prepared(sink, batch, [rows(first)], [rows(*rest)])
        sink.commit(committable)
        found.insert(0, Delivered(committable, 3))
    return found


def ids_of(*batches: int) -> list[int]:
    return [batch * 10 + n for batch in batches for n in range(3)]


def head(lake: Lake) -> tuple[int | None, dict[str, str]]:
    """What a commit to main changes."""
    table = lake.table()
    return table.metadata.current_snapshot_id, table.properties


def manifests(table: Table) -> list[ManifestFile]:
    snapshot = table.current_snapshot()
    assert snapshot is not None
    return snapshot.manifests(table.io)


def is_refused(lake: Lake, branches: list[Delivered], why: str) -> None:
    """Both verbs name the table, the batch and the way out, and change nothing."""
    before, sink = head(lake), lake.sink()
    for verb in (sink.find_delivered, sink.take_back):
        with pytest.raises(TakeBackRefusedError, match=why) as caught:
            verb(branches)
        assert "Iceberg table shop.orders" in str(caught.value)
        assert "--keep iceberg" in str(caught.value)
    assert head(lake) == before


@pytest.fixture
def sink(lake: Lake) -> IcebergSink:
    lake.create()
    return lake.sink()


def test_files_of_the_batches_go(lake: Lake, sink: IcebergSink) -> None:
    """From any process, in one snapshot; the files stay, for older snapshots."""
    delivered(sink, 1, 2)
    branches = delivered(sink, 3, 4)
    files, before = lake.data(), lake.table().current_snapshot()
    other = lake.sink()
    found = other.find_delivered(branches)
    assert [visible.rows for visible in found] == [3, 3]
    assert sorted(name for visible in found for name in visible.names) == sorted(
        f"file://{path}" for path in files if ".b3." in str(path) or ".b4." in str(path)
    )
    for _ in range(2):  # the second call changes nothing
        other.take_back(branches)
        assert lake.ids() == ids_of(1, 2)
        assert other.find_delivered(branches) == [Visible(0)] * 2
        after = lake.table().current_snapshot()
        assert before is not None
        assert after is not None
        assert after.parent_snapshot_id == before.snapshot_id
    assert lake.data() == files
    assert sorted(
        lake.table().scan(snapshot_id=before.snapshot_id).to_arrow()["id"].to_pylist()
    ) == ids_of(1, 2, 3, 4)


def test_removal_is_described_as_engines_expect(lake: Lake, sink: IcebergSink) -> None:
    """The snapshot counts what is left; deleted entries keep the numbers of their commits."""
    delivered(sink, 1)
    (found,) = delivered(sink, 2)
    committed = lake.table().metadata.last_sequence_number
    sink.take_back([found])
    snapshot = lake.table().current_snapshot()
    assert snapshot is not None
    assert snapshot.summary is not None
    summary = snapshot.summary.additional_properties
    sizes = [path.stat().st_size for path in lake.data()]
    gone = [path.stat().st_size for path in lake.data() if ".b2." in str(path)]
    assert snapshot.summary.operation.value == "delete"
    assert {name: summary[name] for name in summary if name.startswith("total-")} == {
        "total-data-files": "2",
        "total-delete-files": "0",
        "total-equality-deletes": "0",
        "total-files-size": str(sum(sizes) - sum(gone)),
        "total-position-deletes": "0",
        "total-records": "3",
    }
    assert (summary["deleted-data-files"], summary["deleted-records"]) == ("2", "3")
    io = lake.table().io
    entries = [e for m in manifests(lake.table()) for e in m.fetch_manifest_entry(io, False)]
    deleted = [entry for entry in entries if entry.status == ManifestEntryStatus.DELETED]
    assert {(e.snapshot_id, e.sequence_number) for e in deleted} == {
        (snapshot.snapshot_id, committed)
    }
    assert len(deleted) == 2


@pytest.mark.parametrize("change", [another_writer, add_a_column, partition_by_id])
def test_another_commit_comes_first(
    lake: Lake, sink: IcebergSink, intruder: Intruder, change: Callable[[Lake], None]
) -> None:
    """It survives, and the files are proven again."""
    delivered(sink, 1)
    branches = delivered(sink, 2)
    intruder.calls, intruder.before = 0, lambda: change(lake)
    sink.take_back(branches)
    assert lake.ids() == [*ids_of(1), *([100] if change is another_writer else [])]
    is_of_main = change is another_writer
    assert intruder.calls == (3 if is_of_main else 2)


def test_batch_is_compacted_just_before_the_removal(
    lake: Lake, sink: IcebergSink, intruder: Intruder
) -> None:
    """Its files vanish, as those of a batch that is taken back; but its rows are there."""
    branches = delivered(sink, 1, 2)
    intruder.before = lambda: rewrite_the_table(lake)
    with pytest.raises(TakeBackRefusedError, match="has 0 of the batch's 2 data files"):
        sink.take_back(branches)
    assert lake.ids() == ids_of(1, 2)
    is_refused(lake, branches, "has 0 of the batch's 2 data files")


@pytest.mark.parametrize("has_landed", [False, True])
@pytest.mark.parametrize("error", [CommitStateUnknownException("502"), ConnectionError("reset")])
def test_catalog_gives_no_answer(
    lake: Lake, sink: IcebergSink, intruder: Intruder, error: Exception, *, has_landed: bool
) -> None:
    """As if the process was killed there; the next call finds out."""
    delivered(sink, 1)
    branches = delivered(sink, 2)
    setattr(intruder, "after" if has_landed else "before", raising(error))
    with pytest.raises(SinkUnavailableError, match="Iceberg table shop.orders"):
        sink.take_back(branches)
    left = ids_of(1) if has_landed else ids_of(1, 2)
    assert lake.ids() == left
    assert sink.find_delivered(branches)[0].rows == (0 if has_landed else 3)
    intruder.calls = 0
    sink.take_back(branches)
    assert lake.ids() == ids_of(1)
    assert intruder.calls == (0 if has_landed else 1)


def test_catalog_calls_a_removal_failed_that_it_made(
    lake: Lake, sink: IcebergSink, intruder: Intruder
) -> None:
    delivered(sink, 1)
    branches = delivered(sink, 2)
    intruder.calls, intruder.after = 0, raising(CommitFailedException("Requirement failed"))
    sink.take_back(branches)
    assert (lake.ids(), intruder.calls) == (ids_of(1), 1)


def test_other_writers_always_come_first(
    lake: Lake, sink: IcebergSink, intruder: Intruder, monkeypatch: pytest.MonkeyPatch
) -> None:
    branches = delivered(sink, 1)
    monkeypatch.setattr(finishing, "PATIENCE_S", -1.0)
    intruder.before = lambda: another_writer(lake)
    with pytest.raises(SinkUnavailableError, match="came first each time"):
        sink.take_back(branches)
    sink.take_back(branches)
    assert lake.ids() == [100]


# -- late drivers ----------------------------------------------------------------------------------


def test_late_commit_shows_nothing_again(lake: Lake, sink: IcebergSink) -> None:
    """Neither does any other verb, and the files are not touched."""
    (found,) = delivered(sink, 1)
    sink.take_back([found])
    files, before = lake.data(), head(lake)
    lake.sink().commit(found.committable)
    sink.abort(found.committable)
    sink.abort(found.committable.branch_id)
    with pytest.raises(CommitRejectedError):
        sink.abort_decided(found.committable)
    assert (lake.ids(), lake.data(), head(lake)) == ([], files, before)


def test_driver_is_paused_in_its_commit_while_the_batch_is_taken_back(
    lake: Lake, sink: IcebergSink, intruder: Intruder
) -> None:
    """Its request is sent when its successor has committed the batch, and a rewind removed it."""
    paused = lake.sink()
    committable = prepared(sink, 1, [rows(1)], [rows(2, 3)])

    def meanwhile() -> None:
        sink.commit(committable)
        sink.take_back([Delivered(committable, 3)])
        assert lake.ids() == []

    intruder.before = meanwhile
    paused.commit(committable)
    assert (lake.ids(), lake.marks()) == ([], [])


def test_new_query_writes_the_same_batches(lake: Lake, sink: IcebergSink) -> None:
    """And a second rewind removes these, and finds the others gone."""
    delivered(sink, 0)
    old = delivered(sink, 1)
    sink.take_back(old)
    new = of_query(sink, "a0-b1", 1, 15)
    assert lake.ids() == [*ids_of(0), 15]
    sink.commit(old[0].committable)
    assert lake.ids() == [*ids_of(0), 15]
    both = [new, *old]
    assert [found.rows for found in sink.find_delivered(both)] == [1, 0]
    sink.take_back(both)
    assert lake.ids() == ids_of(0)


def of_query(sink: IcebergSink, query_id: str, batch: int, *ids: int) -> Delivered:
    branch_id = replace(branch(batch), owner=replace(branch().owner, query_id=query_id), token=9)
    done = [task(sink, branch_id, rows(*ids))]
    (committable,) = sink.vote(replace(branch_id, attempt=DRIVER_ATTEMPT), done)
    sink.commit(committable)
    return Delivered(committable, len(ids))


def test_batches_of_two_queries_go_at_once(lake: Lake, sink: IcebergSink) -> None:
    """As after a rewind that kept this sink."""
    both = [of_query(sink, "a0-b1", 1, 15), *delivered(sink, 1)]
    count = len(lake.table().snapshots())
    sink.take_back(both)
    assert (lake.ids(), len(lake.table().snapshots())) == ([], count + 1)
    assert sink.find_delivered(both) == [Visible(0)] * 2


def test_mark_of_a_task_appears_again(lake: Lake, sink: IcebergSink) -> None:
    """Older snapshots name its files, also when nobody can read that in the manifest."""
    handle = sink.beginTransaction(branch())
    sink.write(handle, rows(1))
    done = sink.preCommit(handle)
    (mark,) = lake.folder.rglob("*.mark")
    content = mark.read_bytes()
    (committable,) = sink.vote(replace(branch(), attempt=DRIVER_ATTEMPT), [done])
    sink.commit(committable)
    sink.take_back([Delivered(committable, 1)])
    files = lake.data()
    for _ in range(2):
        mark.write_bytes(content)
        for found in sink.find_branches(branch().owner):
            sink.abort(found)
        assert (lake.data(), lake.marks()) == (files, [])
        for path in lake.folder.rglob("sparkonce*.s0.avro"):
            path.unlink()


# -- refusals --------------------------------------------------------------------------------------


def delete_a_row(lake: Lake) -> None:
    lake.table().delete("id = 21")


def delete_a_file(lake: Lake) -> None:
    lake.table().delete("id = 20")


def roll_back(lake: Lake) -> None:
    first = lake.table().snapshots()[1]
    lake.table().manage_snapshots().rollback_to_snapshot(first.snapshot_id).commit()


def lose_the_proof(lake: Lake) -> None:
    with lake.table().transaction() as change:
        change.remove_properties(*(n for n in lake.table().properties if "sparkonce" in n))


def recreate(lake: Lake) -> None:
    lake.catalog.drop_table(NAME)
    lake.create()


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (rewrite_the_table, r"has 0 of the batch's 2 data files.* of batch 2;"),
        (delete_a_row, r"has 1 of the batch's 2 data files.* of batch 2;"),
        (delete_a_file, r"has 1 of the batch's 2 data files.* of batch 2;"),
        (roll_back, r"has 0 of the batch's 2 data files.* of batch 2;"),
        (lose_the_proof, r"does not show that the batch was committed.* of batch 2;"),
        (recreate, r"is another table now .* of batch 2;"),
    ],
)
def test_table_was_changed(
    lake: Lake, sink: IcebergSink, change: Callable[[Lake], None], why: str
) -> None:
    branches = delivered(sink, 1, 2)
    change(lake)
    is_refused(lake, branches, why)


def test_table_does_not_exist(lake: Lake, sink: IcebergSink) -> None:
    branches = delivered(sink, 1)
    lake.catalog.drop_table(NAME)
    for verb in (sink.find_delivered, sink.take_back):
        with pytest.raises(TakeBackRefusedError, match=r"does not exist.*--keep iceberg"):
            verb(branches)


def test_log_that_knows_other_rows_is_refused(lake: Lake, sink: IcebergSink) -> None:
    (found,) = delivered(sink, 1)
    with pytest.raises(TakeBackRefusedError, match="has 3 of the 2 rows"):
        sink.take_back([found._replace(rows=2)])
    assert lake.ids() == ids_of(1)


def test_one_batch_that_was_changed_keeps_all(lake: Lake, sink: IcebergSink) -> None:
    branches = delivered(sink, 1, 2, 3)
    delete_a_row(lake)
    is_refused(lake, branches, "of batch 2;")


def test_format_version_is_newer(lake: Lake, sink: IcebergSink) -> None:
    branches = delivered(sink, 1)
    path = Path(lake.table().metadata_location.removeprefix("file://"))
    content = json.loads(path.read_text())
    path.write_text(json.dumps({**content, "format-version": 3, "next-row-id": 0}))
    is_refused(lake, branches, "has format version 3")


@pytest.mark.parametrize("bounds", [True, False])
def test_row_is_deleted_by_position(lake: Lake, sink: IcebergSink, *, bounds: bool) -> None:
    """The data file is still there, with all of its rows."""
    branches = delivered(sink, 1, 2)
    path = lake.sink().find_delivered(branches)[0].names[0]
    delete_position(lake.table(), path, bounds=bounds)
    assert len(lake.ids()) == 5
    is_refused(lake, branches, "marks rows .* as deleted")


def test_row_is_deleted_by_value(lake: Lake, sink: IcebergSink) -> None:
    branches = delivered(sink, 1, 2)
    delete_id(lake.table(), 20)
    is_refused(lake, branches, "marks rows .* as deleted")


def test_rows_of_other_files_are_deleted(lake: Lake, sink: IcebergSink) -> None:
    """Delete files that are older than the batch, or name another file, delete none of its rows."""
    older = delivered(sink, 1)
    (path, *_) = sink.find_delivered(older)[0].names
    delete_position(lake.table(), path, bounds=False)
    delete_position(lake.table(), path)
    branches = delivered(sink, 2)
    delete_position(lake.table(), path)
    before = lake.ids()
    sink.take_back(branches)
    assert lake.ids() == [number for number in before if number < 20]
    assert len(lake.ids()) == 2


def test_value_is_deleted_before_the_batch(lake: Lake, sink: IcebergSink) -> None:
    """The batch brings the value again; the rows of the batch before are not known."""
    older = delivered(sink, 1)
    delete_id(lake.table(), 20)
    branches = delivered(sink, 2)
    is_refused(lake, [*branches, *older], "of batch 1;")
    assert sink.find_delivered(branches)[0].rows == 3
    sink.take_back(branches)
    assert sink.find_delivered(branches) == [Visible(0)]


# -- other tables ----------------------------------------------------------------------------------


def test_partitioned_table(lake: Lake) -> None:
    """Also if its partitions change between the batches."""
    lake.create(Schema(*FIELDS), IDENTITY)
    sink = lake.sink()
    sink.validate(SCHEMA)
    delivered(sink, 1)
    branches = delivered(sink, 2)
    with lake.table().update_spec() as update:
        update.add_field("name", BucketTransform(4), "bucket")
    sink = lake.sink()
    sink.validate(SCHEMA)
    delivered(sink, 3)
    branches = [*delivered(sink, 4), *branches]
    assert [len(found.names) for found in sink.find_delivered(branches)] == [3, 3]
    sink.take_back(branches)
    assert lake.ids() == ids_of(1, 3)
    assert lake.table().scan(row_filter="id = 11").to_arrow()["id"].to_pylist() == [11]
    assert lake.table().scan(row_filter="id = 21").to_arrow()["id"].to_pylist() == []


FIELDS = (
    NestedField(1, "id", LongType(), required=False),
    NestedField(2, "name", StringType(), required=False),
)


def test_partition_of_another_engines_deletes(lake: Lake) -> None:
    """A delete file without bounds may delete rows of its own partition only."""
    lake.create(Schema(*FIELDS), IDENTITY)
    sink = lake.sink()
    branches = delivered(sink, 2)
    another_writer(lake)
    delete_position(lake.table(), "file:///elsewhere", 100, bounds=False)
    assert sink.find_delivered(branches)[0].rows == 3
    delete_position(lake.table(), "file:///elsewhere", 21, bounds=False)
    is_refused(lake, branches, "marks rows .* as deleted")


@pytest.mark.parametrize("change", [add_a_column, rename_a_column, drop_a_column])
def test_columns_have_changed(
    lake: Lake, sink: IcebergSink, change: Callable[[Lake], None]
) -> None:
    delivered(sink, 1)
    branches = delivered(sink, 2)
    change(lake)
    sink.take_back(branches)
    assert lake.ids() == ids_of(1)


def test_column_of_old_partitions_is_dropped(lake: Lake) -> None:
    lake.create(Schema(*FIELDS), PartitionSpec(PartitionField(2, 1000, IdentityTransform(), "n")))
    sink = lake.sink()
    delivered(sink, 1)
    branches = delivered(sink, 2)
    merge_manifests(lake)
    with lake.table().update_spec() as update:
        update.remove_field("n")
    drop_a_column(lake)
    assert sink.find_delivered(branches)[0].rows == 3
    sink.take_back(branches)
    assert lake.ids() == [*ids_of(1), 100]


def merge_manifests(lake: Lake) -> None:
    """As every append of another engine does now and then."""
    with lake.table().transaction() as change:
        change.set_properties(
            {"commit.manifest-merge.enabled": "true", "commit.manifest.min-count-to-merge": "1"}
        )
    another_writer(lake)


def test_manifests_are_merged_and_rewritten(lake: Lake, sink: IcebergSink) -> None:
    """The files are in a manifest with those of others, which stay; the batch's own one expired."""
    delivered(sink, 1)
    branches = delivered(sink, 2, 3)
    merge_manifests(lake)
    assert len(manifests(lake.table())) == 1
    for path in lake.folder.rglob("sparkonce*.s0.avro"):
        path.unlink()
    assert [found.rows for found in sink.find_delivered(branches)] == [3, 3]
    sink.take_back(branches)
    assert lake.ids() == [*ids_of(1), 100]
    delivered(sink, 4)
    assert lake.ids() == [*ids_of(1), *ids_of(4), 100]


def test_snapshots_expire(lake: Lake, sink: IcebergSink) -> None:
    """Both before and after the removal."""
    delivered(sink, 1)
    branches = delivered(sink, 2)
    for _ in range(2):
        another_writer(lake)
        table = lake.table()
        old = [s.snapshot_id for s in table.snapshots() if s != table.current_snapshot()]
        table.maintenance.expire_snapshots().by_ids(old).commit()
        sink.take_back(branches)
        assert sink.find_delivered(branches) == [Visible(0)]
    assert lake.ids() == [*ids_of(1), 100, 100]


def test_table_is_rolled_back_to_before_the_removal(lake: Lake, sink: IcebergSink) -> None:
    """The rows are there again, whatever the table's properties say, and go again."""
    delivered(sink, 1)
    branches = delivered(sink, 2)
    before = lake.table().current_snapshot()
    assert before is not None
    sink.take_back(branches)
    lake.table().manage_snapshots().rollback_to_snapshot(before.snapshot_id).commit()
    assert sink.find_delivered(branches)[0].rows == 3
    sink.take_back(branches)
    assert lake.ids() == ids_of(1)


def test_only_the_batches_own_manifests_are_read(
    lake: Lake, sink: IcebergSink, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each once a call, however many others there are."""
    delivered(sink, *range(1, 12))
    branches = delivered(sink, 12, 13)
    read: list[str] = []
    real = ManifestFile.fetch_manifest_entry

    def fetch(self: ManifestFile, *args: object, **settings: object) -> object:
        read.append(self.manifest_path)
        return real(self, *args, **settings)  # type: ignore[arg-type]

    monkeypatch.setattr(ManifestFile, "fetch_manifest_entry", fetch)
    sink.find_delivered(branches)
    assert len(read) == 2
    assert all(".b12." in path or ".b13." in path for path in read)


def test_proof_of_many_batches_is_one_number(
    lake: Lake, sink: IcebergSink, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is kept of the batches with gaps between them is bounded, and this is not."""
    monkeypatch.setattr(ranges, "MOST_RUNS", 2)
    branches = delivered(sink, 1, 3, 5, 7)
    sink.take_back(branches)
    (kept,) = [v for n, v in lake.table().properties.items() if n.endswith(".taken_back")]
    assert kept == "1"
    sink.take_back(branches)
    assert sink.find_delivered(branches) == [Visible(0)] * 4
    later = delivered(sink, 9)
    sink.take_back(later)  # a rewind past less does not forget the one past more
    assert sink.find_delivered([*branches, *later]) == [Visible(0)] * 5


def test_many_drivers_do_not_push_the_proof_out(
    lake: Lake, sink: IcebergSink, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(proofs, "KEPT", 3)
    branches = delivered(sink, 1)
    sink.take_back(branches)
    for token in range(4, 9):
        committable = prepared(sink, token, [rows(token)], token=token)
        sink.commit(committable)
        sink.take_back([Delivered(committable, 1)])
    assert sink.find_delivered(branches) == [Visible(0)]
    with pytest.raises(CommitUnresolvedError, match="no longer shows how batch 1 ended"):
        sink.commit(branches[0].committable)
    assert lake.ids() == []
