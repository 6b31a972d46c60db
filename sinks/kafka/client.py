"""The connection of one process to the brokers, for requests that confluent-kafka does not have.

    one KafkaAdminClient per process (its own I/O thread) ◄── any number of our threads

kafka-python keeps the pieces that are needed here to itself: `_manager` and the functions that
find coordinators. They are used in this package's `client` and `finisher` only, and the version is
pinned.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Awaitable, Callable, Collection
from typing import Any, Final, TypeVar

from kafka import errors
from kafka.admin import KafkaAdminClient
from kafka.net.compat import KafkaNetClient
from kafka.net.inet import KafkaNetSocket
from kafka.protocol.metadata import CoordinatorType
from tenacity import Retrying, retry_if_exception, stop_after_delay, wait_exponential

from sparkonce.sinks.kafka.settings import KafkaSettings

REQUEST_TIMEOUT_MS: Final = 5_000

IN_FLIGHT: Final = 1_000
"""Requests of one connection at a time. kafka-python refuses what is more, by default than 5."""

ResultT = TypeVar("ResultT")


def is_transient(error: BaseException) -> bool:
    """Whether asking again can give another answer: no connection, or a coordinator on the move."""
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

    One patience is shared by all questions of one call, so that the call ends in time.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._until = time.monotonic() + seconds

    def __call__(self, question: Callable[[], ResultT]) -> ResultT:
        """The answer to `question`, or its last error; it is asked once at least."""
        retrying = Retrying(
            retry=retry_if_exception(is_transient),
            wait=wait_exponential(multiplier=0.002, max=0.25),
            stop=stop_after_delay(max(0.0, self._until - time.monotonic())),
            reraise=True,
        )
        return retrying(question)


async def refresh(admin: Any) -> None:
    """Learn which brokers there are now."""
    await admin._manager.cluster.refresh_metadata()  # noqa: SLF001


class Connection:
    """Opened at the first question, shared by all threads of the process, reopened after `close`.

    Args:
        settings: address and security.
    """

    def __init__(self, settings: KafkaSettings) -> None:
        self._settings = settings
        self._lock = threading.Lock()
        self._admin: Any = None
        self._owner_pid = os.getpid()

    def close(self) -> None:
        """Close the connections; the next question opens new ones."""
        with self._lock:
            admin, self._admin = self._admin, None
        if admin is not None and self._owner_pid == os.getpid():
            admin.close()

    def ask(
        self,
        question: Callable[[Any], Awaitable[ResultT]],
        forget: Collection[str] = (),
    ) -> ResultT:
        async def ask() -> ResultT:
            try:
                return await question(admin)
            except errors.UnknownBrokerIdError:
                # It came after our last look; kafka-python looks again every five minutes only.
                await refresh(admin)
                raise

        admin = self._connected()
        try:
            result: ResultT = admin._manager.run(ask)  # noqa: SLF001
        except RuntimeError as error:  # another thread has closed the client meanwhile
            raise errors.KafkaConnectionError(str(error)) from error
        finally:
            # Coordinators move, and kafka-python would keep every id it has ever seen.
            cached = admin._manager.cluster._coordinators  # noqa: SLF001
            for name in forget:
                cached.pop((CoordinatorType.TRANSACTION, name), None)
                cached.pop((CoordinatorType.GROUP, name), None)
        return result

    def _connected(self) -> Any:
        deadline = time.monotonic() + REQUEST_TIMEOUT_MS / 1000
        if not self._lock.acquire(timeout=REQUEST_TIMEOUT_MS / 1000):
            raise errors.KafkaConnectionError("another thread is still connecting")
        try:
            if self._owner_pid != os.getpid():
                # The I/O thread did not survive the fork; its sockets belong to the parent.
                self._admin, self._owner_pid = None, os.getpid()
            if self._admin is None:
                left_ms = max(1, int((deadline - time.monotonic()) * 1000))
                self._admin = _connect(self._settings, left_ms)
            return self._admin
        finally:
            self._lock.release()


class _ClosingSocket(KafkaNetSocket):  # type: ignore[misc] # kafka-python has no types for it
    """Closes what cannot connect; kafka-python leaves it to the garbage collector.

    A driver that waits for its brokers tries several times a second.
    """

    SCHEMES = ("sparkonce-direct",)

    async def sock_connect(self, net: Any, sock: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return await super().sock_connect(net, sock, *args, **kwargs)
        except BaseException:
            sock.close()
            raise


def _connect(settings: KafkaSettings, timeout_ms: int) -> Any:
    """A new client. One that cannot connect is closed, which kafka-python leaves undone."""
    made: list[Any] = []

    def net_client(**config: object) -> Any:
        made.append(KafkaNetClient(**config))
        return made[-1]

    try:
        return KafkaAdminClient(
            **settings.for_admin(),
            client_id=str(settings.config.get("client.id", "sparkonce")),
            request_timeout_ms=REQUEST_TIMEOUT_MS,
            bootstrap_timeout_ms=timeout_ms,
            max_in_flight_requests_per_connection=IN_FLIGHT,
            reconnect_backoff_ms=20,
            reconnect_backoff_max_ms=500,
            kafka_client=net_client,
            proxy_url=f"{_ClosingSocket.SCHEMES[0]}://",
        )
    except BaseException:
        for client in made:
            client.close()
        raise
