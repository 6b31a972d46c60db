"""What the base classes give a sink: payloads, rows, and errors that say what to change."""

from __future__ import annotations

import itertools
import signal
import subprocess
import sys
import textwrap
import threading
from abc import ABC
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, replace
from datetime import UTC, datetime, time, timedelta
from pathlib import Path
from typing import Any, ClassVar

import pyarrow as pa
import pytest
from pyspark import cloudpickle

from sparkonce import ExactlyOnce, parallel
from sparkonce.errors import (
    CommitRejectedError,
    CommitUnresolvedError,
    ConfigurationError,
    PreparedBranchLostError,
    PrepareRejectedError,
    ProtocolError,
)
from sparkonce.finding import Level
from sparkonce.model import DRIVER_ATTEMPT, BranchId, Committable, CommittedBatch, Owner
from sparkonce.parallel import at_once
from sparkonce.sinks import FileSink, IdempotentSink, Payload, RowSink, capabilities, verbs
from sparkonce.sinks.base import AnySink
from sparkonce.sinks.capabilities import AbortsMany, ChecksLog
from sparkonce.sinks.committables import check_committable
from sparkonce.sinks.kafka import KafkaSink
from sparkonce.sinks.postgres import PostgresSink
from sparkonce.sinks.s3 import S3Connection, S3Sink
from sparkonce.spark_hooks.partition_writer import PartitionWriter
from sparkonce.spark_hooks.validating import check_pickles
from sparkonce.steps import POINTS
from sparkonce.testing.kills import CommitPolicy, Kill, crash_points, sample
from sparkonce.testing.sink_world import stored
from sparkonce.txn_log.record import Incarnation
from tests.support.disk import Disk

BRANCH = BranchId(Owner("0" * 16, "5b1d"), 7, 4, "list", 0, 11)


class ListSink(RowSink[list[Any]]):
    kind: ClassVar[str] = "list"

    def beginTransaction(self, branch_id: BranchId) -> list[Any]:
        return []

    def write_rows(self, handle: list[Any], rows: Sequence[Mapping[str, Any]]) -> None:
        handle.append(list(rows))

    def preCommit(self, handle: list[Any]) -> Committable:
        return Committable(BRANCH)

    def commit(self, committable: Committable) -> None: ...

    def abort(self, branch: BranchId | Committable) -> None: ...


@pytest.mark.parametrize(
    "make",
    [
        lambda: FileSink("orders"),
        lambda: KafkaSink("orders", bootstrap_servers="nowhere.invalid:1"),
        lambda: PostgresSink("postgresql://nowhere.invalid/shop", table="orders"),
        lambda: S3Sink(
            "s3://lake/orders", connection=S3Connection(endpoint_url="http://nowhere.invalid:1")
        ),
    ],
)
def test_what_a_newer_version_has_prepared_is_refused(make: Callable[[], AnySink]) -> None:
    """At once, and before a server is asked: nothing is proven by fields that are not known."""
    with pytest.raises(ConfigurationError, match="newer sparkonce"):
        make().commit(Committable(BRANCH, {"files": [], "columns": []}, version=99))


# -- rows ------------------------------------------------------------------------------------------


def test_rows_come_in_order_and_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """`write_rows` gets every row once, as dictionaries, no more than `rows_at_once` at a time."""
    monkeypatch.setattr(ListSink, "rows_at_once", 2)
    sink = ListSink()
    handle = sink.beginTransaction(BRANCH)
    sink.write(handle, pa.record_batch({"id": [1, 2, 3], "name": ["a", None, "ü"]}))
    assert handle == [
        [{"id": 1, "name": "a"}, {"id": 2, "name": None}],
        [{"id": 3, "name": "ü"}],
    ]


@pytest.mark.parametrize("zone", ["GMT+8", "UTC+01:00", "Z", "PST", "+08:00", "Europe/Berlin"])
def test_instants_of_any_zone_that_spark_knows(zone: str) -> None:
    """At any depth; in a zone that Python knows they are shown in it, else in UTC."""
    at = datetime(2026, 7, 1, 12, 30, tzinfo=UTC)
    kind = pa.timestamp("us", zone)
    rows = pa.record_batch(
        {
            "at": pa.array([at, None], kind),
            "deep": pa.array([[{"at": at}], None], pa.list_(pa.struct([("at", kind)]))),
        }
    )
    sink = ListSink()
    handle = sink.beginTransaction(BRANCH)
    sink.write(handle, rows)
    assert handle == [[{"at": at, "deep": [{"at": at}]}, {"at": None, "deep": None}]]
    is_known = zone in {"+08:00", "Europe/Berlin"}
    assert (handle[0][0]["at"].utcoffset() != timedelta(0)) == is_known


def test_time_of_day_keeps_its_nanoseconds_or_is_refused() -> None:
    """Python's has microseconds; Spark's TIME(9) does not."""
    sink = ListSink()
    handle = sink.beginTransaction(BRANCH)
    kind = pa.time64("ns")
    sink.write(handle, pa.record_batch({"at": pa.array([1_000], kind)}))
    assert handle == [[{"at": time(0, 0, 0, 1)}]]
    with pytest.raises(pa.ArrowInvalid, match="would lose data"):
        sink.write(handle, pa.record_batch({"at": pa.array([1_001], kind)}))


# -- payloads --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Everything(Payload):
    VERSION: ClassVar[int] = 2
    text: str
    etag: bytes
    parts: tuple[tuple[int, bytes], ...]
    extra: dict[str, Any]
    size: float | None = None

    @classmethod
    def upgrade(cls, fields: dict[str, Any], version: int) -> dict[str, Any]:
        return {**fields, "etag": b""} if version == 1 else fields


def test_payload_comes_back_as_it_went() -> None:
    """Bytes, tuples and nested values survive the log."""
    made = Everything("ü", b"\x00\xff", ((1, b"a"), (2, b"")), {"a": [None, True, {"b": (1.5,)}]})
    committable = stored(made.committable(BRANCH, safe_until=9.0))
    assert Everything.of(committable) == made
    assert (committable.version, committable.safe_until) == (2, 9.0)


def test_payload_of_an_older_version() -> None:
    """`upgrade` reads what older code prepared."""
    older = Committable(BRANCH, {"text": "a", "parts": [], "extra": {}}, version=1)
    assert Everything.of(older).etag == b""


@pytest.mark.parametrize(
    ("committable", "told"),
    [
        (Committable(BRANCH, {}, version=3), "version 3 of Everything, and this is version 2"),
        (Committable(BRANCH, {"url": ""}, version=2), r"fields \['url'\].*raise VERSION"),
    ],
)
def test_payload_that_cannot_be_read(committable: Committable, told: str) -> None:
    """The error tells the versions and the fields."""
    with pytest.raises(ConfigurationError, match=told):
        Everything.of(committable)


def test_payload_that_a_record_cannot_keep() -> None:
    """The error tells the field and the type."""
    with pytest.raises(ProtocolError, match=r"Everything\.extra holds a set"):
        Everything("", b"", (), {"a": {1}}).committable(BRANCH)


# -- misuse ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("committable", "told"),
    [
        (None, "returned None instead of a Committable"),
        ({"file": "x"}, "returned a dict instead of a Committable"),
        (Committable(replace(BRANCH, attempt=12)), "of another branch"),
        (Committable(replace(BRANCH, sink="other")), "of another branch"),
        (Committable(BRANCH, {"path": Path()}), "'path' holds a PosixPath"),  # type: ignore[dict-item]
        (Committable(BRANCH, {"size": float("nan")}), "'size' holds a float"),
    ],
)
def test_what_precommit_must_not_return(committable: object, told: str) -> None:
    """The error names the sink and says what to return."""
    with pytest.raises(ProtocolError, match=f"ListSink 'list'.*{told}"):
        check_committable(ListSink(), committable, BRANCH)


def test_payload_is_as_a_record_gives_it_back() -> None:
    """Else the checksum of the record would be that of something else: numbers sort otherwise."""
    kept: Any = {"ends": {9: 1, 10: (2, 3)}}
    checked = check_committable(ListSink(), Committable(BRANCH, kept), BRANCH)
    assert checked.payload == {"ends": {"9": 1, "10": [2, 3]}} == stored(checked).payload


def test_vote_passes_the_tasks_committables_on_or_makes_its_own() -> None:
    """Both are of the batch; one of another batch is refused."""
    by_driver = replace(BRANCH, attempt=DRIVER_ATTEMPT)
    for branch_id in (BRANCH, by_driver):
        check_committable(ListSink(), Committable(branch_id), by_driver)
    with pytest.raises(ProtocolError, match="of another branch"):
        check_committable(ListSink(), Committable(replace(by_driver, batch_id=8)), by_driver)


def test_handle_that_is_committed() -> None:
    """Of a subclass of a subclass too: call preCommit first."""

    class Child(ListSink):
        def commit(self, committable: Committable) -> None: ...

    for sink in (ListSink(), Child()):
        with pytest.raises(ProtocolError, match=r"got a list: call preCommit\(handle\) first"):
            sink.commit([])  # type: ignore[arg-type]


def test_sink_without_a_lasting_name() -> None:
    """A class without a kind needs name=; one that never calls __init__ of its base is told so."""

    class Nameless(ListSink):
        kind: ClassVar[str] = ""

    class Careless(ListSink):
        def __init__(self) -> None: ...

    with pytest.raises(ConfigurationError, match="Nameless has no permanent name"):
        Nameless()
    assert Nameless(name="given").name == "given"
    with pytest.raises(ConfigurationError, match=r"Careless has no name: call super\(\)"):
        ExactlyOnce("test", sinks=[Careless()], log="sqlite:///:memory:")


@pytest.mark.parametrize("name", ["columns", "transform", "select", "distribute_by", "writers"])
def test_attribute_that_hides_one_of_the_contract(name: str) -> None:
    """A sink's own list of columns is no function that makes columns."""

    class Own(ListSink):
        def __init__(self) -> None:
            super().__init__()
            setattr(self, name, ["id", "name"])

    with pytest.raises(ConfigurationError, match=rf"Own.{name} is \['id', 'name'\].*_{name}"):
        ExactlyOnce("test", sinks=[Own()], log="sqlite:///:memory:")


def test_kind_that_is_no_name() -> None:
    class Spaced(ListSink):
        kind: ClassVar[str] = "My Sink"

    with pytest.raises(ConfigurationError, match="name='My Sink': a sink's name has"):
        Spaced()


def test_sink_that_does_not_pickle() -> None:
    """The attribute is named, and where to open it."""

    class Open(ListSink):
        def __init__(self) -> None:
            super().__init__()
            self.dropped, self.lock = threading.Lock(), threading.Lock()

        def __getstate__(self) -> dict[str, Any]:
            return {k: v for k, v in vars(self).items() if k != "dropped"}

    sink = Open()
    with pytest.raises(ConfigurationError, match="its attribute 'lock', a lock, does not pickle"):
        check_pickles(sink)


def test_transform_is_not_sent_to_the_executors() -> None:
    """The driver applies it, and it may hold a DataFrame to join with, which does not pickle."""
    customers = threading.Lock()
    sink = ListSink(transform=lambda df: df.join(customers))  # type: ignore[arg-type]
    check_pickles(sink)
    writer = PartitionWriter([sink], Incarnation("orders", BRANCH.owner, 4), 7)
    assert cloudpickle.loads(cloudpickle.dumps(writer))
    assert sink.transform is not None
    lines = S3Sink("s3://lake/orders", format="json", transform=sink.transform)
    check_pickles(lines)
    assert lines.columns is not None


@pytest.mark.parametrize(
    "function", ["input_file_name", "input_file_block_start", "INPUT_FILE_BLOCK_LENGTH"]
)
def test_function_that_a_snapshot_has_no_answer_to(function: str) -> None:
    """With sinks that need a snapshot it gives '' or -1; a column of that name is no call."""
    FileSink(".", select=["id", function, "(a + b) AS c", f"my_{function}(id)"])
    FileSink(".", select=[f"'it\\'s {function}()' AS note", f'"{function}()" AS too'])
    for call in (f"upper({function} ()) AS file", f"`{function}`() AS file"):
        with pytest.raises(ConfigurationError, match=f"{function}.*make the column in the query"):
            FileSink(".", select=["id", call])


class DealingSink(ListSink):
    distribute_by = ("id",)


@pytest.mark.parametrize("writers", [0, -1, True, 1.0, "1"])
@pytest.mark.parametrize("sink", [ListSink, DealingSink])
def test_writers_are_a_number_of_tasks(sink: type[ListSink], writers: Any) -> None:
    with pytest.raises(ConfigurationError, match="must be a whole number from 1"):
        sink(writers=writers)


def test_rows_that_are_dealt_out_need_a_number_of_tasks() -> None:
    """Any other way of dealing them would differ in a replay, and a number without columns says
    no more than columns without a number."""
    assert [sink(writers=1).writers for sink in (ListSink, DealingSink)] == [1, 1]
    assert (ListSink().writers, DealingSink(writers=4).writers) == (None, 4)
    with pytest.raises(ConfigurationError, match="writers=4 needs columns"):
        ListSink(writers=4)
    with pytest.raises(ConfigurationError, match=r"distributes its rows by \['id'\]: set writers="):
        DealingSink()


# -- optional verbs --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("verb", "mixin"),
    [
        ("vote", "Votes"),
        ("commit_many", "CommitsMany"),
        ("abort_many", "AbortsMany"),
        ("abort_decided", "AbortsDecided"),
        ("publish", "Publishes"),
        ("find_branches", "FindsBranches"),
        ("take_back", "TakesBack"),
        ("lists_uncommitted_only", "FindsBranches"),
        ("commit_one_phase", "CommitsOnePhase"),
        ("check_log", "ChecksLog"),
        ("diagnose", "Diagnoses"),
        ("room_for_tasks", "Diagnoses"),
    ],
)
def test_optional_verb_without_its_mixin(verb: str, mixin: str) -> None:
    """Nobody would call it, so the class is refused; also where it inherits the verb."""

    def called(self: object, *_: object) -> None: ...

    helper = type("Helper", (), {verb: called})
    for bases, namespace in (((ListSink,), {verb: called}), ((helper, ListSink), {})):
        with pytest.raises(ProtocolError, match=f"Own defines {verb} but is no {mixin}, .*inherit"):
            type("Own", bases, namespace)


def test_every_optional_verb_has_its_mixin_and_a_default() -> None:
    """No mixin is left out of the check, and none of its verbs is missing in a plain sink."""
    mixins = [
        m for m in vars(capabilities).values() if isinstance(m, type) and m.__bases__ == (ABC,)
    ]
    assert len(mixins) == 13
    for mixin in mixins:
        for verb in mixin.__abstractmethods__:  # type: ignore[attr-defined]
            with pytest.raises(ProtocolError, match=f"is no {mixin.__name__}"):
                type("Own", (ListSink,), {verb: None})
            assert hasattr(verbs, verb) or mixin is capabilities.CommitsOnePhase


def test_sink_without_optional_verbs() -> None:
    """Each has a default: branches one by one, and nothing to tell or to find."""

    class Plain(ListSink):
        def commit(self, committable: Committable) -> None:
            raise PreparedBranchLostError("gone", committable.branch_id)

        def abort(self, branch: BranchId | Committable) -> None:
            ended.append(branch)

    ended: list[object] = []
    sink, branch = Plain(), Committable(BRANCH)
    assert verbs.vote(sink, BRANCH, [branch]) == [branch]
    assert [type(error) for error in verbs.commit_many(sink, [branch])] == [PreparedBranchLostError]
    assert verbs.abort_many(sink, [branch]) == [None]
    verbs.abort_decided(sink, branch)
    assert ended == [branch, branch]
    assert not list(verbs.find_branches(sink, BRANCH.owner))
    assert not verbs.lists_uncommitted_only(sink)
    verbs.forget_proofs(sink, BRANCH.owner, 7)
    assert not list(verbs.diagnose(sink))
    verbs.check_log(sink, "sqlite:///log.db")
    verbs.publish(sink, CommittedBatch("orders", BRANCH.owner, 7, 0, (), (branch,)))


def test_sink_with_an_optional_verb() -> None:
    """It is used in place of the default."""

    class Refusing(ListSink, AbortsMany, ChecksLog):
        def abort_many(self, found: Sequence[Committable]) -> Sequence[Exception | None]:
            return [TimeoutError() for _ in found]

        def check_log(self, address: str) -> None:
            raise ConfigurationError(f"{address} is among the rows")

    assert isinstance(verbs.abort_many(Refusing(), [Committable(BRANCH)])[0], TimeoutError)
    with pytest.raises(ConfigurationError, match="log.db is among"):
        ExactlyOnce("test", sinks=[Refusing()], log="sqlite:///log.db")


@pytest.mark.parametrize("sink", [FileSink, IdempotentSink, KafkaSink, PostgresSink, S3Sink])
def test_sinks_can_abort_what_is_decided_and_list_what_is_left(sink: type[AnySink]) -> None:
    assert issubclass(sink, capabilities.AbortsDecided)
    assert issubclass(sink, capabilities.FindsBranches)


# -- idempotent stores -----------------------------------------------------------------------------


class StoreSink(IdempotentSink):
    kind: ClassVar[str] = "list"
    knows: bool | None = None
    failure: Exception | None = None

    def __init__(self, stage: Path) -> None:
        super().__init__(stage)
        self.store: dict[str, list[Any]] = {}

    def put(self, branch_id: BranchId, rows: Any) -> None:
        values = [row for batch in rows for row in batch.to_pylist()]
        if self.failure is not None:
            raise self.failure
        self.store.setdefault(str(branch_id), values)

    def has(self, branch_id: BranchId) -> bool | None:
        return self.knows


def staged(sink: StoreSink) -> Committable:
    handle = sink.beginTransaction(BRANCH)
    sink.write(handle, pa.record_batch({"id": [1, 2]}))
    return stored(sink.preCommit(handle))


def test_rows_stay_staged_until_the_batch_is_complete(tmp_path: Path) -> None:
    """A commit whose outcome is unknown finds them again; the sweep removes them."""
    sink = StoreSink(tmp_path)
    committable = staged(sink)
    sink.failure = TimeoutError("no answer")
    (outcome,) = verbs.commit_many(sink, [committable])
    assert isinstance(outcome, CommitUnresolvedError)
    sink.failure = None
    sink.commit(committable)
    assert list(sink.store.values()) == [[{"id": 1}, {"id": 2}]]
    (left,) = sink.find_branches(BRANCH.owner)
    sink.abort(left)
    assert list(tmp_path.iterdir()) == []
    assert len(sink.store) == 1


def test_stage_at_the_home_of_a_user_that_is_not_there() -> None:
    with pytest.raises(ConfigurationError, match="knows no home of ~nobody-here"):
        StoreSink(Path("~nobody-here/stage"))


def test_doctor_misses_the_stage(tmp_path: Path) -> None:
    (found,) = verbs.diagnose(StoreSink(tmp_path))
    assert found.level is Level.OK
    (found,) = verbs.diagnose(StoreSink(tmp_path / "gone"))
    assert (found.level, found.fix) == (Level.ERROR, "mount its disk, or create it")


def test_staged_rows_are_on_the_disk_before_the_decision(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bytes and name: the store has nothing yet, so a power cut would take the last copy."""
    disk = Disk(monkeypatch)
    staged(StoreSink(tmp_path))
    (file,) = tmp_path.iterdir()
    assert disk.done == [f"sync {file.name}", f"sync {tmp_path.name}"]
    assert disk.holds(file)


@pytest.mark.parametrize(
    ("knows", "error"),
    [(True, None), (False, PreparedBranchLostError), (None, CommitUnresolvedError)],
)
def test_staged_rows_that_somebody_deleted(
    tmp_path: Path, knows: bool | None, error: type[Exception] | None
) -> None:
    """The store alone tells: it has them, it has not, or it cannot say."""
    sink = StoreSink(tmp_path)
    committable = staged(sink)
    next(tmp_path.iterdir()).unlink()
    sink.knows = knows
    if error is None:
        sink.commit(committable)
    else:
        with pytest.raises(error, match="are gone"):
            sink.commit(committable)


def test_stage_below_a_mount_proves_nothing(tmp_path: Path) -> None:
    """Neither that its rows are gone, nor that an abort has ended them."""
    stage, away = tmp_path / "stage", tmp_path / "away"
    stage.mkdir()
    sink = StoreSink(stage)
    sink.knows = False
    sink.validate(pa.schema([]))
    committable = staged(sink)
    stage.rename(away)
    stage.mkdir()
    for call in (sink.commit, sink.abort):
        with pytest.raises(CommitUnresolvedError, match=r"mount (it|that one) again"):
            call(committable)
    sink.abort_decided(committable)  # where it is gone for good
    sink.knows = True
    sink.commit(committable)
    stage.rmdir()
    away.rename(stage)
    sink.commit(committable)
    assert len(sink.store) == 1


@pytest.mark.parametrize("knows", [True, False, None])
def test_rows_that_the_store_may_have_are_not_freed_for_another_key(
    tmp_path: Path, knows: bool | None
) -> None:
    """An operator's `redo` writes them under another one; this one's may have landed."""
    sink = StoreSink(tmp_path)
    committable = staged(sink)
    sink.knows = knows
    if knows is False:
        sink.abort_decided(committable)
        assert list(tmp_path.iterdir()) == []
        return
    with pytest.raises(CommitRejectedError, match="has them" if knows else "cannot tell"):
        sink.abort_decided(committable)
    sink.commit(committable)
    assert list(sink.store.values()) == [[{"id": 1}, {"id": 2}]]


def test_rows_are_refused_before_the_decision(tmp_path: Path) -> None:
    class Picky(StoreSink):
        def check(self, batch: pa.RecordBatch) -> None:
            raise PrepareRejectedError(f"{batch.num_rows} rows are too many")

    sink = Picky(tmp_path)
    handle = sink.beginTransaction(BRANCH)
    with pytest.raises(PrepareRejectedError, match="2 rows are too many"):
        sink.write(handle, pa.record_batch({"id": [1, 2]}))
    sink.discard(handle)


@pytest.mark.parametrize("kind", [StoreSink, FileSink])
def test_folder_of_an_executors_own_is_refused(
    tmp_path: Path, kind: type[StoreSink | FileSink]
) -> None:
    """The driver would look for what stands there behind the decision, and find nothing."""
    folder = tmp_path / "orders"
    folder.mkdir()
    sink = kind(folder)
    sink.validate(pa.schema([("id", pa.int64())]))
    sent = cloudpickle.loads(cloudpickle.dumps(sink))
    sent.discard(sent.beginTransaction(BRANCH))
    folder.rename(tmp_path / "of the driver")
    folder.mkdir()
    with pytest.raises(PrepareRejectedError, match=f"folder {folder} on .* is not the one"):
        sent.beginTransaction(BRANCH)


def test_staged_file_that_was_cut(tmp_path: Path) -> None:
    """Wherever it ends, between two messages too, no part of the rows is taken for all of them."""
    sink = StoreSink(tmp_path)
    handle = sink.beginTransaction(BRANCH)
    for n in range(2):
        sink.write(handle, pa.record_batch({"id": [n]}))
    committable = stored(sink.preCommit(handle))
    (path,) = tmp_path.iterdir()
    whole = path.read_bytes()
    end = len(whole) - 8  # of the last message; the mark after it may be left out
    told = set()
    for length in range(0, end, 8):
        path.write_bytes(whole[:length])
        (outcome,) = verbs.commit_many(sink, [committable])
        assert isinstance(outcome, CommitUnresolvedError), length
        assert sink.store == {}
        told.add(str(outcome))
    short = f"{path} holds {{}} of the 2 rows that list has staged: restore the file"
    assert {short.format(n) for n in (0, 1)} <= {text.partition(",")[0] for text in told}
    path.write_bytes(whole)
    sink.commit(committable)
    assert list(sink.store.values()) == [[{"id": 0}, {"id": 1}]]


def test_stage_that_is_gone_is_never_a_loss(tmp_path: Path) -> None:
    """A folder that is not mounted proves nothing, whatever the store says."""
    stage = tmp_path / "stage"
    stage.mkdir()
    sink = StoreSink(stage)
    committable = staged(sink)
    stage.rename(tmp_path / "elsewhere")
    sink.knows = False
    with pytest.raises(CommitUnresolvedError, match="mount it again"):
        sink.commit(committable)


def test_stage_that_does_not_exist(tmp_path: Path) -> None:
    """It is named before any data moves."""
    with pytest.raises(ConfigurationError, match=r"stage='.*nowhere' is no folder"):
        StoreSink(tmp_path / "nowhere").validate(pa.schema([]))


# -- the kit -------------------------------------------------------------------------------------


def test_contract_and_plugin_are_imported_without_spark_and_clients() -> None:
    """Neither slows a test run that does not ask for a server."""
    program = (
        "import sys; from sparkonce.testing import SinkContract, SinkWorld, plugin;"
        "sys.exit(bool({'pyspark', 'boto3', 'psycopg', 'confluent_kafka'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_sample_of_kills_is_the_seeds() -> None:
    """The same seed takes the same batches, each with the kills of its recovery."""
    chain = crash_points(["left", "right"])
    chosen = sample(chain, 4, seed=1)
    assert chosen == sample(chain, 4, seed=1) != sample(chain, 4, seed=2)
    assert sum(not kill.again for kill in chosen) == 4
    decided = chain.index(Kill("decide.after", "none"))
    every = sample(chain, 99, seed=3)
    place = every.index(chain[decided])
    assert every[place : place + 7] == chain[decided : decided + 7]


@pytest.mark.parametrize("policy", ["immediate", "after_checkpoint"])
def test_sample_of_kills_repeats_every_commit(policy: CommitPolicy) -> None:
    """Whatever the seed: a sink whose commit is not idempotent does not pass by chance."""
    chain = crash_points(["left", "right"], policy)
    for count, seed in itertools.product((1, 5), range(50)):
        chosen = sample(chain, count, seed)
        assert sum(not kill.again for kill in chosen) == count
        assert "complete.before" in {kill.point for kill in chosen}


@pytest.mark.parametrize("policy", ["immediate", "after_checkpoint"])
def test_chain_of_kills_reaches_every_point(policy: CommitPolicy) -> None:
    """All points but those after a loss; the checkpoint policy has four more."""
    points = {kill.point for kill in crash_points(["left", "right"], policy)}
    after_a_loss = {"rewrite.before", "amend.before", "amend.after"}
    of_checkpoint = {"hold.before", "hold.after", "abandon.before", "abandon.after"}
    wanted = set(POINTS) - after_a_loss
    assert points == (wanted if policy == "after_checkpoint" else wanted - of_checkpoint)


def test_kill_at_which_too_much_is_visible() -> None:
    """The error tells the point and what each sink showed."""
    with pytest.raises(AssertionError, match=r"killed at decide.before.*'left': 'all'"):
        Kill("decide.before", "none").check({"left": "all", "right": "none"})


def test_interrupt_waits_for_what_has_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a sweep that Ctrl-C has left behind aborts the branches of the next batch."""
    waits, interrupted, left = threading.Event(), threading.Event(), threading.Event()
    main = threading.get_ident()
    seen: list[tuple[int, bool]] = []

    def interrupt(number: int, frame: object) -> None:
        interrupted.set()
        raise KeyboardInterrupt

    def work(item: int) -> None:
        if item == 0:
            assert waits.wait(60)
            while not interrupted.wait(0.1):  # one that comes right before a wait is lost to it
                signal.pthread_kill(main, signal.SIGINT)
        assert interrupted.wait(60)
        seen.append((item, left.wait(0.2)))

    def wait_for(futures: Sequence[Future[None]], timeout_s: float) -> None:
        waits.set()
        wait(futures, timeout_s)

    monkeypatch.setattr(parallel, "wait", wait_for)
    before = signal.signal(signal.SIGINT, interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            at_once(work, range(3), most=2)
    finally:
        signal.signal(signal.SIGINT, before)
        left.set()
    assert sorted(seen) == [(0, False), (1, False)]  # the third had not begun


def test_work_goes_on_when_the_main_thread_has_ended() -> None:
    """A script's end: a commit that is repeated then would fail until its patience is over."""
    script = """
        import concurrent.futures.thread, threading
        from sparkonce.parallel import at_once

        def late():
            while not concurrent.futures.thread._shutdown:
                pass
            print(at_once(str, [1, 2]))

        threading.Thread(target=late).start()
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, check=False
    )
    assert (done.stdout, done.returncode) == ("['1', '2']\n", 0), done.stderr
