"""Before any data moves: can the executors' Python load what the tasks need?

One small Spark job with a few tasks for each core. Its function is pickled by value and imports
sparkonce itself, so that it can report an executor that does not have it: in a task of a batch,
unpickling would fail before any code of sparkonce ran.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Final

from pyspark import cloudpickle

from sparkonce import __version__
from sparkonce.errors import ConfigurationError
from sparkonce.sinks import verbs
from sparkonce.sinks.base import AnySink
from sparkonce.spark_hooks.partition_writer import as_sent
from sparkonce.steps import step

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

logger = logging.getLogger("sparkonce")

_TASKS_PER_CORE: Final = 2
_REMEDY: Final = (
    f"Give every executor the driver's Python version, sparkonce {__version__} with the extras of "
    "the pipeline's sinks, and your own modules: docs/howto/install.md shows how to send them along"
)
_NO_PYTHON: Final = re.compile(r'\[PYTHON_VERSION_MISMATCH\][^\n]*|Cannot run program "[^\n]*')
_HOST: Final = re.compile(r"\(TID \d+\) \((\S+) executor")
_LOCAL: Final = re.compile(r"local(\[.*)?$")
"""Masters whose executor is the driver's own process. "local-cluster[…]" has real executors."""


def has_executors(spark: SparkSession) -> bool:
    """Whether tasks run in other processes than the driver's own JVM."""
    return _LOCAL.match(spark.sparkContext.master or "") is None


def check_executors(spark: SparkSession, sinks: Sequence[AnySink]) -> None:
    """Load the sinks in Spark tasks, on as many executors as there are now.

    Raises:
        ConfigurationError: an executor has no sparkonce, another version of it, or not all modules
            of the sinks.
    """
    context = spark.sparkContext
    tasks = context.defaultParallelism * _TASKS_PER_CORE
    look = _look(cloudpickle.dumps([as_sent(sink) for sink in sinks]), __version__)
    with step("probe"):
        try:
            found = context.parallelize(range(tasks), tasks).mapPartitions(look).collect()
        except Exception as error:
            if sign := _NO_PYTHON.search(str(error)):
                host = _HOST.search(str(error))
                where = f" on {host[1]}" if host else ""
                raise ConfigurationError(
                    f"the Python of the executors{where} cannot be used: {sign[0]}. {_REMEDY}"
                ) from error
            raise
    wrong = sorted({(host, python, what) for host, python, what in found if what})
    if wrong:
        lines = "; ".join(f"{host} ({python}) {what}" for host, python, what in wrong)
        raise ConfigurationError(f"some executors cannot run this pipeline: {lines}. {_REMEDY}")


def warn_of_room(spark: SparkSession, sinks: Sequence[AnySink]) -> None:
    """Log which servers have fewer connections left than the executors have cores."""
    context = spark.sparkContext
    cores = most_tasks(dict(context.getConf().getAll())) or context.defaultParallelism
    for sink in sinks:
        if reason := verbs.lacks_room(sink, cores):
            logger.warning("%s. docs/howto/cluster.md, Connections, has what to do", reason)


def most_tasks(conf: Mapping[str, str]) -> int | None:
    """How many tasks the executors of these settings run at a time; None if they do not say it."""
    is_dynamic = conf.get("spark.dynamicAllocation.enabled", "false").lower() == "true"
    counted = "spark.dynamicAllocation.maxExecutors" if is_dynamic else "spark.executor.instances"
    try:
        executors, cores = int(conf.get(counted, "")), int(conf.get("spark.executor.cores", "1"))
        return executors * cores // int(conf.get("spark.task.cpus", "1"))
    except (ValueError, ZeroDivisionError):  # it is not set, or is no number
        return None


def _look(sent: bytes, version: str) -> Callable[[object], Iterator[tuple[str, str, str]]]:
    def look(_: object) -> Iterator[tuple[str, str, str]]:
        # A function inside a function is pickled by value; it may name no global of this module.
        import pickle  # noqa: PLC0415
        import socket  # noqa: PLC0415
        import sys  # noqa: PLC0415

        what = ""
        try:
            import sparkonce  # noqa: PLC0415

            if sparkonce.__version__ != version:
                what = f"has sparkonce {sparkonce.__version__}, and the driver {version}"
            else:
                pickle.loads(sent)  # noqa: S301 - the driver's own
        except ModuleNotFoundError as error:
            what = f"lacks the module {error.name!r}"
        except Exception as error:  # noqa: BLE001 - reported
            what = f"cannot load the sinks: {type(error).__name__}: {error}"
        yield socket.gethostname(), sys.executable, what

    return look
