"""Whole batches on each S3 server: manifests, their merging, and the readers that follow them."""

from __future__ import annotations

import datetime as dt
import json
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.fs as pa_fs
import pyarrow.parquet as pq
import pytest
from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException, StreamingQueryException

import sparkonce
from integration_tests.support.proxy import Proxy, http_request
from integration_tests.support.s3 import OWNER, World, branch, key_of, prepare
from integration_tests.support.spark import session_zone
from sparkonce import ExactlyOnce
from sparkonce.errors import CommitUnresolvedError, ConfigurationError, PreparedBranchLostError
from sparkonce.model import Committable, CommittedBatch, Owner
from sparkonce.sinks import S3Sink
from sparkonce.sinks.s3.manifests.manifest import CommittedFile, Layout, Manifest, Span, encode_file
from sparkonce.sinks.s3.manifests.publisher import Publisher
from sparkonce.sinks.s3.writing.keys import NULL_FOLDER
from sparkonce.sinks.s3.writing.objects import S3Objects
from sparkonce.testing.services import S3Server

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType

FOLDER = f"lake/orders/_sparkonce/orders/{OWNER.digest}.s3/"

pytestmark = pytest.mark.usefixtures("lost_at_once")


@pytest.fixture
def arrow_s3(s3: S3Server) -> pa_fs.S3FileSystem:
    """Arrow's own S3 client, which shares nothing with the sink."""
    return pa_fs.S3FileSystem(
        endpoint_override=s3.endpoint_url.removeprefix("http://"),
        scheme="http",
        access_key=s3.access_key,
        secret_key=s3.secret_key,
        region=s3.region,
    )


@pytest.fixture
def read(world: World, arrow_s3: pa_fs.S3FileSystem) -> Callable[..., list[int]]:
    """`read(**choice)` gives the ids that a reader of committed batches sees."""

    def ids(**choice: Any) -> list[int]:
        dataset = sparkonce.committed_dataset(
            f"s3://{world.bucket}/lake/orders", filesystem=arrow_s3, **choice
        )
        return sorted(dataset.to_table()["id"].to_pylist())

    return ids


def committed(*committables: Committable, batch_id: int = 1, **changes: Any) -> CommittedBatch:
    values: dict[str, Any] = {"revision": 0, "offsets": ('{"0":7}',), "pipeline": "orders"}
    return CommittedBatch(
        owner=OWNER, batch_id=batch_id, committables=committables, **{**values, **changes}
    )


def rows(*ids: int) -> pa.RecordBatch:
    return pa.RecordBatch.from_pydict({"id": list(ids)})


def deliver(sink: S3Sink, batch_id: int, *ids: int) -> CommittedBatch:
    prepared = prepare(sink, branch(batch_id), rows(*ids))
    sink.commit(prepared)
    batch = committed(prepared, batch_id=batch_id)
    sink.publish(batch)
    return batch


def manifests(world: World) -> dict[str, bytes]:
    return {key: world.body(key) for key in world.objects() if "/_sparkonce/" in key}


def test_damaged_parts_abort_the_batch(
    spark: SparkSession,
    make_sink: Callable[..., S3Sink],
    proxy: Proxy,
    world: World,
    tmp_path: Path,
) -> None:
    """The query fails, the next run aborts what is left, and writes every row once."""
    spark.range(20).write.parquet(str(tmp_path / "in"))

    def run() -> None:
        sink = make_sink(endpoint_url=f"http://127.0.0.1:{proxy.port}")
        with (
            closing(sink),
            closing(
                ExactlyOnce("orders", sinks=[sink], log=f"sqlite:///{tmp_path}/log.db")
            ) as pipeline,
        ):
            spark.readStream.schema("id long").parquet(
                str(tmp_path / "in")
            ).writeStream.foreachBatch(pipeline).option(
                "checkpointLocation", str(tmp_path / "checkpoint")
            ).trigger(availableNow=True).start().awaitTermination()

    proxy.spoil = http_request(b"partNumber=")
    with pytest.raises(StreamingQueryException, match="UploadPart answered"):
        run()
    assert proxy.spoiled
    assert world.counts() == (0, 0)
    proxy.spoil = None
    run()
    files = [key for key in world.objects() if key.endswith(".parquet")]
    assert sorted(n for key in files for n in world.table(key)["id"].to_pylist()) == [*range(20)]


# -- one batch -------------------------------------------------------------------------------------


def test_batch_becomes_visible_at_once(
    sink: S3Sink, world: World, read: Callable[..., list[int]]
) -> None:
    """Between the commit of its objects and its manifest, readers of batches see none of it."""
    deliver(sink, 0, 1)
    parts = [prepare(sink, branch(1, attempt=n), rows(10 * n)) for n in (1, 2)]
    sink.commit(parts[0])
    assert read() == [1]
    sink.commit(parts[1])
    assert read() == [1]
    sink.publish(committed(*parts))
    assert read() == [1, 10, 20]
    assert read(batch=0) == [1]
    assert read(after=0) == [10, 20]


def test_manifest_for_people(sink: S3Sink, world: World) -> None:
    """It names pipeline, query, batch, offsets, and each object with its rows and bytes."""
    batch = deliver(sink, 1, 5, 6)
    (told,) = (json.loads(body) for body in manifests(world).values())
    key = key_of(batch.committables[0])
    size = len(world.body(key))
    assert {**told, "layout": None} == {
        "v": 1,
        "pipeline": "orders",
        "query": OWNER.query_id,
        "sink": "s3",
        "batch": 1,
        "revision": 0,
        "rows": 2,
        "bytes": size,
        "offsets": ['{"0":7}'],
        "layout": None,
        "objects": [{"key": key.removeprefix("lake/orders/"), "rows": 2, "bytes": size}],
    }
    assert told["layout"]["format"] == "parquet"
    assert told["layout"]["partition_by"] == []


def test_published_twice(sink: S3Sink, world: World) -> None:
    """A second time, and by several drivers at once, it stays what it was."""
    batch = deliver(sink, 1, 5)
    before = world.objects()
    with ThreadPoolExecutor(4) as pool:
        for outcome in [pool.submit(sink.publish, batch) for _ in range(8)]:
            outcome.result()
    assert world.objects() == before


def test_drivers_that_publish_at_the_same_time(
    make_sink: Callable[..., S3Sink], world: World, read: Callable[..., list[int]]
) -> None:
    """All return, and there is one manifest."""
    sinks = [make_sink() for _ in range(4)]
    prepared = prepare(sinks[0], branch(), rows(5))
    sinks[0].commit(prepared)
    gate = threading.Barrier(4)

    def publish(sink: S3Sink) -> None:
        gate.wait()
        sink.publish(committed(prepared))

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(publish, sinks))
    assert list(manifests(world)) == [f"{FOLDER}000000000001.json"]
    assert read() == [5]


def test_branch_that_was_lost_and_written_again(
    sink: S3Sink, world: World, read: Callable[..., list[int]]
) -> None:
    """The manifest names what stands, also when a paused driver comes with the old decision."""
    kept, lost = (prepare(sink, branch(1, attempt=n), rows(n)) for n in (1, 2))
    sink.commit(kept)
    sink.abort(lost)
    with pytest.raises(PreparedBranchLostError):
        sink.commit(lost)
    again = prepare(sink, branch(1, attempt=2, write_pass=1), rows(2))
    sink.commit(again)
    amended = committed(kept, again, revision=1)
    for batch in (committed(kept, lost), amended, committed(kept, lost), amended):
        sink.publish(batch)
        named = [json.loads(body)["revision"] for body in manifests(world).values()]
        assert named in ([0], [1])
    assert read() == [1, 2]


def test_answer_to_the_manifest_is_lost(
    make_sink: Callable[..., S3Sink],
    proxy: Proxy,
    world: World,
    read: Callable[..., list[int]],
) -> None:
    """It is put again, finds itself, and counts once."""
    sink = make_sink(endpoint_url=f"http://127.0.0.1:{proxy.port}")
    prepared = prepare(sink, branch(), rows(5))
    sink.commit(prepared)
    proxy.lose = http_request(b"PUT ")
    sink.publish(committed(prepared))
    assert proxy.lost == 1
    assert read() == [5]
    sink.close()


def test_server_is_away_when_the_manifest_is_due(
    s3: S3Server, sink: S3Sink, world: World, read: Callable[..., list[int]]
) -> None:
    """The batch is not called complete; the next try writes it."""
    prepared = prepare(sink, branch(), rows(5))
    sink.commit(prepared)
    s3.kill()
    try:
        with pytest.raises(CommitUnresolvedError, match=r"manifest s3://.*000000000001\.json"):
            sink.publish(committed(prepared))
    finally:
        s3.start()
    with pytest.raises(ConfigurationError, match="no manifest"):
        read()
    sink.publish(committed(prepared))
    assert read() == [5]


def test_two_pipelines_in_one_prefix(
    make_sink: Callable[..., S3Sink], world: World, read: Callable[..., list[int]]
) -> None:
    """Each keeps its batches apart, also of equal numbers; nobody's is written twice."""
    deliver(make_sink(), 1, 1)
    other = make_sink(name="copy")
    prepared = prepare(other, branch(1, sink="copy"), rows(2))
    other.commit(prepared)
    other.publish(committed(prepared))
    theirs = make_sink()
    owner = Owner("f" * 16, OWNER.query_id)
    foreign = prepare(theirs, replace(branch(1), owner=owner), rows(3))
    theirs.commit(foreign)
    theirs.publish(CommittedBatch("returns", owner, 1, 0, (), ()))
    assert read() == [1, 2]
    assert read(source=f"orders/{OWNER.digest}.copy", batch=1) == [2]
    with pytest.raises(ConfigurationError, match="source="):
        read(batch=1)
    with pytest.raises(ConfigurationError, match="no committed batch has rows"):
        read(source="returns")


def test_plain_listing(sink: S3Sink, world: World, arrow_s3: pa_fs.S3FileSystem) -> None:
    """A reader that lists the prefix sees each object once, and no manifest."""
    deliver(sink, 0, 1)
    deliver(sink, 1, 2)
    listed = pa.dataset.dataset(f"{world.bucket}/lake/orders", filesystem=arrow_s3)
    assert sorted(listed.to_table()["id"].to_pylist()) == [1, 2]


# -- many batches ----------------------------------------------------------------------------------


def publisher_of(sink: S3Sink) -> Publisher:
    folder = FOLDER.removeprefix("lake/orders/")
    return Publisher(sink._clients, sink._place, folder, S3Objects())


def told(batch_id: int) -> Manifest:
    """A batch as it would be, without its object."""
    layout = Layout.of("parquet", (), rows(1).schema)
    files = (CommittedFile(f"f{batch_id}.parquet", 1, 100),)
    return Manifest("orders", OWNER.query_id, "s3", batch_id, 0, ("o",), layout, files)


def names(world: World) -> list[str]:
    return sorted(key.removeprefix(FOLDER) for key in world.objects() if key.startswith(FOLDER))


def test_hundredth_batch_merges(sink: S3Sink, world: World, read: Callable[..., list[int]]) -> None:
    """A hundred manifests become one; what is read stays the same."""
    publisher = publisher_of(sink)
    for batch_id in range(98):
        publisher._put(Span(batch_id, batch_id), encode_file([told(batch_id)], Span(0, 0)))
    batches = [deliver(sink, batch_id, batch_id) for batch_id in (98, 99, 100)]
    merged = "000000000000-000000000099.json.gz"
    assert names(world) == [merged, "000000000100.json"]
    assert read(after=97) == [98, 99, 100]
    assert read(after=98, batch=99) == [99]
    sink.publish(batches[1])  # a paused driver
    assert read(after=97) == [98, 99, 100]
    assert names(world) == [merged, "000000000100.json"]


@pytest.mark.parametrize("call", ["put_object", "delete_objects"])
def test_crash_inside_a_merge(
    sink: S3Sink,
    world: World,
    read: Callable[..., list[int]],
    monkeypatch: pytest.MonkeyPatch,
    call: str,
) -> None:
    """Before or after the merged file is there: readers see each batch once; it is made good."""
    publisher = publisher_of(sink)
    deliver(sink, 0, 7)
    for batch_id in range(1, 100):
        publisher._put(Span(batch_id, batch_id), encode_file([told(batch_id)], Span(0, 0)))
    client = publisher._client()
    with monkeypatch.context() as patch:

        def crash(**_: Any) -> None:
            raise KeyboardInterrupt

        patch.setattr(client, call, crash)
        with pytest.raises(KeyboardInterrupt):
            publisher.merge(99)
    assert len(names(world)) == (100 if call == "put_object" else 101)
    assert read(batch=0) == [7]
    publisher.merge(199)
    assert names(world) == ["000000000000-000000000099.json.gz"]
    assert read(batch=0) == [7]


def test_batches_that_are_made_anew(
    sink: S3Sink, world: World, read: Callable[..., list[int]]
) -> None:
    """Log and targets were restored, the objects removed, and the merged file stayed."""
    publisher = publisher_of(sink)
    for batch_id in range(97):
        publisher._put(Span(batch_id, batch_id), encode_file([told(batch_id)], Span(0, 0)))
    for batch in [deliver(sink, batch_id, batch_id) for batch_id in (97, 98, 99)][1:]:
        world.client.delete_object(Bucket=world.bucket, Key=key_of(batch.committables[0]))
    for batch_id in (98, 99):
        prepared = prepare(sink, branch(batch_id, token=9), rows(10 * batch_id))
        sink.commit(prepared)
        sink.publish(committed(prepared, batch_id=batch_id))
        assert read(after=batch_id - 1, batch=batch_id) == [10 * batch_id]
    assert names(world) == ["000000000000-000000000099.json.gz"]
    assert read(after=96) == [97, 980, 990]


def test_merge_that_may_not_delete(
    sink: S3Sink, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The batch is published all the same, and the right that is missing is named."""
    publisher = publisher_of(sink)
    answer = {"Errors": [{"Key": "x", "Code": "AccessDenied"}]}
    monkeypatch.setattr(publisher._client(), "delete_objects", lambda **_: answer)
    publisher.publish(told(99))
    assert "grant s3:DeleteObject" in caplog.text


@pytest.mark.slow
def test_hundred_thousand_batches(sink: S3Sink, world: World, arrow_s3: pa_fs.S3FileSystem) -> None:
    """Listing takes one request, and a reader of the newest batch opens one manifest."""
    publisher = publisher_of(sink)
    spans = [Span(n, n + 9_999) for n in range(0, 90_000, 10_000)]
    spans += [Span(n, n + 99) for n in range(90_000, 99_900, 100)]
    spans += [Span(n, n) for n in range(99_900, 99_999)]
    with ThreadPoolExecutor(8) as pool:
        list(
            pool.map(
                lambda span: publisher._put(
                    span, encode_file(map(told, range(span.first, span.last + 1)), span)
                ),
                spans,
            )
        )
    publisher.publish(told(99_999))
    assert len(names(world)) == 10  # ten files of ten thousand batches
    assert len(publisher._spans()) == 10
    deliver(sink, 100_000, 5)
    dataset = sparkonce.committed_dataset(
        f"s3://{world.bucket}/lake/orders", filesystem=arrow_s3, after=99_999
    )
    assert dataset.to_table()["id"].to_pylist() == [5]
    assert len(dataset.files) == 1
    everything = sparkonce.committed_dataset(
        f"s3://{world.bucket}/lake/orders", filesystem=arrow_s3, batch=99_999
    )
    assert len(everything.files) == 100_000


# -- Spark -----------------------------------------------------------------------------------------


@pytest.fixture
def spark_s3(spark: SparkSession, s3: S3Server, fresh_bucket: str) -> Iterator[SparkSession]:
    """Spark, which finds the bucket with S3A."""
    base = f"fs.s3a.bucket.{fresh_bucket}."
    settings = {
        "endpoint": s3.endpoint_url,
        "endpoint.region": s3.region,
        "access.key": s3.access_key,
        "secret.key": s3.secret_key,
        "path.style.access": "true",
    }
    for key, value in settings.items():
        spark.conf.set(base + key, value)
    yield spark
    for key in settings:
        spark.conf.unset(base + key)


@pytest.mark.parametrize(
    ("kind", "written", "is_read"),
    [
        (pa.string(), ["ä +%", "", None, NULL_FOLDER], ["ä +%", None, None, None]),
        (
            pa.timestamp("us", "Europe/Berlin"),
            ["2050-07-01T12:00Z", "2026-10-25T00:30Z", "2026-10-25T01:30Z"],
            ["2050-07-01T12:00Z", "2026-10-25T00:30Z", "2026-10-25T00:30Z"],
        ),
    ],
    ids=["text", "times"],
)
def test_what_folders_give_back(
    spark_s3: SparkSession,
    make_sink: Callable[..., S3Sink],
    world: World,
    arrow_s3: pa_fs.S3FileSystem,
    kind: pa.DataType,
    written: list[str | None],
    is_read: list[str | None],
) -> None:
    """What docs/howto/s3-reading.md says; a session with another zone reads the same times."""

    def column(texts: list[str | None]) -> pa.Array[Any]:
        if pa.types.is_string(kind):
            return pa.array(texts)
        times = [text and dt.datetime.fromisoformat(text) for text in texts]
        return pa.array(times, pa.timestamp("us", "UTC")).cast(kind)

    sink = make_sink(partition_by=["k"])
    rows = pa.RecordBatch.from_pydict({"id": range(len(written)), "k": column(written)})
    prepared = prepare(sink, branch(), rows)
    sink.commit(prepared)
    sink.publish(committed(prepared))
    url = f"s3://{world.bucket}/lake/orders"
    wanted = pa.table({"id": rows["id"], "k": column(is_read)})
    arrow = sparkonce.committed_dataset(url, filesystem=arrow_s3).to_table().sort_by("id")
    assert arrow.equals(wanted)
    seen = sparkonce.read_committed(spark_s3, url).sort("id").toArrow()  # times as UTC
    assert seen.cast(wanted.schema).equals(wanted)


@pytest.mark.parametrize("file_format", ["parquet", "json", "csv"])
def test_query_is_read_back_by_spark(
    spark_s3: SparkSession,
    make_sink: Callable[..., S3Sink],
    world: World,
    arrow_s3: pa_fs.S3FileSystem,
    tmp_path: Path,
    file_format: str,
) -> None:
    """Every row of the query, with its types and folders, whole and at each batch."""
    sink = make_sink(format=file_format, partition_by=["day", "code"])
    source = tmp_path / "in"
    frame = spark_s3.sql(
        "SELECT id, concat('n', id % 3) AS name, date'2026-01-01' + CAST(id % 2 AS INT) AS day, "
        "CAST(id / 4 AS DECIMAL(20, 6)) AS price, concat('00', id % 2) AS code, "
        "timestamp_micros(1767225600000000 + id) AS at FROM range(30)"
    )
    schema = frame.schema
    for n in range(3):
        frame.where(f"id % 3 = {n}").coalesce(1).write.mode("append").parquet(str(source))
    run_query(spark_s3, sink, tmp_path, schema)
    url = f"s3://{world.bucket}/lake/orders"
    seen = sparkonce.read_committed(spark_s3, url)
    assert seen.schema.simpleString() == schema.simpleString()
    assert Counter(seen.collect()) == Counter(frame.collect())
    assert sparkonce.read_committed(spark_s3, url, batch=1).count() == 20
    assert sparkonce.read_committed(spark_s3, url, after=0, batch=1).count() == 10
    assert sparkonce.newest_committed(url, spark=spark_s3) == 2
    arrow = sparkonce.committed_dataset(url, filesystem=arrow_s3).to_table()
    assert sorted(arrow["code"].to_pylist()) == ["000"] * 15 + ["001"] * 15
    assert sorted(arrow["id"].to_pylist()) == list(range(30))
    assert sorted(arrow["price"].to_pylist()) == sorted(row.price for row in frame.collect())


@pytest.mark.parametrize("file_format", ["parquet", "json"])
def test_struct_that_is_null_though_its_fields_may_not_be(
    spark_s3: SparkSession,
    make_sink: Callable[..., S3Sink],
    world: World,
    arrow_s3: pa_fs.S3FileSystem,
    tmp_path: Path,
    file_format: str,
) -> None:
    """As of a left join, of CASE without ELSE, in an array, and every VARIANT."""
    select = [
        "id",
        "CASE WHEN id % 2 = 0 THEN named_struct('a', id, 'b', named_struct('c', 'x')) END AS deep",
        "array(named_struct('a', id), null) AS items",
    ]
    if file_format == "parquet":  # Arrow reads no binary from JSON
        select.append("parse_json(CASE WHEN id % 2 = 0 THEN '{\"k\": 1}' END) AS doc")
    url = f"s3://{world.bucket}/lake/orders"
    rows = spark_s3.range(4)
    assert not rows.selectExpr(select[1]).schema["deep"].dataType["a"].nullable
    sink = make_sink(format=file_format, select=select)
    run_batch(spark_s3, sink, tmp_path, rows)
    seen = sparkonce.read_committed(spark_s3, url).sort("id")
    wanted = rows.selectExpr(*select)
    as_text = [f"to_json(struct({name})) AS {name}" for name in wanted.columns]
    assert seen.selectExpr(*as_text).collect() == wanted.selectExpr(*as_text).collect()
    arrow = sparkonce.committed_dataset(url, filesystem=arrow_s3)
    table = arrow.to_table(columns=["id", "deep", "items"]).sort_by("id")
    assert table["deep"].to_pylist() == [
        {"a": 0, "b": {"c": "x"}},
        None,
        {"a": 2, "b": {"c": "x"}},
        None,
    ]
    assert table["items"].to_pylist() == [[{"a": n}, None] for n in range(4)]


def test_column_that_may_not_be_null_where_it_is(
    spark_s3: SparkSession,
    make_sink: Callable[..., S3Sink],
    world: World,
    arrow_s3: pa_fs.S3FileSystem,
    tmp_path: Path,
) -> None:
    """It may be in batches without it, and in the folder of an empty string: it is found there."""
    select = ["id", "if(id % 2 = 0, '', 'x') AS day"]
    for n, columns in enumerate([select, [*select, "named_struct('a', id) AS deep", "1 AS more"]]):
        sink = make_sink(partition_by=["day"], select=columns)
        run_batch(spark_s3, sink, tmp_path, spark_s3.range(2 * n, 2 * n + 2))
    url = f"s3://{world.bucket}/lake/orders"
    seen = sparkonce.read_committed(spark_s3, url)
    for column, ids in [("day", [0, 2]), ("deep", [0, 1]), ("more", [0, 1])]:
        assert sorted(row.id for row in seen.where(f"{column} IS NULL").collect()) == ids
    seen.write.parquet(str(tmp_path / "copy"))
    table = sparkonce.committed_dataset(url, filesystem=arrow_s3).to_table()
    pq.write_table(table, tmp_path / "copy.parquet")
    assert pq.read_table(tmp_path / "copy.parquet")["more"].null_count == 2


def run_batch(spark: SparkSession, sink: S3Sink, folder: Path, rows: DataFrame) -> None:
    """Deliver the rows as the next batch of the query."""
    rows.coalesce(1).write.mode("append").parquet(str(folder / "in"))
    run_query(spark, sink, folder, rows.schema)


def run_query(spark: SparkSession, sink: S3Sink, folder: Path, schema: StructType) -> None:
    """Deliver what is new in the folder `in`, a batch for each file."""
    log = f"sqlite:///{folder}/log.db"
    with closing(ExactlyOnce("orders", sinks=[sink], log=log)) as pipeline:
        (
            spark.readStream.schema(schema)
            .option("maxFilesPerTrigger", 1)
            .parquet(str(folder / "in"))
            .writeStream.foreachBatch(pipeline)
            .option("checkpointLocation", str(folder / "checkpoint"))
            .trigger(availableNow=True)
            .start()
            .awaitTermination()
        )


@pytest.mark.parametrize("file_format", ["parquet", "json", "csv"])
def test_sessions_of_other_zones(
    spark_s3: SparkSession,
    make_sink: Callable[..., S3Sink],
    world: World,
    arrow_s3: pa_fs.S3FileSystem,
    tmp_path: Path,
    file_format: str,
) -> None:
    """Folders of instants are named in the writers' zones; whoever reads gets the instants."""
    sink = make_sink(format=file_format, partition_by=["hour"])
    times = "timestamp_micros(1782900000000000 + {0} * 3600000000) AS hour, "
    times += "timestamp_micros(1782900000000000 + {0}) AS at"
    batches = [
        spark_s3.sql(f"SELECT id, {times.format('id')} FROM range({n}, {n + 3})") for n in (0, 3)
    ]
    micros = ["id", "unix_micros(hour)", "unix_micros(at)"]
    wanted = [row for batch in batches for row in batch.selectExpr(*micros).collect()]
    for zone, batch in zip(["America/New_York", "Asia/Kolkata"], batches, strict=True):
        with session_zone(spark_s3, zone):
            run_batch(spark_s3, sink, tmp_path, batch)
    url = f"s3://{world.bucket}/lake/orders"
    with session_zone(spark_s3, "Europe/Amsterdam"):
        seen = sparkonce.read_committed(spark_s3, url)
        assert seen.selectExpr(*micros).sort("id").collect() == wanted
        # In the reader's own zone a filter of folders means the same instants.
        late = seen.where("hour >= timestamp'2026-07-01 15:00:00'")
        assert [row.id for row in late.sort("id").collect()] == [3, 4, 5]
    arrow = sparkonce.committed_dataset(url, filesystem=arrow_s3).to_table().sort_by("id")
    assert arrow.schema.field("hour").type == pa.timestamp("us", "Asia/Kolkata")
    told = [
        tuple(column.cast(pa.int64()).to_pylist())
        for column in (arrow["id"], arrow["hour"], arrow["at"])
    ]
    assert told == list(zip(*wanted, strict=True))


@pytest.mark.parametrize("file_format", ["parquet", "json", "csv"])
def test_columns_in_another_order(
    spark_s3: SparkSession,
    make_sink: Callable[..., S3Sink],
    world: World,
    arrow_s3: pa_fs.S3FileSystem,
    tmp_path: Path,
    file_format: str,
) -> None:
    """They are told apart by their names; one that came later, or went, is null elsewhere."""
    places = spark_s3.sql("SELECT id, concat('c', id) AS city, 'nl' AS country FROM range(2)")
    for n, columns in enumerate((["id", "city"], ["id", "country", "city"], ["city", "country"])):
        sink = make_sink(format=file_format, select=columns)
        run_batch(spark_s3, sink, tmp_path, places.withColumn("id", places.id + 2 * n))
    url = f"s3://{world.bucket}/lake/orders"
    wanted = [
        *((n, f"c{n % 2}", None) for n in (0, 1)),
        *((n, f"c{n % 2}", "nl") for n in (2, 3)),
        *((None, f"c{n % 2}", "nl") for n in (4, 5)),
    ]
    columns = ["id", "city", "country"]
    seen = sparkonce.read_committed(spark_s3, url)
    assert seen.columns == columns
    assert Counter(map(tuple, seen.collect())) == Counter(wanted)
    arrow = sparkonce.committed_dataset(url, filesystem=arrow_s3).to_table()
    assert Counter(tuple(row[c] for c in columns) for row in arrow.to_pylist()) == Counter(wanted)


def test_prefix_of_any_characters(
    spark_s3: SparkSession, s3: S3Server, make_sink: Callable[..., S3Sink], world: World
) -> None:
    """Readers find what the sink has written; Hadoop would look for patterns in it."""
    prefix = "a b%20+/ä#[1]{x}^"
    deliver(make_sink(prefix), 1, 1, 2)
    url = f"s3://{world.bucket}/{prefix}"
    assert sparkonce.read_committed(spark_s3, url).count() == 2
    its = f"endpoint_override={s3.endpoint_url.removeprefix('http://')}&scheme=http"
    url = url.replace("://", f"://{s3.access_key}:{s3.secret_key}@") + f"?{its}&region={s3.region}"
    assert sparkonce.committed_dataset(url).count_rows() == 2


@pytest.mark.parametrize("file_format", ["json", "csv"])
def test_column_that_spark_has_a_use_for(
    spark_s3: SparkSession,
    make_sink: Callable[..., S3Sink],
    world: World,
    tmp_path: Path,
    file_format: str,
) -> None:
    """It is a column as any other; and a line that was damaged is an error, not a row of nulls."""
    sink = make_sink(format=file_format, compression="none")
    rows = spark_s3.sql("SELECT concat('r', id) AS _corrupt_record, id, 'x' AS name FROM range(2)")
    run_batch(spark_s3, sink, tmp_path, rows)
    url = f"s3://{world.bucket}/lake/orders"
    assert Counter(sparkonce.read_committed(spark_s3, url).collect()) == Counter(rows.collect())
    (key,) = (key for key in world.objects() if "/_sparkonce/" not in key)
    world.put(key, world.body(key).replace(b"1", b"?"))
    with pytest.raises((PySparkException, Py4JJavaError), match="FAILED_READ_FILE"):
        sparkonce.read_committed(spark_s3, url).collect()
