"""What the user wrote, as the two clients understand it.

    config={"sasl.username": …} ──► librdkafka (confluent-kafka), writes on the executors
                                └─► kafka-python, finishes from the driver: security settings only

librdkafka's names are the ones that the user writes. A security setting that kafka-python cannot
get is refused: otherwise the executors would write and the driver could not commit.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from sparkonce.errors import ConfigurationError
from sparkonce.model import JsonValue

TUNED: Final[Mapping[str, JsonValue]] = {
    "linger.ms": 50,
    "batch.size": 1 << 20,
    "batch.num.messages": 100_000,
    "compression.type": "lz4",
    # librdkafka keeps about 300 bytes beside each message, so this is at most 200 MiB together.
    "queue.buffering.max.messages": 250_000,
    "queue.buffering.max.kbytes": 128 * 1024,
    "partitioner": "murmur2_random",  # places keys as Java's and Spark's producers do
    # librdkafka waits this long between its bootstrap connection and the one to the broker.
    "reconnect.backoff.ms": 10,
}
"""Defaults for throughput and for the fixed cost of a small batch; `config` overrides them."""

FEW_BROKERS: Final = 6
"""Up to so many brokers a producer may connect to all of them, also to those it does not need."""

SOCKET_TIMEOUT_MS: Final = 60_000

_ALIASES: Final = {
    "queue.buffering.max.ms": "linger.ms",
    "compression.codec": "compression.type",
    "request.required.acks": "acks",
    "metadata.broker.list": "bootstrap.servers",
    "sasl.mechanism": "sasl.mechanisms",
    "delivery.timeout.ms": "message.timeout.ms",
}

_OWNED: Final = {
    "bootstrap.servers": "use bootstrap_servers=",
    "transactional.id": "sparkonce names each transaction by its branch",
    "transaction.timeout.ms": "use transaction_timeout_ms=",
    "statistics.interval.ms": "sparkonce reads the producer id from the statistics",
    "delivery.report.only.error": "sparkonce counts failed deliveries",
}

_FIXED: Final = {
    "enable.idempotence": frozenset({"true"}),
    "acks": frozenset({"all", "-1"}),
}

_ADMIN_NAMES: Final = {
    "security.protocol": "security_protocol",
    "sasl.mechanisms": "sasl_mechanism",
    "sasl.username": "sasl_plain_username",
    "sasl.password": "sasl_plain_password",
    "ssl.ca.location": "ssl_cafile",
    "ssl.certificate.location": "ssl_certfile",
    "ssl.key.location": "ssl_keyfile",
    "ssl.key.password": "ssl_password",
    "ssl.crl.location": "ssl_crlfile",
    "ssl.endpoint.identification.algorithm": "ssl_check_hostname",
}

_PROTOCOLS: Final = frozenset({"PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL"})
_MECHANISMS: Final = frozenset({"PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"})
_SECRET: Final = re.compile(r"password|secret|\.pem$|oauthbearer|jaas")
_SECURITY: Final = re.compile(
    r"security\.|sasl\.|ssl\.|enable\.sasl|enable\.ssl|oauthbearer|https\."
)
_TOPIC: Final = re.compile(r"[A-Za-z0-9._-]{1,249}")


class Secret(str):
    """A password whose `repr` does not show it, for clients that log their settings."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "'***'"


@dataclass(frozen=True, slots=True)
class KafkaSettings:
    """Where the brokers are, and how both clients talk to them.

    Attributes:
        bootstrap_servers: as librdkafka takes it, "host:port,host:port".
        config: further librdkafka settings, by their primary names.

    Raises:
        ConfigurationError: a setting belongs to sparkonce, breaks exactly-once, or cannot be
            given to the client that commits.
    """

    bootstrap_servers: str
    config: Mapping[str, object] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        if not isinstance(self.bootstrap_servers, str) or not self.bootstrap_servers.strip():
            raise ConfigurationError('bootstrap_servers: give "host:port,host:port"')
        config = {_ALIASES.get(name, name): value for name, value in self.config.items()}
        if len(config) != len(self.config):
            raise ConfigurationError("config: a setting is given twice, by two of its names")
        object.__setattr__(self, "config", config)
        for name, value in config.items():
            _check(name, value)
        protocol = self._protocol
        if protocol not in _PROTOCOLS:
            raise ConfigurationError(
                f"config['security.protocol']={protocol!r}: choose one of {sorted(_PROTOCOLS)}"
            )
        mechanism = str(config.get("sasl.mechanisms", "GSSAPI")).upper()
        if protocol.startswith("SASL") and mechanism not in _MECHANISMS:
            raise ConfigurationError(
                f"config['sasl.mechanisms']={mechanism!r}: the client that commits on the driver "
                f"knows {sorted(_MECHANISMS)}; choose one of them"
            )

    @property
    def _protocol(self) -> str:
        return str(self.config.get("security.protocol", "PLAINTEXT")).upper()

    def for_producer(
        self,
        transactional_id: str,
        transaction_timeout_ms: int,
        max_message_bytes: int | None,
        brokers: int | None = None,
    ) -> dict[str, object]:
        """Settings of confluent-kafka's `Producer`, without callbacks.

        Args:
            transactional_id: the branch's name.
            transaction_timeout_ms: how long the broker keeps the transaction open.
            max_message_bytes: the topic's limit, where known. librdkafka does not split a batch
                that the broker refuses as too large, so batches stay below it.
            brokers: how many the cluster has, where known.
        """
        tuned = dict(TUNED)
        if brokers is not None and brokers <= FEW_BROKERS:
            # Between its bootstrap connection and the one that it needs, librdkafka waits 11 ms or
            # more, unless it connects to all brokers: half of the time that a transaction begins.
            tuned["enable.sparse.connections"] = False
        if max_message_bytes is not None:
            tuned["batch.size"] = max(1, min(1 << 20, max_message_bytes * 9 // 10))
        return {
            **tuned,
            # By itself librdkafka would wait for an answer as long as the transaction may last.
            "socket.timeout.ms": min(SOCKET_TIMEOUT_MS, transaction_timeout_ms),
            **self.config,
            "bootstrap.servers": self.bootstrap_servers,
            "transactional.id": transactional_id,
            "transaction.timeout.ms": transaction_timeout_ms,
            "enable.idempotence": True,
            "acks": "all",
            "delivery.report.only.error": True,
        }

    def for_admin(self) -> dict[str, object]:
        """Settings of kafka-python's `KafkaAdminClient`: address and security."""
        admin: dict[str, object] = {"bootstrap_servers": self.bootstrap_servers.split(",")}
        for name, ours in _ADMIN_NAMES.items():
            value = self.config.get(name)
            if value is None:
                continue
            if name == "ssl.endpoint.identification.algorithm":
                admin[ours] = str(value).lower() != "none"
            elif _SECRET.search(name):
                admin[ours] = Secret(value)
            elif name in {"security.protocol", "sasl.mechanisms"}:
                admin[ours] = str(value).upper()
            else:
                admin[ours] = str(value)
        return admin

    def without_secrets(self, text: str) -> str:
        """`text` with every secret of these settings blotted out."""
        for name, value in self.config.items():
            if _SECRET.search(name) and str(value):
                text = text.replace(str(value), "***")
        return text


def check_topic_name(topic: str) -> None:
    """Refuse what no broker takes as a topic's name.

    Raises:
        ConfigurationError: naming the topic.
    """
    if _TOPIC.fullmatch(topic) is None or topic in {".", ".."}:
        raise ConfigurationError(
            f"topic={topic!r}: a topic's name has 1 to 249 of the characters A-Z a-z 0-9 . _ and -"
        )


def _check(name: str, value: object) -> None:
    if name in _OWNED:
        raise ConfigurationError(f"config[{name!r}] cannot be set: {_OWNED[name]}")
    if callable(value):
        raise ConfigurationError(
            f"config[{name!r}] is a function; only plain settings travel to the executors"
        )
    if name in _FIXED and str(value).lower() not in _FIXED[name]:
        raise ConfigurationError(
            f"config[{name!r}]={value!r} breaks exactly-once delivery; leave it out"
        )
    if _SECURITY.match(name) and name not in _ADMIN_NAMES:
        hint = ", use the setting that names a file" if name.endswith(".pem") else ""
        raise ConfigurationError(
            f"config[{name!r}] cannot be given to the client that commits on the driver{hint}; "
            f"known security settings: {', '.join(sorted(_ADMIN_NAMES))}"
        )
