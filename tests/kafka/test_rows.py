"""The parts of the Kafka sink that need no broker: rows to messages, settings to clients."""

from __future__ import annotations

import ctypes
import datetime as dt
import pickle
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pytest
from confluent_kafka import KafkaError

from sparkonce.errors import ConfigurationError, ProtocolError
from sparkonce.model import BranchId, Committable, Owner
from sparkonce.sinks import KafkaSink
from sparkonce.sinks.kafka.branch import KafkaBranch
from sparkonce.sinks.kafka.connecting.settings import KafkaSettings
from sparkonce.sinks.kafka.rows.conventions import RowError, check_schema
from sparkonce.sinks.kafka.rows.messages import COPY, Messages, messages_by_topic
from sparkonce.sinks.kafka.validation import Validation
from sparkonce.sinks.kafka.writing.advice import advice
from tests.support.kafka_settings import SASL

HEADERS = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
TIME = pa.timestamp("us", tz="UTC")


def batch(**columns: pa.Array) -> pa.RecordBatch:
    return pa.RecordBatch.from_pydict(columns)


def messages(rows: pa.RecordBatch, topic: str | None = "orders") -> dict[str, list[dict]]:
    """The messages that librdkafka reads at the addresses, by topic, without its defaults."""
    return {name: _read(found) for name, found in messages_by_topic(rows, topic)}


def _read(found: Messages) -> list[dict]:
    read = [
        {"value": _bytes(row["payload"], row["len"]), "key": _bytes(row["key"], row["key_len"])}
        | ({"partition": int(row["partition"])} if row["partition"] >= 0 else {})
        for row in found.rows
    ]
    for name, column in (("timestamp", found.timestamps), ("headers", found.headers)):
        for number, item in enumerate(() if column is None else column):
            if item:
                read[number][name] = item
    return read


def _bytes(address: int, length: int) -> bytes | None:
    return ctypes.string_at(int(address), int(length)) if address else None


# -- schema ----------------------------------------------------------------------------------------


def test_every_column_of_sparks_convention() -> None:
    """Spark's own column types for Kafka are accepted, including their large variants."""
    check_schema(
        pa.schema(
            [
                ("value", pa.large_string()),
                ("key", pa.binary()),
                ("topic", pa.string()),
                ("partition", pa.int32()),
                ("headers", HEADERS),
                ("timestamp", TIME),
            ]
        ),
        None,
    )


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"id": pa.int64(), "value": pa.string()}, ["'id'", "to_json", "value_format="]),
        (
            {"value": pa.string(), "offset": pa.int64()},
            ["'offset'", "Kafka source", "key and value"],
        ),
        ({"value": pa.string(), "timestampType": pa.int32()}, ["'timestampType'", "Kafka source"]),
        ({"key": pa.string()}, ["'value'", "missing"]),
        ({"value": pa.struct([("a", pa.int32())])}, ["'value'", "struct", "to_json"]),
        ({"value": pa.int64()}, ["'value'", "int64", "cast"]),
        ({"value": pa.string(), "key": pa.int32()}, ["'key'", "int32"]),
        ({"value": pa.string(), "topic": pa.binary()}, ["'topic'", "string"]),
        ({"value": pa.string(), "partition": pa.int64()}, ["'partition'", "int64"]),
        ({"value": pa.string(), "partition": pa.string()}, ["'partition'"]),
        ({"value": pa.string(), "headers": pa.list_(pa.string())}, ["'headers'", "array<struct"]),
        ({"value": pa.string(), "timestamp": pa.timestamp("us")}, ["'timestamp'", "time zone"]),
    ],
)
def test_column_that_kafka_has_no_place_for(
    schema: dict[str, pa.DataType], words: list[str]
) -> None:
    """It is refused before any data moves; the message names the column and the next step."""
    with pytest.raises(ConfigurationError) as refused:
        check_schema(pa.schema(list(schema.items())), "orders")
    assert all(word in str(refused.value) for word in words)


@pytest.mark.parametrize(("topic", "names"), [("out", ["topic"]), ("out", []), (None, ["topic"])])
def test_column_that_leads_rows_away_from_the_sinks_topic(
    topic: str | None,
    names: list[str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The columns of a Kafka source would silently lead all rows back into its topic."""
    sink = KafkaSink(topic, bootstrap_servers="kafka:9092")
    monkeypatch.setattr(Validation, "run", lambda self: None)
    sink.validate(pa.schema([(name, pa.string()) for name in ["value", *names]]))
    told = [line for line in caplog.messages if "column 'topic'" in line and "select=" in line]
    assert len(caplog.messages) == len(told) == (topic is not None and bool(names))
    assert all("not to 'out'" in line for line in told)


def test_no_topic_anywhere() -> None:
    """Neither the sink nor the rows name a topic: refused."""
    with pytest.raises(ConfigurationError, match="no topic"):
        check_schema(pa.schema([("value", pa.string())]), None)


# -- rows ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "data_type", [pa.string(), pa.large_string(), pa.binary(), pa.large_binary()]
)
def test_values_and_keys_with_nulls(data_type: pa.DataType) -> None:
    """Null stays null (a tombstone), empty stays empty, text is UTF-8, also in a slice."""
    values = pa.array([None, "a", "", "grüße €", None], pa.string()).cast(data_type)
    rows = batch(value=values, key=values)
    encoded = [None, b"a", b"", "grüße €".encode(), None]
    expected = [{"value": item, "key": item} for item in encoded]
    assert messages(rows) == {"orders": expected}
    assert messages(rows.slice(1, 3)) == {"orders": expected[1:4]}


def test_only_values() -> None:
    """Without a key column messages carry no key."""
    assert messages(batch(value=pa.array(["a"]))) == {"orders": [{"value": b"a", "key": None}]}


@pytest.mark.parametrize("data_type", [pa.string(), pa.large_binary()])
def test_column_without_a_byte(data_type: pa.DataType) -> None:
    """Arrow keeps no bytes for it, but an empty value is not a tombstone."""
    values = pa.array(["", "", None], pa.string()).cast(data_type)
    expected = [{"value": item, "key": item} for item in (b"", b"", None)]
    assert messages(batch(value=values, key=values)) == {"orders": expected}


def test_topic_by_row() -> None:
    """Each topic gets its rows in order; null means the sink's own topic."""
    rows = batch(value=pa.array(["1", "2", "3", "4"]), topic=pa.array(["b", None, "b", "a"]))
    found = {name: [m["value"] for m in rows] for name, rows in messages(rows, "own").items()}
    assert found == {"b": [b"1", b"3"], "own": [b"2"], "a": [b"4"]}


def test_topic_by_row_takes_all_of_a_row_along() -> None:
    """Headers, time and partition stay with their row."""
    times = [dt.datetime(2026, 1, day, tzinfo=dt.UTC) for day in (2, 3, 4)]
    rows = batch(
        value=pa.array(["1", "2", "3"]),
        topic=pa.array(["a", "b", "a"]),
        partition=pa.array([5, 6, None], pa.int32()),
        headers=pa.array([[{"key": str(n), "value": b"x"}] for n in (1, 2, 3)], HEADERS),
        timestamp=pa.array(times, TIME),
    )
    ((whole,),) = [messages(rows.drop_columns(["topic"])).values()]
    assert messages(rows) == {"a": [whole[0], whole[2]], "b": [whole[1]]}


@pytest.mark.parametrize("missing", [None, ""])
def test_row_without_a_topic(missing: str | None) -> None:
    """No topic in the row and none in the sink: the row is refused, naming the column."""
    rows = batch(value=pa.array(["1"]), topic=pa.array([missing], pa.string()))
    with pytest.raises(RowError, match="'topic'"):
        messages(rows, None)


def test_partition_headers_and_timestamp() -> None:
    """They are part of the message; null omits them, so that the producer chooses."""
    rows = batch(
        value=pa.array(["1", "2"]),
        partition=pa.array([3, None], pa.int32()),
        headers=pa.array(
            [[{"key": "h", "value": b"x"}, {"key": "n", "value": None}], None], HEADERS
        ),
        timestamp=pa.array([dt.datetime(2026, 1, 2, tzinfo=dt.UTC), None], TIME),
    )
    assert messages(rows)["orders"] == [
        {
            "value": b"1",
            "key": None,
            "partition": 3,
            "headers": ((b"h", b"x"), (b"n", None)),
            "timestamp": 1767312000000,
        },
        {"value": b"2", "key": None},
    ]


def test_values_that_librdkafka_takes_one_by_one() -> None:
    """The same rows as an array of rd_kafka_vu_t: kinds, addresses, sizes and numbers."""
    rows = batch(
        value=pa.array(["12", None]),
        key=pa.array(["k", ""]),
        partition=pa.array([3, None], pa.int32()),
        timestamp=pa.array([dt.datetime(2026, 1, 2, tzinfo=dt.UTC), None], TIME),
    )
    ((_, found),) = messages_by_topic(rows, "orders")
    values = found.values(topic=4711)
    assert (values.itemsize, values["kind"].tolist()) == (72, [[2, 3, 4, 5, 7, 8, 10]] * 2)
    numbers = values["value"]
    assert numbers["address"][:, 0].tolist() == [4711, 4711]
    assert numbers["int32"][:, 1].tolist() == [3, -1]
    assert [_bytes(v["address"], v["size"]) for v in numbers[:, 2]] == [b"12", None]
    assert [_bytes(v["address"], v["size"]) for v in numbers[:, 3]] == [b"k", b""]
    assert numbers["int32"][:, 4].tolist() == [COPY, COPY]
    assert numbers["int64"][:, 5].tolist() == [1767312000000, 0]
    assert numbers["address"][:, 6].tolist() == [0, 0]


def test_headers_of_text_are_sent_as_bytes() -> None:
    """A NUL in their values is a byte like any other."""
    kind = pa.list_(pa.struct([("key", pa.string()), ("value", pa.string())]))
    rows = batch(
        value=pa.array(["1"]),
        headers=pa.array([[{"key": "h", "value": "a\0ä"}, {"key": "n", "value": None}]], kind),
    )
    ((message,),) = messages(rows).values()
    assert message["headers"] == ((b"h", "a\0ä".encode()), (b"n", None))


@pytest.mark.parametrize(
    ("column", "values"),
    [
        ("partition", pa.array([-1], pa.int32())),
        ("headers", pa.array([[{"key": None, "value": b"x"}]], HEADERS)),
        ("headers", pa.array([[None]], HEADERS)),
        ("headers", pa.array([[{"key": "a\0b", "value": b"x"}]], HEADERS)),
        ("timestamp", pa.array([0], TIME)),
        ("topic", pa.array(["orders\0evil"])),
        ("topic", pa.array(["."])),
    ],
)
def test_row_that_kafka_cannot_hold(column: str, values: pa.Array) -> None:
    """Refused, naming the column: librdkafka would read each as something else."""
    with pytest.raises(RowError, match=column):
        messages(batch(value=pa.array(["1"]), **{column: values}))


# -- settings --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("transactional.id", "mine"),
        ("transaction.timeout.ms", 1000),
        ("bootstrap.servers", "elsewhere:9092"),
        ("metadata.broker.list", "elsewhere:9092"),
        ("enable.idempotence", False),
        ("enable.idempotence", "false"),
        ("acks", 1),
        ("request.required.acks", "0"),
        ("statistics.interval.ms", 1),
        ("delivery.report.only.error", False),
        ("enabled_events", 0),
        ("error_cb", print),
        ("security.protocol", "TLS"),
        ("enable.ssl.certificate.verification", False),
        ("sasl.oauthbearer.method", "oidc"),
        ("sasl.kerberos.keytab", "x"),
    ],
)
def test_setting_that_is_not_the_users(name: str, value: object) -> None:
    """Settings that the sink owns, that break exactly-once, or that one client lacks: named."""
    with pytest.raises(ConfigurationError) as refused:
        KafkaSink("orders", bootstrap_servers="localhost:9092", config={name: value})
    canonical = {"metadata.broker.list": "bootstrap.servers", "request.required.acks": "acks"}
    assert canonical.get(name, name) in str(refused.value)


def test_defaults_can_be_overridden_by_either_name() -> None:
    """The user's setting replaces a tuned default, also under librdkafka's other name for it."""
    config = {"queue.buffering.max.ms": 5, "compression.codec": "zstd", "acks": "all"}
    producer = KafkaSettings("a:1", config).for_producer("id", 900_000, None)
    assert (producer["linger.ms"], producer["compression.type"]) == (5, "zstd")
    assert "compression.codec" not in producer
    with pytest.raises(ConfigurationError, match="twice"):
        KafkaSettings("a:1", {"linger.ms": 5, "queue.buffering.max.ms": 6})


def test_batches_stay_below_the_topics_limit() -> None:
    """librdkafka does not split a batch that the broker refuses as too large."""
    assert KafkaSettings("a:1").for_producer("id", 1000, 1000)["batch.size"] == 900
    assert KafkaSettings("a:1").for_producer("id", 1000, 10**8)["batch.size"] == 1 << 20


@pytest.mark.parametrize(
    ("brokers", "config", "expected"),
    [
        (1, {}, False),
        (6, {}, False),
        (7, {}, None),
        (None, {}, None),
        (1, {"enable.sparse.connections": True}, True),
    ],
)
def test_producer_connects_to_every_broker_of_a_small_cluster(
    brokers: int | None, config: dict[str, object], expected: bool | None
) -> None:
    """That begins fastest; in a large cluster each task would open too many connections."""
    producer = KafkaSettings("a:1", config).for_producer("id", 1000, None, brokers)
    assert producer.get("enable.sparse.connections") is expected


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        ({"bootstrap_servers": " "}, "bootstrap_servers"),
        ({"topic": "two words"}, "two words"),
        ({"topic": ".."}, "topic"),
        ({"transaction_timeout_s": 0.01}, "transaction_timeout_s=0.01"),
        ({"transaction_timeout_s": float("nan")}, "transaction_timeout_s=nan"),
        ({"config": {"transaction.timeout.ms": 1000}}, "use transaction_timeout_s="),
        (
            {"config": {"transaction.timeout.ms": 1000}, "transaction_timeout_s": 1},
            "use transaction_timeout_s=",
        ),
        ({"name": "a b"}, "name="),
        ({"writers": 2}, "writers=2"),
    ],
)
def test_argument_that_cannot_work(arguments: dict[str, object], word: str) -> None:
    """Refused in the constructor, naming it."""
    with pytest.raises(ConfigurationError, match=word):
        KafkaSink(**{"bootstrap_servers": "localhost:9092", **arguments})  # type: ignore[arg-type]


# -- the sink as a value ---------------------------------------------------------------------------


def test_pickled_sink_keeps_settings_and_shows_no_secret() -> None:
    """It travels with all it needs; `repr`, target and its settings' `repr` hold no password."""
    sink = pickle.loads(  # noqa: S301 - our own bytes
        pickle.dumps(KafkaSink("orders", bootstrap_servers="localhost:9092", config=SASL))
    )
    assert sink._settings.for_producer("id", 1, None)["sasl.password"] == "hunter2"
    shown = f"{sink!r} {sink.target} {sink._settings!r} {vars(sink)!r}"
    assert "hunter2" not in shown
    assert "letmein" not in shown
    assert sink.target == "kafka topic orders"
    assert sink.where == "kafka topic orders at localhost:9092"
    assert sink._settings.without_secrets("bad hunter2") == "bad ***"


BRANCH = BranchId(Owner("0" * 16, "1-2"), 7, 3, "kafka", 0, 42)
PREPARED = KafkaBranch(
    BRANCH.name, 5, 0, {"orders": [0, 2]}, "cluster", ["orders"], 1000.0, 100_000
)


def test_committable_holds_all_that_a_commit_needs() -> None:
    """It survives JSON, and is safe until shortly before the broker's timeout."""
    committable = Committable.from_json(PREPARED.committable(BRANCH).to_json())
    assert KafkaBranch.of(committable) == PREPARED
    assert committable.safe_until == 1000.0 + 100 - 10
    long = KafkaBranch(
        BRANCH.name, 5, 0, {"orders": [0, 2]}, "cluster", ["orders"], 1000.0, 900_000
    )
    assert long.committable(BRANCH).safe_until == 1000.0 + 900 - 60


def test_committable_says_what_stands_for_the_branch() -> None:
    """One line for people: the transaction, its producer, and where its rows are."""
    rows = replace(PREPARED, partitions={"orders": [0, 2], "returns": [1]})
    assert rows.committable(BRANCH).text == (
        f"transaction {BRANCH.name} of producer 5/0, topic orders partitions 0, 2, topic returns "
        "partitions 1"
    )
    nothing = replace(PREPARED, producer_id=-1, producer_epoch=-1, partitions={})
    assert nothing.committable(BRANCH).text == f"transaction {BRANCH.name}, without rows"


def test_committable_of_an_older_version() -> None:
    """Version 1 had one marker, and did not record how long it is kept."""
    payload: dict[str, Any] = {**PREPARED.committable(BRANCH).payload}
    del payload["proof_kept_s"], payload["marker_topics"]
    for topic, topics in (("orders", ["orders"]), (None, [])):
        old = Committable(BRANCH, {**payload, "marker_topic": topic}, version=1)
        assert KafkaBranch.of(old) == replace(PREPARED, marker_topics=topics)


def test_committable_of_somebody_else() -> None:
    """A newer version needs the newer library; a foreign payload is an error in the code."""
    with pytest.raises(ConfigurationError, match="newer"):
        KafkaBranch.of(Committable(BRANCH, {}, version=3))
    with pytest.raises(ProtocolError, match="not a committable"):
        KafkaBranch.of(Committable(BRANCH, {"path": "x"}))


def test_brokers_without_room_for_the_marker() -> None:
    """The error names their setting, 4096 by default."""
    error = KafkaError(KafkaError.OFFSET_METADATA_TOO_LARGE)
    assert "offset.metadata.max.bytes" in advice(error)
