"""One kafka-python client, which reports a refusal instead of a timeout.

    KafkaAdminClient (its own I/O thread) ── Doorkeeper: remembers why each broker refused us

kafka-python retries a wrong password or certificate until its timeout, and then reports only the
timeout.

Some parts of kafka-python that are needed here are private: `_manager`, and the functions that find
coordinators. Only this module, `connection` and the requests in `finishing` use them, and the
version is pinned.
"""

from __future__ import annotations

from typing import Any, Final

from kafka import errors
from kafka.admin import KafkaAdminClient
from kafka.net.compat import KafkaNetClient
from kafka.net.inet import KafkaNetSocket

from sparkonce.sinks.kafka.connecting.access import refusal
from sparkonce.sinks.kafka.connecting.oauth import TokenProvider
from sparkonce.sinks.kafka.connecting.quiet import quieten
from sparkonce.sinks.kafka.connecting.refused import RefusedError
from sparkonce.sinks.kafka.connecting.settings import KafkaSettings
from sparkonce.sinks.kafka.connecting.tls import Draining, context

REQUEST_TIMEOUT_MS: Final = 5_000

IN_FLIGHT: Final = 1_000
"""Requests in flight on one connection. kafka-python refuses more, by default more than 5."""


class Doorkeeper:
    """Watches the connections of one client, so that a refusal is reported as a refusal.

    The first connection fails once every address has refused us. After that a refusal is retried,
    as an unreachable broker is: some broker has accepted us before.
    """

    def __init__(self, manager: Any, settings: KafkaSettings) -> None:
        self._manager = manager
        self._settings = settings
        self._connect = manager.get_connection
        self._refused: dict[Any, RefusedError] = {}
        self.last: str | None = None
        """Why the last attempt failed, in words and without secrets."""
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

    def refusal_behind(self, error: errors.KafkaError) -> RefusedError | None:
        """The refusal that caused this error, if one did, of a client that was accepted before."""
        refused = refusal(error, self._settings)
        if refused is None and isinstance(error, errors.NodeNotReadyError):
            # The error names its broker by number, or no broker at all.
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


class _ClosingSocket(KafkaNetSocket):  # type: ignore[misc] # kafka-python has no types for it
    """Closes a socket that cannot connect; kafka-python leaves it to the garbage collector.

    A driver that waits for its brokers retries several times a second.
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


def connect(settings: KafkaSettings, timeout_ms: int) -> tuple[Any, Doorkeeper]:
    """Open a client. If it cannot connect, close it, which kafka-python omits.

    Raises:
        RefusedError: the brokers refuse us, or we do not trust them.
        kafka.errors.KafkaError: no broker could be reached.
    """
    client_id = str(settings.config.get("client.id", "sparkonce"))
    quieten(client_id)
    config = _security(settings)
    made: list[Any] = []
    doors: list[Doorkeeper] = []

    def net_client(**config: object) -> Any:
        made.append(KafkaNetClient(**config))
        doors.append(Doorkeeper(made[-1]._manager, settings))  # noqa: SLF001
        return made[-1]

    try:
        admin = KafkaAdminClient(
            **config,
            client_id=client_id,
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
        reasons = [door.last for door in doors if door.last is not None]
        if isinstance(error, errors.KafkaTimeoutError) and reasons:
            last = f"the last attempt: {reasons[-1]}"
            raise errors.KafkaTimeoutError(*error.args, last) from error
        raise
    return admin, doors[0]


def _security(settings: KafkaSettings) -> dict[str, object]:
    config = settings.for_admin()
    if settings.uses_tls:
        config["ssl_context"] = context(settings)
    tokens = config.get("sasl_oauth_token_provider")
    if isinstance(tokens, TokenProvider):
        tokens.token()  # in our thread, which may wait for it and reports its failure unchanged
    return config
