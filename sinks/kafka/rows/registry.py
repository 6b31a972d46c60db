"""The Confluent schema registry, which the driver contacts once per start, before any data moves.

    subject "orders-value" ──► register, look up, or take the newest ──► (id, text) of the schema

Executors never contact it: the id travels with the sink, so all of them write the same schema.
"""

from __future__ import annotations

import ssl
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from http.client import (
    CONFLICT,
    FORBIDDEN,
    INTERNAL_SERVER_ERROR,
    NOT_FOUND,
    TOO_MANY_REQUESTS,
    UNAUTHORIZED,
)
from typing import Final, TypeVar

from confluent_kafka.schema_registry import Schema, SchemaRegistryClient
from confluent_kafka.schema_registry.error import SchemaRegistryError

from sparkonce.errors import ConfigurationError, SinkUnavailableError

AUTO_REGISTER: Final = "auto.register.schemas"
USE_LATEST: Final = "use.latest.version"

_DEFAULTS: Final[Mapping[str, object]] = {
    "timeout": 30,  # by default the client waits forever
    "max.retries": 2,
}
_NETWORK_ERRORS: Final = frozenset({"TimeoutException", "NetworkError", "RemoteProtocolError"})
"""By name, since confluent-kafka uses httpx or its successor httpx2."""

ResultT = TypeVar("ResultT")

_SECRET: Final = ("user.info", "password", "secret", "token", "proxy")


@dataclass(frozen=True, slots=True)
class Registry:
    """Where the registry is, and how schemas get into it.

    Attributes:
        config: confluent-kafka's settings of `SchemaRegistryClient`, and `auto.register.schemas`
            and `use.latest.version` of its serializers.

    Raises:
        ConfigurationError: the address is missing, or a setting cannot be used.
    """

    config: Mapping[str, object] = field(repr=False)

    def __post_init__(self) -> None:
        url = self.config.get("url")
        if not isinstance(url, str) or not url.startswith("http"):
            raise ConfigurationError('schema_registry: give {"url": "http://host:8081", …}')
        if "@" in url:
            # The client would log it.
            raise ConfigurationError(
                "schema_registry['url'] holds a user; give the user as 'basic.auth.user.info': "
                '"user:password"'
            )
        for name, value in self.config.items():
            if callable(value):
                raise ConfigurationError(
                    f"schema_registry[{name!r}] is a function; give plain settings only"
                )
            if name in {AUTO_REGISTER, USE_LATEST} and not isinstance(value, bool):
                raise ConfigurationError(f"schema_registry[{name!r}] is True or False")
        if self.uses_latest and self.config.get(AUTO_REGISTER, False):
            raise ConfigurationError(
                f"schema_registry: {USE_LATEST!r} takes the registered schema, and "
                f"{AUTO_REGISTER!r} registers one; choose one of them"
            )

    @property
    def uses_latest(self) -> bool:
        return bool(self.config.get(USE_LATEST, False))

    @property
    def where(self) -> str:
        return str(self.config["url"])

    def schema(self, subject: str, text: str | None) -> tuple[int, str]:
        """The id and text of the schema with which this subject's rows are written.

        Args:
            subject: for example "orders-value".
            text: the schema's text; None takes the subject's newest schema.

        Raises:
            ConfigurationError: the registry refuses us, has no such schema, or calls this one
                incompatible.
            SinkUnavailableError: the registry cannot be reached now.
        """
        return self._ask(subject, lambda client: self._id_and_text(client, subject, text))

    def check(self, subject: str) -> None:
        """Look for the subject's newest schema, and register nothing.

        Raises:
            ConfigurationError: the registry refuses us, or lacks a schema that a start would take.
            SinkUnavailableError: the registry cannot be reached now.
        """

        def look(client: SchemaRegistryClient) -> None:
            try:
                client.get_latest_version(subject)
            except SchemaRegistryError as error:
                if self.uses_latest or error.http_status_code != NOT_FOUND:
                    raise

        self._ask(subject, look)

    def _ask(self, subject: str, ask: Callable[[SchemaRegistryClient], ResultT]) -> ResultT:
        ours = {AUTO_REGISTER, USE_LATEST}
        config = {name: value for name, value in self.config.items() if name not in ours}
        try:
            with SchemaRegistryClient({**_DEFAULTS, **config}) as client:
                return ask(client)
        except ConfigurationError:
            raise
        except SchemaRegistryError as error:
            reason, is_transient = self._advice(error, subject), _is_overloaded(error)
        except Exception as error:  # noqa: BLE001 - from its HTTP client, TLS, files, settings
            reason = f"{type(error).__name__}: {error}. Is the address right, and is it up?"
            is_transient = _is_unreachable(error)
        kind = SinkUnavailableError if is_transient else ConfigurationError
        # Without the cause, which could show a secret.
        raise kind(f"schema registry at {self.where}: {self._without_secrets(reason)}")

    def _id_and_text(
        self, client: SchemaRegistryClient, subject: str, text: str | None
    ) -> tuple[int, str]:
        if text is None:
            latest = client.get_latest_version(subject)
            schema = latest.schema
            if schema.schema_type != "AVRO" or schema.references:
                raise ConfigurationError(
                    f"schema registry at {self.where}: the newest schema of {subject!r} is "
                    f"{schema.schema_type}{' with references' if schema.references else ''}; "
                    "the sink needs an Avro schema without references"
                )
            return int(latest.schema_id), str(schema.schema_str)
        schema = Schema(text, "AVRO")
        if self.config.get(AUTO_REGISTER, True):
            return int(client.register_schema(subject, schema)), text
        return int(client.lookup_schema(subject, schema).schema_id), text

    def _advice(self, error: SchemaRegistryError, subject: str) -> str:
        reply = f"{error.error_message} (HTTP {error.http_status_code})"
        if error.http_status_code in {UNAUTHORIZED, FORBIDDEN}:
            return f"{reply}: it refuses the credentials of schema_registry= for {subject!r}"
        if error.http_status_code == CONFLICT:
            return (
                f"the schema is not compatible with those of the subject {subject!r}: {reply}. "
                "Change the columns or value_schema=, or the subject's compatibility"
            )
        if error.http_status_code == NOT_FOUND:
            return (
                f"{reply}: the subject {subject!r} does not have this schema; register it, or set "
                f"{AUTO_REGISTER!r} to True"
            )
        return f"{reply}, for the subject {subject!r}"

    def _without_secrets(self, text: str) -> str:
        for secret in self._secrets():
            text = text.replace(secret, "***")
        return text

    def _secrets(self) -> list[str]:
        """Longest first, so that masking a short one does not break up a longer one."""
        found = {
            str(value)
            for name, value in self.config.items()
            if any(word in name for word in _SECRET) and value
        }
        found.add(str(self.config.get("basic.auth.user.info", "")).partition(":")[2])
        return sorted(filter(None, found), key=len, reverse=True)


def _is_overloaded(error: SchemaRegistryError) -> bool:
    status: int = error.http_status_code
    return status >= INTERNAL_SERVER_ERROR or status == TOO_MANY_REQUESTS


def _is_unreachable(error: BaseException) -> bool:
    """Whether the network failed, rather than the trust between us and the registry."""
    kinds = {kind.__name__ for kind in type(error).__mro__}
    return not kinds.isdisjoint(_NETWORK_ERRORS) and not any(
        isinstance(cause, ssl.SSLError) for cause in _causes(error)
    )


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
