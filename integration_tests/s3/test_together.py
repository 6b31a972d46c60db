"""Large batches: many files are committed together, and one listing proves them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pyarrow as pa
import pytest

from integration_tests.support.s3 import ROWS, World, branch, files_of, key_of, prepare
from sparkonce.errors import CommitUnresolvedError, ConfigurationError, PreparedBranchLostError
from sparkonce.model import Committable
from sparkonce.sinks import S3Sink
from sparkonce.sinks.s3.connecting.answers import S3_ERRORS
from sparkonce.sinks.s3.connecting.client import Purpose
from sparkonce.sinks.s3.finishing import together
from sparkonce.sinks.s3.finishing.outcome import FileOutcome
from sparkonce.sinks.s3.finishing.together import complete_together
from sparkonce.sinks.verbs import commit_many

pytestmark = pytest.mark.usefixtures("lost_at_once")


@pytest.fixture(autouse=True)
def _few_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(together, "_MANY_FILES", 4)


@pytest.fixture
def prepared(sink: S3Sink) -> list[Committable]:
    return prepare_each(sink, 5)


@pytest.fixture
def asked(sink: S3Sink) -> Counter[str]:
    """The requests of the sink, by operation."""
    counted: Counter[str] = Counter()

    def count(model: Any, **_: Any) -> None:
        counted[model.name] += 1

    for purpose in Purpose:
        client = sink._clients.client(purpose)
        client.meta.events.register("before-call.s3", count)
    return counted


def prepare_each(sink: S3Sink, number: int, *rows: pa.RecordBatch) -> list[Committable]:
    return [prepare(sink, branch(attempt=attempt), *rows) for attempt in range(number)]


def proven(sink: S3Sink, committables: Sequence[Committable]) -> list[bool]:
    """Which branches the listing proves, after they were completed together."""
    known = complete_together(sink._clients, committables)
    keys = [(key_of(each), files_of(each)[0]["etag"]) for each in committables]
    return [key in known and known[key].etag == etag for key, etag in keys]


def test_one_listing_proves_all(
    sink: S3Sink, world: World, prepared: list[Committable], asked: Counter[str]
) -> None:
    assert commit_many(sink, prepared) == [None] * 5
    assert asked == {"CompleteMultipartUpload": 5, "ListObjectsV2": 1}
    assert world.counts() == (0, 5)
    assert all(world.table(key_of(each)).num_rows == ROWS.num_rows for each in prepared)


def test_again(sink: S3Sink, world: World, prepared: list[Committable]) -> None:
    commit_many(sink, prepared[:2])
    before = world.objects()
    assert commit_many(sink, prepared) == [None] * 5
    now = world.objects()
    assert commit_many(sink, prepared) == [None] * 5
    assert world.objects() == now
    assert {key: now[key] for key in before} == before


def test_batch_that_two_drivers_have_written(
    sink: S3Sink, world: World, prepared: list[Committable], asked: Counter[str]
) -> None:
    """As after a rewrite: what is listed is of this batch only, whatever else the query wrote."""
    world.put(key_of(prepared[0]).replace(".b1.", ".b0."))
    newer = [prepare(sink, branch(attempt=n, token=2)) for n in range(4)]
    asked.clear()
    assert commit_many(sink, [*prepared, *newer]) == [None] * 9
    assert asked == {"CompleteMultipartUpload": 9, "ListObjectsV2": 2}


def test_few_files_take_a_head_each(
    sink: S3Sink, prepared: list[Committable], asked: Counter[str]
) -> None:
    assert commit_many(sink, prepared[:3]) == [None] * 3
    assert asked == {"CompleteMultipartUpload": 3, "HeadObject": 3}


def test_lost_and_foreign_ones(sink: S3Sink, world: World, prepared: list[Committable]) -> None:
    lost, foreign, *_ = prepared
    (file,) = files_of(lost)
    world.abort(file["key"], file["upload_id"])
    world.put(key_of(foreign))
    assert proven(sink, prepared) == [False, False, True, True, True]
    outcomes = commit_many(sink, prepared)
    assert [type(error) for error in outcomes[:2]] == [
        PreparedBranchLostError,
        CommitUnresolvedError,
    ]
    assert outcomes[2:] == [None] * 3
    assert world.body(key_of(foreign)) == b"foreign"


def test_other_content_under_a_branchs_name(
    sink: S3Sink, world: World, prepared: list[Committable]
) -> None:
    """As of a copied checkpoint: the key is the same, and the rows are not."""
    other = prepare(sink, prepared[0].branch_id, ROWS.slice(0, 7))
    sink.commit(other)
    assert proven(sink, prepared) == [False, True, True, True, True]
    first, *rest = commit_many(sink, prepared)
    assert isinstance(first, CommitUnresolvedError)
    assert rest == [None] * 4
    assert world.table(key_of(other)).num_rows == 7


def test_same_content_in_another_name(
    sink: S3Sink, world: World, prepared: list[Committable]
) -> None:
    """If an object at our key has our bytes, readers get our rows once, whoever wrote it."""
    ours = prepared[0]
    (file,) = files_of(ours)
    world.abort(file["key"], file["upload_id"])
    twin = prepare(sink, branch(2))
    sink.commit(twin)
    world.upload(file["key"], world.body(key_of(twin)))
    before = world.objects()[file["key"]]
    assert before[0].strip('"') == file["etag"]
    assert all(proven(sink, prepared))
    assert world.objects()[file["key"]] == before


def test_etags_that_are_no_md5s(sink: S3Sink, prepared: list[Committable]) -> None:
    """As with KMS keys: the parts do not show which ETag the object will have."""
    unknown = []
    for each in prepared:
        files = [{**file, "etag": None} for file in files_of(each)]
        payload = {**each.payload, "files": files}
        unknown.append(Committable(each.branch_id, payload, each.version))
    assert complete_together(sink._clients, unknown) == {}
    assert commit_many(sink, unknown) == [None] * 5


def test_listing_is_refused(
    sink: S3Sink, world: World, prepared: list[Committable], asked: Counter[str]
) -> None:
    def refuse(**_: Any) -> None:
        raise S3_ERRORS[0]

    events = sink._clients.client(Purpose.ASK).meta.events
    events.register("before-call.s3.ListObjectsV2", refuse)
    assert commit_many(sink, prepared) == [None] * 5
    assert asked["HeadObject"] == asked["CompleteMultipartUpload"] == 5
    assert world.counts() == (0, 5)


def test_completion_that_did_nothing(
    sink: S3Sink, world: World, prepared: list[Committable], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server may answer 200 and have no object: only the listing counts."""
    monkeypatch.setattr(FileOutcome, "complete", lambda *_: None)
    assert not any(proven(sink, prepared))
    assert world.counts() == (5, 0)


def test_branches_of_several_folders(make_sink: Callable[..., S3Sink], world: World) -> None:
    """A file goes along when its folder gets many."""
    sink = make_sink(partition_by=["day"])
    both = prepare_each(sink, 4)
    only = ROWS.filter(pa.compute.equal(ROWS["day"], "mon"))
    rare = ROWS.set_column(1, "day", pa.array(["sun"] * ROWS.num_rows))
    monday = prepare(sink, branch(attempt=8), only)
    sunday = prepare(sink, branch(attempt=9), rare)
    everything = [*both, monday, sunday, prepare(sink, branch(attempt=10), ROWS.slice(0, 0))]
    known = complete_together(sink._clients, everything)
    assert known.keys() == {file["key"] for each in (*both, monday) for file in files_of(each)}
    assert commit_many(sink, everything) == [None] * len(everything)
    assert world.counts() == (0, 10)


def test_newer_version_is_left_alone(sink: S3Sink, prepared: list[Committable]) -> None:
    first, *rest = prepared
    newer = Committable(first.branch_id, first.payload, first.version + 1)
    outcomes = commit_many(sink, [newer, *rest])
    assert isinstance(outcomes[0], ConfigurationError)
    assert outcomes[1:] == [None] * 4
