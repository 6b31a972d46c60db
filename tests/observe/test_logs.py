"""The fields of the step in the log's records, and a log in JSON."""

from __future__ import annotations

import io
import json
import logging
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from pythonjsonlogger.json import JsonFormatter

from sparkonce.observe import StepFields
from sparkonce.parallel import at_once
from sparkonce.steps import step
from tests.support.guides import HOWTO, block_with
from tests.support.telemetry import run
from tests.support.world import World

logger = logging.getLogger("sparkonce")


@pytest.fixture
def lines() -> Iterator[io.StringIO]:
    """What a handler with the fields writes, as JSON."""
    fields, text = StepFields(), io.StringIO()
    handler = logging.StreamHandler(text)
    handler.addFilter(fields)
    handler.setFormatter(JsonFormatter(["levelname", "message"]))
    logger.addHandler(handler)
    yield text
    logger.removeHandler(handler)
    fields.end()


def read(lines: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in lines.getvalue().splitlines()]


def test_line_of_a_sink_names_pipeline_batch_step_and_sink(
    world: World, lines: io.StringIO
) -> None:
    """Also a line from a thread in which a branch is committed next to others."""

    def warn(verb: str) -> None:
        if verb == "commit":
            logger.warning("slow")

    world.on_call(warn, "left", "right")
    run(world)
    found = {(line["sink"], line["batch"]): line for line in read(lines)}
    assert set(found) == {("left", 0), ("left", 1), ("right", 0), ("right", 1)}
    assert found["left", 1] == {
        "levelname": "WARNING",
        "message": "slow",
        "pipeline": "orders",
        "batch": 1,
        "step": "commit",
        "sink": "left",
    }


def test_configuration_of_the_guide() -> None:
    """Also each step's own line, at level DEBUG, has the fields."""
    script = block_with("dictConfig", HOWTO / "logging.md").replace("INFO", "DEBUG") + (
        "from sparkonce.steps import step\nwith step('decide', pipeline='orders', batch=7): pass\n"
    )
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    (line,) = (json.loads(line) for line in done.stderr.splitlines() if "decide" in line)
    assert line.pop("asctime")
    assert line.pop("message").startswith("decide batch 7 of pipeline 'orders' done after 0.0")
    assert line == {
        "levelname": "DEBUG",
        "name": "sparkonce",
        "pipeline": "orders",
        "batch": 7,
        "step": "decide",
    }


def test_innermost_step_comes_first(lines: io.StringIO) -> None:
    with step("deliver", pipeline="orders", batch=7), step("complete", batch=7):
        logger.warning("here")
    (line,) = read(lines)
    assert (line["step"], line["pipeline"], line["batch"]) == ("complete", "orders", 7)
    assert "sink" not in line


def test_threads_of_a_step_belong_to_it_and_to_no_other(lines: io.StringIO) -> None:
    def commit(branch: str) -> None:
        logger.warning("%s", branch)

    def deliver(batch: int) -> None:
        with step("deliver", batch=batch):
            at_once(commit, [f"{batch}-a", f"{batch}-b"])

    at_once(deliver, [1, 2])
    assert {line["message"]: line["batch"] for line in read(lines)} == {
        "1-a": 1,
        "1-b": 1,
        "2-a": 2,
        "2-b": 2,
    }


def test_other_lines_stay_as_they_are(lines: io.StringIO) -> None:
    with pytest.raises(ZeroDivisionError), step("deliver", batch=7):
        _ = 1 / 0
    logger.warning("outside")
    with step("deliver", batch=7):
        logger.warning("of another batch", extra={"batch": 3})
    outside, own = read(lines)
    assert outside == {"levelname": "WARNING", "message": "outside"}
    assert own["batch"] == 3
