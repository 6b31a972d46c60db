"""The connection of one process to the brokers, for requests that confluent-kafka does not have.

    any number of our threads ──► Connection ──► one kafka-python client per process (`client`)

`Patience` repeats a question while its failure is transient; `Outage` logs that the brokers do not
respond.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Awaitable, Callable, Collection
from typing import Any, TypeVar

from kafka import errors
from kafka.protocol.metadata import CoordinatorType
from tenacity import Retrying, retry_if_exception, stop_after_delay, wait_exponential

from sparkonce.sinks.kafka.connecting import client
from sparkonce.sinks.kafka.connecting.outage import Outage
from sparkonce.sinks.kafka.connecting.refused import RefusedError, in_words
from sparkonce.sinks.kafka.connecting.settings import KafkaSettings

ResultT = TypeVar("ResultT")


def is_transient(error: BaseException) -> bool:
    """Whether asking again may succeed: no connection, or a coordinator that is moving."""
    if isinstance(error, RefusedError):
        return not error.final
    return isinstance(
        error,
        (
            errors.RetriableError,
            errors.UnknownBrokerIdError,
            errors.UnknownError,
            errors.BrokerNotAvailableError,
            OSError,
        ),
    )


class Patience:
    """Asks again, with backoff, while an error is transient and `seconds` have not passed.

    All questions of one call share one patience, so that the call returns in time.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._until = time.monotonic() + seconds

    def __call__(self, question: Callable[[], ResultT]) -> ResultT:
        """The answer to `question`, or its last error. It is asked at least once."""
        retrying = Retrying(
            retry=retry_if_exception(is_transient),
            wait=wait_exponential(multiplier=0.002, max=0.25),
            stop=stop_after_delay(max(0.0, self._until - time.monotonic())),
            reraise=True,
        )
        return retrying(question)


async def refresh(admin: Any) -> None:
    """Learn which brokers the cluster has now."""
    await admin._manager.cluster.refresh_metadata()  # noqa: SLF001


class Connection:
    """Opened at the first question, shared by all threads of a process, reopened after `close`."""

    def __init__(self, settings: KafkaSettings) -> None:
        self._settings = settings
        self._lock = threading.Lock()
        self._admin: tuple[Any, client.Doorkeeper] | None = None
        self._owner_pid = os.getpid()
        self._outage = Outage(settings.bootstrap_servers)

    def close(self) -> None:
        """Close the connections; the next question opens new ones."""
        with self._lock:
            connected, self._admin = self._admin, None
        if connected is not None and self._owner_pid == os.getpid():
            connected[0].close()

    def ask(
        self,
        question: Callable[[Any], Awaitable[ResultT]],
        forget: Collection[str] = (),
    ) -> ResultT:
        """The brokers' answer to `question`, which gets kafka-python's client.

        The coordinators of the names in `forget` are looked up again next time: coordinators move,
        and kafka-python would keep every name that it has ever seen.

        Raises:
            kafka.errors.KafkaError: the brokers' error, or no response.
        """
        try:
            result = self._asked(question, forget)
        except (errors.KafkaError, OSError) as error:
            self._outage.failed(error, self._settings.without_secrets(in_words(error)))
            raise
        self._outage.ends()
        return result

    def _asked(
        self, question: Callable[[Any], Awaitable[ResultT]], forget: Collection[str]
    ) -> ResultT:
        async def ask() -> ResultT:
            try:
                return await question(admin)
            except errors.UnknownBrokerIdError:
                # The broker is new: kafka-python asks for the brokers only every five minutes.
                await refresh(admin)
                raise

        admin, door = self._connected()
        try:
            result: ResultT = admin._manager.run(ask)  # noqa: SLF001
        except errors.KafkaError as error:
            refused = door.refusal_behind(error)
            if refused is None:
                raise
            raise refused from error
        except RuntimeError as error:  # another thread closed the client
            raise errors.KafkaConnectionError(str(error)) from error
        finally:
            cached = admin._manager.cluster._coordinators  # noqa: SLF001
            for name in forget:
                cached.pop((CoordinatorType.TRANSACTION, name), None)
                cached.pop((CoordinatorType.GROUP, name), None)
        return result

    def _connected(self) -> tuple[Any, client.Doorkeeper]:
        timeout_s = client.REQUEST_TIMEOUT_MS / 1000
        deadline = time.monotonic() + timeout_s
        if not self._lock.acquire(timeout=timeout_s):
            raise errors.KafkaConnectionError("another thread is still connecting")
        try:
            if self._owner_pid != os.getpid():
                # The I/O thread did not survive the fork; its sockets belong to the parent.
                self._admin, self._owner_pid = None, os.getpid()
            if self._admin is None:
                left_ms = max(1, int((deadline - time.monotonic()) * 1000))
                self._admin = client.connect(self._settings, left_ms)
            return self._admin
        finally:
            self._lock.release()
