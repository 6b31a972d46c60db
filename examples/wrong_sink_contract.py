"""The contract of a sink that breaks it: `pytest examples/wrong_sink_contract.py -k "not type"`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from examples.wrong_sink import AppendingSink

from sparkonce.testing import SinkContract, SinkWorld


class TestAppendingSink(SinkContract):
    @pytest.fixture
    def make_world(self, tmp_path: Path) -> Callable[[pa.Schema], SinkWorld]:
        def visible() -> list[dict[str, Any]]:
            path = tmp_path / "rows.jsonl"
            text = path.read_text() if path.exists() else ""
            return [json.loads(line) for line in text.splitlines()]

        return lambda _: SinkWorld(
            sink=lambda: AppendingSink(tmp_path),
            visible=visible,
            unfinished=lambda: list(tmp_path.glob(".*")),
            lose=lambda _: next(tmp_path.glob(".*")).unlink(),
        )
