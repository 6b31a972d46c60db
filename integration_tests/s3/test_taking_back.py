"""`S3Sink.take_back` on real servers: exactly a batch's objects go, or none."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from integration_tests.support.s3 import ROWS, World, branch, prepare
from sparkonce.errors import CommitUnresolvedError, PreparedBranchLostError, TakeBackRefusedError
from sparkonce.sinks import Delivered, S3Sink
from sparkonce.sinks.s3.finishing import outcome


def delivered(sink: S3Sink, *batches: int) -> list[Delivered]:
    """Deliver the batches, each in two folders; their branches, newest first."""
    found = []
    for batch in batches:
        committable = prepare(sink, branch(batch))
        sink.commit(committable)
        found.insert(0, Delivered(committable, ROWS.num_rows))
    return found


@pytest.fixture
def sink(make_sink: Callable[..., S3Sink]) -> S3Sink:
    return make_sink(partition_by=["day"])


@pytest.fixture
def unpatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outcome, "PATIENCE_S", 0.0)


def test_objects_of_the_batches_go(
    sink: S3Sink, make_sink: Callable[..., S3Sink], world: World
) -> None:
    """From any process; the objects of earlier batches stay."""
    delivered(sink, 1)
    kept = world.objects()
    branches = delivered(sink, 2, 3)
    found = sink.find_delivered(branches)
    assert [visible.rows for visible in found] == [100, 100]
    names = {name.split("/", 3)[3] for visible in found for name in visible.names}
    assert names == world.objects().keys() - kept.keys()
    other = make_sink(partition_by=["day"])
    for _ in range(2):  # the second call changes nothing
        other.take_back(branches)
        assert world.objects() == kept
        assert [visible.rows for visible in other.find_delivered(branches)] == [0, 0]


def test_half_of_a_branch_is_finished(sink: S3Sink, world: World) -> None:
    """The process was killed between two objects."""
    (found,) = delivered(sink, 1)
    world.client.delete_object(Bucket=world.bucket, Key=min(world.objects()))
    assert [visible.rows for visible in sink.find_delivered([found])] == [50]
    sink.take_back([found])
    assert world.objects() == {}


def test_object_with_other_content_stays(sink: S3Sink, world: World) -> None:
    (found,) = delivered(sink, 1)
    key = min(world.objects())
    world.client.put_object(Bucket=world.bucket, Key=key, Body=b"somebody else's")
    before = world.objects()
    for call in (lambda: sink.find_delivered([found]), lambda: sink.take_back([found])):
        with pytest.raises(TakeBackRefusedError, match="was changed since"):
            call()
    assert world.objects() == before


def test_log_that_knows_other_rows_is_refused(sink: S3Sink, world: World) -> None:
    (found,) = delivered(sink, 1)
    before = world.objects()
    with pytest.raises(TakeBackRefusedError, match="100 of the 99 rows"):
        sink.take_back([found._replace(rows=99)])
    assert world.objects() == before


@pytest.mark.usefixtures("unpatient")
def test_late_commit_shows_nothing_again(sink: S3Sink, world: World) -> None:
    (found,) = delivered(sink, 1)
    sink.take_back([found])
    with pytest.raises((PreparedBranchLostError, CommitUnresolvedError)):
        sink.commit(found.committable)
    assert world.objects() == {}


def test_another_server_proves_nothing(sink: S3Sink, world: World) -> None:
    """The object is absent there, as it would be once it is gone."""
    (found,) = delivered(sink, 1)
    moved = {**found.committable.payload, "endpoint": "http://elsewhere:1"}
    sink.take_back([found])
    elsewhere = found._replace(committable=type(found.committable)(branch(1), moved, 2))
    with pytest.raises(TakeBackRefusedError, match="another endpoint"):
        sink.find_delivered([elsewhere])
    assert world.objects() == {}
