"""Makes the events and hands them to OpenLineage's client; everything here may wait or raise.

`Attempts` ─► what has changed ─► the facts about the query ─► `RunEvent` ─► client ─► transport
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final

from openlineage.client import OpenLineageClient
from openlineage.client.event_v2 import Job, OutputDataset, Run, RunEvent, RunState

from sparkonce.datasets import Dataset, without_secrets
from sparkonce.observe.lineage import facets
from sparkonce.observe.lineage.attempts import Attempts, Change
from sparkonce.observe.lineage.inputs import Read, reads

if TYPE_CHECKING:
    from sparkonce.observing import Facts, Output, Seen, Source

logger = logging.getLogger("sparkonce")

_OFFSETS_KEPT: Final = 4


@dataclass
class _Query:
    """What is known about a pipeline's query.

    Attributes:
        query_id: the permanent id of its checkpoint.
        run_id: Spark's id of the run.
        facts: what may be asked.
        sources: what Spark has said about its sources.
        names: what each sink is called in lineage.
        offsets: of the newest batches, by their ids.
    """

    query_id: str
    run_id: str
    facts: Facts | None = None
    sources: Sequence[Source] = ()
    names: dict[str, Dataset] = field(default_factory=dict)
    offsets: dict[int, tuple[str, ...]] = field(default_factory=dict)


class Emitter:
    """Takes steps and facts, in one thread, in order.

    Args:
        namespace: of the jobs.
        job: the job's name; None for the pipeline's.
        client: gets the events; None for one with OpenLineage's own settings.
    """

    def __init__(self, namespace: str, job: str | None, client: OpenLineageClient | None) -> None:
        self._namespace = namespace
        self._job = job
        self._client = client
        self._attempts = Attempts()
        self._queries: dict[str, _Query] = {}

    def follow(self, pipeline: str, query_id: str, run_id: str) -> None:
        """Send the pipeline's events from now on."""
        self._attempts.follow(pipeline)
        self._queries[pipeline] = _Query(query_id, run_id)

    def describe(self, pipeline: str, facts: Facts) -> None:
        """Take note of what the query reads and writes."""
        if pipeline in self._queries:
            self._queries[pipeline].facts = facts

    def take(self, seen: Seen) -> None:
        """Take note of a step, and send what follows from it.

        Raises:
            Exception: the transport failed; the events of the step are lost.
        """
        failures: list[Exception] = []
        for change in self._attempts.take(seen):
            try:
                self._emit(change)
            except Exception as error:  # noqa: BLE001 - the next event may succeed
                failures.append(error)
        if failures:
            raise failures[0]

    def close(self, timeout_s: float) -> None:
        """Let a transport with a queue of its own send what waits there."""
        if self._client is not None:
            self._client.close(timeout_s)

    # -- one event ---------------------------------------------------------------------------------

    def _emit(self, change: Change) -> None:
        if self._client is None:
            self._client = OpenLineageClient()
        query = self._queries[change.attempt.pipeline]
        event = RunEvent(
            eventType=RunState[change.kind],
            eventTime=datetime.fromtimestamp(change.at_s, UTC).isoformat(timespec="milliseconds"),
            run=Run(change.attempt.id, facets.run_facets(change, query.run_id)),
            job=Job(self._namespace, self._job or change.attempt.pipeline, facets.job_facets()),
            inputs=[facets.input_of(read) for read in _inputs(query, change)],
            outputs=_outputs(query, change),
            producer=facets.PRODUCER,
        )
        self._client.emit(event)


def _inputs(query: _Query, change: Change) -> list[Read]:
    batch_id = change.attempt.batch_id
    is_of_this = change.attempt.owner.query_id == query.query_id
    if change.record is not None and is_of_this:
        query.offsets[batch_id] = change.record.offsets
    offsets = _offsets(query, batch_id) if is_of_this else _recorded_offsets(change)
    if offsets is None:
        return []
    before = _offsets(query, batch_id - 1) if is_of_this and batch_id > 0 else None
    while len(query.offsets) > _OFFSETS_KEPT:
        del query.offsets[next(iter(query.offsets))]
    if not query.sources and query.facts is not None and is_of_this:
        try:
            query.sources = query.facts.sources()
        except Exception:
            logger.warning("lineage: Spark does not describe its sources", exc_info=True)
    return reads(offsets, before, query.sources if is_of_this else ())


def _recorded_offsets(change: Change) -> tuple[str, ...] | None:
    return None if change.record is None else change.record.offsets


def _offsets(query: _Query, batch_id: int) -> tuple[str, ...] | None:
    """The offsets of a batch: as remembered, or as the checkpoint has them."""
    if batch_id not in query.offsets and query.facts is not None:
        try:
            found = query.facts.offsets(batch_id)
        except Exception:
            logger.warning("lineage: the checkpoint cannot be read", exc_info=True)
            return None
        if found is not None:
            query.offsets[batch_id] = found
    return query.offsets.get(batch_id)


def _outputs(query: _Query, change: Change) -> list[OutputDataset]:
    known: Mapping[str, Output] = {} if query.facts is None else query.facts.outputs
    shares = change.shares
    found = []
    for name, output in known.items():
        # A removed sink has a share only in records from before.
        if output.is_current or name in shares:
            dataset = _dataset(query, name, output)
            found.append(facets.output_of(dataset, output.schema, shares.get(name)))
    for name, share in shares.items():
        if name not in known:
            dataset = Dataset("sparkonce", without_secrets(share.target))
            found.append(facets.output_of(dataset, None, share))
    return found


def _dataset(query: _Query, name: str, output: Output) -> Dataset:
    if name not in query.names:
        try:
            query.names[name] = output.dataset()
        except Exception as error:  # noqa: BLE001 - its text may hold a secret
            logger.warning(
                "lineage: the sink %r has its default name: %s", name, facets.message_of(error)
            )
            return output.default
    return query.names[name]
