"""The named moments of the protocol, and what hangs on them."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from sparkonce import failpoints, steps
from sparkonce.failpoints import InjectedError
from sparkonce.observing import Event, Observer, observe
from sparkonce.steps import POINTS, STEPS, step
from tests.support.world import Process, World, at_point

BATCHES = [[[1, 2], [3]], [[4], []]]


class Notes:
    """An observer that writes down what it is shown."""

    def __init__(self) -> None:
        self.seen: list[tuple[Event, str, int | None, str | None]] = []
        self.seconds: list[float] = []
        self.pipelines: set[str | None] = set()

    def on_step(
        self,
        event: Event,
        name: str,
        batch: int | None,
        sink: str | None,
        seconds: float,
        pipeline: str | None,
    ) -> None:
        self.seen.append((event, name, batch, sink))
        self.seconds.append(seconds)
        self.pipelines.add(pipeline)


class Raising(Notes):
    def on_step(self, *args: object) -> None:  # type: ignore[override]
        super().on_step(*args)  # type: ignore[arg-type]
        raise RuntimeError("a metric without a name")


class Blocking(Notes):
    def __init__(self) -> None:
        super().__init__()
        self.released = threading.Event()

    def on_step(self, *args: object) -> None:  # type: ignore[override]
        self.released.wait()


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path, BATCHES)


@pytest.fixture(autouse=True)
def no_hook_stays() -> Iterator[None]:
    """Each test undoes its `observe`."""
    before = steps._hooks
    yield
    assert steps._hooks == before


def test_observer_is_shown_each_step_of_a_batch(world: World) -> None:
    """Started and finished, in the order of the protocol, with batch, sink and seconds."""
    notes: Observer = Notes()
    end = observe(notes)
    world.start(Process())
    end()
    assert isinstance(notes, Notes)
    finished = [(name, sink) for event, name, batch, sink in notes.seen if event != "started"]
    of_batch_0 = [
        (name, sink)
        for event, name, batch, sink in notes.seen
        if event is Event.FINISHED and batch == 0 and name in {"decide", "complete", "deliver"}
    ]
    assert of_batch_0 == [("decide", None), ("complete", None), ("deliver", None)]
    for sink in ("left", "right"):
        for name in ("vote", "commit", "publish", "sweep"):
            assert (name, sink) in finished
    started = [event for event, *_ in notes.seen if event is Event.STARTED]
    assert len(started) * 2 == len(notes.seen)
    assert "orders" in notes.pipelines
    assert all(seconds >= 0 for seconds in notes.seconds)


def test_step_that_fails_is_shown_as_failed(world: World) -> None:
    notes = Notes()
    end = observe(notes)

    def fail() -> None:
        raise InjectedError

    with at_point("vote.after", fail), pytest.raises(InjectedError):
        world.start(Process())
    end()
    assert (Event.FAILED, "deliver", 0, None) in notes.seen
    assert (Event.FINISHED, "deliver", 0, None) not in notes.seen


def test_observer_that_raises_harms_nothing(world: World, caplog: pytest.LogCaptureFixture) -> None:
    """Every batch is delivered, the observer is shown every step, and its error is logged once."""
    raising, notes = Raising(), Notes()
    ends = [observe(raising), observe(notes)]
    world.start(Process())
    world.check()
    for end in ends:
        end()
    assert sorted(raising.seen, key=repr) == sorted(notes.seen, key=repr)
    logged = [r for r in caplog.records if "raised an error" in r.getMessage()]
    assert len(logged) == 1
    assert "a metric without a name" in str(logged[0].exc_text)


def test_observer_that_blocks_harms_nothing(
    world: World, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every batch is delivered; what does not fit into its queue is dropped, and that is logged."""
    monkeypatch.setattr("sparkonce.observing._MOST_WAITING", 3)
    blocking = Blocking()
    end = observe(blocking, timeout_s=0.01)
    world.start(Process())
    world.check()
    end()
    assert "too slow" in caplog.text
    blocking.released.set()


def test_observer_is_shown_the_steps_when_their_batch_has_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its thread does not work inside a batch, where it would take turns with the batch's own."""
    monkeypatch.setattr("sparkonce.observing._LATEST_S", 60)
    is_shown = threading.Event()

    class Waiting(Notes):
        def on_step(self, *args: object) -> None:  # type: ignore[override]
            super().on_step(*args)  # type: ignore[arg-type]
            if args[:2] == (Event.FINISHED, "deliver"):
                is_shown.set()

    notes = Waiting()
    end = observe(notes)
    for batch in (0, 1):  # of the first one, the thread may see a part when it starts
        is_shown.clear()
        with step("deliver", batch=batch), step("decide", batch=batch):
            pass
        assert is_shown.wait(30)
    end()
    names = ["deliver", "decide", "decide", "deliver"]
    assert [name for _, name, *_ in notes.seen] == names * 2


def test_each_step_is_one_line_in_the_log(world: World, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "sparkonce"):
        world.start(Process())
    assert "decide batch 0 of pipeline 'orders' done after 0.0" in caplog.text


@pytest.mark.parametrize("name", list(STEPS))
def test_points_of_a_step(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step reaches its declared fail points, with what it concerns, and no others."""
    reached: list[tuple[str, object]] = []
    monkeypatch.setattr(failpoints, "handler", lambda point, where: reached.append((point, where)))
    with step(name, batch=7, token=3):
        pass
    declared = [point for point in POINTS if point.split(".")[0] == name]
    assert reached == [(point, {"batch": 7, "token": 3}) for point in declared]


def test_step_that_fails_reaches_no_point_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    reached: list[str] = []
    monkeypatch.setattr(failpoints, "handler", lambda point, where: reached.append(point))
    with pytest.raises(ConnectionError), step("decide", batch=7):
        raise ConnectionError
    assert reached == ["decide.before"]


def test_table_of_moments_in_the_documents() -> None:
    """docs/explanation/moments.md says what happens at each point, under its name."""
    text = (Path(__file__).parents[2] / "docs/explanation/moments.md").read_text()
    assert [point for point in POINTS if f"`{point}`" not in text] == []
