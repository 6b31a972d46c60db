"""Before any data moves: can the executors' Python load what the tasks need?

One small Spark job with a few tasks for each core. Its function is pickled by value and imports
sparkonce itself, so that it can report an executor that does not have it: in a task of a batch,
unpickling would fail before any code of sparkonce ran.

    task ─► reports what it cannot load
      └─ fails, as in a Python of another version; Spark runs it again, perhaps on another host
           └─► a second job, whose tasks run no Python of Spark's, asks each executor's interpreter
"""

from __future__ import annotations

import logging
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from pyspark import cloudpickle

from sparkonce import __version__
from sparkonce.errors import ConfigurationError
from sparkonce.sinks import verbs
from sparkonce.sinks.base import AnySink
from sparkonce.spark_hooks.partition_writer import as_sent
from sparkonce.steps import step

if TYPE_CHECKING:
    from pyspark import SparkContext
    from pyspark.sql import SparkSession

logger = logging.getLogger("sparkonce")

_TASKS_PER_CORE: Final = 2
_PATIENCE_S: Final = 60.0
_PAUSE_S: Final = 0.5
_REMEDY: Final = (
    f"Give every executor the driver's Python version, sparkonce {__version__} with the extras of "
    "the pipeline's sinks, and your own modules: docs/howto/install.md shows how to send them along"
)
_NO_PYTHON: Final = re.compile(r'\[PYTHON_VERSION_MISMATCH\][^\n]*|Cannot run program "[^\n]*')
_VERSION: Final = (
    'import sys; print(*sys.version_info[:3], sep=".", end=" "); print(sys.executable)'
)
_ASK: Final = (
    "cat > /dev/null; "
    'printf "%s\\t%s %s\\n" "$PWD" "$(uname -n)" "$("$0" -E -S -c "$1" 2>&1 | tail -n 1)"'
)
"""Shell: `FOLDER HOST VERSION INTERPRETER`, or why the interpreter does not run in the place of the
last two. Each executor has a folder of its own, or a host."""
_ANSWER: Final = re.compile(r"[^\t]*\t(\S+) (?:(\d+\.\d+)\.\d+ (.*)|(.*))")
_HOST: Final = re.compile(r"\(TID \d+\) \((\S+) executor")
_LOCAL: Final = re.compile(r"local(\[.*)?$")
"""Masters whose executor is the driver's own process. "local-cluster[…]" has real executors."""


def has_executors(spark: SparkSession) -> bool:
    """Whether tasks run in other processes than the driver's own JVM."""
    return _LOCAL.match(spark.sparkContext.master or "") is None


def check_executors(spark: SparkSession, sinks: Sequence[AnySink]) -> None:
    """Load the sinks in Spark tasks, on as many executors as there are now.

    Raises:
        ConfigurationError: an executor has another Python, no sparkonce, another version of it, or
            not all modules of the sinks.
    """
    context = spark.sparkContext
    tasks = context.defaultParallelism * _TASKS_PER_CORE
    look = _look(cloudpickle.dumps([as_sent(sink) for sink in sinks]), __version__)
    with step("probe"):
        try:
            found = context.parallelize(range(tasks), tasks).mapPartitions(look).collect()
        except Exception as error:
            if wrong := _other_pythons(context, tasks):
                raise _refusal(wrong) from error
            if sign := _NO_PYTHON.search(str(error)):
                host = _HOST.search(str(error))
                where = f" on {host[1]}" if host else ""
                raise ConfigurationError(
                    f"the Python of the executors{where} cannot be used: {sign[0]}. {_REMEDY}"
                ) from error
            raise
        wrong = {f"{host} ({python}) {what}" for host, python, what, _ in found if what}
        if any(attempt for *_, attempt in found):
            wrong |= _other_pythons(context, tasks)
    if wrong:
        raise _refusal(wrong)


def _refusal(wrong: Iterable[str]) -> ConfigurationError:
    lines = "; ".join(sorted(wrong))
    return ConfigurationError(f"some executors cannot run this pipeline: {lines}. {_REMEDY}")


def _other_pythons(context: SparkContext, tasks: int) -> set[str]:
    """Each host whose interpreter has another minor version than the driver's, or does not run."""
    try:
        answers = _answers(context, tasks)
    except Exception as error:  # noqa: BLE001 - the error of the probe itself is raised
        logger.warning("the executors could not be asked for their Python's version: %s", error)
        return set()
    return {what for answer in answers if (what := complaint(answer, context.pythonExec))}


def _answers(context: SparkContext, tasks: int) -> set[str]:
    """What the executors answer; an executor that is busy with the failed tasks is asked again."""
    # Not of a range, which PySpark computes in Python workers.
    numbers: Any = context.parallelize(list(range(tasks)), tasks)._jrdd  # noqa: SLF001
    tracker: Any = context._jsc.sc().statusTracker()  # noqa: SLF001
    deadline, found = time.monotonic() + _PATIENCE_S, set()
    while True:
        found |= set(numbers.pipe(question(context.pythonExec)).collect())
        executors = len(tracker.getExecutorInfos()) - 1  # the driver is one of them
        if len(found) >= executors or time.monotonic() > deadline:
            return found
        time.sleep(_PAUSE_S)


def question(interpreter: str) -> list[str]:
    """A command that prints the host's name and the interpreter's version."""
    return ["sh", "-c", _ASK, interpreter, _VERSION]


def complaint(answer: str, interpreter: str) -> str | None:
    """What is wrong with the interpreter that gave this answer; None if nothing is known."""
    mine = f"{sys.version_info.major}.{sys.version_info.minor}"
    match = _ANSWER.fullmatch(answer)
    if match is None:
        return None
    host, version, python, failure = match.groups()
    if version is None:
        return f"{host} ({interpreter}) cannot run Python: {failure}"
    return None if version == mine else f"{host} ({python}) has Python {version}, the driver {mine}"


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


def _look(sent: bytes, version: str) -> Callable[[object], Iterator[tuple[str, str, str, int]]]:
    def look(_: object) -> Iterator[tuple[str, str, str, int]]:
        # A function inside a function is pickled by value; it may name no global of this module.
        import pickle  # noqa: PLC0415
        import socket  # noqa: PLC0415
        import sys  # noqa: PLC0415

        from pyspark import TaskContext  # noqa: PLC0415

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
        task = TaskContext.get()
        attempt = 0 if task is None else task.attemptNumber()
        yield socket.gethostname(), sys.executable, what, attempt

    return look
