"""Typed rows in Kafka: from a query's columns to what a consumer's own deserializer reads.

The reader shares nothing with the sink: confluent-kafka's consumer and its Avro deserializer, which
asks the registry for the schema that each message names.
"""

from __future__ import annotations

import datetime as dt
import json
from collections import Counter
from collections.abc import Callable, Iterator
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from confluent_kafka import OFFSET_BEGINNING, Consumer, KafkaError, Message, TopicPartition
from confluent_kafka.schema_registry import SchemaRegistryClient
from confluent_kafka.schema_registry.avro import AvroDeserializer
from confluent_kafka.serialization import MessageField, SerializationContext
from pyspark.errors import StreamingQueryException

from integration_tests.support import registry as registries
from integration_tests.support.registry import Registry
from sparkonce import ExactlyOnce, failpoints
from sparkonce.errors import ConfigurationError, SinkUnavailableError
from sparkonce.finding import Level
from sparkonce.sinks import KafkaSink
from sparkonce.sinks.kafka.rows.registry import Registry as RegistryClient
from sparkonce.testing.services import KafkaServer

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

UTC = dt.UTC
LOGIN = "writer:hunter2"


@pytest.fixture
def registry() -> Iterator[Registry]:
    with registries.running() as registry:
        yield registry


@pytest.fixture
def topic(fresh_topic: Callable[..., str]) -> str:
    return fresh_topic(3)


class Job:
    """A query over a folder of JSON files, one file a batch, into one topic."""

    def __init__(self, spark: SparkSession, folder: Path, server: KafkaServer, topic: str) -> None:
        self.spark = spark
        self.folder = folder
        self.server = server
        self.topic = topic
        self.files = 0
        (folder / "in").mkdir()

    def add(self, *rows: dict[str, Any]) -> None:
        """One file of rows, and so one batch."""
        hidden = self.folder / "hidden"
        hidden.write_text("\n".join(map(json.dumps, rows)))
        hidden.rename(self.folder / "in" / f"{self.files:05d}.json")
        self.files += 1

    def sink(self, **settings: Any) -> KafkaSink:
        return KafkaSink(self.topic, bootstrap_servers=self.server.bootstrap_servers, **settings)

    def run(
        self,
        schema: str,
        *sinks: KafkaSink,
        shape: Callable[[DataFrame], DataFrame] = lambda df: df,
    ) -> None:
        """Process all files; raises the error of the query."""
        rows = self.spark.readStream.schema(schema).option("maxFilesPerTrigger", 1)
        with ExactlyOnce("typed", sinks=sinks, log=f"sqlite:///{self.folder}/txn.db") as pipeline:
            (
                shape(rows.json(str(self.folder / "in")))
                .writeStream.foreachBatch(pipeline)
                .option("checkpointLocation", str(self.folder / "ckpt"))
                .trigger(availableNow=True)
                .start()
                .awaitTermination()
            )

    def messages(self, topic: str | None = None) -> list[Message]:
        """What a consumer of committed records reads."""
        consumer = Consumer(
            {
                "bootstrap.servers": self.server.bootstrap_servers,
                "group.id": "reader",
                "isolation.level": "read_committed",
                "enable.partition.eof": True,
                "enable.auto.commit": False,
                "log_level": 0,
            }
        )
        topic = topic or self.topic
        partitions = consumer.list_topics(topic, timeout=30).topics[topic].partitions
        consumer.assign([TopicPartition(topic, p, OFFSET_BEGINNING) for p in partitions])
        found, ends = [], 0
        while ends < len(partitions):
            message = consumer.poll(30)
            assert message is not None, "the topic cannot be read to its end"
            if message.error() is None:
                found.append(message)
            elif message.error().code() == KafkaError._PARTITION_EOF:
                ends += 1
        consumer.close()
        return found

    def read_avro(self, registry: Registry, login: str | None = None) -> list[tuple[Any, Any]]:
        """Key and value of each message, as confluent-kafka's own deserializer reads them."""
        auth = {} if login is None else {"basic.auth.user.info": login}
        with SchemaRegistryClient({"url": registry.url, **auth}) as client:
            read = AvroDeserializer(client)
            context = {
                kind: SerializationContext(self.topic, kind)
                for kind in (MessageField.KEY, MessageField.VALUE)
            }

            def decoded(data: bytes | None, kind: str) -> Any:
                framed = data is not None and data[:1] == b"\0"
                return read(data, context[kind]) if framed else data

            return [
                (decoded(m.key(), MessageField.KEY), decoded(m.value(), MessageField.VALUE))
                for m in self.messages()
            ]


@pytest.fixture
def job(spark: SparkSession, tmp_path: Path, kafka: KafkaServer, topic: str) -> Job:
    kafka.start()  # an earlier test may have killed it
    return Job(spark, tmp_path, kafka, topic)


def multiset(items: Any) -> Counter[str]:
    return Counter(map(repr, items))


SCHEMA = """id long, name string, amount decimal(12,2), at timestamp, local timestamp_ntz, day date,
    raw binary, small short, ratio double, yes boolean, tags array<string>,
    counts map<string,int>, home struct<town: string, since: date, geo: struct<x: float>>,
    history array<struct<at: timestamp, by: string>>"""
FULL = {
    "id": 1,
    "name": "Grüße 🦊",
    "amount": "-1234567890.10",
    "at": "2026-01-02T03:04:05.123456Z",
    "local": "1969-12-31T23:59:59.999999",
    "day": "1582-10-15",
    "raw": "AP8=",
    "small": -7,
    "ratio": "NaN",
    "yes": True,
    "tags": ["a", None, ""],
    "counts": {"k": 1, "none": None},
    "home": {"town": "Köln", "since": "2020-02-29", "geo": {"x": 1.5}},
    "history": [{"at": "1969-07-20T20:17:40.000001Z", "by": None}, None],
}
READ = {
    "id": 1,
    "name": "Grüße 🦊",
    "amount": Decimal("-1234567890.10"),
    "at": dt.datetime(2026, 1, 2, 3, 4, 5, 123456, UTC),
    "local": dt.datetime(1969, 12, 31, 23, 59, 59, 999999),  # noqa: DTZ001 - it has no zone
    "day": dt.date(1582, 10, 15),
    "raw": b"\x00\xff",
    "small": -7,
    "ratio": float("nan"),
    "yes": True,
    "tags": ["a", None, ""],
    "counts": {"k": 1, "none": None},
    "home": {"town": "Köln", "since": dt.date(2020, 2, 29), "geo": {"x": 1.5}},
    "history": [{"at": dt.datetime(1969, 7, 20, 20, 17, 40, 1, UTC), "by": None}, None],
}
NOTHING = dict.fromkeys(READ, None)


# -- Avro ------------------------------------------------------------------------------------------


def test_every_type_in_avro(job: Job, registry: Registry) -> None:
    """Whole rows, each type with and without nulls, are read back unchanged, in two batches.

    The registry gets one request, whatever the number of rows, tasks and batches.
    """
    job.add(FULL, {"id": 2})
    job.add({**FULL, "id": 3})
    sink = job.sink(value_format="avro", key="id", schema_registry={"url": registry.url})
    job.run(SCHEMA, sink)
    assert registry.requests == [f"POST /subjects/{job.topic}-value/versions"]
    assert multiset(job.read_avro(registry)) == multiset(
        [(b"1", READ), (b"2", {**NOTHING, "id": 2}), (b"3", {**READ, "id": 3})]
    )


def test_structs_beside_sparks_own_columns(job: Job, registry: Registry) -> None:
    """A null struct is a tombstone; key, headers, partition and timestamp keep their meaning."""
    job.add(
        {"id": 1, "name": "a", "part": 0, "gone": False},
        {"id": 2, "name": None, "part": 2, "gone": True},
        {"id": None, "name": "c", "part": 1, "gone": False},
    )
    sink = job.sink(
        value_format="avro",
        key_format="avro",
        schema_registry={"url": registry.url},
        select=[
            "if(gone, null, struct(id, name)) AS value",
            "if(id is null, null, struct(id)) AS key",
            "part AS partition",
            "array(named_struct('key', 'h', 'value', cast(name AS binary))) AS headers",
            "timestamp'2026-01-02 03:04:05Z' AS timestamp",
        ],
    )
    job.run("id long, name string, part int, gone boolean", sink)
    assert multiset(job.read_avro(registry)) == multiset(
        [
            ({"id": 1}, {"id": 1, "name": "a"}),
            ({"id": 2}, None),
            (None, {"id": None, "name": "c"}),
        ]
    )
    found = {m.partition(): (m.headers(), m.timestamp()[1], m.value()) for m in job.messages()}
    assert {p: (h, t) for p, (h, t, _) in found.items()} == {
        0: ([("h", b"a")], 1767323045000),
        1: ([("h", b"c")], 1767323045000),
        2: ([("h", None)], 1767323045000),
    }
    assert found[2][2] is None
    assert [s["name"] for s in registry.versions(f"{job.topic}-key")] == ["Key"]


@pytest.mark.parametrize("key", ["id", ["id"]])
def test_key_of_one_column_is_a_record_of_it(
    job: Job, registry: Registry, key: str | list[str]
) -> None:
    """A name and a list of one name mean the same, in Avro as well."""
    job.add({"id": 7})
    sink = job.sink(
        value_format="avro", key=key, key_format="avro", schema_registry={"url": registry.url}
    )
    job.run("id long", sink)
    assert multiset(job.read_avro(registry)) == multiset([({"id": 7}, {"id": 7})])


def test_column_key_that_is_no_record(job: Job, registry: Registry) -> None:
    """In Avro a column `key` keeps its own type, and a null is no key."""
    job.add({"id": 7}, {"id": None})
    sink = job.sink(
        value_format="avro",
        key_format="avro",
        select=["struct(*) AS value", "id AS key"],
        schema_registry={"url": registry.url},
    )
    job.run("id long", sink)
    read = multiset([(7, {"id": 7}), (None, {"id": None})])
    assert multiset(job.read_avro(registry)) == read
    assert registry.versions(f"{job.topic}-key") == ["long"]


def test_replay_after_a_crash_registers_no_second_schema(
    job: Job, registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next driver asks once and gets the same id, and every row is delivered once."""
    job.add({"id": 1})

    def crash(point: str, where: object) -> None:
        if point == "decide.before":
            raise failpoints.InjectedError(point)

    def sink() -> KafkaSink:
        return job.sink(value_format="avro", schema_registry={"url": registry.url})

    with monkeypatch.context() as patch:
        patch.setattr(failpoints, "handler", crash)
        with pytest.raises(StreamingQueryException, match=r"decide\.before"):
            job.run("id long", sink())
    assert job.messages() == []
    job.add({"id": 2})
    job.run("id long", sink())
    assert multiset(job.read_avro(registry)) == multiset([(None, {"id": 1}), (None, {"id": 2})])
    assert len(registry.versions(f"{job.topic}-value")) == 1
    posted = [r for r in registry.requests if r.startswith("POST")]
    assert posted == [f"POST /subjects/{job.topic}-value/versions"] * 2


def test_column_added_later(job: Job, registry: Registry) -> None:
    """It makes a second, compatible version of the schema, and old rows can still be read."""
    settings = {"value_format": "avro", "schema_registry": {"url": registry.url}}
    job.add({"id": 1, "name": "a"})
    job.run("id long", job.sink(**settings))
    job.add({"id": 2, "name": "b"})
    job.run("id long, name string", job.sink(**settings))
    read = multiset([(None, {"id": 1}), (None, {"id": 2, "name": "b"})])
    assert multiset(job.read_avro(registry)) == read
    assert len(registry.versions(f"{job.topic}-value")) == 2


def test_schema_that_the_registry_holds_for_incompatible(job: Job, registry: Registry) -> None:
    """Refused before any row is written, with the registry's reason; nothing is registered."""
    settings = {"value_format": "avro", "schema_registry": {"url": registry.url}}
    job.add({"id": 1})
    job.run("id long", job.sink(**settings))
    job.add({"id": 2})
    with pytest.raises(
        StreamingQueryException, match=r"(?s)ConfigurationError.*not compatible.*TYPE"
    ):
        job.run("id string", job.sink(**settings))
    assert multiset(job.read_avro(registry)) == multiset([(None, {"id": 1})])
    assert len(registry.versions(f"{job.topic}-value")) == 1


SCHEMA_TEXT = json.dumps(
    {
        "type": "record",
        "name": "Order",
        "fields": [
            {"name": "id", "type": "long"},
            {"name": "at", "type": ["null", {"type": "long", "logicalType": "timestamp-millis"}]},
            {
                "name": "state",
                "type": {"type": "enum", "name": "State", "symbols": ["NEW", "PAID"]},
            },
            {"name": "source", "type": "string", "default": "spark"},
            {
                "name": "price",
                "type": {"type": "bytes", "logicalType": "decimal", "precision": 20, "scale": 4},
            },
        ],
    }
)
ORDER = {"id": 1, "at": "2026-01-02T03:04:05.678901Z", "state": "PAID", "price": "12.34"}
ORDER_SCHEMA = "id long, at timestamp, state string, price decimal(12,2)"
ORDER_READ = {
    "id": 1,
    "at": dt.datetime(2026, 1, 2, 3, 4, 5, 678000, UTC),
    "state": "PAID",
    "source": "spark",
    "price": Decimal("12.3400"),
}


def test_schema_that_the_user_wrote(job: Job, registry: Registry) -> None:
    """Fields without a column get their default; times are cut to what the schema holds."""
    job.add(ORDER)
    sink = job.sink(
        value_format="avro", value_schema=SCHEMA_TEXT, schema_registry={"url": registry.url}
    )
    job.run(ORDER_SCHEMA, sink)
    assert job.read_avro(registry) == [(None, ORDER_READ)]
    assert registry.versions(f"{job.topic}-value") == [json.loads(SCHEMA_TEXT)]


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"id": None}, "'value.id' is null"),
        ({"state": "hunter2"}, "'value.state' is none of the schema's symbols: NEW, PAID"),
    ],
)
def test_row_that_does_not_fit_its_schema(
    job: Job, registry: Registry, wrong: dict[str, Any], words: str
) -> None:
    """The batch is aborted; the error names the field and shows nothing of the row."""
    job.add(ORDER, {**ORDER, **wrong})
    sink = job.sink(
        value_format="avro", value_schema=SCHEMA_TEXT, schema_registry={"url": registry.url}
    )
    with pytest.raises(StreamingQueryException) as failed:
        job.run(ORDER_SCHEMA, sink)
    assert "PrepareRejectedError" in str(failed.value)
    assert words in str(failed.value)
    assert "hunter2" not in str(failed.value)
    assert job.messages() == []


def test_schemas_that_only_others_register(job: Job, registry: Registry) -> None:
    """Without auto-registration a schema is looked up, or the newest one is used unchanged."""
    subject = f"{job.topic}-value"
    by_hand = {"url": registry.url, "auto.register.schemas": False}
    newest = {"url": registry.url, "use.latest.version": True}
    job.add(ORDER)
    for settings in (by_hand, newest):
        sink = job.sink(
            value_format="avro",
            value_schema=SCHEMA_TEXT if settings is by_hand else None,
            schema_registry=settings,
        )
        with pytest.raises(StreamingQueryException, match=f"(?s)ConfigurationError.*{subject}"):
            job.run(ORDER_SCHEMA, sink)
    assert registry.versions(subject) == []
    registry.register({"schema": SCHEMA_TEXT}, subject)
    job.run(
        ORDER_SCHEMA,
        job.sink(value_format="avro", value_schema=SCHEMA_TEXT, schema_registry=by_hand),
    )
    job.add({**ORDER, "id": 2})
    job.run(ORDER_SCHEMA, job.sink(value_format="avro", schema_registry=newest))
    assert multiset(job.read_avro(registry)) == multiset(
        [(None, ORDER_READ), (None, {**ORDER_READ, "id": 2})]
    )
    assert not [r for r in registry.requests if r == f"POST /subjects/{subject}/versions"]


def test_credentials_of_the_registry(
    job: Job, registry: Registry, caplog: pytest.LogCaptureFixture
) -> None:
    """The right ones are accepted, wrong ones are refused, and neither appears anywhere."""
    registry.login = LOGIN
    job.add({"id": 1})

    def sink(login: str) -> KafkaSink:
        settings = {"url": registry.url, "basic.auth.user.info": login}
        return job.sink(value_format="avro", schema_registry=settings)

    caplog.set_level("DEBUG")
    with pytest.raises(StreamingQueryException, match=r"(?s)credentials.*-value") as refused:
        job.run("id long", sink("writer:letmein"))
    job.run("id long", sink(LOGIN))
    assert job.read_avro(registry, LOGIN) == [(None, {"id": 1})]
    shown = f"{refused.value} {caplog.text} {sink(LOGIN)!r} {vars(sink(LOGIN))} "
    shown += repr(vars(sink(LOGIN)._avro))
    assert "hunter2" not in shown
    assert "letmein" not in shown


def test_registry_that_does_not_answer(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unavailable, naming its address and no password; no row is written."""
    monkeypatch.setattr("sparkonce.spark_hooks.validating._FOR_S", 1.0)
    job.add({"id": 1})
    login = {"basic.auth.user.info": "writer:hunter2"}
    url = {"url": "http://127.0.0.1:1", "max.retries": 0, **login}
    with pytest.raises(StreamingQueryException, match=r"http://127\.0\.0\.1:1") as failed:
        job.run("id long", job.sink(value_format="avro", schema_registry=url))
    assert "SinkUnavailableError" in str(failed.value)
    assert "hunter2" not in str(failed.value)
    assert job.messages() == []


@pytest.mark.parametrize(
    ("status", "error"),
    [
        (503, SinkUnavailableError),
        (500, SinkUnavailableError),
        (429, SinkUnavailableError),
        (422, ConfigurationError),
        (403, ConfigurationError),
    ],
)
def test_registry_that_fails(registry: Registry, status: int, error: type[Exception]) -> None:
    """Overloaded or restarting: unavailable. A refusal: a wrong setting."""
    registry.failing = status
    client = RegistryClient({"url": registry.url, "max.retries": 0})
    with pytest.raises(error, match=f"HTTP {status}"):
        client.schema("orders-value", '"string"')


# -- JSON ------------------------------------------------------------------------------------------


def test_json_is_what_spark_makes_of_the_row(job: Job) -> None:
    """Values and keys equal the output of `to_json` byte for byte, for every type."""
    job.add(FULL, {**dict.fromkeys(FULL, None), "id": 2})
    job.run(SCHEMA, job.sink(value_format="json", key=["id", "day"], key_format="json"))
    frame = job.spark.read.schema(SCHEMA).json(str(job.folder / "in"))
    expected = frame.selectExpr("to_json(struct(id, day)) AS k", "to_json(struct(*)) AS v")
    assert multiset((m.key(), m.value()) for m in job.messages()) == multiset(
        (row.k.encode(), row.v.encode()) for row in expected.collect()
    )
    (first,) = (m.value().decode() for m in job.messages() if b'"id":1,' in m.value())
    for part in ('"Grüße 🦊"', '"amount":-1234567890.10', '"2026-01-02T03:04:05.123Z"', '"NaN"'):
        assert part in first


def test_tombstones_in_json(job: Job) -> None:
    """A null struct has no value; an empty one is an empty object; a null key stays null."""
    job.add({"id": 1, "gone": True}, {"id": 2, "gone": False}, {"gone": False})
    select = ["string(id) AS key", "if(gone, null, struct(id)) AS value"]
    job.run("id long, gone boolean", job.sink(value_format="json", select=select))
    assert multiset((m.key(), m.value()) for m in job.messages()) == multiset(
        [(b"1", None), (b"2", b'{"id":2}'), (None, b"{}")]
    )


def test_sinks_of_different_shapes_share_one_pass(
    job: Job, registry: Registry, fresh_topic: Callable[..., str]
) -> None:
    """Each gets its own columns; a random value made in `select` is the same in key and value."""
    job.add({"id": 1, "a b": "x"}, {"id": 2, "a b": None})
    servers = job.server.bootstrap_servers
    other, plain = fresh_topic(1), fresh_topic(1)
    text = ["to_json(struct(*)) AS value", "string(id) AS key"]
    job.run(
        "id long, `a b` string",
        job.sink(value_format="json", key="u", select=["uuid() AS u", "*"]),
        KafkaSink(
            other,
            bootstrap_servers=servers,
            name="avro",
            value_format="avro",
            key="id",
            select=["id", "`a b` AS a"],
            schema_registry={"url": registry.url},
        ),
        KafkaSink(plain, bootstrap_servers=servers, name="plain", select=text),
    )
    values = [(m.key().decode(), json.loads(m.value())) for m in job.messages()]
    assert [key for key, _ in values] == [value["u"] for _, value in values]
    assert len({key for key, _ in values}) == 2
    rows = multiset([{"id": 1, "a b": "x"}, {"id": 2}])
    assert multiset({k: v for k, v in value.items() if k != "u"} for _, value in values) == rows
    assert multiset(json.loads(m.value()) for m in job.messages(plain)) == rows
    job.topic = other
    assert multiset(job.read_avro(registry)) == multiset(
        [(b"1", {"id": 1, "a": "x"}), (b"2", {"id": 2, "a": None})]
    )


def test_column_that_could_be_data_or_kafkas(job: Job) -> None:
    """Refused before any row is written, naming both solutions; the first of them works."""
    job.add({"id": 1, "timestamp": "2026-01-02T03:04:05Z"})
    schema = "id long, timestamp timestamp"
    with pytest.raises(StreamingQueryException, match=r"(?s)'timestamp' can be data.*struct\(\*\)"):
        job.run(schema, job.sink(value_format="json"))
    job.run(schema, job.sink(value_format="json", select=["struct(*) AS value"]))
    assert [m.value() for m in job.messages()] == [
        b'{"id":1,"timestamp":"2026-01-02T03:04:05.000Z"}'
    ]


def test_doctor_asks_the_registry(kafka: KafkaServer, topic: str, registry: Registry) -> None:
    """A driver cannot start without it; the subject may be empty yet, and nothing is registered."""
    registry.login = LOGIN

    def found(login: str = LOGIN, **settings: object) -> list[tuple[Level, str]]:
        config = {"url": registry.url, "basic.auth.user.info": login, **settings}
        sink = KafkaSink(
            topic,
            bootstrap_servers=kafka.bootstrap_servers,
            value_format="avro",
            schema_registry=config,
        )
        return [(f.level, f.what) for f in sink.diagnose() if "registry" in f.what]

    assert found() == [(Level.OK, f"schema registry at {registry.url}: reachable")]
    assert {request.split()[0] for request in registry.requests} == {"GET"}
    for failure in (found("writer:wrong"), found(**{"use.latest.version": True})):
        ((level, what),) = failure
        assert level is Level.ERROR
        assert LOGIN.partition(":")[2] not in what
        assert "wrong" not in what
    registry.failing = 503
    assert [level for level, _ in found()] == [Level.ERROR]
