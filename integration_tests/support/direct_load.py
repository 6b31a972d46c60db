"""Branches that are loaded straight into their target."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from integration_tests.support.postgres import ROWS, World, stage
from sparkonce.model import BranchId, Committable
from sparkonce.sinks import PostgresSink

if TYPE_CHECKING:
    import pyarrow as pa

KEYED = "id bigint PRIMARY KEY, name text"


def ready(world: World, schema: pa.Schema = ROWS.schema, **options: Any) -> PostgresSink:
    return world.ready(schema, load="direct", **options)


def prepare(sink: PostgresSink, rows: pa.Table = ROWS, branch_id: BranchId | None = None) -> Any:
    """One task's branch, as the log gives it back."""
    return Committable.from_json(json.loads(json.dumps(stage(sink, rows, branch_id).to_json())))
