"""SqliteSink: the table that it creates, what it refuses, and which database proves a loss."""

from __future__ import annotations

import contextlib
import datetime as dt
import sqlite3
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from sparkonce.errors import (
    CommitRejectedError,
    CommitUnresolvedError,
    ConfigurationError,
    PreparedBranchLostError,
    PrepareRejectedError,
)
from sparkonce.model import Committable
from sparkonce.sinks import SqliteSink
from sparkonce.spark_hooks.validating import validate_sinks
from sparkonce.testing import SinkContract, SinkWorld
from sparkonce.testing.sink_world import branch
from tests.support.sink_worlds import sqlite_world

TRIGGER = """
CREATE TRIGGER no BEFORE INSERT ON orders WHEN new.id = 2 BEGIN SELECT raise(ABORT, 'no'); END
"""
ROWS = pa.record_batch({"id": [1, 2], "note": ["a", None]})


def asked(path: Path, query: str) -> list[Any]:
    with contextlib.closing(sqlite3.connect(path)) as db, db:
        return db.execute(query).fetchall()


def executed(path: Path, script: str) -> None:
    with contextlib.closing(sqlite3.connect(path)) as db:
        db.executescript(script)


def prepared(sink: SqliteSink, rows: pa.RecordBatch = ROWS, attempt: int = 1) -> Committable:
    sink.validate(rows.schema)
    handle = sink.beginTransaction(branch(attempt, sink=sink.name))
    sink.write(handle, rows)
    return sink.preCommit(handle)


class TestSqliteSinkThatCreatesItsTable(SinkContract):
    @pytest.fixture
    def make_world(self, tmp_path: Path) -> Callable[[pa.Schema], SinkWorld]:
        def make(schema: pa.Schema) -> SinkWorld:
            world = sqlite_world(tmp_path / "shop.db", schema)
            asked(tmp_path / "shop.db", "DROP TABLE orders")
            return world

        return make


def test_table_is_created_from_the_columns(tmp_path: Path) -> None:
    path = tmp_path / "shop.db"
    rows = pa.record_batch(
        {
            "id": pa.array([7], pa.int64()),
            "is new": pa.array([True]),
            "weight": pa.array([0.5], pa.float32()),
            "amount": pa.array([Decimal("0.0000000")], pa.decimal128(20, 7)),
            "at": pa.array([dt.datetime(2026, 2, 28, tzinfo=dt.UTC)], pa.timestamp("us", tz="UTC")),
            "raw": pa.array([b"\x00"]),
            'say "days"': pa.array([[dt.date(2026, 2, 28)]], pa.list_(pa.date32())),
            "map": pa.array([[("a", b"\xff")]], pa.map_(pa.string(), pa.binary())),
        }
    )
    sink = SqliteSink(path, "my orders")
    sink.commit(prepared(sink, rows))
    found = asked(path, 'SELECT name, type FROM pragma_table_info("my orders")')
    assert [kind for _, kind in found] == [
        *["INTEGER"] * 2,
        "REAL",
        "TEXT",
        "TEXT",
        "BLOB",
        "TEXT",
        "TEXT",
    ]
    assert [name for name, _ in found] == rows.schema.names
    assert asked(path, 'SELECT * FROM "my orders"') == [
        (
            7,
            1,
            0.5,
            "0.0000000",
            "2026-02-28 00:00:00+00:00",
            b"\x00",
            '["2026-02-28"]',
            '[["a", "ff"]]',
        )
    ]


def test_table_called_commits(tmp_path: Path) -> None:
    """A user's table never has the name of one of ours."""
    sink = SqliteSink(tmp_path / "shop.db", "commits")
    sink.commit(prepared(sink))
    assert asked(tmp_path / "shop.db", "SELECT id FROM commits") == [(1,), (2,)]


def test_columns_in_other_cases(tmp_path: Path) -> None:
    """SQLite and Spark tell no column ID from id."""
    asked(tmp_path / "shop.db", "CREATE TABLE Orders (ID, NOTE)")
    sink = SqliteSink(tmp_path / "shop.db", "orders")
    sink.commit(prepared(sink))
    assert asked(tmp_path / "shop.db", "SELECT id FROM orders") == [(1,), (2,)]


@pytest.mark.parametrize(
    ("made", "columns", "told"),
    [
        ("CREATE TABLE orders (id)", ["id", "note"], r"has no column \['note'\]"),
        ("CREATE VIEW orders AS SELECT 1 AS id", ["id"], "is no table, but a view"),
        ("CREATE TABLE other (id)", ["id", "ID"], "each once"),
        ("CREATE TABLE other (id)", ["sparkonce_branch"], "none of them sparkonce_branch"),
        ("CREATE TABLE other (id)", [], "at least one name"),
    ],
)
def test_target_that_cannot_work(tmp_path: Path, made: str, columns: list[str], told: str) -> None:
    asked(tmp_path / "shop.db", made)
    sink = SqliteSink(tmp_path / "shop.db", "orders")
    with pytest.raises(ConfigurationError, match=told):
        sink.validate(pa.schema([(name, pa.int64()) for name in columns]))


def test_file_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "text.db").write_text("no database" * 100)
    for path in ("text.db", "missing/shop.db"):
        with pytest.raises(ConfigurationError, match="its folder must exist"):
            SqliteSink(tmp_path / path, "orders").validate(ROWS.schema)


def test_another_database_proves_nothing(tmp_path: Path) -> None:
    """An unmounted disk is no lost branch, and no verb but validate creates a file."""
    path = tmp_path / "shop.db"
    sink = SqliteSink(path, "orders")
    committable = prepared(sink)
    path.rename(tmp_path / "aside.db")
    assert list(sink.find_branches(committable.branch_id.owner)) == []
    with pytest.raises(sqlite3.OperationalError, match="unable to open"):
        sink.commit(committable)
    with pytest.raises(PrepareRejectedError, match="driver and executors on one machine"):
        sink.beginTransaction(branch(2, sink="sqlite"))
    assert not path.exists()
    SqliteSink(path, "orders").validate(ROWS.schema)
    for verb in (sink.commit, sink.abort, sink.abort_decided):
        with pytest.raises(CommitUnresolvedError, match="put that one back"):
            verb(committable)
    with pytest.raises(PrepareRejectedError, match="is not the database that the driver uses"):
        sink.beginTransaction(branch(2, sink="sqlite"))
    path.unlink()
    (tmp_path / "aside.db").rename(path)
    sink.commit(committable)
    assert asked(path, "SELECT id FROM orders") == [(1,), (2,)]


@pytest.mark.parametrize(
    "made",
    [
        "CREATE TABLE orders (id INTEGER PRIMARY KEY, note)",
        "CREATE TABLE orders (id, note); CREATE UNIQUE INDEX one ON orders (id)",
        "CREATE TABLE orders (id, note TEXT NOT NULL)",
        f"CREATE TABLE orders (id, note); {TRIGGER}",
    ],
)
def test_constraint_refuses_before_the_decision(tmp_path: Path, made: str) -> None:
    """A batch that the table will not take is aborted, and never decided."""
    path = tmp_path / "shop.db"
    executed(path, made)
    sink = SqliteSink(path, "orders")
    tasks = [prepared(sink, attempt=n) for n in (1, 2)]
    with pytest.raises(PrepareRejectedError, match="does not take the rows of batch 1"):
        sink.vote(tasks[0].branch_id, tasks)
    assert asked(path, "SELECT * FROM orders") == []
    one = prepared(sink, pa.record_batch({"id": [1], "note": ["a"]}), attempt=3)
    assert sink.vote(one.branch_id, [one]) == [one]
    sink.commit(one)
    assert asked(path, "SELECT * FROM orders") == [(1, "a")]


def test_constraint_refuses_after_the_decision(tmp_path: Path) -> None:
    """Another writer took the key meanwhile: an operator makes room, or settles it."""
    path = tmp_path / "shop.db"
    asked(path, "CREATE TABLE orders (id INTEGER PRIMARY KEY, note)")
    sink = SqliteSink(path, "orders")
    committable = prepared(sink)
    sink.vote(committable.branch_id, [committable])
    asked(path, "INSERT INTO orders VALUES (2, 'other')")
    with pytest.raises(CommitRejectedError, match="sparkonce_staging_orders.*sparkonce settle"):
        sink.commit(committable)
    asked(path, "DELETE FROM orders")
    sink.commit(committable)
    assert asked(path, "SELECT id FROM orders") == [(1,), (2,)]


def test_decided_branch_is_aborted_only_where_it_is_not_committed(tmp_path: Path) -> None:
    """`settle --as redo` never doubles rows."""
    path = tmp_path / "shop.db"
    sink = SqliteSink(path, "orders")
    committable = prepared(sink)
    sink.abort_decided(committable)
    assert asked(path, "SELECT * FROM sparkonce_staging_orders") == []
    again = prepared(sink, attempt=2)
    sink.commit(again)
    with pytest.raises(CommitRejectedError, match="a rewrite would duplicate them"):
        sink.abort_decided(again)


CHANGE_TYPE = """
BEGIN;
CREATE TABLE new (id INTEGER, code TEXT);
INSERT INTO new SELECT * FROM orders;
DROP TABLE orders;
ALTER TABLE new RENAME TO orders;
COMMIT;
"""
CODES = pa.record_batch({"id": [1, 2, 3], "code": ["007", "1e5", "12.50"]})
TYPED_STAGING = """
CREATE TABLE sparkonce_staging_orders AS SELECT '' AS sparkonce_branch, * FROM orders WHERE false;
"""


def test_column_that_becomes_text(tmp_path: Path) -> None:
    """The target's types apply to a row when it is committed, and no older types do."""
    path = tmp_path / "shop.db"
    sink = SqliteSink(path, "orders")
    sink.commit(prepared(sink, pa.record_batch({"id": [0], "code": [6]})))
    executed(path, CHANGE_TYPE)
    sink.commit(prepared(sink, CODES, attempt=2))
    assert asked(path, "SELECT code FROM orders") == [("6",), ("007",), ("1e5",), ("12.50",)]


def test_names_of_columns_outlive_the_types_of_an_older_version(tmp_path: Path) -> None:
    """To SQLite, Ä and ä are two names, and A and a are one."""
    path = tmp_path / "shop.db"
    executed(path, f'CREATE TABLE orders ("Ä" INTEGER, ID TEXT); {TYPED_STAGING}')
    sink = SqliteSink(path, "orders")
    sink.commit(prepared(sink, pa.record_batch({"Ä": [1], "id": ["007"]})))
    assert asked(path, "SELECT * FROM orders") == [(1, "007")]


def test_column_that_becomes_text_while_rows_are_staged(tmp_path: Path) -> None:
    """The rows of a prepared branch are kept as the query gave them."""
    path = tmp_path / "shop.db"
    executed(path, "CREATE TABLE orders (id INTEGER, code INTEGER)")
    sink = SqliteSink(path, "orders")
    prices = pa.record_batch({"id": [1, 2], "code": [Decimal("12.50"), Decimal("7.00")]})
    committable = prepared(sink, prices)
    executed(path, CHANGE_TYPE)
    sink.validate(prices.schema)
    sink.commit(committable)
    assert asked(path, "SELECT code FROM orders") == [("12.50",), ("7.00",)]


@pytest.mark.parametrize(
    ("declared", "value"),
    [
        ("STRING", "007"),
        ("INT", "9007199254740993.0"),
        ("DOUBLE", "1e3"),
        ("DATE", "20260228"),
        ("REAL", 2**53 + 1),
        ("DECIMAL(38, 9)", Decimal("12345678901234567890.123456789")),
        ("TEXT", 0.30000000000000004),
    ],
)
def test_type_that_would_change_a_value(tmp_path: Path, declared: str, value: Any) -> None:
    path = tmp_path / "shop.db"
    executed(path, f"CREATE TABLE orders (v {declared})")
    with pytest.raises(ConfigurationError, match="column 'v' has the type .*: declare it as"):
        SqliteSink(path, "orders").validate(pa.record_batch({"v": [value]}).schema)


def test_columns_in_other_cases_of_other_letters(tmp_path: Path) -> None:
    """SQLite folds ASCII only: to it, ä and Ä are two columns."""
    path = tmp_path / "shop.db"
    executed(path, "CREATE TABLE orders (ID INTEGER, Ä INTEGER)")
    sink = SqliteSink(path, "orders")
    with pytest.raises(ConfigurationError, match=r"has no column \['ä'\]"):
        sink.validate(pa.record_batch({"id": [1], "ä": [2]}).schema)
    executed(path, "ALTER TABLE orders ADD COLUMN ä INTEGER")
    sink.commit(prepared(sink, pa.record_batch({"Id": [1], "Ä": [2]})))
    sink = SqliteSink(path, "orders")  # whose staging table has no ä
    both = pa.record_batch({"id": [3], "ä": [4], "Ä": [5]})
    sink.commit(prepared(sink, both, 2))
    assert asked(path, "SELECT id, Ä, ä FROM orders") == [(1, 2, None), (3, 5, 4)]


@pytest.mark.parametrize(
    ("declared", "value", "kept"),
    [
        ("VARCHAR(9)", "007", "007"),
        ("", "007", "007"),
        ("blob", "1e3", "1e3"),
        ("DATE", dt.date(2026, 2, 28), "2026-02-28"),
        ("REAL", 7, 7.0),
        ("BIGINT", 2**53 + 1, 2**53 + 1),
        ("DECIMAL(10, 2)", Decimal("12.50"), 12.5),
        ("DOUBLE POINT", 2.5, 2.5),
    ],
)
def test_type_that_keeps_every_value(
    tmp_path: Path, declared: str, value: Any, kept: object
) -> None:
    path = tmp_path / "shop.db"
    executed(path, f"CREATE TABLE orders (v {declared})")
    sink = SqliteSink(path, "orders")
    kind = pa.int32() if value == 7 else None
    sink.commit(prepared(sink, pa.record_batch({"v": pa.array([value], kind)})))
    assert asked(path, "SELECT v FROM orders") == [(kept,)]


def test_json_has_no_value_that_json_cannot_hold(tmp_path: Path) -> None:
    path = tmp_path / "shop.db"
    sink = SqliteSink(path, "orders")
    rows = pa.record_batch({"v": [[float("nan"), 2.0, float("-inf")]], "w": [{"x": b"\xff"}]})
    sink.commit(prepared(sink, rows))
    assert asked(path, "SELECT v, w FROM orders") == [("[null, 2.0, null]", '{"x": "ff"}')]


@pytest.mark.parametrize(
    "column",
    [
        pa.array([400_000_000], pa.int32()).cast(pa.date32()),
        pa.array([b"M\xfcller"]).view(pa.string()),
    ],
    ids=["year", "text"],
)
def test_value_that_python_cannot_hold_is_named(tmp_path: Path, column: pa.Array[Any]) -> None:
    sink = SqliteSink(tmp_path / "shop.db", "orders")
    with pytest.raises(ValueError, match="column 'v' has a value that Python cannot hold"):
        prepared(sink, pa.record_batch({"id": [1], "v": column}))


def test_second_sink_of_a_table_with_constraints(tmp_path: Path) -> None:
    """Each sink's vote is rolled back, so a row of the other one would be refused too late."""
    path = tmp_path / "shop.db"
    sinks = [SqliteSink(path, table, name=name) for name, table in (("a", "t"), ("b", "t"))]
    executed(path, "CREATE TABLE t (id INTEGER)")
    schemas = {sink.name: pa.schema([("id", pa.int64())]) for sink in sinks}
    validate_sinks(sinks, schemas)
    executed(path, "CREATE UNIQUE INDEX once ON t (id)")
    with pytest.raises(ConfigurationError, match="'a' and 'b' both write into .*: use one sink"):
        validate_sinks(sinks, schemas)


def test_staging_table_of_an_older_version(tmp_path: Path) -> None:
    """Its types are removed, and what it holds is committed."""
    path = tmp_path / "shop.db"
    executed(path, "CREATE TABLE orders (id INTEGER, code INTEGER)")
    sink = SqliteSink(path, "orders")
    committable = prepared(sink, pa.record_batch({"id": [0], "code": [6]}))
    executed(path, f"ALTER TABLE sparkonce_staging_orders RENAME TO staged; {TYPED_STAGING}")
    executed(path, "INSERT INTO sparkonce_staging_orders SELECT * FROM staged; DROP TABLE staged")
    executed(path, CHANGE_TYPE)
    sink.validate(CODES.schema)
    sink.commit(prepared(sink, CODES, attempt=2))
    sink.commit(committable)
    assert asked(path, "SELECT code FROM orders") == [("007",), ("1e5",), ("12.50",), ("6",)]


@pytest.mark.parametrize("column", ["id INTEGER PRIMARY KEY", "id INTEGER NOT NULL"])
def test_table_that_replaces_values(tmp_path: Path, column: str) -> None:
    """Without an error, rows of earlier batches would go, or a default would replace a null."""
    path = tmp_path / "shop.db"
    executed(path, f"CREATE TABLE orders ({column} on conflict\n REPLACE DEFAULT 7, note)")
    with pytest.raises(ConfigurationError, match=r"shop\.db.*ON CONFLICT REPLACE.*make the table"):
        SqliteSink(path, "orders").validate(ROWS.schema)


SKIPPING = TRIGGER.replace("ABORT, 'no'", "IGNORE")
IGNORING = [
    "CREATE TABLE orders (id INTEGER PRIMARY KEY ON CONFLICT IGNORE, note)",
    "CREATE TABLE orders (id INTEGER, note TEXT NOT NULL ON CONFLICT IGNORE)",
    f"CREATE TABLE orders (id, note); {SKIPPING}",
]


@pytest.mark.parametrize("made", IGNORING)
def test_table_that_leaves_rows_out_before_the_decision(tmp_path: Path, made: str) -> None:
    """A batch of which the table would drop rows silently is aborted, and never decided."""
    path = tmp_path / "shop.db"
    executed(path, f"{made}; INSERT INTO orders VALUES (2, 'other');")
    sink = SqliteSink(path, "orders")
    committable = prepared(sink)
    with pytest.raises(PrepareRejectedError, match=r"1 of 2 rows.*IGNORE.*change the query"):
        sink.vote(committable.branch_id, [committable])
    assert asked(path, "SELECT * FROM orders WHERE id = 1") == []


def test_table_that_leaves_rows_out_after_the_decision(tmp_path: Path) -> None:
    """All staged rows are still there, so none is lost: an operator makes room, or settles it."""
    path = tmp_path / "shop.db"
    executed(path, IGNORING[0])
    sink = SqliteSink(path, "orders")
    committable = prepared(sink)
    sink.vote(committable.branch_id, [committable])
    asked(path, "INSERT INTO orders VALUES (2, 'other')")
    with pytest.raises(CommitRejectedError, match=r"1 of 2 rows.*sparkonce settle"):
        sink.commit(committable)
    assert asked(path, "SELECT id FROM orders") == [(2,)]
    asked(path, "DELETE FROM orders")
    sink.commit(committable)
    assert asked(path, "SELECT id FROM orders") == [(1,), (2,)]


@pytest.mark.parametrize("made", ["CREATE TABLE orders (id, note)", IGNORING[0]])
def test_staged_row_that_is_gone(tmp_path: Path, made: str) -> None:
    """Only rows that are no longer staged prove a loss."""
    path = tmp_path / "shop.db"
    executed(path, f"{made}; INSERT INTO orders VALUES (2, 'other');")
    sink = SqliteSink(path, "orders")
    committable = prepared(sink)
    asked(path, "DELETE FROM sparkonce_staging_orders WHERE id = 1")
    with pytest.raises(PreparedBranchLostError, match="1 of 2 staged rows are left"):
        sink.commit(committable)
    assert asked(path, "SELECT id FROM orders") == [(2,)]


COMPUTING = [
    "CREATE TABLE orders (id, note); CREATE INDEX a ON orders (json_extract(note, '$.a'))",
    "CREATE TABLE orders (id, note); CREATE INDEX a ON orders (id, note -> 'a')",
    "CREATE TABLE orders (id, note); CREATE INDEX a ON orders (id) WHERE json(note) = 1",
    "CREATE TABLE orders (id, note, a GENERATED ALWAYS AS (json_extract(note, '$.a')) STORED)",
    "CREATE TABLE orders (id, note, a AS (json_extract(note, '$.a')) STORED)",
    "CREATE TABLE orders (id, note, CHECK (json_extract(note, '$.a') IS NULL))",
]


@pytest.mark.parametrize("made", COMPUTING)
def test_expression_of_the_table_that_fails(tmp_path: Path, made: str) -> None:
    """SQLite reports it as an SQL error, and the batch is rejected as for a constraint."""
    path = tmp_path / "shop.db"
    executed(path, made)
    sink = SqliteSink(path, "orders")
    committable = prepared(sink)
    with pytest.raises(PrepareRejectedError, match="malformed JSON"):
        sink.vote(committable.branch_id, [committable])
    with pytest.raises(CommitRejectedError, match=r"malformed JSON.*sparkonce settle"):
        sink.commit(committable)
    assert asked(path, "SELECT id FROM orders") == []


def test_table_that_is_gone_for_a_moment(tmp_path: Path) -> None:
    """Nothing was refused, so the commit is repeated; an operator may be replacing the table."""
    path = tmp_path / "shop.db"
    sink = SqliteSink(path, "orders")
    committable = prepared(sink)
    executed(path, "ALTER TABLE orders RENAME TO aside")
    with pytest.raises(sqlite3.OperationalError, match="no such table"):
        sink.commit(committable)
    executed(path, "ALTER TABLE aside RENAME TO orders")
    sink.commit(committable)
    assert asked(path, "SELECT id FROM orders") == [(1,), (2,)]


def test_name_that_is_used_again_is_refused(tmp_path: Path) -> None:
    """The log and the checkpoint were restored, so that a batch gets the name of another one."""
    path = tmp_path / "shop.db"
    sink = SqliteSink(path, "orders")
    sink.commit(prepared(sink, CODES))
    with pytest.raises(PrepareRejectedError, match="older copy"):
        sink.vote(branch(), [prepared(sink, CODES)])
    assert len(asked(path, "SELECT code FROM orders")) == len(CODES)
