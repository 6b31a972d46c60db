"""When a query starts and when the interpreter exits: the two moments without a batch."""

from __future__ import annotations

import atexit
import contextlib
import functools
import logging
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from pyspark import SparkContext
from pyspark.sql import SparkSession
from pyspark.sql.streaming import StreamingQueryListener
from pyspark.sql.streaming.listener import JStreamingQueryListener

from sparkonce.once import once
from sparkonce.spark_hooks.query import RunId
from sparkonce.spark_hooks.running_query import RunningQuery
from sparkonce.storage.hadoop import java_class

if TYPE_CHECKING:
    from pyspark.sql.streaming.listener import QueryStartedEvent


logger = logging.getLogger("sparkonce")

_EXIT_WAIT_S = 10.0
_WRAPPER = "org.apache.spark.sql.streaming.PythonStreamingQueryListenerWrapper"


class StartListener(StreamingQueryListener):  # type: ignore[misc] # PySpark is not followed
    """Calls bound methods with each query that starts, in a thread of its own.

    The newest object's method comes first, and the first one that claims the start is the last: a
    notebook may still hold older objects of the same pipeline.

    There is one listener for each session, since Spark calls all of them and waits. It holds the
    methods' objects weakly, so it keeps no pipeline that is not used any more.
    """

    def __init__(self, session: SparkSession) -> None:
        self._session = session
        self._actions: list[weakref.WeakMethod[Callable[[RunningQuery], bool]]] = []

    @staticmethod
    def add(action: Callable[[RunningQuery], bool]) -> StartListener | None:
        """Listen to the session of this process; None while there is no classic one."""
        session = SparkSession.getActiveSession() or SparkSession._instantiatedSession  # noqa: SLF001
        if session is None or not hasattr(session, "_jsparkSession"):
            return None
        listener = once(_Listeners).of(session)
        listener._actions.append(weakref.WeakMethod(action, listener._actions.remove))  # noqa: SLF001
        return listener

    def is_of(self, session: SparkSession) -> bool:
        return bool(self._session._jsparkSession.streams() == session._jsparkSession.streams())  # noqa: SLF001

    @property
    def is_heard(self) -> bool:
        """Whether the session still runs."""
        return self._session.sparkContext._jsc is not None  # noqa: SLF001

    def hears(self, query: RunningQuery) -> bool:
        """Whether it hears of the query's starts: Spark calls a session's own listeners only."""
        return query.is_of(self._session)

    @functools.cached_property
    def _jlistener(self) -> Any:
        """The listener that Spark calls; PySpark asks for it by this name."""
        jvm: Any = SparkContext._jvm  # noqa: SLF001
        wrapper = java_class(jvm, _WRAPPER)
        return wrapper(_StartsOnly(self))

    def onQueryStarted(self, event: QueryStartedEvent) -> None:  # noqa: N802 - PySpark's name
        actions = [action for method in list(self._actions) if (action := method()) is not None]
        if actions:
            # `start()` waits for this call. The query is looked up here, since one without new data
            # may end right after it, and is recovered in another thread, so that `start()` returns.
            query = RunningQuery.find(self._session, RunId(str(event.id), str(event.runId)))
            threading.Thread(target=_call_first, args=(actions[::-1], query), daemon=True).start()

    def onQueryProgress(self, event: Any) -> None:  # noqa: N802
        pass

    def onQueryTerminated(self, event: Any) -> None:  # noqa: N802
        pass


class _Listeners:
    """The listeners of this process, for the sessions that still run."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._added: list[StartListener] = []

    def of(self, session: SparkSession) -> StartListener:
        with self._lock:
            self._added = [listener for listener in self._added if listener.is_heard]
            for listener in self._added:
                if listener.is_of(session):
                    return listener
            listener = StartListener(session)
            session.streams.addListener(listener)
            self._added.append(listener)
            return listener


def _call_first(actions: Sequence[Callable[[RunningQuery], bool]], query: RunningQuery) -> None:
    for action in actions:
        if action(query):
            return


class _StartsOnly(JStreamingQueryListener):  # type: ignore[misc] # PySpark is not followed
    """Leaves the other events in the JVM; PySpark would fetch each, with 23 calls for a batch."""

    def onQueryProgress(self, jevent: Any) -> None:  # noqa: N802
        pass

    def onQueryIdle(self, jevent: Any) -> None:  # noqa: N802
        pass

    def onQueryTerminated(self, jevent: Any) -> None:  # noqa: N802
        pass


def commit_at_exit(name: str, lock: threading.RLock, commit_last: Callable[[float], None]) -> None:
    """Commit a pipeline's last batch, unless the lock shows that one is being delivered now."""
    if not lock.acquire(timeout=_EXIT_WAIT_S):
        logger.warning(
            "pipeline %r: a batch is still being delivered when the interpreter exits; if it is "
            "decided, the next start finishes it",
            name,
        )
        return
    try:
        commit_last(_EXIT_WAIT_S)
    except Exception:
        logger.exception("pipeline %r: the last batch is not committed", name)
    finally:
        lock.release()


def call_at_exit(action: Callable[[], None]) -> None:
    """Call `action`, a bound method, when the interpreter exits, while threads can still start.

    `atexit` is too late: sinks commit from thread pools, which are shut down by then. A forked
    child inherits the callback but not the threads, so nothing is called there.
    """
    method, process = weakref.WeakMethod(action), os.getpid()

    def call() -> None:
        bound = method()
        if bound is not None and os.getpid() == process:
            bound()

    register = getattr(threading, "_register_atexit", atexit.register)
    with contextlib.suppress(RuntimeError):  # the interpreter is exiting already
        register(call)
