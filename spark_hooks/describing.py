"""What lineage may ask about a query: the names of its sinks, its sources, a batch's offsets."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING

from sparkonce.observing import Facts, Output
from sparkonce.sinks import verbs
from sparkonce.spark_hooks.running_query import RunningQuery
from sparkonce.spark_hooks.settings import Settings

if TYPE_CHECKING:
    import pyarrow as pa


def facts_of(
    query: RunningQuery, settings: Settings, schemas: Mapping[str, pa.Schema] | None = None
) -> Facts:
    """The facts, without asking any server yet."""
    known = schemas or {}
    outputs = {
        sink.name: Output(
            partial(verbs.dataset, sink),
            verbs.default_dataset(sink),
            known.get(sink.name),
            is_current=sink in settings.sinks,
        )
        for sink in settings.all_sinks
    }
    return Facts(outputs, query.described_sources, query.offsets)
