"""Names, folders and settings of the S3 sink; no server is asked."""

from __future__ import annotations

import base64
import pickle
import re
from contextlib import closing
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparkonce.errors import ConfigurationError
from sparkonce.model import BranchId, Owner
from sparkonce.sinks import S3Sink
from sparkonce.sinks.s3.connecting.client import Purpose
from sparkonce.sinks.s3.connecting.place import Place
from sparkonce.sinks.s3.finishing.branch import BranchOutcome
from sparkonce.sinks.s3.writing.columns import check_schema
from sparkonce.sinks.s3.writing.formats import (
    BUFFER_BYTES,
    MAX_PART_BYTES,
    MIN_PART_BYTES,
    FileFormat,
)
from sparkonce.sinks.s3.writing.keys import (
    branch_of,
    branch_stem,
    file_key,
    folder_name,
    value_text,
)
from sparkonce.sinks.s3.writing.staged import StagedFile, crc32c, etag_of_parts
from sparkonce.sinks.s3.writing.upload import MAX_PARTS, PARTS_IN_FLIGHT
from sparkonce.sinks.s3.writing.writer import ROLL_AT_PARTS, split
from tests.support.s3_sinks import s3_sink

OWNER = Owner("0123456789abcdef", "11111111-2222-3333-4444-555555555555")
KEYS: dict[str, Any] = {
    "region_name": "eu-west-1",
    "aws_access_key_id": "a",
    "aws_secret_access_key": "b",
}
LABELS = st.from_regex(r"[A-Za-z0-9_-]{1,32}", fullmatch=True)
COUNTS = st.integers(0, 2**40)
BRANCHES = st.builds(
    BranchId,
    owner=st.just(OWNER),
    batch_id=COUNTS,
    token=COUNTS,
    sink=LABELS,
    write_pass=COUNTS,
    attempt=COUNTS,
)


def branch(**changes: Any) -> BranchId:
    values = {"batch_id": 1, "token": 1, "sink": "s3", "write_pass": 0, "attempt": 1}
    return BranchId(owner=OWNER, **{**values, **changes})


@given(
    BRANCHES,
    st.integers(0, 10**6),
    st.sampled_from(["", "lake/orders/"]),
    st.sampled_from(["parquet", "json", "json.gz", "csv.zst"]),
)
def test_key_tells_its_branch(
    branch_id: BranchId, number: int, prefix: str, extension: str
) -> None:
    """What is written into a file's key is read back from it."""
    key = file_key(Place("lake", prefix), "day=2026-01-01/", branch_id, number, extension)
    assert branch_of(key, OWNER) == branch_id


@given(BRANCHES, BRANCHES)
def test_no_stem_is_the_prefix_of_another_branch(one: BranchId, other: BranchId) -> None:
    """Batch 1 never finds the files of batch 12."""
    assert branch_stem(one).startswith(branch_stem(other)) == (one == other)


@pytest.mark.parametrize(
    "key",
    [
        "orders/part-00000.parquet",
        "orders/sparkonce.ffffffffffff.s3.t1.b1.p0.a1.n0.parquet",
        f"orders/sparkonce.{OWNER.digest}.s3.t1.b1.p0.a1.parquet",
        f"orders/sparkonce.{OWNER.digest}.s3.t1.b1.p0.a1.n0.parquet.bak",
        f"orders/x-sparkonce.{OWNER.digest}.s3.t1.b1.p0.a1.n0.parquet",
        f"orders/sparkonce.{OWNER.digest}.s3.t1.b1.p0.a1.n0.parquet/other",
        f"orders/sparkonce.{OWNER.digest}.s.3.t1.b1.p0.a1.n0.parquet",
        f"orders/sparkonce.{OWNER.digest}.s3.t\u0661.b1.p0.a1.n0.parquet",
    ],
)
def test_foreign_key_is_nobodys_branch(key: str) -> None:
    """Only a whole file name of this very owner counts."""
    assert branch_of(key, OWNER) is None


@pytest.mark.parametrize(
    ("url", "bucket", "prefix"),
    [
        ("s3://lake", "lake", ""),
        ("s3://lake/", "lake", ""),
        ("s3://lake/orders", "lake", "orders/"),
        ("s3a://lake/a/b/", "lake", "a/b/"),
        ("s3://lake/what?/is#this", "lake", "what?/is#this/"),
    ],
)
def test_url(url: str, bucket: str, prefix: str) -> None:
    """A prefix ends with a slash, so that `orders` is not a prefix of `orders-eu`."""
    assert Place.from_url(url) == Place(bucket, prefix)


@pytest.mark.parametrize(
    "url", ["lake/orders", "http://lake/x", "s3://", "s3:///x", "s3://lake/a//b", "s3://lake/../x"]
)
def test_broken_url(url: str) -> None:
    """A url that is none is refused with its text."""
    with pytest.raises(ConfigurationError, match="give s3://BUCKET/PREFIX"):
        S3Sink(url)


@pytest.mark.parametrize("bucket", ["lake--use1-az4--x-s3", "lake--use1-az4--xa-s3"])
def test_directory_bucket(bucket: str) -> None:
    """S3 Express One Zone refuses Content-MD5, so that nothing could be written."""
    with pytest.raises(ConfigurationError, match=f"{bucket}'.*general purpose bucket"):
        S3Sink(f"s3://{bucket}/orders")


@pytest.mark.parametrize(
    ("query", "advice"),
    [
        ("?region=eu-west-1", "region_name="),
        ("?region_name=eu-west-1", "region_name="),
        ("?endpoint_override=minio:9000&scheme=http", "endpoint_url="),
        ("/?x=1&path_style=true", "addressing_style="),
        ("?access_key=AKIA&secret_key=hunter2", "aws_access_key_id="),
    ],
)
def test_setting_in_the_url(query: str, advice: str) -> None:
    """Logs and readers take it there; as a part of the prefix, the rows would be elsewhere."""
    with pytest.raises(ConfigurationError, match=rf"url=.*S3Connection\({advice}") as told:
        S3Sink(f"s3://lake/orders{query}")
    assert "hunter2" not in str(told.value)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, ""),
        (True, "true"),
        (7, "7"),
        (Decimal("1E-7"), "0.0000001"),
        (Decimal("1.50"), "1.50"),
        (date(2026, 1, 2), "2026-01-02"),
        (datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC), "2026-01-02 03:04:05"),
        (datetime(2026, 1, 2, 3, 4, 5, 120000, tzinfo=UTC), "2026-01-02 03:04:05.12"),
        ("a b", "a b"),
    ],
)
def test_value_as_spark_writes_it(value: object, text: str) -> None:
    """Folder names are Spark's casts to string (the integration tests ask Spark itself)."""
    assert value_text(value) == text


def test_folder_escapes_as_spark_does() -> None:
    """What a path or a glob could misread is written in percent."""
    folder = folder_name(["a=b", "n", "e"], ["x/y%z:\n[é]^ ~", None, ""])
    assert folder == (
        "a%3Db=x%2Fy%25z%3A%0A%5Bé%5D%5E ~"
        "/n=__HIVE_DEFAULT_PARTITION__/e=__HIVE_DEFAULT_PARTITION__/"
    )


@given(st.lists(st.tuples(st.sampled_from(["a", "b", "", None]), st.sampled_from([1, 2, None]))))
def test_split_keeps_every_row_once(rows: list[tuple[str | None, int | None]]) -> None:
    """Each row is in the folder of its values, and in no other one."""
    schema = pa.schema([("s", pa.string()), ("id", pa.int64()), ("n", pa.int32())])
    columns = [[s for s, _ in rows], list(range(len(rows))), [n for _, n in rows]]
    arrays = [pa.array(c, f.type) for c, f in zip(columns, schema, strict=True)]
    parts = list(split(pa.RecordBatch.from_arrays(arrays, schema=schema), ["n", "s"]))
    assert all(part.schema.names == ["id"] for _, part in parts)
    assert {index: folder for folder, part in parts for index in part["id"].to_pylist()} == {
        index: folder_name(["n", "s"], [n, s]) for index, (s, n) in enumerate(rows)
    }
    assert sum(part.num_rows for _, part in parts) == len(rows)


def test_split_of_many_columns_does_not_overflow() -> None:
    """The product of the columns' values may be larger than any integer."""
    count = 10_000
    names = [f"c{i}" for i in range(6)]
    batch = pa.RecordBatch.from_pydict({name: range(count) for name in [*names, "id"]})
    assert sum(1 for _ in split(batch, names)) == count


@pytest.mark.parametrize(
    ("kind", "value"),
    [(pa.date32(), 10**8), (pa.date32(), -(10**6)), (pa.timestamp("us", "UTC"), 10**18)],
)
def test_value_that_names_no_folder_is_told_by_its_column(kind: pa.DataType, value: int) -> None:
    batch = pa.record_batch({"n": [1], "day": pa.array([value], kind)})
    with pytest.raises(ValueError, match="column 'day' has a value that can name no folder"):
        list(split(batch, ["n", "day"]))


@pytest.mark.parametrize(
    ("zone", "at", "text"),
    [
        ("Europe/Berlin", datetime(2040, 7, 1, 10, tzinfo=UTC), "2040-07-01 12%3A00%3A00"),
        ("Europe/Berlin", datetime(2040, 1, 1, 10, tzinfo=UTC), "2040-01-01 11%3A00%3A00"),
        ("Europe/Berlin", datetime(1850, 1, 1, tzinfo=UTC), "1850-01-01 00%3A53%3A28"),
        ("-03:30", datetime(2040, 7, 1, 10, 0, 0, 500, tzinfo=UTC), "2040-07-01 06%3A30%3A00.0005"),
        ("Europe/Berlin", None, "__HIVE_DEFAULT_PARTITION__"),
    ],
)
def test_folder_of_an_instant(zone: str, at: datetime | None, text: str) -> None:
    """In its zone's own time, also where summer is beyond what 32-bit tables of zones know."""
    batch = pa.record_batch({"n": [1], "at": pa.array([at], pa.timestamp("us", zone))})
    ((folder, _),) = split(batch, ["at"])
    assert folder == f"at={text}/"


@given(st.integers(MIN_PART_BYTES, 32 << 20), st.integers(1, 32))
def test_buffers_of_all_open_files_are_bounded(part_bytes: int, files: int) -> None:
    """However large a part is to be, the default number of open files fits into memory."""
    sizes = FileFormat("parquet", ("day",), "zstd", part_bytes, files).part_sizes
    assert MIN_PART_BYTES <= sizes.first <= part_bytes
    assert sizes.largest == sizes.first
    assert sizes.first * files <= BUFFER_BYTES


@given(st.integers(1, 32))
def test_parts_that_grow_are_bounded(files: int) -> None:
    """The buffers of all open files and the parts on their way fit, at any length of the files."""
    sizes = FileFormat("parquet", ("day",), "zstd", None, files).part_sizes
    grown = [sizes.of(number) for number in range(1, MAX_PARTS + 1)]
    assert grown == sorted(grown)
    assert (grown[0], grown[-1]) == (sizes.first, sizes.largest)
    assert sizes.first >= MIN_PART_BYTES
    assert sizes.largest <= MAX_PART_BYTES
    assert sizes.largest * (files + PARTS_IN_FLIGHT) <= BUFFER_BYTES or files > 30
    assert sizes.largest * files <= BUFFER_BYTES


@pytest.mark.parametrize(
    ("settings", "elsewhere", "grows"),
    [
        ({}, "", True),
        ({}, "https://bucket.vpce-1.s3.eu-west-1.vpce.amazonaws.com", True),
        ({}, "https://r2.example", False),
        ({"part_size": "growing"}, "https://r2.example", True),
        ({"endpoint_url": "https://r2.example"}, "", False),
        ({"endpoint_url": "https://r2.example", "part_size": "growing"}, "", True),
        ({"part_size": 8 << 20}, "", False),
    ],
)
def test_parts_grow_where_the_server_is_known_to_take_them(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], elsewhere: str, grows: bool
) -> None:
    """Others refuse parts of several sizes when the file is completed, after the decision."""
    if elsewhere:
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", elsewhere)
    with closing(s3_sink("s3://lake/orders", **KEYS, **settings)) as sink:
        sizes = sink.beginTransaction(branch())._format.part_sizes
    assert (sizes.largest > sizes.first) is grows


def test_server_that_the_environment_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is absent at another one is not lost, however it was chosen; keys stay out of records.

    Records of older versions do not say which it was, so nothing is called lost by them there.
    """
    with closing(s3_sink("s3://lake/orders", **KEYS)) as sink:
        amazons = sink.preCommit(sink.beginTransaction(branch()))
        assert amazons.payload["endpoint"] is None
        assert BranchOutcome.of(amazons, sink._clients).outcome.same_server
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://me:hunter2@minio:9000")
    with closing(s3_sink("s3://lake/orders", **KEYS)) as sink:
        minios = sink.preCommit(sink.beginTransaction(branch()))
        assert minios.payload["endpoint"] == "http://minio:9000"
        assert BranchOutcome.of(minios, sink._clients).outcome.same_server
        assert not BranchOutcome.of(amazons, sink._clients).outcome.same_server
    with closing(s3_sink("s3://lake/orders", endpoint_url="http://minio:9000", **KEYS)) as sink:
        assert BranchOutcome.of(minios, sink._clients).outcome.same_server
    monkeypatch.delenv("AWS_ENDPOINT_URL")
    with closing(s3_sink("s3://lake/orders", **KEYS)) as sink:
        assert not BranchOutcome.of(minios, sink._clients).outcome.same_server


@pytest.mark.parametrize(
    ("folders", "part_bytes", "gib"),
    [((), None, 242), (("day",), None, 43), ((), 8 << 20, 70), ((), 32 << 20, 281)],
)
def test_largest_file(folders: tuple[str, ...], part_bytes: int | None, gib: int) -> None:
    """What docs/howto/s3.md says; the rest of the 10,000 parts holds what comes when it is full."""
    sizes = FileFormat("parquet", folders, "zstd", part_bytes, 32).part_sizes
    assert sum(map(sizes.of, range(1, ROLL_AT_PARTS + 1))) >> 30 == gib
    assert sum(map(sizes.of, range(ROLL_AT_PARTS + 1, MAX_PARTS + 1))) >= 4 << 30


def test_etag_of_parts() -> None:
    """The MD5 of the parts' binary MD5s, and their number (figure from md5sum)."""
    etags = ["5d41402abc4b2a76b9719d911017c592", "7d793037a0760186574b0282f2f435e7"]
    assert etag_of_parts(etags) == "065947336a2f2a95ba8899f3675c3be6-2"


def test_checksum_of_parts() -> None:
    """CRC32C as its standard has it; of an object what a real server answered for these parts."""
    assert crc32c(b"123456789") == base64.b64encode(bytes.fromhex("e3069283")).decode()
    parts = (crc32c(b"a" * (5 << 20)), crc32c(b"hello"))
    assert StagedFile("k", "u", ("a", "b"), checksums=parts).checksum == "QYpdNA==-2"


def test_prefix_that_leaves_no_room_for_files() -> None:
    Place.from_url(f"s3://lake/{'ä' * 449}")
    with pytest.raises(ConfigurationError, match="url=.*902 bytes.*900"):
        S3Sink(f"s3://lake/{'ä' * 449}aaa/")


def test_text_that_names_no_folder() -> None:
    """Spark keeps what is no UTF-8 in a string; the error says that, and not something of times."""
    text = pa.array([b"ok", b"\xff"]).view(pa.string())
    with pytest.raises(ValueError, match="column 'k' .*can name no folder.*UTF-8") as told:
        list(split(pa.RecordBatch.from_arrays([text], names=["k"]), ["k"]))
    assert "9999" not in str(told.value)


def test_staged_file_survives_json() -> None:
    """Keys that a newer library adds are passed over."""
    file = StagedFile("k", "u", ("a", "b"), None, ("c", "d"), 10, 2)
    assert StagedFile.from_json({**file.to_json(), "later": 1}) == file


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"format": "xml"}, "format='xml'"),
        ({"compression": "zip"}, "compression='zip'"),
        ({"format": "csv", "compression": "snappy"}, "compression='snappy'"),
        ({"format": "json", "parquet": {"compression_level": 3}}, "parquet="),
        ({"parquet": {"no_such_setting": 3}}, "no_such_setting"),
        ({"parquet": {"flavor": "spark"}}, "flavor"),
        ({"parquet": {"allow_truncated_timestamps": "false"}}, "allow_truncated_timestamps"),
        ({"addressing_style": "host"}, "addressing_style='host'"),
        ({"verify": "false"}, "verify='false'"),
        ({"verify": 1}, "verify=1"),
        ({"target_file_size": 0}, "target_file_size=0"),
        ({"aws_session_token": "hunter2"}, "aws_session_token="),
        ({"checksum": "crc64"}, "checksum='crc64'"),
        ({"server_side_encryption": "rot13"}, "server_side_encryption='rot13'"),
        ({"sse_kms_key_id": "k"}, "sse_kms_key_id="),
        ({"acl": "public"}, "acl='public'"),
        ({"metadata": {"Sparkonce-Branch": "x"}}, "metadata="),
        ({"metadata": {"a b": "x"}}, "metadata="),
        ({"metadata": {"a": "ä"}}, "metadata="),
        ({"metadata": {"a": "b\r\nx-amz-acl: public-read"}}, "metadata="),
        ({"metadata": {"a": 1}}, "metadata="),
        ({"metadata": {1: "a"}}, "metadata="),
        ({"tags": {"owner": 7}}, "tags= contains 'owner': 7"),
        ({"tags": {"": "lake"}}, "tags="),
        ({"tags": {"aws:owner": "lake"}}, "tags="),
        ({"tags": {"owner": "lake & co"}}, "tags="),
        ({"tags": {"owner": "l" * 257}}, "tags="),
        ({"tags": {"o" * 129: "lake"}}, "tags="),
        ({"tags": {str(n): "" for n in range(11)}}, "tags= contains 11"),
        ({"partition_by": "day"}, "partition_by='day'"),
        ({"partition_by": ["day", "day"]}, "each once"),
        ({"part_size": 1 << 20}, "part_size=1048576"),
        ({"part_size": 1 << 26}, "part_size=67108864"),
        ({"part_size": "large"}, "part_size=large"),
        ({"max_open_files": 0}, "max_open_files=0"),
        ({"aws_access_key_id": "a"}, "aws_secret_access_key"),
        ({"aws_secret_access_key": "hunter2"}, "aws_access_key_id"),
        ({"endpoint_url": "http://me:hunter2@host"}, "endpoint_url"),
        ({"endpoint_url": "host:9000"}, "endpoint_url"),
        ({"name": "a.b"}, "name='a.b'"),
    ],
)
def test_setting_that_cannot_work(settings: dict[str, Any], message: str) -> None:
    """It is refused when the sink is made; the message names it and repeats no secret."""
    with pytest.raises(ConfigurationError) as caught:
        s3_sink("s3://lake/orders", **settings)
    assert message in str(caught.value)
    assert "hunter2" not in str(caught.value)


def test_tags_that_s3_takes() -> None:
    s3_sink(
        "s3://lake/orders",
        tags={"Kostenstelle": "Köln 4/7 + @x=y:z", **{str(n): "" for n in range(9)}},
    )


def test_url_with_credentials_is_not_repeated() -> None:
    """Somebody's secret in the url does not reach a log."""
    with pytest.raises(ConfigurationError) as caught:
        S3Sink("s3://key:hunter2@lake/orders")
    assert "hunter2" not in str(caught.value)


FIELDS = [
    pa.field("id", pa.int64()),
    pa.field("day", pa.date32()),
    pa.field("price", pa.float64()),
    pa.field("tags", pa.list_(pa.string())),
]


UNKNOWN_ZONES = ["GMT+8", "UTC+01:00", "Z", "PST", "+8:00"]


@pytest.mark.parametrize(
    ("fields", "partition_by", "message"),
    [
        (FIELDS, ["region"], "region"),
        (FIELDS, ["price"], "'price' is double"),
        (FIELDS, ["tags"], "'tags' is list"),
        (FIELDS[:2], ["id", "day"], "names every column"),
        ([*FIELDS, pa.field("_day", pa.date32())], ["day", "_day"], "'_day' .* select="),
        ([*FIELDS, pa.field(".day", pa.date32())], [".day"], "'.day' .* select="),
        ([*FIELDS, FIELDS[0]], [], "more than once"),
        ([pa.field("i", pa.month_day_nano_interval())], [], "Parquet cannot hold"),
        *(
            ([*FIELDS, pa.field("at", pa.timestamp("us", z))], ["at"], f"'at'.*'{re.escape(z)}'")
            for z in UNKNOWN_ZONES
        ),
    ],
)
def test_schema_that_cannot_work(
    fields: list[pa.Field[Any]], partition_by: list[str], message: str
) -> None:
    """It is refused before any data moves."""
    with pytest.raises(ConfigurationError, match=message):
        check_schema(
            pa.schema(fields), FileFormat("parquet", tuple(partition_by), "zstd", 8 << 20, 32)
        )


@pytest.mark.parametrize("zone", ["Europe/Berlin", "UTC", "+08:00", "-03:30", "Etc/GMT+8"])
def test_zones_that_name_folders(zone: str) -> None:
    fields = [
        *FIELDS,
        pa.field("at", pa.timestamp("us", zone)),
        pa.field("utc", pa.timestamp("us")),
    ]
    check_schema(pa.schema(fields), FileFormat("parquet", ("at", "utc"), "zstd", 8 << 20, 32))


def csv_of(kind: pa.DataType, *years: str | None) -> str:
    """A file whose column `x` has the begin of these years."""
    days = [y and np.datetime64(f"{y}-01-01", "D").astype(int) for y in years]
    if pa.types.is_date(kind):
        numbers = pa.array(days, pa.int32())
    else:
        numbers = pa.array([day and 86_400_000_000 * int(day) for day in days], pa.int64())
    table = pa.table({"x": numbers.cast(kind), "y": range(len(years))})
    where = pa.BufferOutputStream()
    writer = FileFormat("csv", (), "none", 8 << 20, 32).writer(where, table.schema)
    writer.write(table)
    writer.close()
    return where.getvalue().to_pybytes().decode()


ZONED = pa.timestamp("us", "Asia/Kolkata")
LOCAL = pa.timestamp("us")


@pytest.mark.parametrize(
    ("kind", "year"),
    [(kind, year) for kind in (ZONED, LOCAL) for year in ("-32768", "10000", "32768", "294000")]
    + [(pa.date32(), year) for year in ("-32768", "32768", "290000")],
    ids=str,
)
def test_year_that_csv_cannot_give_back(kind: pa.DataType, year: str) -> None:
    """Spark would read null, or the file would say another year: it is refused, by the column."""
    with pytest.raises(ValueError, match="column 'x' has .*use another format"):
        csv_of(kind, "2026", None, year)


@pytest.mark.parametrize(
    ("kind", "year"),
    [(kind, year) for kind in (ZONED, LOCAL) for year in ("-32767", "0000", "9999")]
    + [(pa.date32(), year) for year in ("-32767", "0000", "32767")],
    ids=str,
)
def test_year_that_csv_holds(kind: pa.DataType, year: str) -> None:
    """The first and the last ones; those with a zone are in UTC."""
    rest = {ZONED: " 00:00:00.000000Z", LOCAL: " 00:00:00.000000"}.get(kind, "")
    assert csv_of(kind, year, None).splitlines() == ['"x","y"', f"{year}-01-01{rest},0", ",1"]


TEXT = pa.field("text", pa.string())
GEOMETRY = pa.struct(
    [("srid", pa.int32()), pa.field("wkb", pa.binary(), metadata={"geometry": "true"})]
)
"""As Spark gives one to Python."""


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        ("csv", [TEXT, pa.field("tags", pa.list_(pa.string()))], "'tags'.*CSV holds no nested"),
        ("csv", [TEXT, pa.field("s", pa.struct([TEXT]))], "'s'.*CSV holds no nested"),
        ("csv", [TEXT, pa.field("b", pa.binary())], "'b'.*CSV holds no bytes"),
        ("csv", [TEXT, pa.field("span", pa.duration("us"))], "'span'.*CSV has no intervals"),
        ("csv", [TEXT], "one column 'text' cannot hold nulls"),
        ("csv", [TEXT, pa.field("v", pa.null())], "'v'.*no type.*cast it"),
        ("parquet", [TEXT, pa.field("v", pa.null())], "'v'.*no type.*cast it"),
        ("parquet", [pa.field("l", pa.list_(pa.null()))], "'l'.*no type.*cast it"),
        ("json", [pa.field("m", pa.map_(pa.int32(), pa.string()))], "'m'.*keys of JSON's"),
        ("json", [pa.field("l", pa.list_(pa.duration("us")))], "'l'.*JSON has no intervals"),
        ("parquet", [pa.field("s", pa.struct([TEXT, TEXT]))], "'s'.*two fields of one name"),
        ("json", [pa.field("l", pa.list_(pa.struct([TEXT, TEXT])))], "'l'.*two fields of one name"),
        ("parquet", [pa.field("g", GEOMETRY)], "'g'.*st_asbinary and st_srid"),
        ("json", [pa.field("l", pa.list_(GEOMETRY))], "'l'.*st_asbinary and st_srid"),
    ],
)
def test_column_that_the_format_cannot_give_back(
    name: Any, fields: list[pa.Field[Any]], message: str
) -> None:
    """It is refused before any data moves, wherever it is nested."""
    with pytest.raises(ConfigurationError, match=message):
        check_schema(pa.schema(fields), FileFormat(name, (), "gzip", 8 << 20, 32))


def test_json_is_made_by_spark() -> None:
    """The columns are checked, and asked of Spark as one line beside those of the folders."""
    sink = S3Sink("s3://lake/orders", format="json", partition_by=["day"])
    assert sink.columns is not None
    line, folder = sink.columns(pa.schema([TEXT, pa.field("day", pa.date32())]), "row")
    assert line.startswith("to_json(struct(validate_utf8(row.`text`) AS `text`), map(")
    assert folder == "row.`day` AS `day`"
    with pytest.raises(ConfigurationError, match="partition_by names"):
        sink.columns(pa.schema([TEXT]), "row")


def test_schema_that_works() -> None:
    """Folders from a date; nested columns in the files."""
    check_schema(pa.schema(FIELDS), FileFormat("parquet", ("day",), "zstd", 8 << 20, 32))


OSS = "https://oss-cn-hangzhou.aliyuncs.com"
PATH, VIRTUAL = f"{OSS}/lake/k?", "https://lake.oss-cn-hangzhou.aliyuncs.com/k?"


@pytest.mark.parametrize(
    ("settings", "said_by_boto3", "url"),
    [
        ({"endpoint_url": OSS}, "", PATH),
        ({"endpoint_url": OSS}, "virtual", VIRTUAL),
        ({"endpoint_url": OSS, "addressing_style": "virtual"}, "", VIRTUAL),
        ({"endpoint_url": OSS, "addressing_style": "virtual"}, "path", VIRTUAL),
        ({"endpoint_url": OSS, "addressing_style": "path"}, "virtual", PATH),
        ({}, "", "https://lake.s3.amazonaws.com/k?"),
        ({"addressing_style": "virtual"}, "", "https://lake.s3.eu-west-1.amazonaws.com/k?"),
        ({"addressing_style": "path"}, "", "https://s3.eu-west-1.amazonaws.com/lake/k?"),
    ],
)
def test_where_the_bucket_is_named(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    settings: dict[str, Any],
    said_by_boto3: str,
    url: str,
) -> None:
    """Some servers refuse it in the path (Alibaba's), others know it only there."""
    config = tmp_path / "config"
    line = f"  addressing_style = {said_by_boto3}\n" if said_by_boto3 else ""
    config.write_text(f"[default]\ns3 =\n{line}" if line else "")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(config))
    with closing(s3_sink("s3://lake/x", **KEYS, **settings)) as sink:
        for purpose in Purpose:
            client = sink._clients.client(purpose)
            told = client.generate_presigned_url("get_object", {"Bucket": "lake", "Key": "k"})
            assert told.startswith(url)


def test_sink_travels_and_keeps_its_secrets() -> None:
    """It pickles to the executors; what is shown of it has no keys."""
    sink = s3_sink(
        "s3://lake/orders/",
        aws_access_key_id="AKIDEXAMPLE",
        aws_secret_access_key="hunter2",
        aws_session_token="hunter2-token",
    )
    copy = pickle.loads(pickle.dumps(sink))  # noqa: S301
    assert repr(copy) == "<S3Sink 's3' -> s3://lake/orders>"
    shown = f"{copy!r} {copy.target} {vars(copy)!r}"
    assert "hunter2" not in shown
    assert "AKIDEXAMPLE" not in shown
    assert copy._clients == sink._clients
