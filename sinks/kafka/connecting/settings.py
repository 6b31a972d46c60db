"""The user's settings, as the two clients take them.

    config={"sasl.username": …} ──► librdkafka (confluent-kafka), which writes on the executors
                                └─► kafka-python, which finishes from the driver: it gets only the
                                    security settings, those of TLS as an `ssl.SSLContext` (`tls`)

The user writes librdkafka's names. A security setting that kafka-python cannot take is refused:
otherwise the executors would write and the driver could not commit.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, cast

from sparkonce.errors import ConfigurationError
from sparkonce.model import JsonValue
from sparkonce.sinks.kafka.connecting.oauth import OAuthCallback, TokenCallback, TokenProvider

TUNED: Final[Mapping[str, JsonValue]] = {
    "linger.ms": 50,
    "batch.size": 1 << 20,
    "batch.num.messages": 100_000,
    "compression.type": "lz4",
    # librdkafka keeps about 300 bytes with each message, so both limits allow 200 MiB at most.
    "queue.buffering.max.messages": 250_000,
    "queue.buffering.max.kbytes": 128 * 1024,
    "partitioner": "murmur2_random",  # places keys as Java's and Spark's producers do
    # librdkafka waits this long between its bootstrap connection and its connection to a broker.
    "reconnect.backoff.ms": 10,
}
"""Defaults for throughput and for small batches; `config` overrides them."""

FEW_BROKERS: Final = 6
"""In a cluster of at most this size a producer connects to every broker, needed or not."""

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
    "transaction.timeout.ms": "use transaction_timeout_s=",
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
"""The security settings that both clients take."""

_PROTOCOLS: Final = frozenset({"PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL"})
_PASSWORD_MECHANISMS: Final = frozenset({"PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"})
_MECHANISMS: Final = _PASSWORD_MECHANISMS | {"OAUTHBEARER"}
_SECRET: Final = re.compile(r"password|secret|\.pem$|oauthbearer|jaas")
_SECURITY: Final = re.compile(
    r"security\.|sasl\.|ssl\.|enable\.sasl|enable\.ssl|oauthbearer|https\."
)


class Secret(str):
    """A password that its `repr` hides, for clients that log their settings."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "'***'"


@dataclass(frozen=True, slots=True)
class KafkaSettings:
    """Where the brokers are, and how both clients connect to them.

    Attributes:
        bootstrap_servers: in librdkafka's form, "host:port,host:port".
        config: further librdkafka settings, by their primary names.

    Raises:
        ConfigurationError: a setting belongs to sparkonce, breaks exactly-once, or is unknown to
            the client that commits.
    """

    bootstrap_servers: str
    config: Mapping[str, object] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        if not isinstance(self.bootstrap_servers, str) or not self.bootstrap_servers.strip():
            raise ConfigurationError('bootstrap_servers: give "host:port,host:port"')
        config = {_ALIASES.get(name, name): value for name, value in self.config.items()}
        if len(config) != len(self.config):
            raise ConfigurationError("config: a setting is given twice, under two of its names")
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
                f"config['oauth_cb'] is given, but config['security.protocol']={self.protocol!r} "
                "uses no token; set security.protocol to SASL_SSL"
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
                f"driver supports {sorted(_MECHANISMS)}; choose one of them"
            )
        if self.mechanism in _PASSWORD_MECHANISMS:
            for name in ("sasl.username", "sasl.password"):
                if not isinstance(self.config.get(name), str) or not self.config[name]:
                    raise ConfigurationError(
                        f"config[{name!r}] is missing, but {self.mechanism} needs it"
                    )
        callback = self.config.get("oauth_cb")
        if (self.mechanism == "OAUTHBEARER") != (callback is not None):
            raise ConfigurationError(
                f"config['sasl.mechanisms']={self.mechanism!r} and config['oauth_cb'] belong "
                "together: with OAUTHBEARER both clients get their tokens from a function, "
                "oauth_cb(config) -> (token, expiry in Unix seconds)"
            )
        if callback is not None:
            _check_travels(callback)

    @property
    def protocol(self) -> str:
        return str(self.config.get("security.protocol", "PLAINTEXT")).upper()

    @property
    def mechanism(self) -> str:
        """The SASL mechanism, used only with SASL; librdkafka's default is GSSAPI."""
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
        """The name of the setting that holds the client's certificate, if one is given."""
        return self._given("ssl.certificate.pem", "ssl.certificate.location")

    @property
    def key(self) -> str | None:
        """The name of the setting that holds the client's key, if one is given."""
        return self._given("ssl.key.pem", "ssl.key.location")

    def text(self, name: str) -> str | None:
        """A setting as text; None where it is not given."""
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
        """The settings of librdkafka for a producer.

        Args:
            transactional_id: the branch's name.
            transaction_timeout_ms: how long the broker keeps the transaction open.
            max_message_bytes: the topic's limit, if known. Batches stay below it, since librdkafka
                does not split a batch that the broker refuses as too large.
            brokers: the number of brokers in the cluster, if known.
        """
        tuned = dict(TUNED)
        if brokers is not None and brokers <= FEW_BROKERS:
            # librdkafka waits 11 ms or more between its bootstrap connection and the connection
            # that it needs, unless it connects to all brokers. That wait is half of the time it
            # takes to begin a transaction.
            tuned["enable.sparse.connections"] = False
        if max_message_bytes is not None:
            tuned["batch.size"] = max(1, min(1 << 20, max_message_bytes * 9 // 10))
        return {
            **tuned,
            # librdkafka would wait for a response as long as the transaction may last.
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
        """Settings of kafka-python's `KafkaAdminClient`, without those of TLS (see `tls`)."""
        admin: dict[str, object] = {
            "bootstrap_servers": self.bootstrap_servers.split(","),
            "security_protocol": self.protocol,
        }
        if self.protocol.startswith("SASL"):
            admin["sasl_mechanism"] = self.mechanism
            if self.mechanism in _PASSWORD_MECHANISMS:
                user = str(self.config["sasl.username"])
                if self.mechanism.startswith("SCRAM"):  # kafka-python does not escape the name
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
        """`text` with every secret of these settings masked."""
        for name, value in self.config.items():
            if _SECRET.search(name) and str(value):
                text = text.replace(str(value), "***")
        return text


def _check(name: str, value: object) -> None:
    if name in _OWNED:
        raise ConfigurationError(f"config[{name!r}] cannot be set: {_OWNED[name]}")
    if callable(value) and name != "oauth_cb":
        raise ConfigurationError(
            f"config[{name!r}] is a function; oauth_cb is the only function that travels to the "
            "executors"
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
            f"config[{name!r}] is not supported by the client that commits on the driver"
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
            "name can be turned off, by ssl.endpoint.identification.algorithm=none"
        )
    return ""


def _check_travels(callback: object) -> None:
    from pyspark import cloudpickle  # noqa: PLC0415 - slow to import; Spark itself pickles with it

    try:
        cloudpickle.dumps(callback)
    except Exception as error:
        raise ConfigurationError(
            f"config['oauth_cb'] cannot travel to the executors ({type(error).__name__}: {error}). "
            "Give a function of a module that they also have; let it open what it needs when it is "
            "called"
        ) from error
