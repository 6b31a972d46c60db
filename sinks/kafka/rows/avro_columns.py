"""The columns that a sink sends as Avro: schemas chosen by the driver, rows encoded by tasks."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

import pyarrow as pa

from sparkonce.errors import ConfigurationError, ProtocolError, SinkUnavailableError
from sparkonce.finding import Finding, Level
from sparkonce.sinks.kafka.rows.avro_rows import AvroSchema
from sparkonce.sinks.kafka.rows.avro_schema import derive, fit, parse
from sparkonce.sinks.kafka.rows.registry import Registry


class AvroColumns:
    """Which of `value` and `key` are Avro, and in which schemas.

    Without `value_schema` the value's schema is derived from its type.

    Raises:
        ConfigurationError: a setting is missing, wrong, or contradicts another.
    """

    def __init__(
        self,
        columns: Collection[str],
        topic: str | None,
        value_schema: str | None,
        config: Mapping[str, object] | None,
    ) -> None:
        if topic is None:
            raise ConfigurationError(
                "a schema belongs to a topic: rows in Avro need the sink's own topic, "
                "KafkaSink('orders', …)"
            )
        if not isinstance(config, Mapping):
            raise ConfigurationError(
                'rows in Avro need a schema registry: schema_registry={"url": "http://host:8081"}'
            )
        if not isinstance(value_schema, str | None):
            raise ConfigurationError("value_schema= is the text of a schema: give json.dumps(…)")
        self._registry = Registry(dict(config))
        if value_schema is not None:
            if self._registry.uses_latest:
                raise ConfigurationError(
                    "value_schema= names one schema, and 'use.latest.version' another; choose one"
                )
            try:
                parse(value_schema)
            except ConfigurationError as error:
                raise ConfigurationError(f"value_schema: {error}") from None
        self._topic = topic
        self._columns = tuple(columns)
        self._texts = {"value": value_schema}
        self._schemas: dict[str, AvroSchema] = {}

    def sent(self, schema: pa.Schema) -> pa.Schema:
        """The schema of the rows after `encoded`."""
        for name in self._columns:
            if name in schema.names:
                index = schema.names.index(name)
                schema = schema.set(index, pa.field(name, pa.large_binary()))
        return schema

    def choose_schemas(self, schema: pa.Schema) -> None:
        """Choose a schema for each column that fits its type and that the registry has.

        Raises:
            ConfigurationError: there is none, or rows name topics of their own.
            SinkUnavailableError: the registry cannot be reached now.
        """
        if "topic" in schema.names:
            raise ConfigurationError(
                f"the column 'topic' names other topics, but the schema is for {self._topic!r}; "
                "give each topic a sink of its own, with transform= to filter its rows"
            )
        self._schemas = {n: self._chosen(n, schema.field(n).type) for n in self._columns}

    def _chosen(self, name: str, kind: pa.DataType) -> AvroSchema:
        text = self._texts.get(name)
        if text is None and not self._registry.uses_latest:
            text = derive(kind, name.title())
        if text is not None:
            _check(name, kind, text)  # first, since the registry keeps a schema permanently
        subject = f"{self._topic}-{name}"
        schema_id, text = self._registry.schema(subject, text)
        _check(name, kind, text)
        return AvroSchema(name, text, schema_id)

    def diagnose(self) -> Iterator[Finding]:
        """Whether the registry can be asked for each column's subject."""
        for name in self._columns:
            try:
                self._registry.check(f"{self._topic}-{name}")
            except (ConfigurationError, SinkUnavailableError) as error:
                yield Finding(Level.ERROR, str(error), "see schema_registry=")
                return
        yield Finding(Level.OK, f"schema registry at {self._registry.where}: reachable")

    def encoded(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """The rows with these columns in Avro.

        Raises:
            RowError: naming the field that does not fit the schema.
        """
        for name in self._columns:
            if name not in self._schemas:
                raise ProtocolError("`validate` was not called, so no schema is chosen")
            index = batch.schema.names.index(name)
            column = self._schemas[name].encoded(batch.column(index))
            batch = batch.set_column(index, name, column)
        return batch


def _check(name: str, kind: pa.DataType, text: str) -> None:
    try:
        fit(kind, text)
    except ConfigurationError as error:
        raise ConfigurationError(f"the {name} does not fit its Avro schema: {error}") from None
