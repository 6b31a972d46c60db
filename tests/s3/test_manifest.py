"""Manifests of committed batches: their names and lines, and what readers make of them."""

from __future__ import annotations

import base64
import datetime as dt
import errno
import gzip
import io
import itertools
import json
import os
import tempfile
import tracemalloc
import zlib
from collections.abc import Callable
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.fs as pa_fs
import pyarrow.parquet as pq
import pytest
from botocore.exceptions import ClientError
from hypothesis import given
from hypothesis import strategies as st

import sparkonce
from sparkonce.errors import ConfigurationError, SparkOnceError
from sparkonce.model import BranchId, Committable, CommittedBatch, Owner
from sparkonce.sinks.s3.connecting.client import Clients
from sparkonce.sinks.s3.connecting.place import Place
from sparkonce.sinks.s3.manifests import readers
from sparkonce.sinks.s3.manifests.committed import Files, find_committed, find_newest
from sparkonce.sinks.s3.manifests.manifest import (
    FANOUT,
    FORMAT_VERSION,
    CommittedFile,
    Layout,
    Manifest,
    Span,
    decode_file,
    encode_file,
    newest,
    source_folder,
)
from sparkonce.sinks.s3.manifests.publisher import Publisher
from sparkonce.sinks.s3.writing.keys import NULL_FOLDER, file_key
from sparkonce.sinks.s3.writing.objects import S3Objects
from sparkonce.sinks.s3.writing.writer import split

OWNER = Owner("0" * 16, "query")
SCHEMA = pa.schema([("id", pa.int64()), ("day", pa.string())])
LAYOUT = Layout.of("parquet", ("day",), SCHEMA)
GOLDEN = Path(__file__).parents[1] / "golden"
FOLDER = source_folder("orders", OWNER.digest, "s3")


def manifest(batch_id: int, **changes: Any) -> Manifest:
    values: dict[str, Any] = {
        "revision": 0,
        "offsets": ('{"0":1}',),
        "layout": LAYOUT,
        "files": (CommittedFile(f"day=x/f{batch_id}.parquet", 2, 10),),
    }
    return Manifest("orders", OWNER.query_id, "s3", batch_id, **{**values, **changes})


class Memory(Files):
    """Files that a test changes between the reader's steps."""

    def __init__(self, *batch_ids: int, folder: str = FOLDER) -> None:
        self.files: dict[str, bytes] = {}
        for batch_id in batch_ids:
            self.put(Span(batch_id, batch_id), [manifest(batch_id)], folder)
        self.before_read: list[Callable[[], None]] = []
        self.before_names: list[Callable[[], None]] = []
        self.reads = 0

    def put(self, span: Span, manifests: list[Manifest], folder: str = FOLDER) -> None:
        self.files[folder + span.name] = encode_file(manifests, span)

    def merge(self, first: int, last: int) -> None:
        self.put(Span(first, last), [manifest(n) for n in range(first, last + 1)])
        for batch_id in range(first, last + 1):
            del self.files[FOLDER + Span(batch_id, batch_id).name]

    def names(self, folder: str) -> list[str]:
        if self.before_names:
            self.before_names.pop(0)()
        return [name for name in self.files if name.startswith(folder)]

    def read(self, name: str) -> bytes:
        self.reads += 1
        if self.before_read:
            self.before_read.pop(0)()
        if name not in self.files:
            raise FileNotFoundError(name)
        return self.files[name]


def found(files: Files, **choice: Any) -> list[int]:
    """The batches whose objects are read."""
    keys = find_committed(files, "s3://lake/orders", **choice).keys
    return [int(key.removeprefix("day=x/f").removesuffix(".parquet")) for key in keys]


# -- names and lines -------------------------------------------------------------------------------


@given(st.integers(0, 10**12 - 1), st.integers(0, 10**6))
def test_name_tells_its_batches(first: int, more: int) -> None:
    span = Span(first, min(first + more, 10**12 - 1))
    assert Span.from_name(span.name) == span


@pytest.mark.parametrize("name", ["1.json", "0" * 12, "0" * 12 + ".json.gz", "x" + "0" * 12])
def test_foreign_name(name: str) -> None:
    assert Span.from_name(name) is None


@pytest.mark.parametrize("count", [1, 3])
def test_what_is_written_is_read(count: int) -> None:
    """Also without rows, and merged."""
    manifests = [manifest(0, layout=None, files=()), *(manifest(n) for n in range(1, count))]
    span = Span(0, count - 1)
    assert decode_file(encode_file(manifests, span), span.name) == manifests


@pytest.mark.parametrize("extension", ["parquet", "json", "json.gz", "json.zst", "csv.gz"])
def test_pattern_for_readers_that_hide_nothing(tmp_path: Path, extension: str) -> None:
    """The one of docs/howto/s3-reading.md names rows in every folder, and no manifest."""
    place, branch_id = Place("lake", ""), BranchId(OWNER, 7, 3, "s3", 0, 1)
    keys = [file_key(place, folder, branch_id, 0, extension) for folder in ("", "day=x/")]
    for name in (*keys, *(FOLDER + span.name for span in (Span(0, 99), Span(100, 100)))):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    found = duckdb.execute("FROM glob(?)", [f"{tmp_path}/**/sparkonce.*.{extension}"]).fetchall()
    assert sorted(Path(name).relative_to(tmp_path) for (name,) in found) == sorted(map(Path, keys))


def test_schema_is_kept() -> None:
    """Zones, nested columns and the order come back."""
    schema = pa.schema(
        [
            ("at", pa.timestamp("us", "Europe/Berlin")),
            ("m", pa.map_(pa.string(), pa.list_(pa.decimal128(38, 18)))),
        ]
    )
    assert Layout.of("csv", (), schema).arrow_schema() == schema


@pytest.mark.parametrize("body", [b"{}", b"x", b'{"v":2}', b'{"v":3}', b"[]"])
def test_file_that_is_no_manifest(body: bytes) -> None:
    """Nothing is guessed from it."""
    with pytest.raises(ConfigurationError, match=r"0\.json"):
        decode_file(body, "0.json")


def test_highest_revision_counts() -> None:
    old, new = manifest(1), manifest(1, revision=1, files=())
    assert newest([manifest(2), new, old]) == [new, manifest(2)]


def test_manifest_of_a_batch() -> None:
    """Its objects are named below the sink's url, and their rows and bytes are those prepared."""
    branches = [BranchId(OWNER, 7, 3, "s3", 0, attempt) for attempt in (1, 2)]
    committables = tuple(
        Committable(
            branch,
            {
                "files": [{"key": f"lake/day=x/f{branch.attempt}", "rows": 2, "bytes": 10}],
                "layout": LAYOUT.to_json(),
            },
        )
        for branch in reversed(branches)
    )
    batch = CommittedBatch("orders", OWNER, 7, 1, ("o",), committables)
    assert Manifest.of(batch, "s3", "lake/") == manifest(
        7,
        revision=1,
        offsets=("o",),
        files=(CommittedFile("day=x/f1", 2, 10), CommittedFile("day=x/f2", 2, 10)),
    )


def zoned(zone: str, *partition_by: str) -> Layout:
    schema = pa.schema([("id", pa.int64()), ("k", pa.timestamp("us", zone))])
    return Layout.of("parquet", partition_by, schema)


def prepared(number: int, layout: Layout) -> Committable:
    files = [{"key": f"lake/f{number}", "rows": 2, "bytes": 10}]
    return Committable(
        BranchId(OWNER, 7, 3, "s3", 0, number), {"files": files, "layout": layout.to_json()}
    )


def test_batch_whose_branches_were_written_differently() -> None:
    """Some were lost and written again in a session of another zone: each object tells its own."""
    berlin, new_york, utc = map(zoned, ("Europe/Berlin", "America/New_York", "UTC"))
    branches = [prepared(n, layout) for n, layout in enumerate([berlin, new_york, berlin, utc])]
    written = Manifest.of(
        CommittedBatch("orders", OWNER, 7, 1, ("o",), (*branches,)), "s3", "lake/"
    )
    span = Span(7, 7)
    assert decode_file(encode_file([written], span), span.name) == [written]
    files = Memory()
    files.put(span, [written])
    committed = find_committed(files, "s3://lake/orders")
    expected = {berlin: ["f0", "f2"], new_york: ["f1"], utc: ["f3"]}
    assert committed.keys_by_layout == expected
    assert sorted(committed.keys) == ["f0", "f1", "f2", "f3"]


def test_format_of_a_manifest_is_as_old_as_it_can_be() -> None:
    """Readers of version 1 are refused the batches that they would read wrongly, and no others."""
    other = zoned("UTC")
    again = replace(LAYOUT, schema=base64.b64encode(zlib.compress(packed(LAYOUT), 1)).decode())
    for layouts, version in [([LAYOUT, LAYOUT], 1), ([LAYOUT, again], 1), ([LAYOUT, other], 2)]:
        branches = tuple(prepared(n, layout) for n, layout in enumerate(layouts))
        batch = CommittedBatch("orders", OWNER, 7, 0, (), branches)
        assert json.loads(Manifest.of(batch, "s3", "lake/").encode())["v"] == version


def packed(layout: Layout) -> bytes:
    return zlib.decompress(base64.b64decode(layout.schema))


def test_batch_in_two_formats() -> None:
    """No table can be made of it: the error says what it is, and what reads it."""
    layouts = [zoned("UTC"), zoned("UTC", "k")]
    branches = tuple(prepared(n, layout) for n, layout in enumerate(layouts))
    files = Memory()
    batch = CommittedBatch("orders", OWNER, 7, 0, (), branches)
    files.put(Span(7, 7), [Manifest.of(batch, "s3", "lake/")])
    with pytest.raises(ConfigurationError, match="If one batch has both.*rewritten"):
        find_committed(files, "s3://lake/orders")


@pytest.mark.parametrize("version", range(1, FORMAT_VERSION + 1))
def test_manifest_of_every_version_is_read(version: int) -> None:
    """As it was written then; whoever changes the format adds what it wrote until then."""
    body = (GOLDEN / f"manifest-v{version}.json").read_bytes()
    (told,) = decode_file(body, "manifest.json")
    assert told.pipeline == "orders"
    assert [layout.zone() for layout in told.layouts] == ["Europe/Berlin", "UTC"][:version]
    assert told.encode() + b"\n" == body


# -- which batches are read ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("choice", "batches"),
    [
        ({}, [0, 1, 2, 3]),
        ({"batch": 2}, [0, 1, 2]),
        ({"after": 1}, [2, 3]),
        ({"after": 1, "batch": 2}, [2]),
        ({"after": 3}, []),
        ({"after": 3, "batch": 3}, []),
        ({"after": 3, "batch": 1}, []),
        ({"source": "orders"}, [0, 1, 2, 3]),
        ({"source": f"orders/{OWNER.digest}.s3", "batch": 0}, [0]),
    ],
)
def test_choice_of_batches(choice: dict[str, Any], batches: list[int]) -> None:
    """Up to a batch, after one, or both; merged or not."""
    files = Memory(2, 3)
    files.put(Span(0, 1), [manifest(0), manifest(1)])
    assert found(files, **choice) == batches


def test_batch_that_is_not_committed() -> None:
    """It is refused rather than read without its rows."""
    with pytest.raises(ConfigurationError, match="batch 4 is not committed here.* is 5"):
        found(Memory(0, 1, 2, 5), batch=4)


def test_reader_that_goes_on(tmp_path: Path) -> None:
    """Up to the newest batch and from there: each row once, of empty and merged batches too."""
    (tmp_path / FOLDER).mkdir(parents=True)
    disk = pa_fs.LocalFileSystem()

    def put(span: Span, *manifests: Manifest) -> int:
        (tmp_path / FOLDER / span.name).write_bytes(encode_file(manifests, span))
        return sparkonce.newest_committed(str(tmp_path), filesystem=disk)

    with pytest.raises(ConfigurationError, match="there is no manifest"):
        sparkonce.newest_committed(str(tmp_path), filesystem=disk)
    assert put(Span(5, 5), manifest(5)) == 5
    assert put(Span(6, 6), manifest(6, layout=None, files=())) == 6
    assert put(Span(7, 7), manifest(7)) == 7
    assert put(Span(0, 99), *map(manifest, range(5, 100))) == 99
    files = Memory(5)
    seen, rows = -1, []
    for batch_id in (6, 7, 8):
        newest_one = find_newest(files, "s3://lake/orders")
        rows += found(files, after=seen, batch=newest_one)
        seen = newest_one
        files.put(Span(batch_id, batch_id), [manifest(batch_id)])
    assert rows == [5, 6, 7]
    files.put(Span(0, 0), [manifest(0)], source_folder("orders-eu", OWNER.digest, "s3"))
    assert find_newest(files, "s3://lake/orders", source="orders-eu") == 0
    with pytest.raises(ConfigurationError, match="source="):
        find_newest(files, "s3://lake/orders")


def test_batch_without_rows() -> None:
    """It can be asked for, and its columns are those of the batches before."""
    files = Memory(0)
    files.put(Span(1, 1), [manifest(1, layout=None, files=())])
    assert found(files, batch=1) == [0]
    assert found(files, after=0, batch=1) == []


def test_nothing_is_committed() -> None:
    with pytest.raises(ConfigurationError, match="there is no manifest"):
        found(Memory())


def test_several_pipelines_in_one_place() -> None:
    """Together they can be read; their batch numbers are never mixed."""
    files = Memory(0, 1)
    other = source_folder("orders-eu", Owner("1" * 16, "q").digest, "s3")
    files.put(Span(0, 0), [manifest(7)], other)
    assert sorted(found(files)) == [0, 1, 7]
    assert found(files, source="orders") == [0, 1]
    assert found(files, source="orders-eu") == [7]
    with pytest.raises(ConfigurationError, match=r"'orders-eu/.*', 'orders/.*source="):
        found(files, batch=0)


def test_manifest_left_over_by_a_merge() -> None:
    """Batches that stand in two files are read once."""
    files = Memory(0, 1, 2)
    files.put(Span(0, 1), [manifest(0), manifest(1)])
    assert found(files) == [0, 1, 2]


def test_merged_while_it_is_read() -> None:
    """A file that is gone by then: the reader begins again, and misses nothing."""
    files = Memory(0, 1, 2)
    files.before_read = [lambda: files.merge(0, 1)]
    assert found(files) == [0, 1, 2]


def test_merged_while_it_is_listed() -> None:
    """A listing that missed both the old and the new file is not believed."""
    files = Memory(0, 1, 2)
    complete = Memory.names
    torn = [name for name in complete(files, FOLDER) if name.endswith("2.json")]
    listings = [torn]

    def names(folder: str) -> list[str]:
        return listings.pop() if listings else complete(files, folder)

    files.merge(0, 1)
    files.names = names  # type: ignore[method-assign]
    assert found(files) == [0, 1, 2]
    assert listings == []


def test_batches_that_come_while_it_is_listed() -> None:
    """They do not keep a reader of a busy pipeline from ending."""
    files = Memory(0)
    files.before_names = [lambda: None] + [
        lambda n=n: files.put(Span(n, n), [manifest(n)])  # type: ignore[misc]
        for n in range(1, 100)
    ]
    assert found(files) == [0]


def test_manifests_that_never_stand_still() -> None:
    """The reader says so instead of hanging."""
    files = Memory(0)
    numbers = itertools.count()
    files.names = lambda _: [FOLDER + Span(next(numbers), 10**6).name]  # type: ignore[method-assign]
    with pytest.raises(SparkOnceError, match="kept changing"):
        found(files)


def test_other_folders_between_the_batches() -> None:
    files = Memory(0)
    files.put(Span(1, 1), [manifest(1, layout=Layout.of("parquet", (), SCHEMA))])
    with pytest.raises(ConfigurationError, match="read them separately"):
        found(files)
    assert found(files, batch=0) == [0]


def test_column_that_came_later() -> None:
    """It is null in what is older; another type is refused."""
    files = Memory(0)
    wider = SCHEMA.append(pa.field("more", pa.float64()))
    files.put(Span(1, 1), [manifest(1, layout=Layout.of("parquet", ("day",), wider))])
    assert find_committed(files, "s3://x").schema == wider
    changed = pa.schema([("id", pa.string()), ("day", pa.string())])
    files.put(Span(2, 2), [manifest(2, layout=Layout.of("parquet", ("day",), changed))])
    with pytest.raises(ConfigurationError, match="changed its type"):
        find_committed(files, "s3://x")


def test_column_that_may_not_be_null_where_it_is(tmp_path: Path) -> None:
    """It may be in batches without it, and in folders: what is read can be written again."""

    def rows(*, later: bool) -> pa.Table:
        inner = pa.struct([pa.field("a", pa.int64(), nullable=False)])
        fields = [pa.field("id", pa.int64(), nullable=False)]
        if later:
            fields.append(pa.field("deep", inner, nullable=False))
        value = {"id": int(later), "deep": {"a": 1}}
        return pa.Table.from_pylist([value], schema=pa.schema(fields))

    day = pa.field("day", pa.string(), nullable=False)
    (tmp_path / FOLDER).mkdir(parents=True)
    for batch_id, (later, text) in enumerate([(False, "x"), (True, NULL_FOLDER)]):
        key = f"day={text}/f.parquet"
        (tmp_path / key).parent.mkdir()
        pq.write_table(rows(later=later), tmp_path / key)
        layout = Layout.of("parquet", ("day",), rows(later=later).schema.append(day))
        told = manifest(batch_id, files=(CommittedFile(key, 1, 1),), layout=layout)
        span = Span(batch_id, batch_id)
        (tmp_path / FOLDER / span.name).write_bytes(encode_file([told], span))
    disk = pa_fs.LocalFileSystem()
    table = sparkonce.committed_dataset(str(tmp_path), filesystem=disk).to_table()
    assert [table.schema.field(name).nullable for name in ("id", "day", "deep")] == [
        False,
        True,
        True,
    ]
    pq.write_table(table, tmp_path / "again")
    assert pq.read_table(tmp_path / "again").sort_by("id").to_pylist() == [
        {"id": 0, "day": "x", "deep": None},
        {"id": 1, "day": None, "deep": {"a": 1}},
    ]
    latest = sparkonce.committed_dataset(str(tmp_path), filesystem=disk, after=0)
    assert not latest.schema.field("deep").nullable


def test_layout_that_comes_back() -> None:
    """The newest one tells the zone, and the columns where there are no rows; not their order."""
    berlin, utc = zoned("Europe/Berlin"), zoned("UTC")
    wider = berlin.arrow_schema().insert(0, pa.field("more", pa.int64()))
    for others in (utc, Layout.of("parquet", (), wider)):
        files = Memory()
        for batch_id, layout in enumerate([berlin, others, berlin]):
            files.put(Span(batch_id, batch_id), [manifest(batch_id, layout=layout)])
        both = find_committed(files, "s3://lake/orders").schema
        assert both.field("k").type == pa.timestamp("us", "Europe/Berlin")
        assert both.names[:2] == ["id", "k"]
        files.put(Span(3, 3), [manifest(3, layout=None, files=())])
        assert find_committed(files, "s3://lake/orders", after=2).schema == berlin.arrow_schema()


def test_hundred_thousand_batches(tmp_path: Path) -> None:
    """They are some two hundred manifests, of which a reader of one batch opens one."""
    last = 100_000 + 99 * FANOUT + 98
    files = Memory()
    spans = [
        *(Span(n, n + FANOUT**2 - 1) for n in range(0, 100_000, FANOUT**2)),
        *(Span(n, n + FANOUT - 1) for n in range(100_000, 100_000 + 99 * FANOUT, FANOUT)),
        *(Span(n, n) for n in range(100_000 + 99 * FANOUT, last + 1)),
    ]
    for span in spans:
        files.put(span, [manifest(n) for n in range(span.first, span.last + 1)])
    assert len(files.files) == 10 + 99 + 99
    assert len(found(files)) == last + 1
    assert files.reads == len(files.files)
    files.reads = 0
    assert found(files, after=54_320, batch=54_321) == [54_321]
    assert files.reads == 1
    print(f"{sum(map(len, files.files.values())) / 2**20:.1f} MiB of manifests")


def test_text_in_zstd(tmp_path: Path) -> None:
    """pyarrow would parse the compressed bytes: it is refused, and what can read them is named."""
    (tmp_path / FOLDER).mkdir(parents=True)
    files = (CommittedFile("f.csv.zst", 1, 1),)
    (tmp_path / FOLDER / Span(0, 0).name).write_bytes(
        encode_file([manifest(0, files=files)], Span(0, 0))
    )
    with pytest.raises(ConfigurationError, match="use read_committed"):
        sparkonce.committed_dataset(str(tmp_path), filesystem=pa_fs.LocalFileSystem())


def test_keys_in_the_url_are_not_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """pyarrow takes them there; errors name the place without them."""
    url = "s3://KEY:SECRET@lake/orders?endpoint_override=SECRET"
    known = SimpleNamespace(from_uri=lambda _: (pa_fs.LocalFileSystem(), str(tmp_path)))
    monkeypatch.setattr(
        readers, "pa_fs", SimpleNamespace(FileSystem=known, FileSelector=pa_fs.FileSelector)
    )
    with pytest.raises(ConfigurationError, match=r"^s3://lake/orders: there is no manifest"):
        sparkonce.committed_dataset(url)


@pytest.mark.parametrize(
    "url", ["s3://KEY:SEC/RET@lake/orders", "s3://KEY:SEC#RET@lake", "nofs://KEY:SECRET@lake"]
)
def test_keys_in_a_url_that_cannot_be_read_are_not_repeated(url: str) -> None:
    """It may be for one of their characters: the error says how to write it."""
    with pytest.raises(ConfigurationError, match="%2F") as told:
        sparkonce.committed_dataset(url)
    assert "SEC" not in str(told.value)


@pytest.mark.parametrize(
    "url", ["s3://lake/a b/100%25/ä#[1]{x}^", "s3a://lake/what?/is#this", "s3://lake"]
)
@pytest.mark.parametrize("settings", ["?region=eu-west-1&scheme=http&endpoint_override=x:1"])
def test_readers_url_is_the_sinks(url: str, settings: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No character of a prefix has another meaning; what pyarrow takes stands behind it."""
    roots = []

    def note(files: Any, shown: str, **_: Any) -> None:
        roots.append(files.root)
        raise ConfigurationError(shown)

    monkeypatch.setattr(readers, "find_committed", note)
    with pytest.raises(ConfigurationError) as told:
        sparkonce.committed_dataset(url.replace("://", "://KEY:SECRET@") + settings)
    place = Place.from_url(url)
    assert roots == [f"{place.bucket}/{place.prefix}"]
    assert str(told.value) == url


NOON = dt.datetime(2026, 7, 1, 12, 30, 0, 500000, tzinfo=dt.UTC)


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        (pa.string(), ["a/b ä%", "007", "x=y", "true"]),
        (pa.int8(), [1, -2]),
        (pa.decimal128(10, 2), [Decimal("1.50"), Decimal("-0.07")]),
        (pa.bool_(), [True, False]),
        (pa.date32(), [NOON.date()]),
        (pa.timestamp("us"), [NOON.replace(tzinfo=None)]),
        (pa.timestamp("us", "Europe/Berlin"), [NOON, NOON.replace(month=1, microsecond=0)]),
        (
            pa.timestamp("us", "Europe/Berlin"),
            [NOON.replace(year=y) for y in (1, 1850, 2050, 9998)],
        ),
        (pa.timestamp("us", "+05:30"), [NOON]),
    ],
    ids=str,
)
def test_folders_give_back_their_values(
    tmp_path: Path, kind: pa.DataType, values: list[Any]
) -> None:
    """With their types, by pyarrow from a copy on a disk; half a batch beside them is not read."""
    rows = pa.RecordBatch.from_arrays(
        [pa.array(range(len(values) + 1)), pa.array([*values, None], kind)], names=["id", "k"]
    )
    files = []
    for n, (folder, part) in enumerate(split(rows, ["k"])):
        (tmp_path / folder).mkdir()
        files.append(CommittedFile(f"{folder}{n}.parquet", part.num_rows, 1))
        for key in (files[-1].key, f"{folder}uncommitted.parquet"):
            pq.write_table(pa.Table.from_batches([part]), tmp_path / key)
    layout = Layout.of("parquet", ("k",), rows.schema)
    (tmp_path / FOLDER).mkdir(parents=True)
    (tmp_path / FOLDER / Span(0, 0).name).write_bytes(
        encode_file([manifest(0, files=tuple(files), layout=layout)], Span(0, 0))
    )
    dataset = sparkonce.committed_dataset(str(tmp_path), filesystem=pa_fs.LocalFileSystem())
    assert dataset.to_table().sort_by("id").equals(pa.Table.from_batches([rows]))
    assert dataset.to_table(filter=ds.field("k").is_null())["id"].to_pylist() == [len(values)]


def test_folders_of_one_batch_in_two_zones(tmp_path: Path) -> None:
    """After a restart in another zone, lost branches were written again: the instants are right."""
    branches = []
    for number, zone in enumerate(["Europe/Berlin", "America/New_York"]):
        kind = pa.timestamp("us", zone)
        rows = pa.record_batch({"id": [number], "k": pa.array([NOON], kind)})
        ((folder, part),) = split(rows, ["k"])
        (tmp_path / folder).mkdir()
        key = f"{folder}{number}.parquet"
        pq.write_table(pa.Table.from_batches([part]), tmp_path / key)
        branches.append(
            Committable(
                BranchId(OWNER, 0, 1, "s3", number, number),
                {
                    "files": [{"key": f"lake/{key}", "rows": 1, "bytes": 1}],
                    "layout": Layout.of("parquet", ("k",), rows.schema).to_json(),
                },
            )
        )
    batch = CommittedBatch("orders", OWNER, 0, 1, (), tuple(branches))
    (tmp_path / FOLDER).mkdir(parents=True)
    (tmp_path / FOLDER / Span(0, 0).name).write_bytes(
        encode_file([Manifest.of(batch, "s3", "lake/")], Span(0, 0))
    )
    dataset = sparkonce.committed_dataset(str(tmp_path), filesystem=pa_fs.LocalFileSystem())
    assert dataset.to_table()["k"].to_pylist() == [NOON, NOON]


# -- merging -------------------------------------------------------------------------------------


class Bucket:
    """As much of a client as merging takes."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.gets = 0
        self.may_delete = True
        self.takes_lists = True

    def put_object(self, *, Key: str, Body: Any, **_: Any) -> None:  # noqa: N803
        self.objects[Key] = Body if isinstance(Body, bytes) else Body.read()

    def get_object(self, *, Key: str, **_: Any) -> dict[str, Any]:  # noqa: N803
        self.gets += 1
        return {"Body": io.BytesIO(self.objects[Key])}

    def delete_objects(self, *, Delete: Any, **_: Any) -> dict[str, Any]:  # noqa: N803
        keys = [entry["Key"] for entry in Delete["Objects"]]
        if not self.takes_lists:
            raise ClientError({"Error": {"Code": "MissingContentMD5"}}, "DeleteObjects")
        if not self.may_delete:
            return {"Errors": [{"Key": key, "Code": "AccessDenied"} for key in keys]}
        for key in keys:
            del self.objects[key]
        return {}

    def delete_object(self, *, Key: str, **_: Any) -> None:  # noqa: N803
        if not self.may_delete:
            raise ClientError({"Error": {"Code": "AccessDenied"}}, "DeleteObject")
        del self.objects[Key]

    def get_paginator(self, _: str) -> Bucket:
        return self

    def paginate(self, **_: Any) -> list[dict[str, Any]]:
        return [{"Contents": [{"Key": key} for key in sorted(self.objects)]}]


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Bucket:
    bucket = Bucket()
    monkeypatch.setattr(Publisher, "_client", lambda _: bucket)
    return bucket


def publisher() -> Publisher:
    return Publisher(Clients(), Place("lake", ""), FOLDER, S3Objects())


def test_merging_takes_little_memory(bucket: Bucket) -> None:
    """Manifests are joined line by line, on the driver's disk, however many objects they name."""
    files = tuple(CommittedFile(f"day=x/f{n}.parquet", 2, 10) for n in range(1000))
    line = encode_file([manifest(0, files=files)], Span(0, 0))
    for n in range(FANOUT):
        bucket.objects[FOLDER + Span(n, n).name] = line.replace(b'"batch":0,', b'"batch":%d,' % n)
    tracemalloc.start()
    publisher().merge(FANOUT - 1)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 5 << 20
    whole = FOLDER + Span(0, FANOUT - 1).name
    assert list(bucket.objects) == [whole]
    lines = gzip.decompress(bucket.objects[whole]).splitlines()
    assert [json.loads(line)["batch"] for line in lines] == list(range(FANOUT))


def test_merging_without_room_for_it(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The driver's temporary folder is full: a warning, and the batch is published all the same."""
    for n in range(FANOUT - 1):
        bucket.objects[FOLDER + Span(n, n).name] = encode_file([manifest(n)], Span(n, n))

    def refuse() -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(tempfile, "TemporaryFile", refuse)
    publisher().publish(manifest(FANOUT - 1))
    assert len(bucket.objects) == FANOUT
    assert "could not be merged now" in caplog.text
    assert "temporary folder" in caplog.text
    assert "No space left" in caplog.text


def test_merging_where_lists_are_not_deleted(bucket: Bucket) -> None:
    """Older servers want a Content-MD5 with them, which boto3 no longer sends: one by one then."""
    bucket.takes_lists = False
    for batch_id in range(2 * FANOUT):
        span = Span(batch_id, batch_id)
        bucket.objects[FOLDER + span.name] = encode_file([manifest(batch_id)], span)
    publisher().merge(2 * FANOUT - 1)
    assert sorted(bucket.objects) == [
        FOLDER + Span(n * FANOUT, (n + 1) * FANOUT - 1).name for n in range(2)
    ]


@pytest.mark.parametrize("takes_lists", [True, False])
def test_merging_without_the_right_to_delete(bucket: Bucket, takes_lists: bool) -> None:
    """What is merged stays beside it, and is not read again and again."""
    bucket.may_delete, bucket.takes_lists = False, takes_lists
    for batch_id in range(10 * FANOUT):
        span = Span(batch_id, batch_id)
        bucket.objects[FOLDER + span.name] = encode_file([manifest(batch_id)], span)
        if (batch_id + 1) % FANOUT == 0:
            bucket.gets = 0
            publisher().merge(batch_id)
            assert bucket.gets <= 2 * FANOUT + 1
    merged = [key for key in bucket.objects if key.endswith(".gz")]
    assert len(merged) == 10
    bucket.may_delete = True
    publisher().merge(10 * FANOUT - 1)
    assert sorted(bucket.objects) == sorted(merged)
    files = Memory()
    files.files = bucket.objects
    assert found(files) == list(range(10 * FANOUT))
    for key in merged:
        assert gzip.decompress(bucket.objects[key]).count(b"\n") == FANOUT


def anew(batch_id: int, **changes: Any) -> Manifest:
    """The batch as it is made again, with another object."""
    files = (CommittedFile(f"day=x/f{100_000 + batch_id}.parquet", 2, 10),)
    return manifest(batch_id, files=files, **changes)


@pytest.mark.parametrize(
    ("first", "last", "merged"),
    [
        (50, 2 * FANOUT - 1, FANOUT),
        (FANOUT, 2 * FANOUT - 1, FANOUT),
        (FANOUT**2 - 2, FANOUT**2 - 1, FANOUT**2),
    ],
    ids=["inside a merged file", "at its beginning", "ten thousand"],
)
def test_batches_that_are_made_anew(bucket: Bucket, first: int, last: int, merged: int) -> None:
    """Log and targets were restored, and the merged files stayed: their lines count no more."""
    spans = [Span(n, n + merged - 1) for n in range(0, last, merged)]
    for span in spans:
        lines = map(manifest, range(span.first, span.last + 1))
        bucket.objects[FOLDER + span.name] = encode_file(lines, span)
    files = Memory()
    files.files = bucket.objects
    for batch_id in range(first, last + 1):
        publisher().publish(anew(batch_id))
        assert found(files, after=batch_id - 1, batch=batch_id) == [100_000 + batch_id]
    assert found(files) == [*range(first), *range(100_000 + first, 100_000 + last + 1)]
    assert sorted(bucket.objects) == [FOLDER + span.name for span in spans]
    for span in spans:
        assert len(decode_file(bucket.objects[FOLDER + span.name], span.name)) == span.size


def test_merged_file_that_was_shortened(bucket: Bucket) -> None:
    """As the runbook has it: what is made anew counts, also where lost branches had been redone."""
    rest = Span(0, 49)
    lines = [manifest(n, revision=1) for n in range(FANOUT)]
    bucket.objects[FOLDER + rest.name] = encode_file(lines[: rest.size], rest)
    files = Memory()
    files.files = bucket.objects
    with pytest.raises(ConfigurationError, match="the newest committed one is 49"):
        found(files, batch=50)
    for batch_id in range(50, FANOUT):
        publisher().publish(anew(batch_id))
    assert list(bucket.objects) == [FOLDER + Span(0, FANOUT - 1).name]
    assert found(files) == [*range(50), *range(100_050, 100_000 + FANOUT)]
