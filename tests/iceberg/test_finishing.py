"""What happens to a table between the decision of a batch and its commit, and after it."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.exceptions import CommitFailedException, CommitStateUnknownException
from pyiceberg.table.update import RemovePartitionSpecsUpdate, SetSnapshotRefUpdate
from pyiceberg.transforms import IdentityTransform

from sparkonce.errors import (
    CommitRejectedError,
    CommitUnresolvedError,
    PreparedBranchLostError,
    PrepareRejectedError,
)
from sparkonce.model import DRIVER_ATTEMPT, Committable
from sparkonce.sinks.capabilities import Delivered
from sparkonce.sinks.lakehouse import finishing
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

CHANGES: list[Callable[[Lake], None]] = [
    another_writer,
    add_a_column,
    rename_a_column,
    drop_a_column,
    partition_by_id,
    rewrite_the_table,
]


@pytest.mark.parametrize("change", CHANGES)
def test_table_changes_before_and_after_the_commit(
    lake: Lake, change: Callable[[Lake], None]
) -> None:
    """The batch is there once, also when its commit is repeated afterwards."""
    lake.create()
    sink = lake.sink()
    sink.validate(SCHEMA)
    sink.commit(prepared(sink, 0, [rows(9)]))
    committable = prepared(sink, 1, [rows(1, 2)], [rows(3)])
    change(lake)
    others = [] if change is not another_writer else [100]
    for _ in range(2):
        sink.commit(committable)
        assert lake.ids() == [1, 2, 3, 9, *others]
    assert lake.table().scan(row_filter="id = 2").to_arrow()["id"].to_pylist() == [2]
    rewrite_the_table(lake)
    lake.sink().commit(committable)
    assert lake.ids() == [1, 2, 3, 9, *others]
    assert lake.marks() == []


def test_partitions_change_before_the_vote(lake: Lake) -> None:
    """The manifest is written in the spec of its files."""
    lake.create()
    sink = lake.sink()
    sink.validate(SCHEMA)
    done = task(sink, branch(), rows(1, 2))
    partition_by_id(lake)
    (committable,) = sink.vote(replace(branch(), attempt=DRIVER_ATTEMPT), [done])
    sink.commit(committable)
    assert lake.table().scan(row_filter="id = 2").to_arrow()["id"].to_pylist() == [2]


def test_commit_leaves_the_next_batch_alone(lake: Lake) -> None:
    """Its tasks may have the same attempt numbers."""
    lake.create()
    sink = lake.sink()
    first, second = (prepared(sink, n, [rows(n)]) for n in (1, 2))
    sink.commit(first)
    assert len(lake.marks()) == 2
    sink.abort(second)
    assert (lake.ids(), lake.marks(), len(lake.data())) == ([1], [], 1)


def test_snapshots_expire(lake: Lake) -> None:
    """The proof is no part of a snapshot."""
    lake.create()
    sink = lake.sink()
    committable = prepared(sink, 1, [rows(1)])
    sink.commit(committable)
    first = lake.table().current_snapshot()
    assert first is not None
    another_writer(lake)
    lake.table().maintenance.expire_snapshots().by_id(first.snapshot_id).commit()
    assert lake.table().snapshot_by_id(first.snapshot_id) is None
    lake.sink().commit(committable)
    assert lake.ids() == [1, 100]


def test_table_is_rolled_back(lake: Lake) -> None:
    """An operator removes the rows on purpose, and a repeated commit does not add them again."""
    lake.create()
    sink = lake.sink()
    sink.commit(prepared(sink, 0, [rows(1)]))
    before = lake.table().current_snapshot()
    assert before is not None
    sink.commit(committable := prepared(sink, 1, [rows(2)]))
    lake.table().manage_snapshots().rollback_to_snapshot(before.snapshot_id).commit()
    lake.sink().commit(committable)
    assert lake.ids() == [1]


def test_table_is_another_one(lake: Lake) -> None:
    lake.create()
    sink = lake.sink()
    committable = prepared(sink, 1, [rows(1)])
    lake.catalog.drop_table(NAME)
    with pytest.raises(CommitUnresolvedError, match="does not exist, and a batch is prepared"):
        sink.commit(committable)
    lake.create()
    with pytest.raises(CommitUnresolvedError, match="another table now"):
        sink.commit(committable)
    assert lake.ids() == []


def test_table_is_renamed_and_back(lake: Lake) -> None:
    lake.create()
    sink = lake.sink()
    committable = prepared(sink, 1, [rows(1)])
    lake.catalog.rename_table(NAME, "shop.other")
    with pytest.raises(CommitUnresolvedError, match="bring it back under this name"):
        sink.commit(committable)
    lake.catalog.rename_table("shop.other", NAME)
    sink.commit(committable)
    assert lake.ids() == [1]


def test_table_is_recreated_while_tasks_write(lake: Lake) -> None:
    lake.create()
    sink = lake.sink()
    done = task(sink, branch(), rows(1))
    lake.catalog.drop_table(NAME)
    lake.create()
    with pytest.raises(PrepareRejectedError, match="dropped and created again"):
        sink.vote(replace(branch(), attempt=DRIVER_ATTEMPT), [done])


def test_driver_is_paused_between_its_check_and_its_commit(lake: Lake, intruder: Intruder) -> None:
    """Its successor commits the batch, and the next one, and compacts the table meanwhile."""
    lake.create()
    sink, successor = lake.sink(), lake.sink()
    committable = prepared(sink, 1, [rows(1, 2)])

    def meanwhile() -> None:
        successor.commit(committable)
        successor.commit(prepared(successor, 2, [rows(3)], token=4))
        rewrite_the_table(lake)

    intruder.before = meanwhile
    sink.commit(committable)
    assert intruder.calls > 1
    assert lake.ids() == [1, 2, 3]
    assert lake.marks() == []


def test_driver_is_paused_while_its_batch_is_aborted(lake: Lake, intruder: Intruder) -> None:
    lake.create()
    sink, successor = lake.sink(), lake.sink()
    committable = prepared(sink, 1, [rows(1)])
    intruder.before = lambda: successor.abort(committable)
    with pytest.raises(PreparedBranchLostError, match="was aborted"):
        sink.commit(committable)
    assert (lake.ids(), lake.marks(), lake.data()) == ([], [], [])


def test_abort_is_paused_while_its_batch_is_committed(lake: Lake, intruder: Intruder) -> None:
    lake.create()
    sink, successor = lake.sink(), lake.sink()
    committable = prepared(sink, 1, [rows(1)])
    intruder.before = lambda: successor.commit(committable)
    sink.abort(committable)
    assert lake.ids() == [1]
    with pytest.raises(CommitRejectedError, match="a rewrite would duplicate"):
        sink.abort_decided(committable)


@pytest.mark.parametrize("has_landed", [False, True])
@pytest.mark.parametrize("error", [CommitStateUnknownException("502"), ConnectionError("reset")])
def test_catalog_gives_no_answer(
    lake: Lake, intruder: Intruder, error: Exception, *, has_landed: bool
) -> None:
    lake.create()
    sink = lake.sink()
    committable = prepared(sink, 1, [rows(1)])
    setattr(intruder, "after" if has_landed else "before", raising(error))
    with pytest.raises(type(error)):
        sink.commit(committable)
    assert lake.ids() == ([1] if has_landed else [])
    sink.commit(committable)
    assert lake.ids() == [1]


def test_catalog_calls_a_commit_failed_that_it_made(lake: Lake, intruder: Intruder) -> None:
    """As when the client sends a request again by itself: the table must stay readable."""
    lake.create()
    sink = lake.sink()
    intruder.calls = 0
    intruder.after = raising(CommitFailedException("Requirement failed"))
    sink.commit(prepared(sink, 1, [rows(1)]))
    assert lake.ids() == [1]
    assert intruder.calls == 1


def test_first_request_lands_after_the_client_has_sent_it_again(
    lake: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The catalog said that the commit failed, and the table did not show it yet."""
    lake.create()
    sink = lake.sink()
    late: list[Callable[[], Any]] = []
    real = SqlCatalog.commit_table

    def commit_table(self: Any, *args: Any) -> Any:
        if not late:
            late.append(lambda: real(self, *args))
            raise CommitFailedException("another request is being handled")
        if len(late) == 1:
            late.append(late[0]())
        return real(self, *args)

    monkeypatch.setattr(SqlCatalog, "commit_table", commit_table)
    sink.commit(prepared(sink, 1, [rows(1)]))
    assert len(late) == 2
    assert lake.ids() == [1]
    sink.commit(prepared(sink, 2, [rows(2)]))
    assert lake.ids() == [1, 2]


def test_other_writers_always_come_first(
    lake: Lake, intruder: Intruder, monkeypatch: pytest.MonkeyPatch
) -> None:
    lake.create()
    sink = lake.sink()
    committable = prepared(sink, 1, [rows(1)])
    monkeypatch.setattr(finishing, "PATIENCE_S", -1.0)
    intruder.before = lambda: another_writer(lake)
    with pytest.raises(CommitUnresolvedError, match="came first each time"):
        sink.commit(committable)
    sink.commit(committable)
    assert lake.ids() == [1, 100]


@pytest.mark.parametrize("what", ["*.parquet", "sparkonce*.avro", "*a65536.b1.mark"])
def test_something_prepared_is_gone(lake: Lake, what: str) -> None:
    """The sink calls a batch lost only after the table itself rules it out."""
    lake.create()
    sink = lake.sink()
    committable = prepared(sink, 1, [rows(1)], [rows(2)])
    next(iter(lake.folder.rglob(what))).unlink()
    for _ in range(2):
        with pytest.raises(PreparedBranchLostError):
            lake.sink().commit(committable)
    assert lake.ids() == []
    assert '"t3.p0":"1"' in "".join(lake.table().properties.values())


@pytest.mark.parametrize("length", [0, 40])
def test_mark_is_torn(lake: Lake, length: int) -> None:
    """Its writer was killed, or the disk was full: nothing that it stands for was written yet."""
    lake.create()
    sink = lake.sink()
    begun = sink.beginTransaction(branch(1, 7))
    task(sink, branch(1, 0), rows(1))
    (path,) = lake.folder.rglob(f"{begun.branch_id}mark")
    whole = path.read_text()
    for torn in (begun.branch_id, replace(branch(1), attempt=DRIVER_ATTEMPT)):
        (path.parent / f"{torn}mark").write_text(whole[:length])
    found = list(sink.find_branches(branch().owner))
    assert len(found) == 3
    for each in found:
        sink.abort(each)
    assert (lake.ids(), lake.marks(), lake.data()) == ([], [], [])


def test_zombie_cannot_commit_what_was_called_lost(lake: Lake, intruder: Intruder) -> None:
    lake.create()
    zombie, sink = lake.sink(), lake.sink()
    committable = prepared(sink, 1, [rows(1)])

    def meanwhile() -> None:
        (mark,) = lake.folder.rglob("*a65536.b1.mark")
        mark.unlink()
        with pytest.raises(PreparedBranchLostError):
            sink.commit(committable)

    intruder.before = meanwhile
    with pytest.raises(PreparedBranchLostError):
        zombie.commit(committable)
    assert lake.ids() == []


def test_log_from_a_backup_asks_for_a_batch_of_long_ago(
    lake: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sparkonce.sinks.lakehouse.proofs.KEPT", 3)
    lake.create()
    sink = lake.sink()
    first = prepared(sink, 0, [rows(0)])
    sink.commit(first)
    for n in range(1, 6):
        sink.commit(prepared(sink, n, [rows(n)], token=3 + n))
    with pytest.raises(CommitUnresolvedError, match="no longer shows how batch 0 ended"):
        sink.commit(first)
    assert lake.ids() == list(range(6))


def test_mark_of_a_committed_task_appears_again(lake: Lake) -> None:
    """As by a write that arrives late, or where a bucket keeps versions."""
    lake.create()
    sink = lake.sink()
    handle = sink.beginTransaction(branch())
    sink.write(handle, rows(1))
    done = sink.preCommit(handle)
    (mark,) = lake.folder.rglob("*.mark")
    content = mark.read_bytes()
    (committable,) = sink.vote(replace(branch(), attempt=DRIVER_ATTEMPT), [done])
    sink.commit(committable)
    mark.write_bytes(content)
    sink.abort(done)
    assert (lake.ids(), lake.marks()) == ([1], [])

    rewrite_the_table(lake)
    next(lake.folder.rglob("sparkonce*.s0.avro")).unlink()  # expired: nobody can tell any more
    mark.write_bytes(content)
    files = lake.data()
    sink.abort(done)
    assert (lake.data(), lake.marks()) == (files, [])


def test_task_is_swept_while_it_runs(lake: Lake) -> None:
    """What it writes afterwards has a mark again, so the next sweep finds it."""
    lake.create()
    with lake.table().update_spec() as update:
        update.add_field("id", IdentityTransform(), "part")
    sink = lake.sink()
    handle = sink.beginTransaction(branch())
    sink.write(handle, rows(1))
    sink.abort(branch())
    sink.write(handle, rows(2))
    sink.preCommit(handle)
    assert len(lake.data()) == len(lake.marks()) == 1
    for found in sink.find_branches(branch().owner):
        sink.abort(found)
    assert (lake.data(), lake.marks()) == ([], [])


def test_another_table_of_that_name_is_not_touched(lake: Lake) -> None:
    """The batch's table is an archive now; both have their files in one folder."""
    lake.create()
    sink = lake.sink()
    done = task(sink, branch(), rows(1))
    committable = prepared(sink, 2, [rows(2)])
    sink.commit(prepared(sink, 3, [rows(3)]))
    lake.catalog.rename_table(NAME, "shop.archive")
    lake.create()
    for found in (done, committable, committable.branch_id):
        with pytest.raises(CommitUnresolvedError, match="another table now"):
            sink.abort(found)
    sink.abort_decided(committable)
    again = replace(committable.branch_id, write_pass=1, attempt=0)
    (rewritten,) = sink.vote(replace(again, attempt=DRIVER_ATTEMPT), [task(sink, again, rows(2))])
    sink.commit(rewritten)
    assert lake.ids() == [2]
    archive = lake.catalog.load_table("shop.archive")
    assert archive.scan().to_arrow()["id"].to_pylist() == [3]
    assert len(lake.data()) == 4


def test_abort_that_an_operator_wants_is_a_commit(lake: Lake, intruder: Intruder) -> None:
    """The batch's mark is gone, and a driver is paused before its commit."""
    lake.create()
    zombie, sink = lake.sink(), lake.sink()
    committable = prepared(sink, 1, [rows(1)])

    def meanwhile() -> None:
        (mark,) = lake.folder.rglob("*a65536.b1.mark")
        mark.unlink()
        sink.abort_decided(committable)

    intruder.before = meanwhile
    with pytest.raises(PreparedBranchLostError):
        zombie.commit(committable)
    assert lake.ids() == []


def test_partition_spec_is_gone(lake: Lake) -> None:
    """As after a removal of metadata that has expired: readers could not read the files."""
    lake.create()
    sink = lake.sink()
    committable = prepared(sink, 1, [rows(1)])
    partition_by_id(lake)
    table = lake.table()
    removal = RemovePartitionSpecsUpdate(spec_ids=[0])
    table.catalog.commit_table(table, (), (removal,))
    with pytest.raises(CommitUnresolvedError, match="no longer has the partition spec 0"):
        sink.commit(committable)


def test_data_has_another_place(lake: Lake) -> None:
    """What is prepared is still found; what tasks are writing is written again."""
    lake.create()
    sink = lake.sink()
    committable, aborted = prepared(sink, 1, [rows(1)]), prepared(sink, 2, [rows(2)])
    done = task(sink, branch(3), rows(3))
    with lake.table().transaction() as change:
        change.set_properties({"write.data.path": f"file://{lake.folder}/other"})
    sink.commit(committable)
    sink.abort(aborted)
    with pytest.raises(PrepareRejectedError, match="was moved"):
        sink.vote(replace(branch(3), attempt=DRIVER_ATTEMPT), [done])
    sink.abort(done)
    assert (lake.ids(), len(lake.data()), lake.marks()) == ([1], 1, [])


def test_batch_of_empty_files_has_no_branch(lake: Lake) -> None:
    lake.create()
    partition_by_id(lake)
    sink = lake.sink()
    done = task(sink, branch(), rows())
    assert sink.vote(replace(branch(), attempt=DRIVER_ATTEMPT), [done]) == []


def test_name_that_is_used_again_is_refused(lake: Lake) -> None:
    """The log and the checkpoint were restored, so that a batch gets the name of another one."""
    lake.create()
    sink = lake.sink()
    sink.commit(prepared(sink, 1, [rows(1)]))
    before = {path: path.read_bytes() for path in lake.data()}
    with pytest.raises(PrepareRejectedError, match="older copy"):
        sink.beginTransaction(branch(1))
    with pytest.raises(PrepareRejectedError, match="older copy"):
        sink.vote(branch(1, DRIVER_ATTEMPT), [task(sink, branch(1, 77), rows(2))])
    for found in sink.find_branches(branch().owner):
        sink.abort(found)
    assert {path: path.read_bytes() for path in before} == before
    assert lake.ids() == [1]


def test_late_task_of_a_committed_batch_is_aborted_alone(lake: Lake) -> None:
    lake.create()
    sink = lake.sink()
    sink.commit(prepared(sink, 1, [rows(1)], [rows(2)]))
    task(sink, branch(1, 7), rows(1))
    (found,) = sink.find_branches(branch().owner)
    assert found.branch_id.attempt == 7
    sink.abort(found)
    assert lake.ids() == [1, 2]
    assert len(lake.data()) == 2
    assert lake.marks() == []


def test_task_of_a_committed_batch_is_never_deleted(
    lake: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver died between the commit and the removal of the marks."""
    lake.create()
    sink = lake.sink()
    done = task(sink, branch(), rows(1))
    (committable,) = sink.vote(replace(branch(), attempt=DRIVER_ATTEMPT), [done])
    with monkeypatch.context() as patch:
        patch.setattr(
            "sparkonce.sinks.lakehouse.marks.Marks.remove_batch", raising(OSError("died"))
        )
        with pytest.raises(TypeError):
            sink.commit(committable)
    assert len(lake.marks()) == 2
    sink.abort(done)
    assert lake.ids() == [1]
    sink.abort(committable)
    assert lake.marks() == []
    assert lake.ids() == [1]
    sink.commit(committable)
    assert lake.ids() == [1]
    assert lake.marks() == []


def test_sink_is_pickled_without_its_connection(lake: Lake) -> None:
    lake.create()
    sink = lake.sink()
    sink.validate(SCHEMA)
    copied = pickle.loads(pickle.dumps(sink))  # noqa: S301
    lake.sinks.append(copied)
    copied.commit(prepared(copied, 1, [rows(1)]))
    assert lake.ids() == [1]


def test_secrets_are_not_shown(lake: Lake) -> None:
    lake.settings["token"] = "s3cret"
    sink = lake.sink()
    assert "s3cret" not in f"{sink!r} {sink.target} {sink.where}"


def test_empty_batch_has_no_branch(lake: Lake) -> None:
    lake.create()
    assert lake.sink().vote(replace(branch(), attempt=DRIVER_ATTEMPT), []) == []


def test_committable_is_small(lake: Lake) -> None:
    """It is in every record: 200 tasks must not make it longer."""
    lake.create()
    sink = lake.sink()
    committable: Committable = prepared(sink, 1, *[[rows(n)] for n in range(200)])
    assert len(str(committable.to_json())) < 1000
    sink.commit(committable)
    assert lake.ids() == list(range(200))


def test_table_is_rolled_back_for_a_rewind(lake: Lake) -> None:
    """A rewind keeps this sink: new batches come once, and a late commit shows nothing again."""
    lake.create()
    sink = lake.sink()
    sink.validate(SCHEMA)
    sink.commit(prepared(sink, 0, [rows(1)]))
    snapshot = lake.table().current_snapshot()
    assert snapshot is not None
    late = prepared(sink, 1, [rows(2)])
    sink.commit(late)
    lake.table().manage_snapshots().rollback_to_snapshot(snapshot.snapshot_id).commit()
    assert lake.ids() == [1]
    branch_id = replace(branch(1), owner=replace(branch().owner, query_id="a0-b1"), token=9)
    done = [task(sink, branch_id, rows(20))]
    (committable,) = sink.vote(replace(branch_id, attempt=DRIVER_ATTEMPT), done)
    for _ in range(2):
        sink.commit(committable)
        assert lake.ids() == [1, 20]
    sink.commit(late)
    assert lake.ids() == [1, 20]


def test_retention_of_main_stays(lake: Lake) -> None:
    """As `ALTER TABLE … REPLACE BRANCH main WITH SNAPSHOT RETENTION` sets it."""
    lake.create()
    kept = {
        "min_snapshots_to_keep": 100,
        "max_snapshot_age_ms": 86400_000,
        "max_ref_age_ms": 10**12,
    }
    table = lake.table()
    main = {"ref_name": "main", "type": "branch", "snapshot_id": table.refs()["main"].snapshot_id}
    update = SetSnapshotRefUpdate(**main, **kept)
    lake.catalog.commit_table(table, (), (update,))
    sink = lake.sink()
    sink.commit(committable := prepared(sink, 1, [rows(1)]))
    assert lake.table().refs()["main"].model_dump(include=set(kept), by_alias=False) == kept
    sink.take_back([Delivered(committable, 1)])
    assert lake.ids() == []
    assert lake.table().refs()["main"].model_dump(include=set(kept), by_alias=False) == kept
