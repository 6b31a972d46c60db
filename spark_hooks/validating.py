"""Before any data moves: each sink checks its settings, its server and its columns."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Final

from pyspark import cloudpickle
from tenacity import Retrying, retry_if_exception_type, stop_after_delay, wait_exponential

from sparkonce.errors import ConfigurationError, SinkUnavailableError, SparkOnceError
from sparkonce.parallel import at_once
from sparkonce.sinks import verbs
from sparkonce.sinks.base import AnySink
from sparkonce.spark_hooks.partition_writer import as_sent
from sparkonce.steps import step
from sparkonce.watching import still_trying

if TYPE_CHECKING:
    import pyarrow as pa

_FOR_S: Final = 120.0
_LONGEST_WAIT_S: Final = 10.0


def patiently(validate: Callable[[], None], pipeline: str, is_active: Callable[[], bool]) -> None:
    """Validate; again while a server cannot be reached, for two minutes, while the query runs.

    Raises:
        ConfigurationError: a sink cannot be used.
        SinkUnavailableError: a server could not be reached for so long.
    """
    Retrying(
        retry=retry_if_exception_type(SinkUnavailableError),
        wait=wait_exponential(multiplier=0.5, max=_LONGEST_WAIT_S),
        stop=lambda state: not is_active() or stop_after_delay(_FOR_S)(state),
        before_sleep=still_trying(
            f"check the sinks of pipeline {pipeline!r}, for at most {_FOR_S:.0f} s"
        ),
        reraise=True,
    )(validate)


def validate_sinks(sinks: Sequence[AnySink], schemas: Mapping[str, pa.Schema]) -> None:
    """Let each sink check its settings, its server, its schema by its name, and the other sinks.

    Raises:
        ConfigurationError: one cannot be used, or cannot be sent to the executors.
        SinkUnavailableError: its server cannot be reached now.
    """

    def check(sink: AnySink) -> None:
        with step("validate", sink=sink), _named(sink):
            sink.validate(schemas[sink.name])

    at_once(check, sinks)
    for sink in sinks:
        with _named(sink):
            verbs.check_others(sink, [other for other in sinks if other is not sink])
    for sink in sinks:  # only now: it carries what `validate` found
        check_pickles(sink)


@contextlib.contextmanager
def _named(sink: AnySink) -> Iterator[None]:
    """Name the sink in an error that is not one of ours."""
    try:
        yield
    except SparkOnceError:
        raise
    except Exception as error:
        raise ConfigurationError(
            f"{sink!r} cannot be used: {type(error).__name__}: {error}"
        ) from error


def check_pickles(sink: AnySink) -> None:
    """Check that a sink pickles, as Spark will pickle it.

    Raises:
        ConfigurationError: it cannot; naming the attribute.
    """
    try:
        cloudpickle.dumps(sent := as_sent(sink))
    except Exception as error:
        named, state = "it", sent.__getstate__()
        for name, value in state.items() if isinstance(state, dict) else ():
            try:
                cloudpickle.dumps(value)
            except Exception:  # noqa: BLE001 - it is raised below
                named = f"its attribute {name!r}, a {type(value).__name__},"
                break
        raise ConfigurationError(
            f"{sink!r} cannot be sent to the executors: {named} does not pickle ({error}). Open it "
            "in beginTransaction or on first use, and leave it out in __getstate__"
        ) from error
