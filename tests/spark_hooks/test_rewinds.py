"""Rewinds without Spark: kills before and after every change, writers that interfere, refusals."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sparkonce import facts
from sparkonce.errors import ConfigurationError, FencedError, SavepointError, TakeBackRefusedError
from sparkonce.model import BranchId, Committable
from sparkonce.sinks import FileSink, TwoPhaseCommitSink
from sparkonce.spark_hooks.checkpoint import open_checkpoint
from sparkonce.spark_hooks.savepoints import Savepoints, create
from sparkonce.storage import LocalFolder
from sparkonce.txn_log.record import State
from sparkonce.txn_log.settlement import Ruling, Settlement
from tests.support.rewind_cases import RewindStage, killed_at_each_moment
from tests.support.savepoint_cases import QUERY, checkpoint

GOOD, NEWEST = 1, 3


@pytest.fixture(autouse=True)
def no_fsync(monkeypatch: pytest.MonkeyPatch) -> None:
    """Thousands of files are written, and no power is lost here."""
    monkeypatch.setattr(os, "fsync", lambda _: None)


@pytest.fixture
def fresh_stage(tmp_path_factory: pytest.TempPathFactory) -> Callable[[], RewindStage]:
    return lambda: RewindStage(tmp_path_factory.mktemp("stage"), batches=NEWEST + 1, savepoint=GOOD)


@pytest.fixture
def stage(tmp_path: Path) -> RewindStage:
    return RewindStage(tmp_path, batches=NEWEST + 1, savepoint=GOOD)


def new_folder(stage: RewindStage, name: str = "new") -> LocalFolder:
    return LocalFolder(stage.folder / name, create=True)


def query_of(location: Path) -> str:
    return str(json.loads((location / "metadata").read_text())["id"])


def test_later_batches_go_and_a_new_query_follows(stage: RewindStage) -> None:
    before = stage.delivered()
    assert before == stage.rows_of(*range(NEWEST + 1))
    query_id = stage.rewind(new_folder(stage))
    assert stage.delivered() == stage.rows_of(*range(GOOD + 1))
    new = stage.folder / "new"
    assert query_of(new) == query_id != QUERY
    stage.incarnation = stage.begin(new, query_id, GOOD + 1)
    assert stage.incarnation.retired[0].query_id == QUERY
    for batch in range(GOOD + 1, NEWEST + 1):
        stage.deliver(batch)
    assert stage.delivered() == before


def test_rewind_is_killed_at_each_change(
    fresh_stage: Callable[[], RewindStage], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No start in between delivers anything wrong; the same command finishes it."""
    moments: list[str] = []

    seen = {"old query may go on": 0, "no query may start": 0}
    for moment, stage in killed_at_each_moment(fresh_stage, "new", monkeypatch):
        moments.append(moment)
        new, head = stage.folder / "new", stage.log.head("orders")
        assert head is not None
        is_bound = (new / "sparkonce.1.json").exists()
        has_begun = head.query_id != QUERY
        state = facts.pipeline(stage.log, head)["state"]
        if not has_begun:
            assert stage.delivered() == stage.rows_of(*range(NEWEST + 1)), moment
            assert state == "fine", moment
            seen["old query may go on"] += 1
        elif stage.delivered() != stage.rows_of(*range(GOOD + 1)):
            assert state == "rewinding", moment
        if has_begun and not is_bound:
            seen["no query may start"] += 1
            for replaces in (None, head.query_id):
                assert stage.is_refused(stage.old, QUERY, NEWEST + 1, replaces=replaces), moment
        if (new / "metadata").exists() and not is_bound:
            assert stage.is_refused(new, query_of(new), GOOD + 1), moment
        if is_bound:
            with pytest.raises(SavepointError, match="already"):
                stage.rewind(new_folder(stage))
        else:
            stage.rewind(new_folder(stage))
        assert stage.delivered() == stage.rows_of(*range(GOOD + 1)), moment
        head = stage.log.head("orders")
        assert head is not None
        assert facts.pipeline(stage.log, head)["state"] == "fine", moment
        assert stage.is_refused(stage.old, QUERY, NEWEST + 1)
        stage.incarnation = stage.begin(new, query_of(new), GOOD + 1)
        stage.deliver(GOOD + 1)
        assert stage.delivered() == stage.rows_of(*range(GOOD + 2)), moment
    assert moments[-1] == ""
    kinds = {" ".join(moment.split()[:2]) for moment in moments[:-1]}
    assert kinds >= {
        f"{t} {k}" for t in ("before", "after") for k in ("write", "removal", "create")
    }
    assert min(seen.values()) > 5, (seen, moments)
    assert len(moments) > 40


def test_query_that_goes_on_after_a_kill_is_rewound_too(
    fresh_stage: Callable[[], RewindStage], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the log's write the old query may run again: what it delivers then is taken back."""

    went_on = 0
    for moment, stage in killed_at_each_moment(
        fresh_stage, "new", monkeypatch, {"create", "write"}
    ):
        head = stage.log.head("orders")
        if head is None or head.query_id != QUERY:
            break
        checkpoint(stage.old, NEWEST + 2)
        stage.incarnation = stage.begin(stage.old, QUERY, NEWEST + 1)
        stage.deliver(NEWEST + 1)
        stage.rewind(new_folder(stage))
        assert stage.delivered() == stage.rows_of(*range(GOOD + 1)), moment
        went_on += 1
    assert went_on > 2


def test_nothing_changes_while_it_looks(stage: RewindStage) -> None:
    before = stage.everything()
    found = stage.look()
    (removal,) = found.removals
    assert removal.batches == tuple(range(GOOD + 1, NEWEST + 1))
    assert removal.rows == len(stage.rows_of(*removal.batches))
    assert len(removal.names) == 2 * len(removal.batches)
    assert stage.everything() == before


def interfering(stage: RewindStage, how: str) -> None:
    newest = min((stage.folder / "out").glob(f"*.b{NEWEST}.parquet"))
    if how == "deleted":
        newest.unlink()
    elif how == "rows deleted":
        pq.write_table(pq.read_table(newest).slice(1), newest)
    else:
        rows = pq.read_table(newest)
        pq.write_table(pa.table({"id": [v + 1 for v in rows["id"].to_pylist()]}), newest)


@pytest.mark.parametrize("how", ["deleted", "rows deleted", "rows updated"])
def test_writer_that_interferes_is_noticed(stage: RewindStage, how: str) -> None:
    interfering(stage, how)
    before = stage.everything()
    with pytest.raises(SavepointError, match=f"{'0 of the 3' if how == 'deleted' else 'changed'}"):
        stage.rewind(new_folder(stage))
    assert stage.everything() == before
    assert not stage.is_refused(stage.old, QUERY, NEWEST + 1)


@pytest.mark.parametrize("how", ["rows deleted", "rows updated"])
def test_writer_that_interferes_in_the_middle_is_noticed(
    stage: RewindStage, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file stays; no start is admitted, until the command has run again, with --keep."""
    take_back = FileSink.take_back

    def late(self: FileSink, branches: object) -> None:
        interfering(stage, how)
        take_back(self, branches)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(FileSink, "take_back", late)
        with pytest.raises(TakeBackRefusedError, match="run the same command again"):
            stage.rewind(new_folder(stage))
    new = stage.folder / "new"
    assert stage.is_refused(new, query_of(new), GOOD + 1)
    assert stage.is_refused(stage.old, QUERY, NEWEST + 1)
    with pytest.raises(SavepointError, match="changed since"):
        stage.rewind(new_folder(stage))
    stage.rewind(new_folder(stage), "out")
    assert not stage.is_refused(new, query_of(new), GOOD + 1)


def test_kept_sink_keeps_its_rows(tmp_path: Path) -> None:
    stage = RewindStage(tmp_path, batches=NEWEST + 1, savepoint=GOOD, sinks=["out", "audit"])
    stage.rewind(new_folder(stage), "audit")
    assert stage.delivered("out") == stage.rows_of(*range(GOOD + 1))
    assert stage.delivered("audit") == stage.rows_of(*range(NEWEST + 1))


class Topic(TwoPhaseCommitSink[None]):
    """Has the target of the folder, and cannot take anything back."""

    kind = "out"
    why_kept = "keeps what it has"

    def __init__(self, target: str) -> None:
        super().__init__()
        self._target = target

    @property
    def target(self) -> str:
        return self._target

    def beginTransaction(self, branch_id: BranchId) -> None: ...

    def write(self, handle: None, batch: pa.RecordBatch) -> None: ...

    def preCommit(self, handle: None) -> Committable:
        raise NotImplementedError

    def commit(self, committable: Committable) -> None: ...

    def abort(self, branch: BranchId | Committable) -> None: ...


def test_sink_that_cannot_is_refused_with_the_reason(stage: RewindStage) -> None:
    """Unless it is kept; so is one that the pipeline has no more, or that has another target."""
    (sink,) = stage.sinks
    before = stage.everything()
    for sinks, why in (
        ([Topic(sink.target)], "Topic keeps what it has"),
        ([Topic("elsewhere")], "went to folder .* writes to elsewhere"),
        ([], "removed="),
    ):
        stage.sinks = [*sinks]
        with pytest.raises(SavepointError, match=why):
            stage.rewind(new_folder(stage))
        assert stage.everything() == before
    stage.rewind(new_folder(stage), "out")
    assert stage.delivered() == stage.rows_of(*range(NEWEST + 1))


def test_running_driver_is_fenced(stage: RewindStage) -> None:
    stage.rewind(new_folder(stage))
    with pytest.raises(FencedError, match="operator's command"):
        stage.deliver(NEWEST + 1)
    assert stage.delivered() == stage.rows_of(*range(GOOD + 1))


def test_driver_that_continues_meanwhile_wins(
    stage: RewindStage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch that is complete between the look and the log's write."""
    write_log = stage.log._write

    def late(step: object) -> object:
        monkeypatch.setattr(stage.log, "_write", write_log)
        stage.deliver(NEWEST + 1)
        return write_log(step)  # type: ignore[arg-type]

    monkeypatch.setattr(stage.log, "_write", late)
    with pytest.raises(SavepointError, match="has continued meanwhile"):
        stage.rewind(new_folder(stage))
    assert stage.delivered() == stage.rows_of(*range(NEWEST + 2))
    assert not stage.is_refused(stage.old, QUERY, NEWEST + 2)


def test_pipeline_is_rewound_again_and_again(stage: RewindStage) -> None:
    """To the same savepoint, to one of the second query, and further back."""
    older = create(
        stage.place,
        stage.log,
        "orders",
        open_checkpoint(str(stage.old), None),
        name="older",
        batch=0,
    )
    good = stage.manifest
    for number in itertools.count():
        name = f"new{number}"
        query_id = stage.rewind(new_folder(stage, name))
        last = stage.manifest.batch
        assert stage.delivered() == stage.rows_of(*range(last + 1))
        new = stage.folder / name
        stage.incarnation = stage.begin(new, query_id, last + 1)
        for batch in range(last + 1, NEWEST + 1):
            stage.deliver(batch)
        assert stage.delivered() == stage.rows_of(*range(NEWEST + 1))
        if number == 1:
            checkpoint(new, NEWEST + 1)
            (new / "metadata").write_text(json.dumps({"id": query_id}))
            files = open_checkpoint(str(new), None)
            place = Savepoints(LocalFolder(stage.root))
            stage.manifest = create(place, stage.log, "orders", files, name="second", batch=2)
        elif number == 2:
            stage.manifest = older
        elif number == 3:
            break
    stage.manifest = good
    with pytest.raises(SavepointError, match="it has taken back"):
        stage.rewind(new_folder(stage, "more"))
    assert stage.delivered() == stage.rows_of(*range(NEWEST + 1))


def test_another_folder_finishes_what_was_interrupted(
    fresh_stage: Callable[[], RewindStage], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second rewind takes the place of the first one, whose folder stays refused."""

    for moment, stage in killed_at_each_moment(
        fresh_stage, "new", monkeypatch, {"write", "removal"}
    ):
        stage.rewind(new_folder(stage, "second"))
        assert stage.delivered() == stage.rows_of(*range(GOOD + 1)), moment
        new, second = stage.folder / "new", stage.folder / "second"
        if (new / "metadata").exists():
            assert stage.is_refused(new, query_of(new), GOOD + 1), moment
        head = stage.log.head("orders")
        assert head is not None
        if (new / "metadata").exists() and query_of(new) in head.retired:
            with pytest.raises(SavepointError):
                stage.rewind(new_folder(stage))
        stage.incarnation = stage.begin(second, query_of(second), GOOD + 1)
        stage.deliver(GOOD + 1)
        assert stage.delivered() == stage.rows_of(*range(GOOD + 2)), moment


# -- what is refused -------------------------------------------------------------------------------


def test_batches_that_the_log_has_forgotten_are_refused(stage: RewindStage) -> None:
    newest = stage.log.newest("orders", QUERY)
    assert newest is not None
    stage.log.forget(newest, stage.incarnation.token, retain=1)
    before = stage.everything()
    with pytest.raises(SavepointError, match=r"lacks records of the batches 2 to 3"):
        stage.rewind(new_folder(stage))
    assert stage.everything() == before


def test_nothing_to_take_back_is_refused(tmp_path: Path) -> None:
    stage = RewindStage(tmp_path, batches=4, savepoint=3)
    with pytest.raises(SavepointError, match="restore it"):
        stage.rewind(new_folder(stage))


def test_unfinished_batch_is_refused(stage: RewindStage) -> None:
    record = stage.log.newest("orders", QUERY)
    assert record is not None
    stage.log.decide(
        replace(record, id=replace(record.id, batch_id=NEWEST + 1), state=State.DECIDED, times={})
    )
    with pytest.raises(SavepointError, match="sparkonce recover"):
        stage.rewind(new_folder(stage))


def test_settled_branch_is_refused(stage: RewindStage) -> None:
    """Nobody can prove what an operator has ruled."""
    record = stage.log.newest("orders", QUERY)
    assert record is not None
    token = stage.incarnation.token
    record = replace(record, id=replace(record.id, batch_id=NEWEST + 1), state=State.DECIDED)
    decided = stage.log.decide(replace(record, times={}))
    branch = next(decided.committables()).branch_id
    ruling = Settlement(str(branch), Ruling.COMMITTED, "me", "why", 0.0, token)
    stage.log.complete(stage.log.settle(decided.id, [ruling], token), token)
    with pytest.raises(SavepointError, match="settled"):
        stage.rewind(new_folder(stage))
    assert stage.delivered() == stage.rows_of(*range(NEWEST + 1))


def test_query_that_another_has_replaced_is_refused(stage: RewindStage) -> None:
    """replaces= bound the name to a checkpoint whose batches count from 0 again."""
    other = checkpoint(stage.folder / "fresh", 2)
    query_id = "22222222-2222-3333-4444-555555555555"
    (other / "metadata").write_text(json.dumps({"id": query_id}))
    stage.incarnation = stage.begin(other, query_id, 0, replaces=QUERY)
    stage.deliver(0)
    with pytest.raises(SavepointError, match="replaces="):
        stage.rewind(new_folder(stage))


def test_folder_of_another_restore_is_refused(stage: RewindStage) -> None:
    new = new_folder(stage)
    marker = {
        "log_id": "restoring",
        "pipeline": "orders",
        "savepoint": [stage.place.address, stage.manifest.name, stage.manifest.made_at],
        "query_id": QUERY,
    }
    new.create("sparkonce.json", json.dumps(marker))
    with pytest.raises(SavepointError, match="another restore"):
        stage.rewind(new)
    new_folder(stage, "full").create("file", "")
    before = stage.everything()
    with pytest.raises(SavepointError, match="not empty"):
        stage.rewind(new_folder(stage, "full"))
    assert stage.everything() == before


def test_old_checkpoint_is_refused_by_name(stage: RewindStage) -> None:
    query_id = stage.rewind(new_folder(stage))
    for replaces in (None, query_id):
        with pytest.raises(ConfigurationError, match="never runs again"):
            stage.begin(stage.old, QUERY, NEWEST + 1, replaces=replaces)
