"""The connection of one process to the brokers, for requests that confluent-kafka does not have.

    one KafkaAdminClient per process (its own I/O thread) ◄── any number of our threads
            └─ Doorkeeper: remembers why each broker did not let us in

By itself kafka-python tries a wrong password or certificate again until the time is over, and then
says only that it is over.

kafka-python keeps the pieces that are needed here to itself: `_manager` and the functions that
find coordinators. They are used in this package's `client`, `finisher`, `open_partitions` and
`together` only, and the version is pinned.
"""

from __future__ import annotations

import logging
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
from kafka.protocol.sasl import SaslAuthenticateRequest
from tenacity import Retrying, retry_if_exception, stop_after_delay, wait_exponential

from sparkonce.sinks.kafka.access import RefusedError, refusal
from sparkonce.sinks.kafka.oauth import TokenProvider
from sparkonce.sinks.kafka.settings import KafkaSettings
from sparkonce.sinks.kafka.tls import Draining, context

REQUEST_TIMEOUT_MS: Final = 5_000

IN_FLIGHT: Final = 1_000
"""Requests of one connection at a time. kafka-python refuses what is more, by default than 5."""

ResultT = TypeVar("ResultT")


def is_transient(error: BaseException) -> bool:
    """Whether asking again can give another answer: no connection, or a coordinator on the move."""
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
        self._admin: tuple[Any, Doorkeeper] | None = None
        self._owner_pid = os.getpid()

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
        async def ask() -> ResultT:
            try:
                return await question(admin)
            except errors.UnknownBrokerIdError:
                # It came after our last look; kafka-python looks again every five minutes only.
                await refresh(admin)
                raise

        admin, door = self._connected()
        try:
            result: ResultT = admin._manager.run(ask)  # noqa: SLF001
        except errors.KafkaError as error:
            refused = door.behind(error)
            if refused is None:
                raise
            raise refused from error
        except RuntimeError as error:  # another thread has closed the client meanwhile
            raise errors.KafkaConnectionError(str(error)) from error
        finally:
            # Coordinators move, and kafka-python would keep every id it has ever seen.
            cached = admin._manager.cluster._coordinators  # noqa: SLF001
            for name in forget:
                cached.pop((CoordinatorType.TRANSACTION, name), None)
                cached.pop((CoordinatorType.GROUP, name), None)
        return result

    def _connected(self) -> tuple[Any, Doorkeeper]:
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


class Doorkeeper:
    """Watches the connections of one client, so that a refusal is told and not "no answer".

    The first connection is given up once every address has refused us. Later, brokers that have let
    us in before are asked again, as one that is away is.
    """

    def __init__(self, manager: Any, settings: KafkaSettings) -> None:
        self._manager = manager
        self._settings = settings
        self._connect = manager.get_connection
        self._refused: dict[Any, RefusedError] = {}
        self.last: str | None = None
        """Why the last attempt failed, whatever it was."""
        manager.get_connection = self._get_connection

    def _get_connection(self, node: Any, *args: Any, **kwargs: Any) -> Any:
        first = self._manager.cluster.bootstrap_brokers
        if not self._manager.bootstrapped and all(b.node_id in self._refused for b in first()):
            raise self._refused[node]
        connection = self._connect(node, *args, **kwargs)
        future = connection.init_future
        if not future.is_done:
            future.add_errback(lambda error: self._failed(node, error))
            future.add_callback(lambda _: self._refused.pop(node, None))
        return connection

    def behind(self, error: errors.KafkaError) -> RefusedError | None:
        """The refusal behind an error of a client that has been let in."""
        refused = refusal(error, self._settings)
        if refused is None and isinstance(error, errors.NodeNotReadyError):
            # It names its broker by number, or has found none at all.
            named = [node for node in error.args if isinstance(node, int)]
            is_first = self._manager.cluster.is_bootstrap
            nodes = named or [node for node in list(self._refused) if not is_first(node)]
            refused = next((self._refused[node] for node in nodes if node in self._refused), None)
        if refused is not None:
            refused.final = False
        return refused

    def _failed(self, node: Any, error: BaseException) -> None:
        refused = refusal(error, self._settings)
        if refused is not None:
            self._refused[node] = refused
        self.last = self._settings.without_secrets(str(refused or error))


class _NoCredentials(logging.Filter):
    """Keeps passwords and tokens out of kafka-python's debug log, which shows every request."""

    NAMES = ("kafka.net.connection", "kafka.protocol.parser")
    KEY = SaslAuthenticateRequest.API_KEY.to_bytes(2, "big")

    def filter(self, record: logging.LogRecord) -> bool:
        args = record.args if isinstance(record.args, tuple) else ()
        return not any(self._tells(arg) for arg in args)

    def _tells(self, arg: object) -> bool:
        # A frame is its length in four bytes, and the key of its request; one is sent alone here.
        return isinstance(arg, SaslAuthenticateRequest) or (
            isinstance(arg, (bytes, bytearray)) and arg[4:6] == self.KEY
        )


_no_credentials = _NoCredentials()


class _ClosingSocket(KafkaNetSocket):  # type: ignore[misc] # kafka-python has no types for it
    """Closes what cannot connect; kafka-python leaves it to the garbage collector.

    A driver that waits for its brokers tries several times a second.
    """

    SCHEMES = ("sparkonce-direct",)

    def socket(self, *args: Any) -> Draining:
        return Draining(*args)

    async def sock_connect(self, net: Any, sock: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return await super().sock_connect(net, sock, *args, **kwargs)
        except BaseException:
            sock.close()
            raise


def _connect(settings: KafkaSettings, timeout_ms: int) -> tuple[Any, Doorkeeper]:
    """A new client. One that cannot connect is closed, which kafka-python leaves undone.

    Raises:
        RefusedError: the brokers do not let us in, or we do not trust them.
        kafka.errors.KafkaError: no broker could be reached.
    """
    for name in _NoCredentials.NAMES:
        logging.getLogger(name).addFilter(_no_credentials)  # once: it is the same object
    config = settings.for_admin()
    if settings.uses_tls:
        config["ssl_context"] = context(settings)
    tokens = config.get("sasl_oauth_token_provider")
    if isinstance(tokens, TokenProvider):
        tokens.token()  # in our thread: it may take its time, and its failure is told as it is
    made: list[Any] = []
    doors: list[Doorkeeper] = []

    def net_client(**config: object) -> Any:
        made.append(KafkaNetClient(**config))
        doors.append(Doorkeeper(made[-1]._manager, settings))  # noqa: SLF001
        return made[-1]

    try:
        admin = KafkaAdminClient(
            **config,
            client_id=str(settings.config.get("client.id", "sparkonce")),
            request_timeout_ms=REQUEST_TIMEOUT_MS,
            bootstrap_timeout_ms=timeout_ms,
            max_in_flight_requests_per_connection=IN_FLIGHT,
            reconnect_backoff_ms=20,
            reconnect_backoff_max_ms=500,
            kafka_client=net_client,
            proxy_url=f"{_ClosingSocket.SCHEMES[0]}://",
        )
    except BaseException as error:
        for client in made:
            client.close()
        told = [door.last for door in doors if door.last is not None]
        if isinstance(error, errors.KafkaTimeoutError) and told:
            raise errors.KafkaTimeoutError(*error.args, f"the last attempt: {told[-1]}") from error
        raise
    return admin, doors[0]
