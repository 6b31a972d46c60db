"""`OpenLineage`, which a user hands to a pipeline: settings, and the emitter of this process.

steps, facts ─► queue ─► thread ─► `Emitter` ─► OpenLineage's client
"""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from sparkonce import steps
from sparkonce.errors import ConfigurationError
from sparkonce.observe.harmless import harmless
from sparkonce.observe.lineage.attempts import STEPS
from sparkonce.observing import Courier, Facts, Seconds, Seen, Shown
from sparkonce.once import forget, made, once

if TYPE_CHECKING:
    from openlineage.client import OpenLineageClient

_FLUSH_S: Final = 1.0
"""How long the end of a pipeline waits for the queue."""

Act: TypeAlias = "Callable[[], None]"


@dataclass(frozen=True)
class OpenLineage:
    """Lineage of a pipeline: ``ExactlyOnce(…, telemetry=OpenLineage(namespace="shop"))``.

    Each batch is a run with a START, and a COMPLETE or a FAIL. They go where OpenLineage's own
    settings say: OPENLINEAGE_URL, ``openlineage.yml``, OPENLINEAGE__TRANSPORT__TYPE. No batch waits
    for any of it, and none fails with it.

    Args:
        namespace: of the jobs; default: OPENLINEAGE_NAMESPACE, or else "default".
        client: an `openlineage.client.OpenLineageClient` of your own, which this process uses in
            one thread; default: one with OpenLineage's own settings.
        job: the job's name; default: the pipeline's.

    Raises:
        ConfigurationError: openlineage-python is not installed.
    """

    namespace: str | None = None
    client: OpenLineageClient | None = None
    job: str | None = None

    def __post_init__(self) -> None:
        try:
            import sparkonce.observe.lineage.events  # noqa: F401, PLC0415 - an extra
        except ImportError as error:
            raise ConfigurationError(
                f"OpenLineage needs {error.name!r}: pip install 'sparkonce[openlineage]'"
            ) from error

    @harmless
    def follow(self, pipeline: str, query_id: str, run_id: str) -> None:
        """See `sparkonce.observing.Telemetry`."""
        once(_Sender, self).follow(pipeline, query_id, run_id)

    @harmless
    def describe(self, pipeline: str, facts: Facts) -> None:
        """See `sparkonce.observing.Telemetry`."""
        once(_Sender, self).describe(pipeline, facts)

    def for_tasks(self, pipeline: str, batch_id: int) -> AbstractContextManager[object] | None:
        """The tasks send no lineage."""

    def tasks_ended(self, pipeline: str, seconds: Iterable[Seconds]) -> None:
        """Lineage needs no times of tasks."""

    @harmless
    def flush(self) -> None:
        """See `sparkonce.observing.Telemetry`. A command follows no pipeline: it sends nothing."""
        sender = made(_Sender, self)
        if sender is not None:
            sender.flush()

    def end(self) -> None:
        """Follow no pipeline any more, and send what waits; for tests."""
        sender = forget(_Sender, self)
        if sender is not None:
            sender.end()


class _Hook(Shown):
    """Hands on the few steps that matter, so that a slow transport keeps only these in memory."""

    def started(self, entered: steps.step) -> None:
        if entered.name in STEPS:
            super().started(entered)

    def ended(self, entered: steps.step, error: BaseException | None) -> None:
        if entered.name in STEPS:
            super().ended(entered, error)


class _Sender:
    """What follows the pipelines of this process that have the same settings.

    Facts go through the queue too: so everything happens in one order, in one thread.
    """

    def __init__(self, settings: OpenLineage) -> None:
        from sparkonce.observe.lineage.events import Emitter  # noqa: PLC0415 - an extra

        namespace = settings.namespace or os.environ.get("OPENLINEAGE_NAMESPACE") or "default"
        self._emitter = Emitter(namespace, settings.job, settings.client)
        self._courier: Courier[Any] = Courier(self._take, "lineage")
        self._hook = _Hook(self._courier)
        steps.add_hook(self._hook)
        atexit.register(self._close)

    def follow(self, pipeline: str, query_id: str, run_id: str) -> None:
        self._courier.put(partial(self._emitter.follow, pipeline, query_id, run_id))

    def describe(self, pipeline: str, facts: Facts) -> None:
        self._courier.put(partial(self._emitter.describe, pipeline, facts))

    def _take(self, item: Seen | Act) -> None:
        if isinstance(item, Seen):
            self._emitter.take(item)
        else:
            item()

    def flush(self) -> bool:
        return self._courier.drain(_FLUSH_S)

    def end(self) -> None:
        steps.remove_hook(self._hook)
        self._courier.end(_FLUSH_S)
        atexit.unregister(self._close)

    def _close(self) -> None:
        if self.flush():
            self._emitter.close(_FLUSH_S)
