"""The Confluent schema registry, asked by the driver once per start, before any data moves.

    subject "orders-value" ──► register, look up, or take the newest ──► (id, text) of the schema

Executors never ask it: the id travels with the sink, so all of them write one schema.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from http.client import CONFLICT, FORBIDDEN, NOT_FOUND, UNAUTHORIZED
from typing import Final

from confluent_kafka.schema_registry import Schema, SchemaRegistryClient
from confluent_kafka.schema_registry.error import SchemaRegistryError

from sparkonce.errors import ConfigurationError

AUTO_REGISTER: Final = "auto.register.schemas"
USE_LATEST: Final = "use.latest.version"

_DEFAULTS: Final[Mapping[str, object]] = {
    "timeout": 30,  # the client's own default is to wait for ever
    "max.retries": 2,
}
_SECRET: Final = ("user.info", "password", "secret", "token", "proxy")


@dataclass(frozen=True, slots=True)
class Registry:
    """Where the registry is and how schemas get into it.

    Attributes:
        config: confluent-kafka's settings of `SchemaRegistryClient`, and of its serializers
            `auto.register.schemas` and `use.latest.version`.

    Raises:
        ConfigurationError: the address is missing, or a setting cannot be used here.
    """

    config: Mapping[str, object] = field(repr=False)

    def __post_init__(self) -> None:
        url = self.config.get("url")
        if not isinstance(url, str) or not url.startswith("http"):
            raise ConfigurationError('schema_registry: give {"url": "http://host:8081", …}')
        if "@" in url:
            # The client's own log would show it.
            raise ConfigurationError(
                "schema_registry['url'] holds a user; give it as 'basic.auth.user.info': "
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
                f"schema_registry: {USE_LATEST!r} takes the schema that is there and "
                f"{AUTO_REGISTER!r} makes one; choose one of them"
            )

    @property
    def uses_latest(self) -> bool:
        return bool(self.config.get(USE_LATEST, False))

    @property
    def where(self) -> str:
        """The addresses."""
        return str(self.config["url"])

    def settle(self, subject: str, text: str | None) -> tuple[int, str]:
        """The id and text of the schema with which this subject's rows are written.

        Args:
            subject: such as "orders-value".
            text: of the schema; None takes the newest that the subject has.

        Raises:
            ConfigurationError: the registry does not answer, refuses us, has no such schema, or
                holds this one for incompatible.
        """
        ours = {AUTO_REGISTER, USE_LATEST}
        config = {name: value for name, value in self.config.items() if name not in ours}
        try:
            with SchemaRegistryClient({**_DEFAULTS, **config}) as client:
                return self._asked(client, subject, text)
        except ConfigurationError:
            raise
        except SchemaRegistryError as error:
            told = self._advice(error, subject)
        except Exception as error:  # noqa: BLE001 - of its HTTP client, TLS, files and settings
            told = f"{type(error).__name__}: {error}. Is the address right, and is it up?"
        raise ConfigurationError(
            f"schema registry at {self.where}: {self._without_secrets(told)}"
        )  # without the cause, which could show a secret

    def _asked(
        self, client: SchemaRegistryClient, subject: str, text: str | None
    ) -> tuple[int, str]:
        if text is None:
            latest = client.get_latest_version(subject)
            schema = latest.schema
            if schema.schema_type != "AVRO" or schema.references:
                raise ConfigurationError(
                    f"schema registry at {self.where}: the newest schema of {subject!r} is "
                    f"{schema.schema_type}{' with references' if schema.references else ''}; "
                    "a schema in Avro that stands for itself is needed"
                )
            return int(latest.schema_id), str(schema.schema_str)
        schema = Schema(text, "AVRO")
        if self.config.get(AUTO_REGISTER, True):
            return int(client.register_schema(subject, schema)), text
        return int(client.lookup_schema(subject, schema).schema_id), text

    def _advice(self, error: SchemaRegistryError, subject: str) -> str:
        told = f"{error.error_message} (HTTP {error.http_status_code})"
        if error.http_status_code in {UNAUTHORIZED, FORBIDDEN}:
            return f"{told}: it refuses the credentials of schema_registry= for {subject!r}"
        if error.http_status_code == CONFLICT:
            return (
                f"the schema is not compatible with those of the subject {subject!r}: {told}. "
                "Change the columns or value_schema=, or the subject's compatibility"
            )
        if error.http_status_code == NOT_FOUND:
            return (
                f"{told}: the subject {subject!r} does not have this schema; register it, or set "
                f"{AUTO_REGISTER!r} to True"
            )
        return f"{told}, for the subject {subject!r}"

    def _without_secrets(self, text: str) -> str:
        for secret in self._secrets():
            text = text.replace(secret, "***")
        return text

    def _secrets(self) -> list[str]:
        """Longest first, so that none hides a part of another from being found."""
        found = {
            str(value)
            for name, value in self.config.items()
            if any(word in name for word in _SECRET) and value
        }
        found.add(str(self.config.get("basic.auth.user.info", "")).partition(":")[2])
        return sorted(filter(None, found), key=len, reverse=True)
