"""A pipeline that JSON or options describe: what it may hold, and what each error says."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql.types import StructType

import sparkonce.sinks
from sparkonce import SparkOnce
from sparkonce.errors import ConfigurationError
from sparkonce.sinks import FileSink, KafkaSink, PostgresSink, S3Sink, SqliteSink
from sparkonce.sinks.base import TwoPhaseCommitSink
from sparkonce.sinks.kafka.connecting import settings as kafka_settings
from sparkonce.spark_hooks.data_source.options import job_of
from sparkonce.spark_hooks.described import TYPES, parameters_of, sinks_for_columns
from sparkonce.spark_hooks.jobs import load_job
from sparkonce.spark_hooks.references import refuse_plain_secrets

HIDDEN = "hunter2-of-the-test"
FILE = {"type": "file", "folder": "/lake"}
POSTGRES = {"type": "postgres", "conninfo": {"env": "ORDERS_DSN"}, "table": "orders"}
KAFKA = {"type": "kafka", "topic": "orders", "bootstrap_servers": "localhost:9092"}


@pytest.fixture
def settings(tmp_path: Path) -> dict[str, Any]:
    """Of a pipeline without sinks."""
    return {"name": "orders", "log": f"sqlite:///{tmp_path}/txn.db"}


def loaded(settings: Mapping[str, Any], *sinks: Any) -> Any:
    return load_job(json.dumps({**settings, "sinks": [*sinks]}), create=True)


def refused(settings: Mapping[str, Any], *sinks: Any) -> str:
    with pytest.raises(ConfigurationError) as caught:
        loaded(settings, *sinks)
    assert HIDDEN not in repr(caught.value)
    assert caught.value.__cause__ is None or HIDDEN not in repr(caught.value.__cause__)
    return str(caught.value)


# -- what it makes ---------------------------------------------------------------------------------


def test_each_type_is_the_kind_of_a_public_sink() -> None:
    """Every sink that needs no Python is there."""
    classes = {name: getattr(sparkonce.sinks, name) for name in TYPES.values()}
    assert {kind: classes[name].kind for kind, name in TYPES.items()} == {k: k for k in TYPES}
    public = {getattr(sparkonce.sinks, name) for name in sparkonce.sinks.__all__}
    ready = {
        cls
        for cls in public
        if issubclass(cls, TwoPhaseCommitSink) and not cls.__abstractmethods__  # type: ignore[attr-defined]
    }
    assert ready == set(classes.values())
    assert all(parameters_of(cls) for cls in classes.values())


def test_json_makes_the_pipeline_that_a_module_makes(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ORDERS_DSN", f"postgresql://u:{HIDDEN}@host/shop")
    pipeline = loaded(
        {**settings, "retain": 7, "adopt": ["batch 3"], "removed": {**FILE, "name": "old"}},
        {
            **KAFKA,
            "key": ["id"],
            "value_format": "json",
            "config": {"linger.ms": 5},
            "transaction_timeout_s": 60,
        },
        {**POSTGRES, "key": "id", "writers": None},
        {"type": "sqlite", "path": "shop.db", "table": "orders", "select": ["id"]},
    )
    kafka, postgres, sqlite = pipeline.sinks
    assert [type(sink) for sink in pipeline.sinks] == [KafkaSink, PostgresSink, SqliteSink]
    assert (kafka.where, kafka._timeout_ms) == ("kafka topic orders at localhost:9092", 60_000)
    assert postgres.where == "postgres table shop.orders at host:5432"
    assert list(sqlite.select) == ["id"]
    assert pipeline.settings.retain == 7
    assert pipeline.settings.adopt == ("batch 3",)
    assert [sink.name for sink in pipeline.settings.removed] == ["old"]
    assert HIDDEN not in repr(pipeline) + repr(postgres)
    pipeline.close()


def test_settings_that_are_objects_are_objects_in_json(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """S3's connection has keys by reference."""
    monkeypatch.setenv("KEY", HIDDEN)
    connection = {
        "endpoint_url": "http://minio:9000",
        "aws_access_key_id": "me",
        "aws_secret_access_key": {"env": "KEY"},
        "verify": False,
    }
    objects = {"acl": "private", "tags": {"team": "orders"}}
    s3 = {"type": "s3", "url": "s3://lake/orders", "connection": connection, "objects": objects}
    pipeline = loaded(settings, {**s3, "part_size": "growing", "partition_by": ["day"]})
    (sink,) = pipeline.sinks
    assert isinstance(sink, S3Sink)
    assert sink._clients.settings.aws_secret_access_key == HIDDEN
    assert HIDDEN not in repr(sink._clients.settings)
    assert sink._objects.tags == {"team": "orders"}
    pipeline.close()


def test_file_holds_the_secret_or_a_whole_setting(settings: dict[str, Any], tmp_path: Path) -> None:
    """A text loses the end of its line; JSON is read where no text can be meant."""
    (tmp_path / "dsn").write_text(f"postgresql://u:{HIDDEN}@host/shop\n")
    (tmp_path / "kafka").write_text('{"linger.ms": 7}')
    (tmp_path / "password").write_text('["a"]\n')
    sasl = {
        "security.protocol": "SASL_PLAINTEXT",
        "sasl.mechanisms": "PLAIN",
        "sasl.username": "me",
        "sasl.password": {"file": str(tmp_path / "password")},
    }
    pipeline = loaded(
        settings,
        {**POSTGRES, "conninfo": {"file": str(tmp_path / "dsn")}},
        {**KAFKA, "config": {"file": str(tmp_path / "kafka")}},
        {**KAFKA, "name": "other", "config": sasl},
        {**FILE, "folder": {"file": str(tmp_path / "password")}},
    )
    postgres, kafka, other, file = pipeline.sinks
    assert postgres._address.conninfo.endswith("@host/shop")
    assert kafka._settings.config == {"linger.ms": 7}
    assert other._settings.config["sasl.password"] == file._folder.name == '["a"]'
    pipeline.close()


def test_log_may_be_a_reference(settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ORDERS_LOG", settings["log"])
    pipeline = loaded({**settings, "log": {"env": "ORDERS_LOG"}}, FILE)
    assert pipeline.log.address == settings["log"]
    pipeline.close()


def test_job_is_a_file_of_json(
    settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the command line takes it; one sink needs no list, and no log is made to look at it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "orders.json").write_text(json.dumps({**settings, "sinks": FILE}))
    with pytest.raises(ConfigurationError, match=r"txn\.db"):
        load_job("orders.json")
    pipeline = load_job("orders.json", create=True)
    assert [type(sink) for sink in pipeline.sinks] == [FileSink]
    pipeline.close()


# -- what it refuses -------------------------------------------------------------------------------

OWN_CLASS = r"for a sink of your own put the pipeline into a module"
ADVICE = r'write \{"env": "NAME"\} or \{"file": "/PATH"\}'


@pytest.mark.parametrize(
    ("sink", "told"),
    [
        ({"type": "kafak"}, rf"sinks\[0\] has the type 'kafak'.*delta, file, iceberg.*{OWN_CLASS}"),
        ({"folder": "/lake"}, r"sinks\[0\] has no type: the types are delta"),
        ({"type": ["file"]}, r"sinks\[0\] has the type \['file'\]"),
        ({"type": "file"}, r"sinks\[0\] FileSink: the parameter 'folder' is missing: add it"),
        (
            {"type": "sqlite", "path": "a", "tabel": "b"},
            r"SqliteSink: there is no parameter 'tabel': use some of path, table, name, select",
        ),
        ({**FILE, "folder": 7}, r"sinks\[0\]\.folder: expected a text, not a whole number"),
        ({**FILE, "writers": "many"}, r"writers: expected a whole number or null, not a text"),
        ({**FILE, "writers": True}, r"writers: expected a whole number or null, not true or false"),
        ({**FILE, "select": "id"}, r"select: expected a list or null, not a text"),
        ({**FILE, "select": [1]}, r"select\[0\]: expected a text, not a whole number"),
        (
            {**FILE, "transform": "f"},
            r"transform= takes a function.*put the pipeline into a module",
        ),
        ({"type": "s3", "url": "s3://b/p", "client": "f"}, r"client= takes a function.*module"),
        (
            {"type": "s3", "url": "s3://b/p", "connection": {"region": "eu"}},
            r"connection S3Connection: there is no parameter 'region': use some of region_name",
        ),
        (
            {"type": "s3", "url": "s3://b/p", "format": "orc"},
            r'format: expected "parquet" or "json" or "csv", not a text',
        ),
        ({**KAFKA, "config": [1]}, r"config: expected an object, not a list"),
        ({**KAFKA, "transaction_timeout_s": "1"}, r"expected a number or null, not a text"),
        ({**KAFKA, "topic": "a b"}, r"a b"),
        ("file", r"sinks\[0\]: expected an object, not a text"),
    ],
)
def test_setting_that_cannot_work_is_named(settings: dict[str, Any], sink: Any, told: str) -> None:
    """With what there is, and before a log is made."""
    message = refused(settings, sink)
    assert re.search(told, message), message
    assert not Path(settings["log"].removeprefix("sqlite:///")).exists()


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('{"name": ', r"the pipeline's JSON: it is no JSON: .*line 1"),
        ('{"name": "orders"}', r"ExactlyOnce: the parameter 'sinks' is missing"),
        (
            '{"name": "o", "sinks": [], "lgo": 1}',
            r"no parameter 'lgo': use some of name, sinks, lo",
        ),
        ('{"name": "o", "sinks": [], "log": 1}', r"log: expected a text, not a whole number"),
        ('{"name": "o", "sinks": "file"}', r"sinks: expected a list, not a text"),
        ('{"name": "o", "sinks": []}', r"sinks= is empty"),
        ("none.json", r"none\.json cannot be read \(No such file"),
        ("list.json", r"list\.json: expected an object"),
    ],
)
def test_pipeline_that_cannot_work_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, told: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "list.json").write_text("[]")
    with pytest.raises(ConfigurationError, match=told):
        load_job(text)


@pytest.mark.parametrize(
    ("reference", "told"),
    [
        ({"env": "NOT_SET"}, r"sinks\[0\]\.conninfo: the environment variable NOT_SET is not set"),
        ({"file": "/no/such/file"}, r"the file /no/such/file cannot be read \(No such file"),
        ({"env": 7}, r'conninfo: write \{"env": "NAME"\}, with a text'),
        ({"env": "A", "file": "B"}, r"conninfo: expected a text, not an object"),
    ],
)
def test_reference_that_leads_nowhere_is_named(
    settings: dict[str, Any], reference: Any, told: str
) -> None:
    assert re.search(told, refused(settings, {**POSTGRES, "conninfo": reference}))


SECRETS: list[dict[str, Any]] = [
    {**POSTGRES, "conninfo": f"postgresql://u:{HIDDEN}@host/shop"},
    {**POSTGRES, "conninfo": f"postgresql://u:{HIDDEN}/@host/shop"},
    {**POSTGRES, "conninfo": f"postgresql://u@host/shop?sslpassword={HIDDEN}"},
    {**POSTGRES, "conninfo": f"host=h user=u password='{HIDDEN}'"},
    {**KAFKA, "config": {"sasl.password": HIDDEN}},
    {**KAFKA, "config": {"ssl.key.pem": HIDDEN}},
    {**KAFKA, "config": {"ssl.key.password": HIDDEN}},
    {**KAFKA, "schema_registry": {"url": "http://r", "basic.auth.user.info": HIDDEN}},
    {**KAFKA, "schema_registry": {"url": f"http://u:{HIDDEN}@r"}},
    {"type": "s3", "url": "s3://b/p", "connection": {"aws_secret_access_key": HIDDEN}},
    {"type": "s3", "url": "s3://b/p", "connection": {"aws_session_token": HIDDEN}},
    {"type": "delta", "uri": "s3://b/p", "storage_options": {"AWS_SECRET_ACCESS_KEY": HIDDEN}},
    {"type": "iceberg", "table": "a.b", "catalog": {"s3.secret-access-key": HIDDEN}},
    {"type": "iceberg", "table": "a.b", "catalog": {"credential": HIDDEN}},
    {"type": "iceberg", "table": "a.b", "catalog": {"uri": f"postgresql+psycopg2://u:{HIDDEN}@h"}},
]


@pytest.mark.parametrize("sink", SECRETS, ids=range(len(SECRETS)))
def test_secret_as_plain_text_is_refused(settings: dict[str, Any], sink: Any) -> None:
    """The message shows where it is and how to refer to it, never the secret."""
    assert re.search(
        rf"sinks\[0\]\.\w+.* is a secret as plain text: {ADVICE}", refused(settings, sink)
    )


def test_secret_of_the_log_is_refused(settings: dict[str, Any]) -> None:
    log = f"postgresql://u:{HIDDEN}@host/shop"
    assert re.search(rf"log is a secret.*{ADVICE}", refused({**settings, "log": log}, FILE))


def test_every_secret_that_kafka_masks_is_refused() -> None:
    """But certificates, which are public, and what needs a function."""
    masks = {name for name in kafka_settings._SHARED if kafka_settings._SECRET.search(name)}
    for name in masks - {"ssl.ca.pem", "ssl.certificate.pem", "sasl.oauthbearer.config"}:
        with pytest.raises(ConfigurationError, match="is a secret"):
            refuse_plain_secrets({name: "x"}, "config")


@pytest.mark.parametrize(
    "value",
    [
        {"conninfo": "postgresql://u@host:5432/shop?sslmode=require"},
        {"conninfo": "host=h passfile=/run/pgpass"},
        {"bootstrap_servers": "a:9092,b:9092", "topic": "passwords"},
        {"delete": "password = 'gone'", "select": ["sha2(token, 256) AS token"], "key": ["token"]},
        {"config": {"ssl.key.location": "/run/key.pem", "ssl.ca.pem": "-----BEGIN"}},
        {"catalog": {"oauth2-server-uri": "http://h/token", "token": {"env": "TOKEN"}}},
        {"schema_registry": {"basic.auth.credentials.source": "USER_INFO"}},
        {"parquet": {"column_encoding": {"token": "PLAIN"}}},
    ],
)
def test_what_is_no_secret_is_taken(value: Any) -> None:
    refuse_plain_secrets(value, "sinks[0]")


def test_no_error_shows_what_a_reference_named(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a constructor quotes its argument."""
    monkeypatch.setenv("WRONG", HIDDEN)
    monkeypatch.setenv("BAD", f"{HIDDEN} with spaces")
    assert "***" in refused(settings, {**KAFKA, "bootstrap_servers": "a", "topic": {"env": "BAD"}})
    assert "***" in refused(settings, {**KAFKA, "config": {"security.protocol": {"env": "WRONG"}}})
    refused(settings, {**FILE, "writers": {"env": "WRONG"}})
    refused({**settings, "name": {"env": "BAD"}}, FILE)
    refused({**settings, "log": {"env": "WRONG"}}, FILE)


# -- options ---------------------------------------------------------------------------------------


def options(**more: str) -> dict[str, str]:
    return {"name": "orders", "log": "sqlite:///txn.db", **more}


def test_pipeline_of_options_is_the_json() -> None:
    """Names in any case; texts become what their parameter takes."""
    given = options(SINKS=json.dumps([FILE, KAFKA]), Retain="7", adopt="batch 3", queryName="q")
    assert json.loads(job_of({**given, "checkpointLocation": "/c"})) == {
        "name": "orders",
        "log": "sqlite:///txn.db",
        "retain": 7,
        "adopt": "batch 3",
        "sinks": [FILE, KAFKA],
    }
    assert job_of({"pipeline": "jobs:pipeline", "key": "monday"}) == "jobs:pipeline"


def test_one_sink_needs_no_json() -> None:
    """Its name and key are not the pipeline's name and the batch job's key."""
    one = {
        "sink.type": "postgres",
        "sink.conninfo": '{"env": "ORDERS_DSN"}',
        "sink.table": "7",
        "sink.key": "id",
        "sink.name": "shop",
        "sink.update": '["amount"]',
        "sink.lock_timeout_s": "5",
    }
    (sink,) = json.loads(job_of({**options(key="monday"), **one}))["sinks"]
    assert sink == {
        **POSTGRES,
        "table": "7",
        "key": "id",
        "name": "shop",
        "update": ["amount"],
        "lock_timeout_s": 5,
    }


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({}, r'needs \.option\("pipeline", "module:attribute"\).*"name", "log" and "sinks"'),
        ({"key": "monday"}, r'needs \.option\("pipeline"'),
        (options(pipeline="jobs:pipeline"), r'"name", "log" would be another one'),
        ({"pipeline": "jobs:pipeline", "comit": "x"}, r'no option "comit": next to "pipeline" it'),
        (
            {"pipeline": "jobs:pipeline", "path": "/lake"},
            r'takes "checkpointLocation", "key", "queryName"',
        ),
        (
            options(topic="orders"),
            r'has no option "topic": .*"name", "sinks".*begin with \'sink\.\'',
        ),
        (options(sinks="[{"), r'the option "sinks" is no JSON'),
        ({**options(sinks="[]"), "sink.type": "file"}, r'give the option "sinks", or those of one'),
        ({**options(), "sink.folder": "/lake"}, r"the sink of the options has no type: the types"),
        ({**options(), "sink.type": "fiel"}, r"has the type 'fiel'"),
    ],
)
def test_options_that_cannot_work_are_named(given: dict[str, str], told: str) -> None:
    with pytest.raises(ConfigurationError, match=told):
        job_of(given)


def test_options_that_are_parameters_of_no_sink_are_named(settings: dict[str, Any]) -> None:
    for name, told in {
        "tabel": "no parameter 'tabel'",
        "writers": "expected a whole number",
    }.items():
        given = {"sink.type": "file", "sink.folder": "/lake", f"sink.{name}": "x"}
        with pytest.raises(ConfigurationError, match=told):
            load_job(job_of({**settings, **given}))


@pytest.mark.parametrize(
    ("needs", "method"), [("checkpointLocation", "streamWriter"), ("key", "writer")]
)
def test_writers_take_options(needs: str, method: str) -> None:
    """For streams and for batch jobs, through the same function."""
    source = SparkOnce(options(sinks=json.dumps(FILE), **{needs: "here"}))
    writer = getattr(source, method)(StructType([]), False)
    assert json.loads(next(iter(writer.__dict__.values()))[0])["sinks"] == FILE


# -- columns ---------------------------------------------------------------------------------------


def test_columns_need_no_secret(tmp_path: Path) -> None:
    """A client of Spark Connect has none of the variables and files."""
    described = [
        {**POSTGRES, "select": ["id"], "name": "shop"},
        {**KAFKA, "value_format": "json", "config": {"file": "/no/such/file"}},
    ]
    (tmp_path / "orders.json").write_text(json.dumps({"name": "orders", "sinks": described}))
    for text in (json.dumps(described), str(tmp_path / "orders.json")):
        postgres, kafka = sinks_for_columns(text)
        assert (postgres.name, postgres.select) == ("shop", ("id",))
        assert kafka.columns is not None
