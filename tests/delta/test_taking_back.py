"""`DeltaSink.take_back`: exactly a batch's data files leave the table, or none."""

from __future__ import annotations

import base64
import json
import shutil
import struct
from collections.abc import Callable
from dataclasses import replace

import pyarrow as pa
import pytest
from deltalake import TableFeatures
from deltalake.exceptions import CommitFailedError

from sparkonce.errors import (
    CommitRejectedError,
    CommitUnresolvedError,
    SinkUnavailableError,
    TakeBackRefusedError,
)
from sparkonce.sinks import Delivered, DeltaSink, Visible
from tests.delta.conftest import (
    Intruder,
    Lake,
    add_a_column,
    another_writer,
    branch,
    checkpoint_and_clean_the_log,
    compact,
    of_driver,
    prepared,
    raising,
    rows,
    task,
    vacuum,
)


def delivered(sink: DeltaSink, *batches: int) -> list[Delivered]:
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


def is_refused(lake: Lake, branches: list[Delivered], why: str) -> None:
    """Both verbs name the table, the batch and the way out, and change nothing."""
    before, sink = lake.table().version(), lake.sink()
    for verb in (sink.find_delivered, sink.take_back):
        with pytest.raises(TakeBackRefusedError, match=why) as caught:
            verb(branches)
        assert f"Delta table {lake.uri}" in str(caught.value)
        assert "--keep delta" in str(caught.value)
    assert lake.table().version() == before


@pytest.fixture
def sink(lake: Lake) -> DeltaSink:
    lake.create()
    return lake.sink()


@pytest.mark.parametrize("columns", [[], ["day"], ["name", "id"]])
def test_files_of_the_batches_go(lake: Lake, columns: list[str]) -> None:
    """From any process, in one version; the files stay, for older versions."""
    lake.create(partition_by=columns)
    sink = lake.sink()
    delivered(sink, 1, 2)
    branches = delivered(sink, 3, 4)
    files, version = lake.data(), lake.table().version()
    other = lake.sink()
    found = other.find_delivered(branches)
    assert [visible.rows for visible in found] == [3, 3]
    assert sorted(name for visible in found for name in visible.names) == sorted(
        f"{path.parent.name}/{path.name}"
        for path in files
        if ".b3." in str(path) or ".b4." in str(path)
    )
    for _ in range(2):  # the second call changes nothing
        other.take_back(branches)
        assert lake.ids() == ids_of(1, 2)
        assert other.find_delivered(branches) == [Visible(0)] * 2
        assert lake.table().version() == version + 1
    vacuum(lake)
    assert lake.data() == files
    older = lake.table()
    older.load_as_version(version)
    assert sorted(older.to_pyarrow_table()["id"].to_pylist()) == ids_of(1, 2, 3, 4)


def test_removal_is_described_as_engines_expect(lake: Lake) -> None:
    """As the add actions were: change feeds are made from it."""
    lake.create(partition_by=["day"], configuration={"delta.enableChangeDataFeed": "true"})
    sink = lake.sink()
    branches = delivered(sink, 1)
    actions = [json.loads(line) for line in lake.log(1).read_text().splitlines()]
    sink.take_back(branches)
    after = [json.loads(line) for line in lake.log(2).read_text().splitlines()]
    said = ("path", "partitionValues", "size", "dataChange")
    assert [[a["remove"][name] for name in said] for a in after if "remove" in a] == [
        [a["add"][name] for name in said] for a in actions if "add" in a
    ]
    changes = pa.table(lake.table().load_cdf(starting_version=2))
    assert sorted(changes["id"].to_pylist()) == ids_of(1)
    assert set(changes["_change_type"].to_pylist()) == {"delete"}


@pytest.mark.parametrize("change", [another_writer, add_a_column])
def test_another_commit_comes_first(
    lake: Lake, sink: DeltaSink, intruder: Intruder, change: Callable[[Lake], None]
) -> None:
    """It survives, and the files are proven again."""
    delivered(sink, 1)
    branches = delivered(sink, 2)
    intruder.calls, intruder.before = 0, lambda: change(lake)
    sink.take_back(branches)
    assert lake.ids() == [*ids_of(1), *([100] if change is another_writer else [])]
    assert intruder.calls == 2


def test_batch_is_compacted_just_before_the_removal(
    lake: Lake, sink: DeltaSink, intruder: Intruder
) -> None:
    """Its files vanish, as those of a batch that is taken back; but its rows are there."""
    branches = delivered(sink, 1, 2)
    intruder.before = lambda: compact(lake)
    with pytest.raises(TakeBackRefusedError, match="has 0 of the batch's 2 data files"):
        sink.take_back(branches)
    assert lake.ids() == ids_of(1, 2)
    is_refused(lake, branches, "has 0 of the batch's 2 data files")


@pytest.mark.parametrize("has_landed", [False, True])
def test_storage_gives_no_answer(
    lake: Lake, sink: DeltaSink, intruder: Intruder, *, has_landed: bool
) -> None:
    """As if the process was killed there; the next call finds out."""
    delivered(sink, 1)
    branches = delivered(sink, 2)
    setattr(intruder, "after" if has_landed else "before", raising(OSError("timeout")))
    with pytest.raises(SinkUnavailableError, match="Delta table"):
        sink.take_back(branches)
    assert lake.ids() == (ids_of(1) if has_landed else ids_of(1, 2))
    assert sink.find_delivered(branches)[0].rows == (0 if has_landed else 3)
    intruder.calls = 0
    sink.take_back(branches)
    assert lake.ids() == ids_of(1)
    assert intruder.calls == (0 if has_landed else 1)


def test_removal_that_landed_is_called_failed(
    lake: Lake, sink: DeltaSink, intruder: Intruder
) -> None:
    delivered(sink, 1)
    branches = delivered(sink, 2)
    intruder.calls, intruder.after = 0, raising(CommitFailedError("version exists"))
    sink.take_back(branches)
    assert (lake.ids(), intruder.calls) == (ids_of(1), 1)


def test_late_commit_shows_nothing_again(lake: Lake, sink: DeltaSink) -> None:
    """Neither does any other verb, and the files are not touched."""
    delivered(sink, 0)
    (found,) = delivered(sink, 1)
    sink.take_back([found])
    files, before = lake.data(), lake.table().version()
    lake.sink().commit(found.committable)
    sink.abort(found.committable)
    sink.abort(found.committable.branch_id)
    with pytest.raises(CommitRejectedError):
        sink.abort_decided(found.committable)
    assert (lake.ids(), lake.data()) == (ids_of(0), files)
    assert lake.table().version() == before


def test_driver_is_paused_in_its_commit_while_the_batch_is_taken_back(
    lake: Lake, sink: DeltaSink, intruder: Intruder
) -> None:
    paused = lake.sink()
    committable = prepared(sink, 1, [rows(1)], [rows(2, 3)])

    def meanwhile() -> None:
        sink.commit(committable)
        sink.take_back([Delivered(committable, 3)])
        assert lake.ids() == []

    intruder.before = meanwhile
    paused.commit(committable)
    assert (lake.ids(), lake.left_over()) == ([], [])


def test_batches_of_two_queries_go_at_once(lake: Lake, sink: DeltaSink) -> None:
    """As after a rewind that kept this sink; each query's proofs are found again."""
    branch_id = replace(branch(1), owner=replace(branch().owner, query_id="a0-b1"), token=9)
    (new,) = sink.vote(of_driver(branch_id), [task(sink, branch_id, rows(15))])
    sink.commit(new)
    both = [Delivered(new, 1), *delivered(sink, 1)]
    version = lake.table().version()
    sink.take_back(both)
    assert (lake.ids(), lake.table().version()) == ([], version + 1)
    assert sink.find_delivered(both) == [Visible(0)] * 2
    for found in both:
        sink.commit(found.committable)
    later = delivered(sink, 2)
    assert sink.find_delivered([*later, *both])[1:] == [Visible(0)] * 2
    assert lake.ids() == ids_of(2)


def test_mark_of_a_task_appears_again(lake: Lake, sink: DeltaSink) -> None:
    """Older versions name its files."""
    handle = sink.beginTransaction(branch())
    sink.write(handle, rows(1))
    done = sink.preCommit(handle)
    (mark,) = lake.folder.rglob("*.mark")
    content = mark.read_bytes()
    (committable,) = sink.vote(of_driver(branch()), [done])
    sink.commit(committable)
    sink.take_back([Delivered(committable, 1)])
    mark.write_bytes(content)
    for found in sink.find_branches(branch().owner):
        sink.abort(found)
    assert (len(lake.data()), lake.left_over()) == (1, [])


# -- refusals --------------------------------------------------------------------------------------


def delete_a_row(lake: Lake) -> None:
    lake.table().delete("id = 21")


def delete_a_file(lake: Lake) -> None:
    lake.table().delete("id = 20")


def restore(lake: Lake) -> None:
    lake.table().restore(1)


def recreate(lake: Lake) -> None:
    shutil.rmtree(lake.uri)
    lake.create()


def take_no_removals(lake: Lake) -> None:
    lake.table().alter.set_table_properties({"delta.appendOnly": "true"})


def forget_transactions(lake: Lake) -> None:
    lake.table().alter.set_table_properties(
        {"delta.setTransactionRetentionDuration": "interval 7 days"}
    )


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (compact, r"has 0 of the batch's 2 data files.* of batch 2;"),
        (delete_a_row, r"has 1 of the batch's 2 data files.* of batch 2;"),
        (delete_a_file, r"has 1 of the batch's 2 data files.* of batch 2;"),
        (restore, r"has 0 of the batch's 2 data files.* of batch 2;"),
        (recreate, r"is another table now .* of batch 2;"),
        (take_no_removals, "unset delta.appendOnly"),
        (forget_transactions, "unset delta.setTransactionRetentionDuration"),
    ],
)
def test_table_was_changed(
    lake: Lake, sink: DeltaSink, change: Callable[[Lake], None], why: str
) -> None:
    branches = delivered(sink, 1, 2)
    change(lake)
    is_refused(lake, branches, why)


def test_table_does_not_exist(lake: Lake, sink: DeltaSink) -> None:
    branches = delivered(sink, 1)
    shutil.rmtree(lake.uri)
    for verb in (sink.find_delivered, sink.take_back):
        with pytest.raises(TakeBackRefusedError, match=r"does not exist.*--keep delta"):
            verb(branches)


def test_log_that_knows_other_rows_is_refused(lake: Lake, sink: DeltaSink) -> None:
    (found,) = delivered(sink, 1)
    with pytest.raises(TakeBackRefusedError, match="has 3 of the 2 rows"):
        sink.take_back([found._replace(rows=2)])
    assert lake.ids() == ids_of(1)


def test_row_is_deleted_by_a_vector(lake: Lake) -> None:
    """The data file is still there, with all of its rows."""
    lake.create().alter.add_feature(
        TableFeatures.DeletionVectors, allow_protocol_versions_increase=True
    )
    sink = lake.sink()
    branches = delivered(sink, 1, 2)
    assert [found.rows for found in sink.find_delivered(branches)] == [3, 3]
    delete_by_vector(lake, sink.find_delivered(branches)[0].names[0])
    assert sorted(pa.table(lake.table().scan())["id"].to_pylist()) == [10, 11, 12, 21, 22]
    is_refused(lake, branches, "marks rows .* as deleted")
    sink.take_back(branches[1:])
    assert len(pa.table(lake.table().get_add_actions())) == 2


def delete_by_vector(lake: Lake, path: str) -> None:
    """Delete the first row of a file, as Spark does it."""
    table = lake.table()
    lines = [
        json.loads(line)
        for version in range(table.version() + 1)
        for line in lake.log(version).read_text().splitlines()
    ]
    (add,) = [line["add"] for line in lines if line.get("add", {}).get("path") == path]
    roaring = struct.pack("<IIHHIH", 12346, 1, 0, 0, 16, 0)
    content = struct.pack("<IQI", 1681511377, 1, 0) + roaring
    vector = {
        "storageType": "i",
        "pathOrInlineDv": z85(content + bytes(-len(content) % 4)),
        "sizeInBytes": len(content),
        "cardinality": 1,
    }
    remove = {"path": path, "dataChange": True, "deletionTimestamp": 1}
    new = {**add, "deletionVector": vector}
    actions = [{"remove": remove}, {"add": new}]
    lake.log(table.version() + 1).write_text("\n".join(map(json.dumps, actions)))


def z85(content: bytes) -> str:
    """Base 85 with another alphabet than Python's."""
    theirs = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#"
    ours = "".join(map(chr, range(ord("!"), ord("!") + 85)))
    text = base64.a85encode(content).decode().replace("z", "!!!!!")
    return text.translate(str.maketrans(ours, theirs))


# -- the log is cleaned up -------------------------------------------------------------------------


def test_log_is_cleaned_up_before_the_removal(lake: Lake, sink: DeltaSink) -> None:
    """Nobody knows how the batch ended, but its files are there; it stays unknown afterwards."""
    delivered(sink, 1)
    branches = delivered(sink, 2, 3)
    another_writer(lake)
    checkpoint_and_clean_the_log(lake)
    assert [found.rows for found in sink.find_delivered(branches)] == [3, 3]
    sink.take_back(branches)
    assert lake.ids() == [*ids_of(1), 100]
    assert sink.find_delivered(branches) == [Visible(0)] * 2
    for found in branches:
        with pytest.raises(CommitUnresolvedError, match="no longer shows how batch"):
            sink.commit(found.committable)
    assert lake.ids() == [*ids_of(1), 100]


def test_log_is_cleaned_up_after_the_removal(lake: Lake, sink: DeltaSink) -> None:
    """Checkpoints keep the proof for ever."""
    branches = delivered(sink, 2)
    sink.take_back(branches)
    another_writer(lake)
    checkpoint_and_clean_the_log(lake)
    assert sink.find_delivered(branches) == [Visible(0)]


def test_checkpoint_without_statistics(lake: Lake) -> None:
    """The size of each file is enough."""
    lake.create(configuration={"delta.checkpoint.writeStatsAsJson": "false"})
    sink = lake.sink()
    branches = delivered(sink, 1)
    checkpoint_and_clean_the_log(lake)
    assert sink.find_delivered(branches)[0].rows == 3
