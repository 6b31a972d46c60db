"""What happens to a table between the decision of a batch and its commit, and after it."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake
from deltalake.exceptions import CommitFailedError

from sparkonce.errors import (
    CommitRejectedError,
    CommitUnresolvedError,
    PreparedBranchLostError,
    PrepareRejectedError,
)
from sparkonce.sinks.lakehouse import finishing
from tests.delta.conftest import (
    SCHEMA,
    Intruder,
    Lake,
    add_a_column,
    another_writer,
    branch,
    checkpoint_and_clean_the_log,
    compact,
    delete_other_rows,
    of_driver,
    prepared,
    raising,
    rows,
    task,
    vacuum,
)

CHANGES: list[Callable[[Lake], None]] = [
    another_writer,
    add_a_column,
    compact,
    delete_other_rows,
    vacuum,
    checkpoint_and_clean_the_log,
]


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("columns", [[], ["day"]], ids=["plain", "partitioned"])
def test_table_changes_before_and_after_the_commit(
    lake: Lake, change: Callable[[Lake], None], columns: list[str]
) -> None:
    """The batch is there once, also when its commit is repeated afterwards."""
    lake.create(partition_by=columns)
    sink = lake.sink()
    sink.validate(SCHEMA)
    sink.commit(prepared(sink, 0, [rows(9)]))
    committable = prepared(sink, 1, [rows(1, 2)], [rows(3)])
    change(lake)
    others = [] if change is not another_writer else [100]
    for _ in range(2):
        sink.commit(committable)
        assert lake.ids() == [1, 2, 3, 9, *others]
    change(lake)
    lake.sink().commit(committable)
    assert lake.ids() == [1, 2, 3, 9, *others, *others]
    assert lake.left_over() == []


def test_pointer_names_the_version_of_the_commit(lake: Lake) -> None:
    """The version is known before the commit only because the commit is conditional on it."""
    lake.create()
    sink = lake.sink()
    for n in range(4):
        another_writer(lake)
        sink.commit(prepared(sink, n, [rows(n)]))
        pointer = lake.table().transaction_version(f"{branch().owner.prefix}delta")
        assert pointer == lake.table().version()
        lines = map(json.loads, lake.log(lake.table().version()).read_text().splitlines())
        (info,) = [line["commitInfo"] for line in lines if "commitInfo" in line]
        batches = "0" if n == 0 else f"0-{n}"
        assert json.loads(info["sparkonce"]) == {"committed": {"t3.p0": batches}}


def test_commits_in_another_order(lake: Lake) -> None:
    lake.create()
    sink = lake.sink()
    first, second, third = (prepared(sink, n, [rows(n)]) for n in (1, 2, 3))
    sink.commit(third)
    sink.abort(second)
    sink.commit(first)
    for each in (first, third):
        sink.commit(each)
    with pytest.raises(PreparedBranchLostError):
        sink.commit(second)
    assert lake.ids() == [1, 3]


def test_log_is_cleaned_up_after_the_commit(lake: Lake) -> None:
    """Nobody knows how the old batch ended; new ones are not held up by that."""
    lake.create()
    sink = lake.sink()
    old, later = prepared(sink, 1, [rows(1)]), prepared(sink, 2, [rows(2)])
    sink.commit(old)
    another_writer(lake)
    checkpoint_and_clean_the_log(lake)
    for act in (sink.commit, sink.abort_decided):
        with pytest.raises(CommitUnresolvedError, match="no longer shows how batch 1 ended"):
            act(old)
    sink.commit(later)
    sink.commit(later)
    with pytest.raises(CommitUnresolvedError, match="no longer shows how batch 1 ended"):
        sink.commit(old)
    successor = prepared(sink, 3, [rows(3)], token=4)
    sink.commit(successor)
    sink.commit(successor)
    assert lake.ids() == [1, 2, 3, 100]


def test_other_drivers_are_not_known_after_a_clean_up(lake: Lake) -> None:
    """The next commit of the sink finds no proofs, and must not make theirs look unfinished."""
    lake.create()
    sink = lake.sink()
    old = prepared(sink, 1, [rows(1)])
    sink.commit(old)
    another_writer(lake)
    checkpoint_and_clean_the_log(lake)
    sink.commit(prepared(sink, 2, [rows(2)], token=4))
    with pytest.raises(CommitUnresolvedError, match="no longer shows how batch 1 ended"):
        sink.commit(old)
    assert lake.ids() == [1, 2, 100]


def test_old_driver_commits_again_after_a_clean_up(lake: Lake) -> None:
    """What it had committed before must not look unfinished by that."""
    lake.create()
    sink = lake.sink()
    old, later = prepared(sink, 1, [rows(1)]), prepared(sink, 3, [rows(3)])
    sink.commit(old)
    another_writer(lake)
    checkpoint_and_clean_the_log(lake)
    sink.commit(prepared(sink, 2, [rows(2)], token=4))
    sink.commit(later)
    with pytest.raises(CommitUnresolvedError, match="no longer shows how batch 1 ended"):
        sink.commit(old)
    sink.commit(later)
    assert lake.ids() == [1, 2, 3, 100]


def test_version_with_the_proofs_was_changed(lake: Lake) -> None:
    """By a tool that rewrites the log: nothing is known, and nothing is called lost."""
    lake.create()
    sink = lake.sink()
    old = prepared(sink, 1, [rows(1)])
    sink.commit(old)
    lines = lake.log(1).read_text().splitlines()
    lake.log(1).write_text("\n".join(line for line in lines if "commitInfo" not in line))
    with pytest.raises(CommitUnresolvedError, match="no longer shows how batch 1 ended"):
        sink.commit(old)
    sink.commit(prepared(sink, 2, [rows(2)]))
    assert lake.ids() == [1, 2]


def with_schema(lake: Lake, schema: pa.Schema) -> None:
    """Another tool overwrites the table's columns."""
    log = lake.log(0)
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    other = DeltaTable.create(f"{lake.folder}/other", schema).schema().to_json()
    for line in lines:
        if "metaData" in line:
            line["metaData"]["schemaString"] = other
    log.write_text("\n".join(map(json.dumps, lines)))


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        (pa.schema([("id", pa.int64())]), "name was string, and is gone"),
        (SCHEMA.set(0, pa.field("id", pa.string())), "id was int64, and is string"),
        (SCHEMA.append(pa.field("n", pa.int64(), nullable=False)), "n is required now"),
        (SCHEMA.set(1, pa.field("name", pa.string(), nullable=False)), "name was string, and is"),
    ],
)
def test_schema_is_overwritten_before_the_commit(
    lake: Lake, schema: pa.Schema, message: str
) -> None:
    """The table keeps its id; the values would be gone, or nobody could read them."""
    lake.create()
    sink = lake.sink()
    committable = prepared(sink, 1, [rows(1)])
    with_schema(lake, schema)
    with pytest.raises(CommitUnresolvedError, match=f"has other columns .*{message}"):
        sink.commit(committable)


def test_column_is_added_while_tasks_write(lake: Lake) -> None:
    """The tasks saw different columns, and both kinds of files fit into the table."""
    lake.create()
    sink = lake.sink()
    first = task(sink, branch(1, 0), rows(1))
    add_a_column(lake)
    second = task(sink, branch(1, 1), rows(2))
    (committable,) = sink.vote(of_driver(branch()), [first, second])
    sink.commit(committable)
    assert (lake.ids(), lake.left_over()) == ([1, 2], [])


def test_only_one_task_saw_a_required_column(lake: Lake) -> None:
    """The rows of the other one would have no value there."""
    lake.create()
    sink = lake.sink()
    first = task(sink, branch(1, 0), rows(1))
    more = SCHEMA.append(pa.field("n", pa.int64(), nullable=False))
    with_schema(lake, more)
    batch = pa.RecordBatch.from_arrays([*rows(2).columns, pa.array([2])], schema=more)
    second = task(sink, branch(1, 1), batch)
    with pytest.raises(PrepareRejectedError, match="n is required now"):
        sink.vote(of_driver(branch()), [first, second])


def test_tasks_of_a_batch_saw_different_partitions(lake: Lake) -> None:
    """Each has a manifest of its own, of which one does not fit."""
    lake.create()
    sink = lake.sink()
    first = task(sink, branch(1, 0), rows(1))
    log = lake.log(0)
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    for line in lines:
        if "metaData" in line:
            line["metaData"]["partitionColumns"] = ["day"]
    log.write_text("\n".join(map(json.dumps, lines)))
    second = task(sink, branch(1, 1), rows(2))
    with pytest.raises(PrepareRejectedError, match="is partitioned by"):
        sink.vote(of_driver(branch()), [first, second])
    assert len(list(lake.folder.rglob("*.adds"))) == 2
    sink.abort(of_driver(branch()))
    assert (lake.left_over(), lake.data()) == ([], [])


def test_commit_that_deltalake_never_takes(lake: Lake, intruder: Intruder) -> None:
    lake.create()
    sink = lake.sink()
    committable = prepared(sink, 1, [rows(1)])
    intruder.before = raising(CommitFailedError("Unsupported table features required: [X]"))
    with pytest.raises(CommitFailedError, match="features required"):
        sink.commit(committable)


def test_table_is_restored_to_an_older_version(lake: Lake) -> None:
    """An operator removes the rows on purpose, and a repeated commit does not add them again."""
    lake.create()
    sink = lake.sink()
    sink.commit(prepared(sink, 0, [rows(1)]))
    before = lake.table().version()
    sink.commit(committable := prepared(sink, 1, [rows(2)]))
    lake.table().restore(before)
    lake.sink().commit(committable)
    assert lake.ids() == [1]


def test_table_is_another_one(lake: Lake) -> None:
    lake.create()
    sink = lake.sink()
    committable = prepared(sink, 1, [rows(1)])
    shutil.rmtree(lake.uri)
    with pytest.raises(CommitUnresolvedError, match="does not exist, and a batch is prepared"):
        sink.commit(committable)
    lake.create()
    with pytest.raises(CommitUnresolvedError, match="another table now"):
        sink.commit(committable)
    sink.abort_decided(committable)
    assert lake.ids() == []


def test_table_is_recreated_while_tasks_write(lake: Lake) -> None:
    lake.create()
    sink = lake.sink()
    done = task(sink, branch(), rows(1))
    shutil.rmtree(lake.uri)
    with pytest.raises(PrepareRejectedError, match="was moved, or dropped"):
        sink.vote(of_driver(branch()), [done])
    with pytest.raises(PrepareRejectedError, match="does not exist any more"):
        sink.beginTransaction(branch())
    lake.create()
    with pytest.raises(PrepareRejectedError, match="dropped and created again"):
        sink.vote(of_driver(branch()), [done])


def test_driver_is_paused_between_its_check_and_its_commit(lake: Lake, intruder: Intruder) -> None:
    """Its successor commits the batch, and the next one, and compacts the table meanwhile."""
    lake.create()
    sink, successor = lake.sink(), lake.sink()
    committable = prepared(sink, 1, [rows(1, 2)])

    def meanwhile() -> None:
        successor.commit(committable)
        successor.commit(prepared(successor, 2, [rows(3)], token=4))
        compact(lake)

    intruder.before = meanwhile
    sink.commit(committable)
    assert lake.ids() == [1, 2, 3]
    assert lake.left_over() == []


@pytest.mark.parametrize("change", CHANGES)
def test_table_changes_between_check_and_commit(
    lake: Lake, intruder: Intruder, change: Callable[[Lake], None]
) -> None:
    lake.create()
    another_writer(lake)
    sink = lake.sink()
    committable = prepared(sink, 1, [rows(1)])
    intruder.before = lambda: change(lake)
    if change is checkpoint_and_clean_the_log:
        lake.append(101)  # else there is nothing to clean up
    sink.commit(committable)
    assert lake.ids().count(1) == 1
    assert lake.left_over() == []


def test_driver_is_paused_for_a_month(lake: Lake, intruder: Intruder) -> None:
    """The next version's file no longer exists when it wakes, and must not be written again."""
    lake.create()
    sink, successor = lake.sink(), lake.sink()
    committable = prepared(sink, 1, [rows(1)])

    def meanwhile() -> None:
        successor.commit(committable)
        another_writer(lake)
        checkpoint_and_clean_the_log(lake)

    intruder.before = meanwhile
    with pytest.raises(Exception, match="Invalid table version"):
        sink.commit(committable)
    assert lake.ids() == [1, 100]
    with pytest.raises(CommitUnresolvedError, match="no longer shows"):
        sink.commit(committable)


def test_driver_is_paused_while_its_batch_is_aborted(lake: Lake, intruder: Intruder) -> None:
    lake.create()
    sink, successor = lake.sink(), lake.sink()
    committable = prepared(sink, 1, [rows(1)])
    intruder.before = lambda: successor.abort(committable)
    with pytest.raises(PreparedBranchLostError, match="was aborted"):
        sink.commit(committable)
    assert (lake.ids(), lake.left_over(), lake.data()) == ([], [], [])


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
def test_log_gives_no_answer(lake: Lake, intruder: Intruder, *, has_landed: bool) -> None:
    lake.create()
    sink = lake.sink()
    committable = prepared(sink, 1, [rows(1)])
    setattr(intruder, "after" if has_landed else "before", raising(OSError("reset")))
    with pytest.raises(OSError, match="reset"):
        sink.commit(committable)
    assert lake.ids() == ([1] if has_landed else [])
    sink.commit(committable)
    assert lake.ids() == [1]


def test_commit_is_called_failed_though_it_landed(lake: Lake, intruder: Intruder) -> None:
    """As when the client sends a request again by itself."""
    lake.create()
    sink = lake.sink()
    intruder.after = raising(CommitFailedError("0"))
    sink.commit(prepared(sink, 1, [rows(1)]))
    assert lake.ids() == [1]
    assert intruder.calls == 1


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


@pytest.mark.parametrize("what", ["a0-*.parquet", "*.adds", "*a65536.b1.mark"])
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
    assert r"\"aborted\":{\"t3.p0\":\"1\"}" in lake.log(lake.table().version()).read_text()


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


def test_vacuum_takes_a_prepared_file(lake: Lake) -> None:
    """Without its retention; the batch is lost then, and known to be."""
    lake.create()
    sink = lake.sink()
    committable = prepared(sink, 1, [rows(1)])
    vacuum(lake)
    assert lake.data() != []
    lake.table().vacuum(
        retention_hours=0, dry_run=False, enforce_retention_duration=False, full=True
    )
    assert lake.data() == []
    with pytest.raises(PreparedBranchLostError, match="somebody deleted them"):
        sink.commit(committable)


def test_mark_of_a_committed_task_appears_again(lake: Lake) -> None:
    lake.create()
    sink = lake.sink()
    handle = sink.beginTransaction(branch())
    sink.write(handle, rows(1))
    done = sink.preCommit(handle)
    (mark,) = lake.folder.rglob("*.mark")
    content = mark.read_bytes()
    (committable,) = sink.vote(of_driver(branch()), [done])
    sink.commit(committable)
    mark.write_bytes(content)
    sink.abort(done)
    assert (lake.ids(), lake.left_over()) == ([1], [])


def test_task_writes_its_mark_again_if_it_is_gone(lake: Lake) -> None:
    """A mark that exists is not replaced, which makes ext4 write it out at once."""
    lake.create()
    sink = lake.sink()
    for is_swept in (False, True):
        handle = sink.beginTransaction(branch(1, int(is_swept)))
        mark = Path(lake.uri, "_sparkonce", f"{handle.branch_id}mark")
        os.utime(mark, (1, 1))
        if is_swept:
            sink.abort(handle.branch_id)
        sink.preCommit(handle)
        assert (mark.stat().st_mtime == 1) is not is_swept


@pytest.mark.parametrize("length", [0, 40])
def test_mark_is_torn(lake: Lake, length: int) -> None:
    """Its writer was killed, or the disk was full: nothing that it stands for was written yet."""
    lake.create()
    sink = lake.sink()
    begun = sink.beginTransaction(branch(1, 7))
    task(sink, branch(1, 0), rows(1))
    folder = Path(lake.uri, "_sparkonce")
    whole = (folder / f"{begun.branch_id}mark").read_text()
    for torn in (begun.branch_id, of_driver(branch(1))):  # of a task, and of the batch
        (folder / f"{torn}mark").write_text(whole[:length])
    found = list(sink.find_branches(branch().owner))
    assert len(found) == 3
    for each in found:
        sink.abort(each)
    assert (lake.ids(), lake.left_over(), lake.data()) == ([], [], [])


def test_commit_removes_the_marks_of_its_tasks_only(lake: Lake) -> None:
    lake.create()
    sink = lake.sink()
    loser, other_batch, other_pass = branch(1, 7), branch(2), replace(branch(1), write_pass=1)
    for each in (loser, other_batch, other_pass):
        task(sink, each, rows(9))
    sink.commit(prepared(sink, 1, [rows(1)], [rows(2)]))
    left = {found.branch_id for found in sink.find_branches(branch().owner)}
    assert left == {loser, other_batch, other_pass}
    assert lake.ids() == [1, 2]


def test_name_that_is_used_again_is_refused(lake: Lake) -> None:
    """The log and the checkpoint were restored, so that a batch gets the name of another one."""
    lake.create()
    sink = lake.sink()
    sink.commit(prepared(sink, 1, [rows(1)]))
    before = {path: path.read_bytes() for path in lake.data()}
    with pytest.raises(PrepareRejectedError, match="older copy"):
        sink.beginTransaction(branch(1))
    with pytest.raises(PrepareRejectedError, match="older copy"):
        sink.vote(of_driver(branch(1)), [task(sink, branch(1, 77), rows(2))])
    for found in sink.find_branches(branch().owner):
        sink.abort(found)
    assert {path: path.read_bytes() for path in before} == before
    assert lake.ids() == [1]


def test_late_task_of_a_committed_batch_is_aborted_alone(lake: Lake) -> None:
    """Its file stays for VACUUM, as in the next test."""
    lake.create()
    sink = lake.sink()
    sink.commit(prepared(sink, 1, [rows(1)], [rows(2)]))
    task(sink, branch(1, 7), rows(1))
    (found,) = sink.find_branches(branch().owner)
    assert found.branch_id.attempt == 7
    sink.abort(found)
    assert lake.ids() == [1, 2]
    assert len(lake.data()) == 3
    assert lake.left_over() == []
    lake.table().vacuum(0, dry_run=False, enforce_retention_duration=False, full=True)
    assert lake.ids() == [1, 2]
    assert len(lake.data()) == 2


def test_late_mark_of_a_compacted_batch_leaves_older_versions_readable(lake: Lake) -> None:
    """The first of two equal requests that write a mark arrives after the commit and OPTIMIZE."""
    lake.create()
    sink = lake.sink()
    first = task(sink, branch(1, 1), rows(1))
    (mark,) = lake.left_over()
    content = (path := Path(lake.uri, "_sparkonce", mark)).read_bytes()
    (committable,) = sink.vote(of_driver(branch(1)), [first, task(sink, branch(1, 2), rows(2))])
    sink.commit(committable)
    version = lake.table().version()
    lake.table().optimize.compact()
    path.write_bytes(content)
    for found in sink.find_branches(branch().owner):
        sink.abort(found)
    assert lake.left_over() == []
    older = lake.table()
    older.load_as_version(version)
    assert sorted(older.to_pyarrow_table()["id"].to_pylist()) == [1, 2]


def test_task_of_a_committed_batch_is_never_deleted(
    lake: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver died between the commit and the removal of the marks."""
    lake.create()
    sink = lake.sink()
    done = task(sink, branch(), rows(1))
    (committable,) = sink.vote(of_driver(branch()), [done])
    with monkeypatch.context() as patch:

        def dies(*_: object, **__: object) -> None:
            raise OSError("died")

        patch.setattr("sparkonce.sinks.lakehouse.marks.Marks.remove_batch", dies)
        with pytest.raises(OSError, match="died"):
            sink.commit(committable)
    assert len(lake.left_over()) == 3
    sink.abort(done)
    assert lake.ids() == [1]
    sink.abort(committable)
    assert lake.left_over() == []
    sink.commit(committable)
    assert lake.ids() == [1]


def test_aborted_branches_leave_nothing(lake: Lake) -> None:
    lake.create(partition_by=["day"])
    sink = lake.sink()
    done = task(sink, branch(5), rows(1, 2, 3))
    committable = prepared(sink, 6, [rows(1, 2, 3)], [rows(4)])
    for found in (done, committable):
        sink.abort(found)
        sink.abort(found)
    assert (lake.ids(), lake.left_over(), lake.data()) == ([], [], [])


def add_a_constraint(lake: Lake) -> None:
    lake.table().alter.add_constraint({"positive": "id > 0"})


def let_proofs_expire(lake: Lake) -> None:
    lake.table().alter.set_table_properties(
        {"delta.setTransactionRetentionDuration": "interval 7 days"}, raise_if_not_exists=False
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (add_a_constraint, "has a CHECK constraint .*drop it"),
        (let_proofs_expire, "forgets after a while how batches ended: unset"),
    ],
)
def test_table_gets_what_the_sink_cannot_handle(
    lake: Lake, change: Callable[[Lake], None], message: str
) -> None:
    """A batch in doubt waits, and nothing is called lost."""
    lake.create()
    sink = lake.sink()
    committable, gone = prepared(sink, 1, [rows(1)]), prepared(sink, 2, [rows(2)])
    change(lake)
    for path in lake.folder.rglob("*b2.files/*.parquet"):
        path.unlink()
    for each in (committable, gone):
        with pytest.raises(CommitUnresolvedError, match=message):
            sink.commit(each)
    assert lake.ids() == []


def test_table_is_partitioned_otherwise(lake: Lake) -> None:
    lake.create()
    sink = lake.sink()
    committable = prepared(sink, 1, [rows(1)])
    write_deltalake(
        lake.uri,
        pa.Table.from_batches([rows(9)]),
        mode="overwrite",
        schema_mode="overwrite",
        partition_by=["day"],
    )
    with pytest.raises(CommitUnresolvedError, match="partitioned by|another table now"):
        sink.commit(committable)
    assert lake.ids() == [9]


def test_sink_is_pickled(lake: Lake) -> None:
    lake.create()
    sink = lake.sink()
    sink.validate(SCHEMA)
    copied = pickle.loads(pickle.dumps(sink))  # noqa: S301
    copied.commit(prepared(copied, 1, [rows(1)]))
    assert lake.ids() == [1]


def test_secrets_are_not_shown(lake: Lake) -> None:
    sink = lake.sink(storage_options={"AWS_SECRET_ACCESS_KEY": "s3cret"})
    assert "s3cret" not in f"{sink!r} {sink.target} {sink.where}"


def test_committable_is_small(lake: Lake) -> None:
    """It is in every record: 200 tasks must not make it longer."""
    lake.create()
    sink = lake.sink()
    committable = prepared(sink, 1, *[[rows(n)] for n in range(200)])
    assert len(str(committable.to_json())) < 1000
    sink.commit(committable)
    assert lake.ids() == list(range(200))


def test_empty_batch_has_no_branch(lake: Lake) -> None:
    lake.create(partition_by=["day"])
    sink = lake.sink()
    assert sink.vote(of_driver(branch()), []) == []
    assert sink.vote(of_driver(branch()), [task(sink, branch(), rows())]) == []
