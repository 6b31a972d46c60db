"""Savepoints without Spark: what a batch needs, kills at every write, deletions that race."""

from __future__ import annotations

import itertools
import json
import os
import shutil
from pathlib import Path

import pytest

from sparkonce.errors import ConfigurationError, SavepointError
from sparkonce.protocol.processes import this_driver
from sparkonce.spark_hooks.checkpoint import open_checkpoint
from sparkonce.spark_hooks.savepoints import Manifest, Savepoints, fork
from sparkonce.spark_hooks.savepoints.changes import Changes
from sparkonce.spark_hooks.savepoints.closure import closure_of
from sparkonce.spark_hooks.savepoints.gone import FileGoneError
from sparkonce.storage import LocalFolder
from tests.support.savepoint_cases import (
    QUERY,
    Observed,
    Stage,
    Turns,
    checkpoint,
    commit,
    killed_at_each_change,
    offsets,
    write,
)

GOLDEN = Path(__file__).parents[1] / "golden" / "savepoint-1.json"


def copied(folder: Path, batch: int) -> set[str]:
    closure = closure_of(LocalFolder(folder), batch)
    return {*closure.copied, *closure.rewritten}


# -- what a batch needs ----------------------------------------------------------------------------


def test_batch_needs_its_own_and_what_came_before(tmp_path: Path) -> None:
    checkpoint(tmp_path, 6)
    assert copied(tmp_path, 3) == {
        "metadata",
        "offsets/2",
        "offsets/3",
        "commits/3",
        "state/0/_metadata/metadata",
        *(f"sources/0/{n}" for n in range(4)),
        *(f"state/0/{p}/{n}.delta" for p in (0, 1) for n in (1, 2, 3, 4)),
    }
    assert closure_of(LocalFolder(tmp_path), 3).settings == {"a": "b"}


@pytest.mark.parametrize("missing", ["offsets/2", "commits/3", "sources/0/1", "state/0/1/3.delta"])
def test_missing_file_is_noticed(tmp_path: Path, missing: str) -> None:
    checkpoint(tmp_path, 6)
    (tmp_path / missing).unlink()
    with pytest.raises(FileGoneError, match=missing.removesuffix(".delta")):
        closure_of(LocalFolder(tmp_path), 3)


def test_newest_whole_state_is_enough(tmp_path: Path) -> None:
    checkpoint(tmp_path, 6)
    for n in (2, 5):
        write(tmp_path, [(f"state/0/0/{n}.snapshot", ""), (f"state/0/1/{n}.snapshot", "")])
    (tmp_path / "state/0/0/1.delta").unlink()
    taken = {name for name in copied(tmp_path, 3) if name.startswith("state/0/0/")}
    assert taken == {f"state/0/0/{name}" for name in ("2.snapshot", "3.delta", "4.delta")}


def test_schema_that_a_later_batch_wrote_is_left(tmp_path: Path) -> None:
    checkpoint(tmp_path, 6)
    kept, left = "state/0/_stateSchema/default/3_0a-b", "state/0/_metadata/v2/4"
    write(tmp_path, [(kept, ""), (left, "")])
    assert {kept, left} & copied(tmp_path, 3) == {kept}


def test_unknown_file_of_the_state_is_refused(tmp_path: Path) -> None:
    checkpoint(tmp_path, 6)
    write(tmp_path, [("state/0/1/4.novelty", "")])
    with pytest.raises(SavepointError, match=r"state/0/1/4\.novelty"):
        closure_of(LocalFolder(tmp_path), 3)


def test_branch_of_a_state_that_lost_is_left(tmp_path: Path) -> None:
    """In format version 2 several attempts leave files of one version; commits/N names one."""
    ids = {n: f"{n:08x}-0000-0000-0000-000000000000" for n in range(6)}
    loser = "ffffffff-0000-0000-0000-000000000000"
    checkpoint(tmp_path, 6)
    shutil.rmtree(tmp_path / "state")
    for n, mine in ids.items():
        write(tmp_path, [(f"commits/{n}", commit(stateUniqueIds={"0": [[mine]]}))])
        write(tmp_path, [(f"state/0/0/{n + 1}_{i}.changelog", "") for i in (mine, loser)])
    assert {n for n in copied(tmp_path, 3) if n.startswith("state")} == {
        f"state/0/0/{n + 1}_{ids[n]}.changelog" for n in range(4)
    }


def test_log_of_files_is_cut_at_the_batch(tmp_path: Path) -> None:
    """Also where Spark has compacted it later, and has deleted the single files."""
    checkpoint(tmp_path, 12)
    entries = [f'{{"path":"file:/in/{n}","batchId":{n}}}' for n in range(10)]
    write(tmp_path, [("sources/0/9.compact", "\n".join(["v1", *entries]))])
    assert "sources/0/9.compact" not in copied(tmp_path, 8)
    assert {"sources/0/9.compact", "sources/0/10"} <= copied(tmp_path, 10)
    for n in range(9):
        (tmp_path / f"sources/0/{n}").unlink()
    closure = closure_of(LocalFolder(tmp_path), 5)
    assert not [name for name in closure.copied if name.startswith("sources/")]
    assert closure.rewritten == {"sources/0/5.compact": "\n".join(["v1", *entries[:6]])}


def test_source_that_is_used_twice(tmp_path: Path) -> None:
    """It has one folder and two uses, as in a join with itself."""
    checkpoint(tmp_path, 6)
    write(tmp_path, [("offsets/3", offsets({"logOffset": 3}, {"logOffset": 3}))])
    taken = {name for name in copied(tmp_path, 3) if name.startswith("sources/")}
    assert taken == {f"sources/0/{n}" for n in range(4)}


def test_source_that_is_used_twice_next_to_another(tmp_path: Path) -> None:
    """The uses do not show whose folder is whose, so the highest counter may be another one's."""
    checkpoint(tmp_path, 6)
    write(tmp_path, [("offsets/3", offsets(*({"logOffset": n} for n in (3, 3, 0))))])
    write(tmp_path, [("sources/1/0", 'v1\n{"path":"file:/other/0","batchId":0}')])
    taken = {name for name in copied(tmp_path, 3) if name.startswith("sources/")}
    assert taken == {"sources/1/0", *(f"sources/0/{n}" for n in range(4))}


# -- kills and races -------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def no_fsync(monkeypatch: pytest.MonkeyPatch) -> None:
    """Thousands of files are written, and no power is lost here."""
    monkeypatch.setattr(os, "fsync", lambda _: None)


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    return Stage(tmp_path, 6)


def all_whole(root: Path) -> list[str]:
    place = Savepoints(LocalFolder(root))
    for name in place.names():
        assert not list(place.verify(place.read(name)))
    return place.names()


def test_making_is_killed_at_each_write(stage: Stage) -> None:
    killed = []
    action = lambda folder: stage.create(folder, "first")  # noqa: E731
    for moment, folder in killed_at_each_change(stage.root, action):
        killed.append(moment)
        assert all_whole(stage.root) in ([], ["first"])
        stage.create(folder, "second", batch=3)
        assert "second" in all_whole(stage.root)
        shutil.rmtree(stage.root)
    assert len(killed) > 20
    assert "after create first.json" in killed
    assert all_whole(stage.root) == ["first"]


def test_deletion_is_killed_at_each_write(stage: Stage) -> None:
    def act(folder: LocalFolder) -> None:
        Savepoints(folder).delete("first")

    def make() -> None:
        shutil.rmtree(stage.root, ignore_errors=True)
        for name, batch in (("first", 5), ("second", 3)):
            stage.create(LocalFolder(stage.root), name, batch)

    make()
    moments = 0
    for moment, folder in killed_at_each_change(stage.root, act):
        moments += 1
        names = all_whole(stage.root)
        assert "second" in names
        if "first" in names or (stage.root / "first.deleting.json").exists():
            Savepoints(folder).delete("first")
        assert all_whole(stage.root) == ["second"], moment
        kept = {file.sha256 for file in Savepoints(folder).read("second").files.values()}
        assert {path.name for path in (stage.root / "files").iterdir()} == kept, moment
        make()
    assert moments > 10


def test_deletion_races_with_a_new_savepoint(tmp_path: Path) -> None:
    """Each order of their calls with up to three changes of turn: what exists is whole."""
    stage = Stage(tmp_path, 1)
    outcomes: dict[str, int] = {"made": 0, "refused": 0}
    for first, second, third in itertools.product(range(12), range(16), (0, 1, 8)):
        shutil.rmtree(stage.root, ignore_errors=True)
        stage.create(LocalFolder(stage.root), "first")
        turns = Turns([0] * first + [1] * second + [0] * third + [1] * 200)
        errors: list[SavepointError] = []

        def make(turns: Turns = turns, errors: list[SavepointError] = errors) -> None:
            try:
                stage.create(Observed(stage.root, turns.note(0)), "second")
            except SavepointError as error:
                errors.append(error)

        def delete(turns: Turns = turns) -> None:
            Savepoints(Observed(stage.root, turns.note(1))).delete("first")

        turns.run([make, delete])
        names = all_whole(stage.root)
        assert names == ([] if errors else ["second"])
        outcomes["refused" if errors else "made"] += 1
    assert min(outcomes.values()) > 20, outcomes


def refused_start(stage: Stage, into: Path, pipeline: str, query_id: str) -> bool:
    """Whether the identity guard refuses to start a query on the checkpoint."""
    files = open_checkpoint(str(into), None) if (into / "metadata").exists() else None
    binding = None if files is None else files.binding()
    claim = stage.claim(
        pipeline,
        query_id,
        6,
        checkpoint=str(into),
        checkpoint_log_id=None if binding is None else binding.log_id,
        checkpoint_pipeline=None if binding is None else binding.pipeline,
    )
    try:
        stage.log.begin(claim)
    except ConfigurationError:
        return True
    return False


def query_of(checkpoint: Path) -> str:
    return str(json.loads((checkpoint / "metadata").read_text())["id"])


def test_restore_is_killed_at_each_write(stage: Stage) -> None:
    stage.create(LocalFolder(stage.root), "first")
    into = stage.folder / "restored"
    moments = []
    for moment, folder in killed_at_each_change(into, stage.restore):
        moments.append(moment)
        is_bound = (into / "sparkonce.1.json").exists()
        if (into / "metadata").exists() and not is_bound:
            assert refused_start(stage, into, "orders", query_of(into)), moment
        if is_bound:
            with pytest.raises(SavepointError, match="already"):
                stage.restore(folder)
        else:
            stage.restore(folder)
        assert refused_start(stage, Path(stage.location), "orders", QUERY), moment
        shown = stage.shown()
        assert (shown["state"], shown["last_complete"]["batch"]) == ("fine", 5), moment
        assert not refused_start(stage, into, "orders", query_of(into)), moment
        shutil.rmtree(into)
    assert len(moments) > 20


def test_fork_is_killed_at_each_write(stage: Stage) -> None:
    """A second run of the command goes on with the query id of the first one."""
    stage.create(LocalFolder(stage.root), "first")
    into = stage.folder / "forked"
    ids: list[str] = []
    moments: list[str] = []

    def act(folder: LocalFolder) -> str:
        return stage.fork(folder, into, f"fork-{len(moments)}")

    for moment, folder in killed_at_each_change(into, act):
        marker = into / "sparkonce.json"
        before = json.loads(marker.read_text()).get("query_id") if marker.exists() else None
        if not (into / "sparkonce.1.json").exists():
            now = act(folder)
            assert before in {None, now}
            assert now not in {QUERY, *ids}
            assert query_of(into) == now
            assert not refused_start(stage, into, f"fork-{len(moments)}", now), moment
            ids.append(now)
        moments.append(moment)
        shutil.rmtree(into)
    assert len(ids) > 20


def test_query_id_comes_last(stage: Stage) -> None:
    """A query that is started meanwhile has all files, or an id of its own, which is refused.

    Otherwise it could read half of a source's log, wait, and be admitted once the restore ends.
    """
    manifest = stage.create(LocalFolder(stage.root), "first")
    into = stage.folder / "restored"
    for moment, _ in killed_at_each_change(into, stage.restore):
        if (into / "metadata").exists():
            assert all((into / name).exists() for name in manifest.files), moment
        shutil.rmtree(into)


def test_query_that_was_started_while_it_was_restored(stage: Stage) -> None:
    stage.create(LocalFolder(stage.root), "first")
    into = stage.folder / "restored"

    def start(moment: str) -> None:
        if moment == "after store offsets/5":
            write(into, [("metadata", '{"id": "its own"}')])

    with pytest.raises(SavepointError, match="has metadata, which is not the savepoint's"):
        stage.restore(Observed(into, start))
    assert refused_start(stage, into, "orders", "its own")


def test_folder_that_somebody_has_used_is_refused(stage: Stage) -> None:
    """Spark was started on a checkpoint whose restore had not ended: it may hold anything."""
    stage.create(LocalFolder(stage.root), "first")
    into = stage.folder / "restored"
    for _, folder in killed_at_each_change(into, stage.restore):
        if (into / "offsets/5").exists():
            write(into, [("offsets/6", "Spark's")])
            with pytest.raises(SavepointError, match="offsets/6"):
                stage.restore(folder)
            break
    else:
        pytest.fail("no kill left half of a checkpoint")
    write(into / "elsewhere", [("file", "")])
    with pytest.raises(SavepointError, match="not empty"):
        stage.restore(LocalFolder(into / "elsewhere"))


# -- what is refused -------------------------------------------------------------------------------


def test_restore_with_later_batches_is_refused(stage: Stage) -> None:
    stage.create(LocalFolder(stage.root), "first")
    stage.deliver(6)
    into = stage.folder / "restored"
    with pytest.raises(SavepointError, match="every batch up to 6"):
        stage.restore(LocalFolder(into))
    assert not list(into.iterdir())


def test_fork_has_no_driver_of_its_parent(stage: Stage) -> None:
    """Else `recover` of the fork would ask whether to fence the parent's, which runs on."""
    stage.log.begin(stage.claim("orders", QUERY, 6))
    stage.create(LocalFolder(stage.root), "first")
    into = stage.folder / "forked"
    stage.fork(LocalFolder(into), into, "fork")
    head = stage.log.head("fork")
    assert head is not None
    assert (head.driver, head.starts) == (this_driver(), 1)


def test_fork_into_the_same_target_is_refused(stage: Stage) -> None:
    stage.create(LocalFolder(stage.root), "first")
    into = stage.folder / "forked"
    with pytest.raises(SavepointError, match="file:/out"):
        stage.fork(LocalFolder(into), into, "fork", "file:/out")
    assert not list(into.iterdir())


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("/in", "file:/moved", "no input file is below /in: .* file:/in/"),
        ("file:/nope", "file:/moved", "no input file is below file:/nope"),
        ("file:/i", "file:/moved", "no input file is below file:/i"),
        ("file:/in", "/moved", "/moved is no URL"),
        ("file:/in", "hdfs:///moved", "hdfs:///moved names no host"),
    ],
)
def test_source_path_that_leads_nowhere_is_refused(
    stage: Stage, old: str, new: str, message: str
) -> None:
    """Before the fork has a name: its start would fail, and the name would be used up."""
    stage.create(LocalFolder(stage.root), "first")
    into = LocalFolder(stage.folder / "forked")
    with pytest.raises(SavepointError, match=message):
        fork(stage.filling(into, "fork", {old: new}), {"out": "file:/other"})
    assert stage.log.pipelines() == ["orders"]
    assert into.names("") == []


@pytest.mark.parametrize("old", ["file:/in", "file:///in", "file:///in/"])
@pytest.mark.parametrize(
    ("new", "expected"),
    [
        ("file:/moved", "file:///moved"),
        ("file:///moved/", "file:///moved"),
        ("file:///moved//to here#1", "file:///moved/to%20here%231"),
        ("file:///100%25", "file:///100%25"),
        ("s3a://bucket/in/", "s3a://bucket/in"),
        ("s3a://bucket", "s3a://bucket"),
    ],
)
def test_source_path_becomes_what_spark_lists(old: str, new: str, expected: str) -> None:
    """Spark takes a file that it knows in another spelling for a new one, and reads it again."""
    changes = Changes("q", "/ckpt", {old: new})
    names = ["file:///in/1.json", "file:///in-eu/2.json", "file:/in/deep/3.json"]
    lines = "\n".join(["v1", *(json.dumps({"path": name}) for name in names)])
    (found,) = changes.applied("sources/0/0", [lines.encode()])
    paths = [json.loads(line)["path"] for line in found.decode().splitlines()[1:]]
    assert paths == [f"{expected}/1.json", "file:///in-eu/2.json", f"{expected}/deep/3.json"]


def test_longest_source_path_counts() -> None:
    changes = Changes("q", "/ckpt", {"file:///in": "file:///a", "file:///in/eu": "file:///b"})
    (found,) = changes.applied("sources/0/0", [b'v1\n{"path":"file:///in/eu/1.json"}'])
    assert b'"file:///b/1.json"' in found


def test_batch_that_is_not_complete_is_refused(stage: Stage) -> None:
    with pytest.raises(SavepointError, match="batch 6 .* not in the log"):
        stage.create(LocalFolder(stage.root), "first", batch=6)
    (stage.folder / "ckpt" / "commits" / "5").unlink()
    with pytest.raises(SavepointError, match="Spark has committed batch 4"):
        stage.create(LocalFolder(stage.root), "first", batch=5)
    assert stage.create(LocalFolder(stage.root), "first").batch == 4


@pytest.mark.parametrize("name", ["", "a/b", "../a", "a.deleting", "-a", "a" * 101])
def test_name_that_is_no_file_name_is_refused(stage: Stage, name: str) -> None:
    with pytest.raises(SavepointError, match="no name"):
        stage.create(LocalFolder(stage.root), name)


def test_damaged_file_is_noticed(stage: Stage) -> None:
    manifest = stage.create(LocalFolder(stage.root), "first")
    stored = stage.root / "files" / manifest.files["offsets/5"].sha256
    stored.write_text(stored.read_text() + " ")
    place = Savepoints(LocalFolder(stage.root))
    assert [name for name, _ in place.verify(manifest)] == ["offsets/5"]
    into = stage.folder / "restored"
    with pytest.raises(SavepointError, match="offsets/5 does not have the checksum"):
        stage.restore(LocalFolder(into))


@pytest.mark.parametrize("damage", ["longer", "of another bit"])
def test_damaged_file_is_written_again(stage: Stage, damage: str) -> None:
    """By the next savepoint that has its content, and by an export onto a damaged copy."""
    first = stage.create(LocalFolder(stage.root), "first")
    other = Savepoints(LocalFolder(stage.folder / "other"))
    Savepoints(LocalFolder(stage.root)).export(first, other, lambda _kept, _all: None)
    for root in (stage.root, stage.folder / "other"):
        stored = root / "files" / first.files["offsets/5"].sha256
        text = stored.read_text()
        stored.write_text(text + " " if damage == "longer" else " " + text[1:])
    stage.create(LocalFolder(stage.root), "second")
    assert all_whole(stage.root) == ["first", "second"]
    Savepoints(LocalFolder(stage.root)).export(first, other, lambda _kept, _all: None)
    assert all_whole(stage.folder / "other") == ["first"]


def test_export_is_killed_at_each_write(stage: Stage) -> None:
    """It continues; another savepoint of the same name stays; damage is not copied."""
    manifest = stage.create(LocalFolder(stage.root), "first")
    place, other = Savepoints(LocalFolder(stage.root)), stage.folder / "other"

    def act(folder: LocalFolder) -> None:
        place.export(manifest, Savepoints(folder), lambda _kept, _all: None)

    moments = 0
    for _, folder in killed_at_each_change(other, act):
        moments += 1
        assert all_whole(other) in ([], ["first"])
        act(folder)
        assert all_whole(other) == ["first"]
        shutil.rmtree(other)
    assert moments > 10
    assert Savepoints(LocalFolder(other)).read("first") == manifest
    shutil.rmtree(stage.root)
    again = stage.create(LocalFolder(stage.root), "first")
    with pytest.raises(SavepointError, match="has a savepoint 'first' already"):
        place.export(again, Savepoints(LocalFolder(other)), lambda _kept, _all: None)
    stored = stage.root / "files" / manifest.files["offsets/5"].sha256
    stored.write_text(stored.read_text() + " ")
    shutil.rmtree(other)
    with pytest.raises(SavepointError, match="does not have the checksum"):
        place.export(again, Savepoints(LocalFolder(other)), lambda _kept, _all: None)
    assert Savepoints(LocalFolder(other)).names() == []


def test_savepoint_of_format_1_is_read() -> None:
    text = GOLDEN.read_text()
    manifest = Manifest.decode(text, "golden")
    assert (manifest.name, manifest.batch, manifest.head.pipeline) == ("first", 5, "orders")
    assert manifest.encode() == text
    with pytest.raises(SavepointError, match="was changed"):
        Manifest.decode(text.replace('"batch_id": 5', '"batch_id": 4'), "golden")
    with pytest.raises(SavepointError, match="format 2"):
        Manifest.decode(text.replace('"v": 1', '"v": 2'), "golden")
