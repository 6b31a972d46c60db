"""Which Arrow type goes into which Postgres type, exactly; and the names. No server needed."""

from __future__ import annotations

import datetime as dt
import json
import pickle
import uuid
from contextlib import nullcontext
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparkonce.errors import ConfigurationError, ProtocolError
from sparkonce.model import (
    DRIVER_ATTEMPT,
    BranchId,
    Committable,
    Owner,
    attempt_of_small_batch,
)
from sparkonce.sinks.postgres import PostgresSink
from sparkonce.sinks.postgres.loading.direct import Prepared
from sparkonce.sinks.postgres.loading.staging import SLICE_BYTES, slices
from sparkonce.sinks.postgres.loading.values import (
    ValueDoesNotFitError,
    binary_encoder,
    convert,
    python_values,
)
from sparkonce.sinks.postgres.merging.merge import Merge
from sparkonce.sinks.postgres.merging.statements import statements
from sparkonce.sinks.postgres.server.sql import branch_of_session, staging_name
from sparkonce.sinks.postgres.target.types import PostgresType, UnmappableError, plan, spark_name

untimed = settings(deadline=None)

QUERY_ID = "11111111-2222-3333-4444-555555555555"
OWNER = Owner("0123456789abcdef", QUERY_ID)


def numeric(precision: int, scale: int) -> PostgresType:
    modifier = (precision << 16 | (scale & 0x7FF)) + 4
    return PostgresType(f"numeric({precision},{scale})", "numeric", modifier)


def kind(name: str, modifier: int = -1) -> PostgresType:
    return PostgresType(name, name, modifier)


def list_of(name: str) -> PostgresType:
    return PostgresType(f"{name}[]", name, is_array=True)


def sent(array: pa.Array[Any], target: PostgresType) -> Any:
    return convert(array, plan("x", array.type, target))


INT_TYPES = [(pa.int8(), 8), (pa.int16(), 16), (pa.int32(), 32), (pa.int64(), 64)]
INT_TARGETS = [("int2", 16), ("int4", 32), ("int8", 64)]


@pytest.mark.parametrize(("arrow", "bits"), INT_TYPES, ids=str)
@pytest.mark.parametrize(("name", "target_bits"), INT_TARGETS, ids=str)
@untimed
@given(data=st.data())
def test_integer_arrives_as_it_is_or_is_refused(
    data: st.DataObject, arrow: pa.DataType, bits: int, name: str, target_bits: int
) -> None:
    """Nothing wraps around."""
    value = data.draw(st.integers(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1))
    array = pa.array([None, value], arrow)
    if -(2 ** (target_bits - 1)) <= value < 2 ** (target_bits - 1):
        assert sent(array, kind(name)).to_pylist() == [None, value]
    else:
        with pytest.raises(ValueDoesNotFitError, match="column 'x'.*does not fit") as caught:
            sent(array, kind(name))
        assert str(value) not in str(caught.value)


@untimed
@given(
    precision=st.integers(1, 38),
    scale=st.integers(0, 38),
    target_scale=st.integers(-5, 38),
    data=st.data(),
)
def test_decimal_never_loses_a_digit(
    precision: int, scale: int, target_scale: int, data: st.DataObject
) -> None:
    """Digits that numeric(p,s) does not keep are refused here; the server would round them."""
    scale = min(scale, precision)
    unscaled = data.draw(st.integers(-(10**precision) + 1, 10**precision - 1))
    value = Decimal(f"{unscaled}E-{scale}")  # exact, whatever the context's precision
    array = pa.array([value, None], pa.decimal128(precision, scale))
    is_kept = unscaled % 10 ** max(0, scale - target_scale) == 0
    try:
        arrived = sent(array, numeric(1000, target_scale))
    except ValueDoesNotFitError:
        assert not is_kept
    else:
        assert is_kept
        assert arrived.to_pylist() == [value, None]
        assert arrived.type.scale <= max(target_scale, 0)


def not_utf8() -> pa.Array:
    """As Spark has it after a cast of bytes to text."""
    offsets = pa.array([0, 2, 4], pa.int32()).buffers()[1]
    return pa.StringArray.from_buffers(2, offsets, pa.py_buffer(b"ab\xff\xfe"))


@pytest.mark.parametrize("name", ["uuid", "text"])
def test_text_that_is_not_utf8(name: str) -> None:
    array = not_utf8()
    column = plan("x", array.type, kind(name))
    with pytest.raises(ValueDoesNotFitError, match="column 'x': a text is not UTF-8"):
        python_values(convert(array, column), column)


def test_decimal_that_moves_by_more_digits_than_arrow_has() -> None:
    """Arrow's cast over 39 digits gives 0 and no error."""
    array = pa.array([Decimal("1E-34")], pa.decimal128(34, 34))
    with pytest.raises(ValueDoesNotFitError, match="does not fit"):
        sent(array, numeric(1000, -5))


@untimed
@given(st.integers(-(2**63), 2**63 - 1))
def test_integer_becomes_a_decimal_for_numeric(value: int) -> None:
    """An int64 sent to a numeric as it is would be stored as 0."""
    arrived = sent(pa.array([value]), numeric(38, 0))
    assert pa.types.is_decimal128(arrived.type)
    assert arrived.to_pylist() == [Decimal(value)]


@untimed
@given(st.integers(-(2**63), 2**63 - 1))
def test_integer_goes_into_a_float_only_as_it_is(value: int) -> None:
    try:
        assert int(sent(pa.array([value]), kind("float8")).to_pylist()[0]) == value
    except ValueDoesNotFitError:
        assert abs(value) > 2**53


@untimed
@given(
    st.datetimes(),
    st.integers(0, 6),
)
def test_timestamp_keeps_every_digit_or_is_refused(value: dt.datetime, digits: int) -> None:
    """timestamp(3) would round microseconds."""
    array = pa.array([value, None], pa.timestamp("us"))
    fits = value.microsecond % 10 ** (6 - digits) == 0
    try:
        assert sent(array, kind("timestamp", digits)).to_pylist() == [value, None]
        assert fits
    except ValueDoesNotFitError:
        assert not fits


@pytest.mark.parametrize("name", ["timestamp", "timestamptz"])
@untimed
@given(value=st.integers(-(2**63), 2**63 - 1))
def test_time_before_the_first_of_postgres_is_refused(name: str, value: int) -> None:
    """Counted from 2000, as Postgres does, one of them is -infinity."""
    zone = "UTC" if name == "timestamptz" else None
    array = pa.array([None, value], pa.int64()).cast(pa.timestamp("us", zone))
    first = -2_440_588 * 86_400 * 10**6
    if value >= first:
        assert sent(array, kind(name)).cast(pa.int64()).to_pylist() == [None, value]
    else:
        with pytest.raises(ValueDoesNotFitError):
            sent(array, kind(name))


def test_date_before_the_first_of_postgres_is_refused() -> None:
    days = pa.array([-2_440_588, None], pa.int32())
    assert sent(days.cast(pa.date32()), kind("date")).cast(pa.int32()).equals(days)
    with pytest.raises(ValueDoesNotFitError):
        sent(pa.array([-2_440_589], pa.int32()).cast(pa.date32()), kind("date"))


@untimed
@given(st.text(), st.integers(1, 20))
def test_text_is_never_cut(value: str, length: int) -> None:
    """The server cuts what is too long where all of it is blanks."""
    target = PostgresType(f"varchar({length})", "varchar", length + 4)
    array = pa.array([None, value.encode(errors="replace").decode()])
    try:
        assert sent(array, target).equals(array)
        assert len(value) <= length
    except ValueDoesNotFitError:
        assert len(value) > length


@pytest.mark.parametrize(("value", "fits"), [("abc", True), ("abcd", True), ("abc ", False)])
def test_text_that_the_merge_judges(value: str, fits: bool) -> None:
    """Where a longer string is staged, the server refuses it, but for blanks that it would cut."""
    target = PostgresType("varchar", "varchar", 3 + 4, is_staged_longer=True)
    array = pa.array([None, value])
    with nullcontext() if fits else pytest.raises(ValueDoesNotFitError):
        assert sent(array, target).equals(array)


@untimed
@given(st.integers(-(2**63), 2**63 - 1), st.integers(0, 6))
def test_interval_keeps_every_digit_or_is_refused(value: int, digits: int) -> None:
    target = PostgresType("interval", "interval", 0x7FFF << 16 | digits)
    array = pa.array([value, None], pa.int64()).cast(pa.duration("us"))
    fits = value % 10 ** (6 - digits) == 0
    try:
        assert sent(array, target).equals(array)
        assert fits
    except ValueDoesNotFitError:
        assert not fits


def test_interval_is_written_in_hours() -> None:
    """A day of Spark has 24 hours; one of Postgres has as many as the calendar says."""
    column = plan("x", pa.duration("us"), kind("interval"))
    values = pa.array([2 * 86_400 * 10**6 + 1, -3_600 * 10**6, None, -(2**63)], pa.int64())
    assert python_values(convert(values.cast(pa.duration("us")), column), column) == [
        *("48:00:00.000001", "-1:00:00.000000", None, "-2562047788:00:54.775808"),
    ]


@pytest.mark.parametrize(
    ("day", "text"),
    [
        (-2_440_588, "4714-11-24 BC"),
        (-719_163, "0001-12-31 BC"),
        (-719_162, "0001-01-01"),
        (2_932_897, "10000-01-01"),
    ],
)
def test_times_that_python_lacks_are_written_all_the_same(day: int, text: str) -> None:
    dates = pa.array([day, None], pa.int32()).cast(pa.date32())
    column = plan("x", dates.type, kind("date"))
    assert python_values(convert(dates, column), column) == [text, None]
    times = pa.array([[day * 86_400 * 10**6 + 1, None], None], pa.list_(pa.int64()))
    times = times.cast(pa.list_(pa.timestamp("us", "UTC")))
    column = plan("x", times.type, list_of("timestamptz"))
    shown = text.replace(" BC", "") + "T00:00:00.000001+00" + (" BC" if "BC" in text else "")
    assert python_values(convert(times, column), column) == [[shown, None], None]


@untimed
@given(
    st.lists(st.none() | st.uuids(), max_size=5), st.sampled_from(["{}", "{{{}}}", "urn:uuid:{}"])
)
def test_uuid_strings_are_read_in_every_spelling(values: list[uuid.UUID | None], how: str) -> None:
    strings = [None if v is None else how.format(v) for v in values]
    array = pa.array(strings, pa.string())
    assert sent(array, kind("uuid")).to_pylist() == [None if v is None else v.bytes for v in values]


@pytest.mark.parametrize(
    "text", ["0x" + "1" * 30, "1_" * 16, " " + "1" * 31, "+" + "1" * 31, "1" * 31, "{}", ""]
)
def test_number_that_is_no_uuid_is_not_made_one(text: str) -> None:
    """Python's `uuid` takes each of the first four, and gives another one."""
    with pytest.raises(ValueDoesNotFitError):
        sent(pa.array([text]), kind("uuid"))


def test_text_that_is_no_uuid_is_refused_without_being_shown() -> None:
    with pytest.raises(ValueDoesNotFitError) as caught:
        sent(pa.array(["my secret"]), kind("uuid"))
    assert "secret" not in str(caught.value)


@untimed
@given(st.lists(st.none() | st.lists(st.none() | st.integers(-5, 5))), st.integers(0, 3))
def test_lists_keep_their_nulls_also_in_a_slice(lists: list[Any], start: int) -> None:
    """Arrow slices share buffers; offsets and nulls of the whole array must not shine through."""
    array = pa.array(lists, pa.list_(pa.int64()))[start:]
    arrived = sent(array, list_of("int4"))
    arrived.validate(full=True)
    assert arrived.to_pylist() == lists[start:]


def test_column_without_values_goes_into_any_type() -> None:
    for target in (kind("int4"), kind("jsonb"), kind("uuid"), kind("inet"), numeric(3, 1)):
        assert sent(pa.nulls(2), target).to_pylist() == [None, None]
    assert sent(pa.nulls(2), list_of("text")).to_pylist() == [None, None]


TIMES_AS_TEXT = [
    ("time", "12:34", True),
    ("time", "24:00:00", True),
    ("time", "12:34:56.123456", True),
    ("time", "12:34:56.123456000", True),
    ("time", "12:34:56.123456789", False),
    ("time", "12:34:60", False),  # the next minute
    ("time", "12:34:56+02", False),  # the zone would be dropped
    ("time", "2026-01-02 12:34:56", False),  # and the date
    ("timetz", "12:34:56.123456+02", True),
    ("timetz", "12:34:56-03:30", True),
    ("timetz", "12:34Z", True),
    ("timetz", "12:34:56.1234567+02", False),
    ("timetz", "12:34:56", False),  # the session's zone would be added
    ("interval", "3 months", True),
    ("interval", "-1 year 2 mons +3 days 12:34:56.123456", True),
    ("interval", "1.5 hours", True),
    ("interval", "P1Y2M3DT4H5M6.5S", True),
    ("interval", "0.000000000 seconds", True),
    ("interval", "@ 1.0 Year ago", True),
    ("interval", "0.0000001 seconds", False),
    ("interval", "PT0.1234567S", False),
    ("interval", "12:34:56.123456789", False),
    ("interval", "0.1 years", False),  # 1.2 months
    ("interval", "P0.1Y", False),
    ("interval", "0.01 Century", False),
    ("interval", "0.0001 ms", False),
    ("interval", "0.5 microseconds", False),
    ("interval", "1e-7 seconds", False),
]


@pytest.mark.parametrize("is_array", [False, True])
@pytest.mark.parametrize(("name", "text", "is_kept"), TIMES_AS_TEXT)
def test_text_that_postgres_would_round_to_microseconds_is_refused(
    name: str, text: str, is_kept: bool, is_array: bool
) -> None:
    values = [[text, None], None] if is_array else [text, None]
    array: Any = pa.array(values)
    target = list_of(name) if is_array else kind(name)
    if is_kept:
        assert sent(array, target).to_pylist() == values
    else:
        with pytest.raises(ValueDoesNotFitError, match=f"does not fit into Postgres type {name}"):
            sent(array, target)


def test_list_of_uuids_is_read_into_values_that_psycopg_writes() -> None:
    column = plan("x", pa.list_(pa.string()), list_of("uuid"))
    value = uuid.uuid4()
    array = convert(pa.array([[str(value), None], None]), column)
    assert not column.binary
    assert python_values(array, column) == [[value, None], None]


@pytest.mark.parametrize(
    ("arrow", "name", "hint"),
    [
        (pa.string(), "int4", "cast it"),
        (pa.string(), "timestamptz", "cast it"),
        (pa.float64(), "numeric", "cast it"),
        (pa.float64(), "int8", "cast it"),
        (pa.float64(), "float4", "rounded"),
        (pa.decimal128(10, 2), "int8", "numeric"),
        (pa.decimal128(10, 2), "float8", "cast it"),
        (pa.timestamp("us", "UTC"), "timestamp", "timestamp_ntz"),
        (pa.timestamp("us"), "timestamptz", "cast it to timestamp in"),
        (pa.bool_(), "int4", "cast it"),
        (pa.int64(), "text", "cast it"),
        (pa.struct([("a", pa.int64())]), "jsonb", "to_json"),
        (pa.map_(pa.string(), pa.int64()), "jsonb", "to_json"),
        (pa.list_(pa.int64()), "jsonb", "to_json"),
        (pa.binary(), "text", "cast it"),
        (pa.string(), "name", "cast it"),
        (pa.string(), "char", "cast it"),
        (pa.string(), "money", "cast it"),
        (pa.duration("us"), "int8", "cast it"),
        (pa.time64("ns"), "timetz", "cast it"),
    ],
    ids=str,
)
def test_types_that_lose_something_are_refused_with_the_fix(
    arrow: pa.DataType, name: str, hint: str
) -> None:
    with pytest.raises(UnmappableError, match=hint):
        plan("x", arrow, kind(name))


@pytest.mark.parametrize(
    ("arrow", "modifier"),
    [
        (pa.duration("us"), 4 << 16 | 0xFFFF),  # interval year
        (pa.string(), 0x7FFF << 16),  # interval(0)
    ],
    ids=str,
)
def test_interval_that_keeps_only_a_part_is_refused(arrow: pa.DataType, modifier: int) -> None:
    with pytest.raises(UnmappableError):
        plan("x", arrow, PostgresType("interval", "interval", modifier))


def test_arrays_are_refused_where_they_do_not_match() -> None:
    with pytest.raises(UnmappableError, match="give an array"):
        plan("x", pa.int32(), list_of("int4"))
    with pytest.raises(UnmappableError, match="arrays of arrays"):
        plan("x", pa.list_(pa.list_(pa.int32())), list_of("int4"))


def test_encoder_takes_the_planned_types() -> None:
    columns = [
        plan("a", pa.int64(), kind("int4")),
        plan("b", pa.large_string(), kind("jsonb")),
        plan("c", pa.list_(pa.int64()), list_of("int8")),
    ]
    arrays = [
        convert(pa.array([1, None]), columns[0]),
        convert(pa.array(["{}", None], pa.large_string()), columns[1]),
        convert(pa.array([[1], None]), columns[2]),
    ]
    batch = pa.RecordBatch.from_arrays(arrays, schema=pa.schema([c.field for c in columns]))
    encoder = binary_encoder(columns)
    assert encoder.write_header() + encoder.write_batch(batch) + encoder.finish()


@pytest.mark.parametrize(
    ("arrow", "name"),
    [
        (pa.int64(), "bigint"),
        (pa.large_string(), "string"),
        (pa.decimal128(10, 2), "decimal(10,2)"),
        (pa.timestamp("us"), "timestamp_ntz"),
        (pa.timestamp("us", "UTC"), "timestamp"),
        (pa.list_(pa.int32()), "array<int>"),
        (pa.null(), "void"),
        (pa.duration("us"), "interval day to second"),
        (pa.map_(pa.string(), pa.int64()), "map<string,bigint>"),
        (pa.struct([("a", pa.time64("ns"))]), "struct<a:time>"),
    ],
    ids=str,
)
def test_types_are_called_what_spark_calls_them(arrow: pa.DataType, name: str) -> None:
    assert spark_name(arrow) == name


@pytest.mark.parametrize("heavy", ["the first rows", "all rows", "one row"])
def test_rows_are_encoded_in_parts_of_bounded_size(heavy: str) -> None:
    """Wherever the large values are; a part is larger only where a single row is."""
    sizes = {"the first rows": [2**20] * 100 + [1] * 900, "all rows": [2**18] * 400}
    values = ["x" * size for size in sizes.get(heavy, [SLICE_BYTES + 1, *[1] * 99])]
    batch = pa.RecordBatch.from_pydict({"id": list(range(len(values))), "value": values})
    parts = list(slices(batch.slice(1) if heavy == "all rows" else batch))
    assert all(part.nbytes <= SLICE_BYTES or part.num_rows == 1 for part in parts)
    assert len(parts) < 20
    ids = [n for part in parts for n in part.column("id").to_pylist()]
    assert ids == list(range(len(values)))[heavy == "all rows" :]


# -- names -----------------------------------------------------------------------------------------

branches = st.builds(
    BranchId,
    owner=st.just(OWNER),
    batch_id=st.integers(0, 10**8),
    token=st.integers(0, 10**6),
    sink=st.from_regex(r"[A-Za-z0-9_-]{1,32}", fullmatch=True),
    write_pass=st.integers(0, 99),
    attempt=st.integers(0, DRIVER_ATTEMPT) | st.integers(0).map(attempt_of_small_batch),
)


@untimed
@given(branches, branches)
def test_staging_names_are_short_and_none_begins_another(one: BranchId, other: BranchId) -> None:
    assert len(staging_name(one)) <= 63
    if one != other:
        assert not staging_name(other).startswith(staging_name(one))


@untimed
@given(branches)
def test_name_of_a_merge_is_read_back(branch_id: BranchId) -> None:
    """Only by the sink whose merge it is; a task's staging session is nobody's merge."""
    name = staging_name(branch_id)
    is_merge = branch_id.attempt == DRIVER_ATTEMPT
    assert branch_of_session(OWNER, branch_id.sink, name) == (branch_id if is_merge else None)
    assert branch_of_session(OWNER, branch_id.sink + "x", name) is None
    assert branch_of_session(Owner("0" * 16, QUERY_ID), branch_id.sink, name) is None


def test_branch_without_batch_has_no_name() -> None:
    with pytest.raises(ProtocolError, match="batch"):
        staging_name(BranchId(OWNER, None, 1, "postgres", 0, 1))
    with pytest.raises(ProtocolError, match="longer"):
        staging_name(BranchId(OWNER, 10**18, 10**18, "postgres", 0, 1))


def test_statement_quotes_names_and_leaves_percent_alone() -> None:
    record = Committable(
        BranchId(OWNER, 0, 1, "postgres", 0, DRIVER_ATTEMPT),
        {
            "schema": 'a"b',
            "table": "100%",
            "columns": ["É%s", "id"],
            "key": ["id"],
            "staging": ["s2", "s1"],
            "rows": 2,
            "system": "7",
            "database": "shop",
            "prepared": True,
        },
        version=1,  # as before there were modes
    )
    *_, text = (part.as_string() for part in statements(Merge.read(record), record.branch_id))
    assert 'INTO "a""b"."100%" ("É%s", "id")' in text
    assert text.index('"s1"') < text.index('"s2"')
    assert 'ORDER BY "id" ON CONFLICT ("id") DO UPDATE SET "É%s" = EXCLUDED."É%s"' in text


def test_record_of_a_version_without_gaps_is_read() -> None:
    target = {"schema": "s", "table": "t", "columns": ["id"], "key": ["id"], "staging": ["x"]}
    server = {"rows": 10**6, "system": "7", "database": "shop", "prepared": True}
    modes = {"mode": "upsert", "update": [], "order_by": [], "delete": None, "helpers": []}
    branch = BranchId(OWNER, 0, 1, "postgres", 0, DRIVER_ATTEMPT)
    payload = {**target, **server, **modes, "dead_letter": None, "attached": []}
    merge = Merge.read(Committable(branch, payload, version=2))
    *_, text = (part.as_string() for part in statements(merge, branch))
    assert text.startswith("INSERT INTO")
    assert text.endswith('ON CONFLICT ("id") DO NOTHING')


OLD_MERGE: dict[str, Any] = {
    "schema": "s",
    "table": "t",
    "columns": ["id"],
    "key": None,
    "staging": ["x", "y"],
    "rows": 9,
    "system": "7",
    "database": "shop",
    "prepared": True,
    "mode": "append",
    "update": [],
    "order_by": [],
    "delete": None,
    "helpers": [],
    "dead_letter": None,
    "attached": ["x", "y"],
    "leading": "id",
    "shape": [["id", "20", -1, "bigint"]],
}
"""As the version with attach= and the shortcuts of upserts wrote it."""


def test_record_with_attached_partitions_is_inserted_if_it_is_merged_again() -> None:
    branch = BranchId(OWNER, 0, 1, "postgres", 0, DRIVER_ATTEMPT)
    merge = Merge.read(Committable(branch, OLD_MERGE, version=5))
    (text,) = (part.as_string() for part in statements(merge, branch))
    assert text == (
        'INSERT INTO "s"."t" ("id") SELECT "id" FROM (SELECT "id" FROM (SELECT "id" FROM "s"."x" '
        'UNION ALL SELECT "id" FROM "s"."y") AS staged) AS staged'
    )
    kept = {k: v for k, v in OLD_MERGE.items() if k not in {"attached", "leading"}}
    written = merge.committable(branch)
    assert (written.version, json.loads(json.dumps(dict(written.payload)))) == (5, kept)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({}, "table s.t, prepared transaction {branch}, staging tables x, y"),
        ({"prepared": False}, "table s.t, an open transaction, staging tables x, y"),
        (
            {"staging": [f"s{n}" for n in range(200)]},
            "table s.t, prepared transaction {branch}, staging tables s0, s1, s2 and 197 more",
        ),
    ],
)
def test_text_says_what_a_merge_is_on_the_server(changes: dict[str, Any], text: str) -> None:
    branch = BranchId(OWNER, 0, 1, "postgres", 0, DRIVER_ATTEMPT)
    merge = Merge.read(Committable(branch, {**OLD_MERGE, **changes}, version=5))
    assert merge.committable(branch).text == text.format(branch=branch)


def test_text_of_a_direct_load_names_table_and_transaction() -> None:
    branch = BranchId(OWNER, 0, 1, "postgres", 0, 7)
    committable = Prepared("s", "t", 3, "7", "shop", "writer").committable(branch)
    assert committable.text == f"table s.t, prepared transaction {branch}"
    assert Prepared.read(committable).role == "writer"


# -- settings --------------------------------------------------------------------------------------

SECRET = "pass-word-9"


@pytest.mark.parametrize(
    "conninfo",
    [
        f"postgresql://me:{SECRET}@db.example:5433/shop",
        f"host=db.example port=5433 dbname=shop user=me password={SECRET}",
    ],
)
def test_secret_is_in_no_text(conninfo: str) -> None:
    sink = PostgresSink(conninfo, table="public.orders")
    assert sink.target == "postgres table shop.public.orders"
    assert sink.where == "postgres table shop.public.orders at db.example:5433"
    for text in (repr(sink), sink.where, repr(vars(sink))):
        assert SECRET not in text
    assert repr(pickle.loads(pickle.dumps(sink))) == repr(sink)  # noqa: S301  # our own bytes


@pytest.mark.parametrize("conninfo", [f"postgresql://me:{SECRET}%zz@h/d", f"password {SECRET}"])
def test_conninfo_that_cannot_be_read_is_not_quoted(conninfo: str) -> None:
    with pytest.raises(ConfigurationError, match="conninfo=") as caught:
        PostgresSink(conninfo, table="t")
    assert SECRET not in str(caught.value)
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"key": ""}, r"key=\[''\]"),
        ({"key": []}, r"key=\[\]"),
        ({"key": ["id", "id"]}, "different columns"),
        ({"lock_timeout_s": 0}, "lock_timeout_s=0"),
        ({"statement_timeout_s": -1}, "statement_timeout_s=-1"),
        ({"name": "a b"}, "name='a b'"),
    ],
)
def test_wrong_setting_is_named(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        PostgresSink("postgresql://localhost/shop", table="t", **wrong)


def test_verb_before_validate_says_so() -> None:
    sink = PostgresSink("postgresql://localhost/shop", table="t")
    with pytest.raises(ProtocolError, match="validate"):
        sink.beginTransaction(BranchId(OWNER, 1, 1, "postgres", 0, 1))
