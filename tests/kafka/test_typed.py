"""Typed rows for Kafka, without a server: which columns go where, and which types fit a schema."""

from __future__ import annotations

import datetime as dt
import json
import pickle
import sys
from io import BytesIO
from typing import Any

import fastavro
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparkonce.errors import ConfigurationError, ProtocolError, SinkUnavailableError
from sparkonce.sinks import KafkaSink
from sparkonce.sinks.kafka.rows.avro_rows import AvroSchema
from sparkonce.sinks.kafka.rows.avro_schema import derive, fit
from sparkonce.sinks.kafka.rows.conventions import RowError
from sparkonce.sinks.kafka.rows.layout import Layout
from sparkonce.sinks.kafka.rows.registry import Registry

TIME = pa.timestamp("us", tz="UTC")
ROW = pa.struct([("id", pa.int64()), ("at", TIME)])


def schema(**columns: pa.DataType) -> pa.Schema:
    return pa.schema(list(columns.items()))


def sink(**settings: Any) -> KafkaSink:
    return KafkaSink(**{"topic": "orders", "bootstrap_servers": "localhost:9092", **settings})


# -- which columns go where ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layout", "columns", "expected"),
    [
        (Layout(None, None, "json"), schema(id=pa.int64()), ["to_json(r) AS value"]),
        (
            Layout(("id",), None, "json"),
            schema(id=pa.int64()),
            ["string(r.`id`) AS key", "to_json(r) AS value"],
        ),
        (
            Layout(("id",), "text", "json"),
            schema(id=pa.date32()),
            ["string(r.`id`) AS key", "to_json(r) AS value"],
        ),
        (
            Layout(("id",), "json", "json"),
            schema(id=pa.int64()),
            ["to_json(struct(r.`id`)) AS key", "to_json(r) AS value"],
        ),
        (
            Layout(None, "text", None),
            schema(key=pa.int64(), value=pa.string()),
            ["string(r.`key`) AS `key`", "r.`value` AS `value`"],
        ),
        (
            Layout(("id",), None, "avro"),
            schema(id=pa.binary(), at=TIME),
            ["r.`id` AS key", "r AS value"],
        ),
        (
            Layout(("a`b", "c.d"), "json", "avro"),
            schema(**{"a`b": pa.string(), "c.d": TIME}),
            ["to_json(struct(r.`a``b`, r.`c.d`)) AS key", "r AS value"],
        ),
        (
            Layout(("id",), "avro", "json"),
            schema(id=pa.int32()),
            ["struct(r.`id`) AS key", "to_json(r) AS value"],
        ),
        (
            Layout(None, None, "json"),
            schema(value=ROW, key=pa.string(), topic=pa.string()),
            ["to_json(r.`value`) AS `value`", "r.`key` AS `key`", "r.`topic` AS `topic`"],
        ),
        (
            Layout(None, "json", None),
            schema(key=ROW, value=pa.string()),
            ["to_json(r.`key`) AS `key`", "r.`value` AS `value`"],
        ),
    ],
)
def test_columns_that_spark_makes(layout: Layout, columns: pa.Schema, expected: list[str]) -> None:
    """Whole rows without a column `value`; otherwise Spark's conventions, with `value` encoded."""
    assert layout(columns, "r") == expected


@pytest.mark.parametrize(
    ("layout", "columns", "words"),
    [
        (Layout(None, None, "json"), schema(id=pa.int64(), topic=pa.string()), "'topic' can be"),
        (Layout(("nr",), None, "json"), schema(id=pa.int64()), "key='nr'.*there are id"),
        (Layout(("at",), None, "json"), schema(at=TIME), "'at' is timestamp.*key_format="),
        (Layout(("x",), None, "json"), schema(x=pa.float64()), "'x' is double"),
        (Layout(("x",), None, "json"), schema(x=pa.decimal128(9, 2)), "'x' is decimal"),
        (Layout(None, None, "json"), schema(value=pa.string()), "'value' is string; JSON"),
        (Layout(("id",), None, "json"), schema(id=pa.int64(), value=ROW), "whole rows.*'value'"),
        (Layout(None, "json", None), schema(key=ROW), "'value' is missing"),
        (Layout(None, "json", "json"), schema(id=pa.int64()), "needs key="),
        (Layout(None, "json", "json"), schema(value=ROW), "needs a column 'key'"),
    ],
)
def test_columns_without_a_clear_place(layout: Layout, columns: pa.Schema, words: str) -> None:
    """Refused, naming the column and the next step; nothing is guessed."""
    with pytest.raises(ConfigurationError, match=f"(?s){words}"):
        layout(columns, "r")


def test_column_that_is_there_twice() -> None:
    twice = pa.schema([("id", pa.int64()), ("id", pa.int64())])
    with pytest.raises(ConfigurationError, match="'id' exists twice"):
        Layout(None, None, "json")(twice, "r")


REGISTRY = {"url": "http://localhost:8081"}


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"value_format": "xml"}, "value_format='xml'.*'json', 'avro'"),
        ({"value_format": "text"}, "value_format='text'.*'json', 'avro'"),
        ({"value_format": "json", "key_format": "xml"}, "key_format='xml'.*'text', 'json', 'avro'"),
        ({"key": "id"}, "needs value_format="),
        ({"key": [], "value_format": "json"}, "key="),
        ({"key": "", "value_format": "json"}, "key="),
        (
            {"key": ["a", "b"], "value_format": "json"},
            "cannot be text.*key_format='json' or 'avro'",
        ),
        ({"key": ["a", "b"], "value_format": "json", "key_format": "text"}, "cannot be text"),
        ({"value_format": "avro"}, "schema_registry="),
        ({"value_format": "avro", "schema_registry": {}}, "url"),
        ({"value_format": "avro", "schema_registry": {"url": "localhost:8081"}}, "http://"),
        ({"value_format": "avro", "schema_registry": REGISTRY, "topic": None}, "topic"),
        ({"value_format": "json", "schema_registry": REGISTRY}, "is for Avro"),
        ({"value_schema": '"string"'}, "is for value_format='avro'"),
        ({"key_format": "avro", "value_schema": '"string"'}, "is for value_format='avro'"),
        ({"value_format": "avro", "schema_registry": REGISTRY, "value_schema": "{"}, "not an Avro"),
        (
            {"value_format": "avro", "schema_registry": REGISTRY, "value_schema": '{"type": "x"}'},
            "value_schema: not an Avro",
        ),
        (
            {
                "value_format": "avro",
                "schema_registry": {**REGISTRY, "use.latest.version": True},
                "value_schema": '"string"',
            },
            "choose one",
        ),
    ],
)
def test_settings_that_do_not_fit_each_other(settings: dict[str, Any], words: str) -> None:
    """Refused in the constructor."""
    with pytest.raises(ConfigurationError, match=words):
        sink(**settings)


def test_typed_sink_as_a_value() -> None:
    """It pickles; two sinks with equal layouts share the work; a plain sink has no layout."""
    typed = sink(value_format="avro", key=["id"], key_format="json", schema_registry=REGISTRY)
    again = pickle.loads(pickle.dumps(typed))  # noqa: S301 - our own bytes
    assert again.columns == typed.columns
    assert hash(again.columns) == hash(typed.columns)
    assert sink().columns is None


@pytest.mark.parametrize("key_format", [None, "text", "json", "avro"])
def test_name_of_a_column_is_a_list_of_one(key_format: str | None) -> None:
    """One meaning of `key`, whatever the format."""
    settings = {"value_format": "json", "key_format": key_format}
    if key_format == "avro":
        settings["schema_registry"] = REGISTRY  # type: ignore[assignment]
    assert sink(key="id", **settings).columns == sink(key=["id"], **settings).columns


def test_avro_is_an_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it plain rows and JSON work, and the error for Avro names the package to install."""
    for module in [
        name for name in sys.modules if name.startswith("sparkonce.sinks.kafka.rows.avro")
    ]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "fastavro", None)
    assert sink(value_format="json").columns is not None
    with pytest.raises(ModuleNotFoundError, match=r"'fastavro'.*sparkonce\[avro\]"):
        sink(value_format="avro", schema_registry=REGISTRY)


# -- Avro: a schema from types ---------------------------------------------------------------------

TYPED = pa.struct(
    [
        pa.field("id", pa.int64(), nullable=False),
        ("at", TIME),
        ("seen", pa.timestamp("us")),
        ("price", pa.decimal128(12, 2)),
        ("tags", pa.list_(pa.field("element", pa.string(), nullable=False))),
        ("home", pa.struct([("geo", pa.struct([("x", pa.float32())]))])),
        ("geo", pa.struct([("x", pa.float64())])),
    ]
)


def test_schema_made_of_types() -> None:
    """Nullable columns default to null; records with the same name in two places do not collide."""
    made = json.loads(derive(TYPED, "Value"))
    assert (made["name"], made["namespace"]) == ("Value", "sparkonce")
    by_name = {field.pop("name"): field for field in made["fields"]}
    assert by_name["id"] == {"type": "long"}
    assert by_name["at"] == {
        "type": ["null", {"type": "long", "logicalType": "timestamp-micros"}],
        "default": None,
    }
    assert by_name["seen"]["type"][1]["logicalType"] == "local-timestamp-micros"
    assert by_name["price"]["type"][1] == {
        "type": "bytes",
        "logicalType": "decimal",
        "precision": 12,
        "scale": 2,
    }
    assert by_name["tags"]["type"][1] == {"type": "array", "items": "string"}
    assert by_name["home"]["type"][1]["namespace"] == "sparkonce.Value"
    fastavro.parse_schema(json.loads(derive(TYPED, "Value")))
    assert derive(pa.int64(), "Key") == '"long"'


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (pa.struct([("größe", pa.int64())]), "'größe'.*rename"),
        (pa.struct([("a", pa.struct([("1st", pa.int64())]))]), r"'a\.1st'"),
        (pa.struct([("a", pa.duration("us"))]), "'a' is duration.*cast"),
        (pa.struct([("m", pa.map_(pa.int32(), pa.int32()))]), "'m' is map.*keys"),
        (pa.struct([("n", pa.null())]), "'n' is null"),
    ],
)
def test_column_that_avro_has_no_place_for(kind: pa.DataType, words: str) -> None:
    """Refused, naming its path and the next step."""
    with pytest.raises(ConfigurationError, match=words):
        derive(kind, "Value")


# -- Avro: a schema given by the user --------------------------------------------------------------


def record(*fields: dict[str, Any]) -> str:
    return json.dumps({"type": "record", "name": "R", "fields": list(fields)})


def one(avro: Any) -> str:
    return record({"name": "a", "type": avro})


def decimal(precision: int, scale: int) -> dict[str, Any]:
    return {"type": "bytes", "logicalType": "decimal", "precision": precision, "scale": scale}


MILLIS = {"type": "long", "logicalType": "timestamp-millis"}


@pytest.mark.parametrize(
    ("kind", "avro"),
    [
        (pa.int64(), "int"),
        (pa.int64(), "double"),
        (pa.float64(), "long"),
        (pa.float64(), "float"),
        (pa.bool_(), "int"),
        (pa.int32(), "string"),
        (pa.int32(), "float"),
        (pa.string(), "bytes"),
        (pa.binary(), "string"),
        (pa.decimal128(12, 2), "double"),
        (pa.decimal128(12, 2), "bytes"),
        (pa.decimal128(12, 2), decimal(12, 1)),
        (pa.decimal128(12, 2), decimal(12, 3)),
        (TIME, "long"),
        (pa.timestamp("us"), MILLIS),
        (TIME, {"type": "long", "logicalType": "local-timestamp-micros"}),
        (pa.date32(), "int"),
        (pa.int32(), {"type": "int", "logicalType": "date"}),
        (pa.list_(pa.int64()), {"type": "array", "items": "int"}),
        (pa.map_(pa.string(), pa.int64()), {"type": "map", "values": "int"}),
        (pa.struct([("b", pa.int64())]), "string"),
        (pa.int64(), ["null", "long", "string"]),
    ],
)
def test_type_that_the_schema_cannot_hold(kind: pa.DataType, avro: Any) -> None:
    """Refused before any row is written: fastavro would write some of these as something else."""
    with pytest.raises(ConfigurationError, match=r"\ba"):
        fit(pa.struct([("a", kind)]), one(avro))


@pytest.mark.parametrize(
    ("written", "words"),
    [
        (record(), "a: the schema's 'R' has no such field"),
        (record({"name": "a", "type": "int"}, {"name": "b", "type": "int"}), "b: .*no such column"),
        (
            record(
                {"name": "a", "type": "int"},
                {"name": "b", "type": ["bytes", "null"], "default": "x"},
            ),
            "b: .*default of bytes",
        ),
    ],
)
def test_columns_and_fields_that_do_not_meet(written: str, words: str) -> None:
    """A column without a field would be lost silently; a field without a column needs a default."""
    with pytest.raises(ConfigurationError, match=words):
        fit(pa.struct([("a", pa.int32())]), written)


def test_named_type_used_twice() -> None:
    """It is found by its name."""
    point = {"type": "record", "name": "P", "fields": [{"name": "x", "type": "double"}]}
    written = record({"name": "a", "type": point}, {"name": "b", "type": ["null", "P"]})
    kind = pa.struct([("x", pa.float64())])
    rows = pa.array([{"a": {"x": 1.0}, "b": {"x": 2.0}}], pa.struct([("a", kind), ("b", kind)]))
    assert read(rows, written) == [{"a": {"x": 1.0}, "b": {"x": 2.0}}]


# -- Avro: rows ------------------------------------------------------------------------------------


def test_text_that_is_not_utf8_is_told_by_its_column() -> None:
    broken = pa.array([b"\xff"]).cast(pa.string(), safe=False)
    rows = pa.StructArray.from_arrays([broken], ["a"])
    with pytest.raises(RowError, match="'value' has text that is not UTF-8"):
        AvroSchema("value", one("string"), 1).encoded(rows)


def read(column: pa.Array[Any], written: str) -> list[Any]:
    """The rows as fastavro reads them, after the frame."""
    encoded = AvroSchema("value", written, 258).encoded(column).to_pylist()
    assert all(data is None or data[:5] == b"\0\0\0\1\2" for data in encoded)
    parsed = json.loads(written)
    return [
        None if data is None else fastavro.schemaless_reader(BytesIO(data[5:]), parsed, None)
        for data in encoded
    ]


ROWS = st.fixed_dictionaries(
    {
        "id": st.integers(-(2**63), 2**63 - 1),
        "at": st.none()
        | st.datetimes(
            dt.datetime(1, 1, 2),  # noqa: DTZ001
            dt.datetime(9999, 12, 30),  # noqa: DTZ001
            timezones=st.just(dt.UTC),
        ),
        "seen": st.none() | st.datetimes(),
        "price": st.none() | st.decimals(-(10**9), 10**9, places=2, allow_nan=False),
        "tags": st.none() | st.lists(st.text()),
        "home": st.none()
        | st.fixed_dictionaries(
            {"geo": st.none() | st.fixed_dictionaries({"x": st.floats(width=32, allow_nan=False)})}
        ),
        "geo": st.none() | st.fixed_dictionaries({"x": st.none() | st.floats(allow_nan=False)}),
    }
)


@given(st.lists(st.none() | ROWS, min_size=1), st.data())
def test_rows_are_read_as_they_were(rows: list[Any], data: st.DataObject) -> None:
    """Also in a slice, and in any time zone of Spark's session."""
    zone = data.draw(st.sampled_from(["UTC", "Europe/Berlin", "America/St_Johns"]))
    index = TYPED.get_field_index("at")
    kind = pa.struct(
        [
            field if number != index else pa.field("at", pa.timestamp("us", tz=zone))
            for number, field in enumerate(TYPED)
        ]
    )
    column = pa.array(rows, TYPED).cast(kind)
    start = data.draw(st.integers(0, len(rows) - 1))
    assert read(column.slice(start), derive(kind, "Value")) == rows[start:]


def test_times_before_1970_in_milliseconds() -> None:
    """They are rounded down to the millisecond, as in Spark's to_avro."""
    micros = [-1, -1000, -1500, 1500, None]
    lists = pa.list_(TIME)
    kind = pa.struct([("a", TIME), ("l", lists), ("m", pa.map_(pa.string(), TIME))])
    rows = pa.array([{"a": at, "l": [at], "m": [("k", at)]} for at in micros], kind)
    avro = ["null", MILLIS]
    written = record(
        {"name": "a", "type": avro},
        {"name": "l", "type": {"type": "array", "items": avro}},
        {"name": "m", "type": {"type": "map", "values": avro}},
    )
    epoch = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)
    for row, millis in zip(read(rows, written), [-1, -1, -2, 1, None], strict=True):
        at = None if millis is None else epoch + dt.timedelta(milliseconds=millis)
        assert row == {"a": at, "l": [at], "m": {"k": at}}


def test_fixed_and_enum_and_map() -> None:
    kind = pa.struct(
        [("f", pa.binary()), ("e", pa.string()), ("m", pa.map_(pa.string(), pa.date32()))]
    )
    written = record(
        {"name": "f", "type": {"type": "fixed", "name": "F", "size": 2}},
        {"name": "e", "type": ["null", {"type": "enum", "name": "E", "symbols": ["A"]}]},
        {"name": "m", "type": {"type": "map", "values": {"type": "int", "logicalType": "date"}}},
    )
    rows = [{"f": b"ab", "e": "A", "m": [("-type", dt.date(2026, 1, 2))]}]
    assert read(pa.array(rows, kind), written) == [{**rows[0], "m": dict(rows[0]["m"])}]


@pytest.mark.parametrize(
    ("kind", "avro", "value", "words"),
    [
        (pa.int64(), "long", None, "'value.a' is null"),
        (pa.list_(pa.int64()), {"type": "array", "items": "long"}, [1, None], r"'value.a\[\]' is"),
        (
            pa.map_(pa.string(), pa.int64()),
            {"type": "map", "values": "long"},
            [("secret", None)],
            r"'value.a\{\}' is null",
        ),
        (
            pa.struct([("b", pa.int64())]),
            {"type": "record", "name": "S", "fields": [{"name": "b", "type": "long"}]},
            {"b": None},
            r"'value\.a\.b' is null",
        ),
        (pa.bool_(), "boolean", None, "'value.a' is null"),
        (pa.list_(pa.bool_()), {"type": "array", "items": "boolean"}, [True, None], r"\[\]' is"),
        (
            pa.map_(pa.string(), pa.bool_()),
            ["null", {"type": "map", "values": "boolean"}],
            [("secret", None)],
            r"'value.a\{\}' is null",
        ),
        (
            pa.string(),
            {"type": "string", "logicalType": "uuid"},
            "secret",
            "'value.a' is text that is not a UUID",
        ),
        (
            pa.string(),
            ["null", {"type": "enum", "name": "E", "symbols": ["A", "B"]}],
            "secret",
            "'value.a' is none of the schema's symbols: A, B",
        ),
        (
            pa.binary(),
            {"type": "fixed", "name": "F", "size": 4},
            b"secret",
            "'value.a' has 6 bytes, and the schema wants 4",
        ),
    ],
)
def test_row_that_does_not_fit(kind: pa.DataType, avro: Any, value: Any, words: str) -> None:
    """The error names the field and the reason, and shows nothing of the row."""
    rows = pa.array([{"a": value}], pa.struct([("a", kind)]))
    with pytest.raises(RowError, match=words) as refused:
        AvroSchema("value", one(avro), 1).encoded(rows)
    assert "secret" not in str(refused.value)


def test_nulls_where_the_schema_has_them() -> None:
    """Also inside a null, in a slice, and next to a tombstone."""
    inner = {"type": "record", "name": "S", "fields": [{"name": "b", "type": "boolean"}]}
    flags = {"type": "map", "values": ["null", "boolean"]}
    written = record({"name": "s", "type": ["null", inner]}, {"name": "m", "type": flags})
    kind = pa.struct([("s", pa.struct([("b", pa.bool_())])), ("m", pa.map_("string", pa.bool_()))])
    given = [{"s": {"b": None}, "m": []}, {"s": None, "m": [("a", None)]}, None]
    given += [{"s": {"b": True}, "m": [("a", False), ("b", None)]}]
    rows = pa.array(given, kind).slice(1)
    assert read(rows, written) == [
        {"s": None, "m": {"a": None}},
        None,
        {"s": {"b": True}, "m": {"a": False, "b": None}},
    ]


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        (schema(value=ROW), r"the value does not fit.*id is int64.*\bint\b"),
        (schema(value=ROW, topic=pa.string()), "'topic' names other topics"),
    ],
)
def test_schema_that_cannot_be_settled(columns: pa.Schema, words: str) -> None:
    """Refused before any request to the registry, which never forgets a schema."""
    written = record({"name": "id", "type": "int"}, {"name": "at", "type": MILLIS})
    nowhere = {"url": "http://127.0.0.1:1", "max.retries": 0}
    typed = sink(value_format="avro", schema_registry=nowhere, value_schema=written)
    assert typed._avro is not None
    with pytest.raises(ConfigurationError, match=words):
        typed._avro.choose_schemas(columns)


@pytest.mark.parametrize(
    ("url", "error"),
    [("http://127.0.0.1:1", SinkUnavailableError), ("http://[", ConfigurationError)],
)
def test_registry_that_cannot_be_reached(url: str, error: type[Exception]) -> None:
    """No server listens now, or there is no such address."""
    with pytest.raises(error, match="schema registry at"):
        Registry({"url": url, "max.retries": 0}).schema("orders-value", '"string"')


def test_row_before_a_schema_is_settled() -> None:
    """A sink that was not validated writes no Avro."""
    typed = sink(value_format="avro", schema_registry=REGISTRY)
    assert typed._avro is not None
    with pytest.raises(ProtocolError, match="validate"):
        typed._avro.encoded(pa.RecordBatch.from_pydict({"value": pa.array([{"id": 1}])}))


# -- the registry's settings -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"auto.register.schemas": "no"}, "True or False"),
        ({"auto.register.schemas": True, "use.latest.version": True}, "choose one"),
        ({"bearer.auth.custom.provider.function": print}, "function"),
        ({"url": "http://reader:hunter2@a:1"}, "basic.auth.user.info"),
    ],
)
def test_registry_setting_that_cannot_work(config: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        Registry({**REGISTRY, **config})


def test_registry_setting_that_nobody_knows() -> None:
    """The client refuses it by its name."""
    with pytest.raises(ConfigurationError, match=r"no\.such"):
        Registry({**REGISTRY, "no.such": 1}).schema("orders-value", '"string"')


def test_registry_shows_no_secret() -> None:
    """Secrets are neither in its `repr` nor in its address, however they were given."""
    registry = Registry(
        {
            "url": "http://a:1/x,https://b:2",
            "ssl.key.password": "letmein",
            "basic.auth.user.info": "writer:s3cret",
        }
    )
    assert registry.where == "http://a:1/x,https://b:2"
    shown = f"{registry!r} {registry._without_secrets('letmein s3cret writer')}"
    assert not [word for word in ("letmein", "s3cret") if word in shown]
    assert "writer" in shown
