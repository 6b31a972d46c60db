"""A world in memory, and what a pipeline in it shows."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.telemetry import BATCHES, InMemory
from tests.support.world import World


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path, BATCHES)


@pytest.fixture
def seen() -> Iterator[InMemory]:
    seen = InMemory()
    yield seen
    seen.telemetry.end()
