"""What the user wrote, as the two clients understand it.

    config={"sasl.username": …} ──► librdkafka (confluent-kafka), writes on the executors
                                └─► kafka-python, finishes from the driver: security settings only,
                                    those of TLS as an `ssl.SSLContext` (see `tls`)

librdkafka's names are the ones that the user writes. A security setting that kafka-python cannot
get is refused: otherwise the executors would write and the driver could not commit.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, cast

from sparkonce.errors import ConfigurationError
from sparkonce.model import JsonValue
from sparkonce.sinks.kafka.oauth import OAuthCallback, TokenCallback, TokenProvider
from sparkonce.sinks.kafka.rows import TOPIC_NAMES, is_topic_name

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
    "delivery.report.only.error": "sparkonce counts deliveries",
    "enabled_events": "sparkonce counts deliveries",
}

_FIXED: Final = {
    "enable.idempotence": frozenset({"true"}),
    "acks": frozenset({"all", "-1"}),
}

_SHARED: Final = frozenset(
    {
        "security.protocol",
        "sasl.mechanisms",
        "sasl.username",
        "sasl.password",
        "oauth_cb",
        "sasl.oauthbearer.config",
        "ssl.ca.location",
        "ssl.ca.pem",
        "ssl.certificate.location",
        "ssl.certificate.pem",
        "ssl.key.location",
        "ssl.key.pem",
        "ssl.key.password",
        "ssl.crl.location",
        "ssl.endpoint.identification.algorithm",
    }
)
"""The security settings that both clients understand."""

_PROTOCOLS: Final = frozenset({"PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL"})
_PASSWORD_MECHANISMS: Final = frozenset({"PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"})
_MECHANISMS: Final = _PASSWORD_MECHANISMS | {"OAUTHBEARER"}
_SECRET: Final = re.compile(r"password|secret|\.pem$|oauthbearer|jaas")
_SECURITY: Final = re.compile(
    r"security\.|sasl\.|ssl\.|enable\.sasl|enable\.ssl|oauthbearer|https\."
)


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
        if self.protocol not in _PROTOCOLS:
            raise ConfigurationError(
                f"config['security.protocol']={self.protocol!r}: choose one of {sorted(_PROTOCOLS)}"
            )
        if self.protocol.startswith("SASL"):
            self._check_sasl()
        elif "oauth_cb" in config:
            raise ConfigurationError(
                f"config['oauth_cb'] is given and config['security.protocol']={self.protocol!r} "
                "uses no token; set it to SASL_SSL"
            )
        if (self.certificate is None) != (self.key is None):
            raise ConfigurationError(
                "config: a client certificate and its key belong together; set both "
                "ssl.certificate.location and ssl.key.location"
            )

    def _check_sasl(self) -> None:
        if self.mechanism not in _MECHANISMS:
            raise ConfigurationError(
                f"config['sasl.mechanisms']={self.mechanism!r}: the client that commits on the "
                f"driver knows {sorted(_MECHANISMS)}; choose one of them"
            )
        if self.mechanism in _PASSWORD_MECHANISMS:
            for name in ("sasl.username", "sasl.password"):
                if not isinstance(self.config.get(name), str) or not self.config[name]:
                    raise ConfigurationError(
                        f"config[{name!r}] is missing, and {self.mechanism} needs it"
                    )
        callback = self.config.get("oauth_cb")
        if (self.mechanism == "OAUTHBEARER") != (callback is not None):
            raise ConfigurationError(
                f"config['sasl.mechanisms']={self.mechanism!r} and config['oauth_cb'] belong "
                "together: OAUTHBEARER gets its tokens from a function for both clients, "
                "oauth_cb(config) -> (token, expiry in Unix seconds)"
            )
        if callback is not None:
            _check_travels(callback)

    @property
    def protocol(self) -> str:
        """How the brokers are spoken to."""
        return str(self.config.get("security.protocol", "PLAINTEXT")).upper()

    @property
    def mechanism(self) -> str:
        """That SASL uses, where it is used at all; librdkafka's default is GSSAPI."""
        return str(self.config.get("sasl.mechanisms", "GSSAPI")).upper()

    @property
    def uses_tls(self) -> bool:
        return self.protocol in {"SSL", "SASL_SSL"}

    @property
    def checks_hostname(self) -> bool:
        name = "ssl.endpoint.identification.algorithm"
        return str(self.config.get(name, "https")).lower() != "none"

    @property
    def certificate(self) -> str | None:
        """The setting that holds the client's certificate, if one does."""
        return self._given("ssl.certificate.pem", "ssl.certificate.location")

    @property
    def key(self) -> str | None:
        """The setting that holds the client's key, if one does."""
        return self._given("ssl.key.pem", "ssl.key.location")

    def text(self, name: str) -> str | None:
        """A setting as text; None when it is not given."""
        value = self.config.get(name)
        return None if value is None else str(value)

    def _given(self, *names: str) -> str | None:
        return next((name for name in names if self.config.get(name) is not None), None)

    def for_producer(
        self,
        transactional_id: str,
        transaction_timeout_ms: int,
        max_message_bytes: int | None,
        brokers: int | None = None,
    ) -> dict[str, object]:
        """Librdkafka's settings for a producer.

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
            **({} if self._callback is None else {"oauth_cb": TokenCallback(self._callback)}),
        }

    def for_admin(self) -> dict[str, object]:
        """Settings of kafka-python's `KafkaAdminClient`, but for TLS (see `tls`)."""
        admin: dict[str, object] = {
            "bootstrap_servers": self.bootstrap_servers.split(","),
            "security_protocol": self.protocol,
        }
        if self.protocol.startswith("SASL"):
            admin["sasl_mechanism"] = self.mechanism
            if self.mechanism in _PASSWORD_MECHANISMS:
                user = str(self.config["sasl.username"])
                if self.mechanism.startswith("SCRAM"):  # kafka-python does not escape it
                    user = user.replace("=", "=3D").replace(",", "=2C")
                admin["sasl_plain_username"] = user
                admin["sasl_plain_password"] = Secret(self.config["sasl.password"])
            if self._callback is not None:
                argument = self.text("sasl.oauthbearer.config")
                admin["sasl_oauth_token_provider"] = TokenProvider(self._callback, argument)
        return admin

    @property
    def _callback(self) -> OAuthCallback | None:
        callback: Any = self.config.get("oauth_cb")
        return cast("OAuthCallback | None", callback)

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
    if not is_topic_name(topic):
        raise ConfigurationError(f"topic={topic!r}: {TOPIC_NAMES}")


def _check(name: str, value: object) -> None:
    if name in _OWNED:
        raise ConfigurationError(f"config[{name!r}] cannot be set: {_OWNED[name]}")
    if callable(value) and name != "oauth_cb":
        raise ConfigurationError(
            f"config[{name!r}] is a function; only plain settings travel to the executors, and "
            "oauth_cb"
        )
    if name == "oauth_cb" and not callable(value):
        raise ConfigurationError(
            "config['oauth_cb'] must be a function: oauth_cb(config) -> (token, expiry)"
        )
    if name in _FIXED and str(value).lower() not in _FIXED[name]:
        raise ConfigurationError(
            f"config[{name!r}]={value!r} breaks exactly-once delivery; leave it out"
        )
    if _SECURITY.match(name) and name not in _SHARED:
        raise ConfigurationError(
            f"config[{name!r}] cannot be given to the client that commits on the driver"
            f"{_way_out(name)}; known security settings: {', '.join(sorted(_SHARED))}"
        )


def _way_out(name: str) -> str:
    if "oauthbearer" in name:
        return ": fetch the token in a function and give that as config['oauth_cb']"
    if "keystore" in name or name.startswith(("ssl.certificate", "ssl.key", "ssl_")):
        return ": give certificate and key as PEM, in ssl.certificate.location and ssl.key.location"
    if "verification" in name:
        return (
            ": point ssl.ca.location at the authority's certificate; only the check of the host's "
            "name can be left out, by ssl.endpoint.identification.algorithm=none"
        )
    return ""


def _check_travels(callback: object) -> None:
    from pyspark import cloudpickle  # noqa: PLC0415 - slow, and Spark's own way to its executors

    try:
        cloudpickle.dumps(callback)
    except Exception as error:
        raise ConfigurationError(
            f"config['oauth_cb'] cannot travel to the executors ({type(error).__name__}: {error}). "
            "Give a function of a module that they have too, which opens what it needs when it is "
            "called"
        ) from error
