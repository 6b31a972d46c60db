"""Sinks without a server, proven by the kit that users have."""

from __future__ import annotations

import contextlib
import json
import sqlite3
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pyarrow as pa
import pytest
from examples.http_sink import HttpSink, serve

from sparkonce.model import BranchId
from sparkonce.sinks import IdempotentSink, SqliteSink
from sparkonce.testing import Proxy, SinkContract, SinkWorld, sink_process
from sparkonce.testing.commit_lines import chosen
from sparkonce.testing.sink_world import SCHEMA, branch
from tests.support.sink_worlds import file_world, http_errors, outcome, sqlite_world

ROOT = Path(__file__).parents[2]


class TestFileSink(SinkContract):
    race_rounds = 40

    @pytest.fixture
    def make_world(self, tmp_path: Path) -> Callable[[pa.Schema], SinkWorld]:
        return lambda schema: replace(file_world(tmp_path), secrets=["s3cr3t"])


def test_staging_of_sqlite_gets_the_columns_of_its_target(tmp_path: Path) -> None:
    """A column that the target has got since: every task failed, and went on failing."""
    path, branch_id = tmp_path / "orders.db", branch(0)
    world = sqlite_world(path, pa.schema({"id": pa.int64()}))
    world.sink().validate(pa.schema({"id": pa.int64()}))
    with contextlib.closing(sqlite3.connect(path)) as db:
        db.execute("ALTER TABLE orders ADD COLUMN note")
    sink = SqliteSink(path, "orders")
    rows = pa.record_batch({"id": [1], "note": ["new"]})
    sink.validate(rows.schema)
    handle = sink.beginTransaction(branch_id)
    sink.write(handle, rows)
    sink.commit(sink.preCommit(handle))
    with contextlib.closing(sqlite3.connect(path)) as db:
        assert db.execute("SELECT id, note FROM orders").fetchall() == [(1, "new")]


class TestSqliteSink(SinkContract):
    race_rounds = 40

    @pytest.fixture
    def make_world(self, tmp_path: Path) -> Callable[[pa.Schema], SinkWorld]:
        return lambda schema: sqlite_world(tmp_path / "shop.db", schema)


def test_commit_of_sqlite_outlives_a_power_loss(tmp_path: Path) -> None:
    """With less than EXTRA the journal may come back, and roll a commit back that had returned."""
    (tmp_path / "shop.db").touch()
    with SqliteSink(tmp_path / "shop.db", "orders")._transaction() as db:
        assert db.execute("PRAGMA journal_mode").fetchone() == ("delete",)
        assert db.execute("PRAGMA synchronous").fetchone() == (3,)


class TestHttpSink(SinkContract):
    race_rounds = 40

    @pytest.fixture
    def make_world(self, tmp_path: Path) -> Iterator[Callable[[pa.Schema], SinkWorld]]:
        api = serve()

        def visible() -> list[dict[str, Any]]:
            with urlopen(f"{api.url}/rows") as answer:  # noqa: S310 - our own server
                return json.load(answer)

        proxy = Proxy(api.server_port)
        yield lambda schema: SinkWorld(
            sink=lambda: HttpSink(f"http://{proxy.address}", stage=tmp_path),
            visible=visible,
            unfinished=lambda: [path.name for path in tmp_path.glob("*.arrow")],
            expected=lambda row: json.loads(json.dumps(row, default=str)),
            proxy=proxy,
            away=lambda: http_errors(503),
        )
        proxy.close()
        api.shutdown()
        api.server_close()


class VersionSink(IdempotentSink):
    """The store remembers the last batch of each query, as Delta does by its txnVersion."""

    kind = "versions"

    def __init__(self, path: Path, stage: Path) -> None:
        super().__init__(stage, writers=1)
        self._store = path

    def put(self, branch_id: BranchId, rows: Iterator[pa.RecordBatch]) -> None:
        values = [(row["id"], row["name"]) for batch in rows for row in batch.to_pylist()]
        with contextlib.closing(sqlite3.connect(self._store, timeout=60)) as db, db:
            is_newer = db.execute(
                "INSERT INTO versions VALUES (?, ?) ON CONFLICT (app) DO UPDATE "
                "SET batch = excluded.batch WHERE excluded.batch > batch",
                [branch_id.owner.prefix, branch_id.batch_id],
            ).rowcount
            if is_newer:
                db.executemany("INSERT INTO orders VALUES (?, ?)", values)


class TestVersionSink(SinkContract):
    most_faults = 4
    race_rounds = 40

    @pytest.fixture
    def make_world(self, tmp_path: Path) -> Callable[[pa.Schema], SinkWorld]:
        path = tmp_path / "store.db"

        def asked(query: str) -> list[Any]:
            with contextlib.closing(sqlite3.connect(path, timeout=60)) as db, db:
                return db.execute(query).fetchall()

        asked("CREATE TABLE orders (id, name)")
        asked("CREATE TABLE versions (app PRIMARY KEY, batch)")
        return lambda schema: SinkWorld(
            sink=lambda: VersionSink(path, tmp_path),
            visible=lambda: [
                {"id": id_, "name": name} for id_, name in asked("SELECT * FROM orders")
            ],
            unfinished=lambda: [path.name for path in tmp_path.glob("*.arrow")],
            one_branch_a_batch=True,
        )

    @pytest.mark.parametrize("name", [])
    def test_rows_of_type(self, name: str) -> None:
        """As SQLite's."""


WRONG = (ROOT / "examples" / "wrong_sink_contract.py").read_text()
LAZY_SINK = """
import json
from pathlib import Path
from sparkonce.errors import PreparedBranchLostError
from sparkonce.model import BranchId, Committable
from sparkonce.sinks import CommitsMany, RowSink
from sparkonce.sinks.verbs import outcome_of_commit

class LazySink(RowSink):
    kind = "lazy"

    def __init__(self, folder):
        super().__init__()
        self._folder = Path(folder)
        self._client = None

    def __getstate__(self):
        return {**self.__dict__, "_client": None}

    def close(self):
        self._client = None

    def _connect(self):
        if self._client is None:
            client = []
SETTINGS
            self._client = client

    def _hidden(self, branch_id):
        return self._folder / f".{branch_id}json"

    def beginTransaction(self, branch_id):
        return branch_id, []

    def write_rows(self, handle, rows):
        handle[1].extend(json.dumps(row) + chr(10) for row in rows)

    def preCommit(self, handle):
        branch_id, lines = handle
        self._hidden(branch_id).write_text("".join(lines))
        return Committable(branch_id)

    def commit(self, committable):
        self._connect()
        hidden = self._hidden(committable.branch_id)
        done = hidden.with_suffix(".done")
        if done.exists():
            return
        if not hidden.exists():
            raise PreparedBranchLostError("gone", committable.branch_id)
        with (self._folder / "rows.jsonl").open("a") as visible:
            visible.write(hidden.read_text())
        done.touch()
        hidden.unlink()

    def abort(self, branch):
        branch_id = branch.branch_id if isinstance(branch, Committable) else branch
        self._hidden(branch_id).unlink(missing_ok=True)
"""
"""Right but for its last steps: the rows are there before their proof. Connects at its first use,
in many lines."""
RACES = {"test_commit_by_two_at_the_same_time", "test_commits_race"}
"""Commits at once double the rows of that sink or not, as it happens."""


TWO_STEPS = """
        with (self._folder / "rows.jsonl").open("a") as visible:
            visible.write(hidden.read_text())
        done.touch()
        hidden.unlink()
"""
HELPER = """
def show(folder, hidden, done):
    with (folder / "rows.jsonl").open("a") as visible:
        visible.write(hidden.read_text())
    done.touch()
    hidden.unlink()
"""
IN_A_POOL = """
    def commit_many(self, committables):
        from concurrent.futures import ThreadPoolExecutor
        with ThreadPoolExecutor(2) as pool:
            return list(pool.map(self._outcome, committables))

    def _outcome(self, committable):
        return outcome_of_commit(self, committable)
"""
IN_AN_OLDER_THREAD = """
    from concurrent.futures import ThreadPoolExecutor

    def __setstate__(self, state):
        self.__dict__.update(state)
        self._pool = self.ThreadPoolExecutor(1)
        self._pool.submit(len, ()).result()

    def commit_many(self, committables):
        pool = vars(self).get("_pool") or self.ThreadPoolExecutor(1)
        return list(pool.map(self._outcome, committables))

    def _outcome(self, committable):
        return outcome_of_commit(self, committable)
"""


def killed_between_the_lines(folder: Path, source: str, module: str = "lazy_sink") -> str:
    """Put the lazy sink into a module, and kill its commit; what pytest says to the failure."""
    path = folder / f"{module.replace('.', '/')}.py"
    path.parent.mkdir(exist_ok=True)
    path.write_text(source)
    contract = WRONG.replace(
        "examples.wrong_sink import AppendingSink", f"{module} import LazySink"
    )
    (folder / "test_lazy.py").write_text(contract.replace("AppendingSink", "LazySink"))
    failed, said = outcome(folder, "between_the_lines")
    assert failed == {"test_process_killed_between_the_lines_of_commit"}, said
    return said


def test_commit_that_prints(tmp_path: Path) -> None:
    """What a sink says on its standard output is not taken for the answer of its process."""
    source = lazy_sink().replace("self._connect()\n", "self._connect(); print('made')\n")
    assert "too much: {'id': 0" in killed_between_the_lines(tmp_path, source)


def test_process_that_hangs_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A verb that waits for what the test's own process holds ends the test, with what it said."""
    monkeypatch.setattr(sink_process, "PATIENCE_S", 5.0)
    world = sqlite_world(tmp_path / "shop.db", SCHEMA)
    sink = world.sink()
    sink.validate(SCHEMA)
    lock = sqlite3.connect(tmp_path / "shop.db", isolation_level=None)
    with contextlib.closing(lock):
        lock.execute("BEGIN IMMEDIATE")
        with pytest.raises(AssertionError, match="abort in another process does not end in 5 s"):
            sink_process.in_other_process(sink, "abort", branch())


def lazy_sink(settings: int = 1) -> str:
    lines = "\n".join(f"            client.append({n})" for n in range(settings))
    return LAZY_SINK.replace("SETTINGS", lines)


def test_every_last_line_of_a_commit_is_killed(tmp_path: Path) -> None:
    """Also of a sink that runs more lines in a process that has just begun."""
    said = killed_between_the_lines(tmp_path, lazy_sink(settings=40))
    assert "too much: {'id': 0" in said


def test_later_commits_are_killed_too(tmp_path: Path) -> None:
    """A target's first commit may run more lines than the others: those are the ones to count."""
    is_first = 'not (self._folder / "rows.jsonl").exists()'
    source = lazy_sink(settings=40).replace("self._client is None", is_first)
    assert "too much: {'id': 0" in killed_between_the_lines(tmp_path, source)


def test_commit_that_outlives_its_kills(tmp_path: Path) -> None:
    """Where each commit runs fewer lines than the last one, none is killed: nothing is proven."""
    shorter = """self._connect()
        for _ in range(400 - 40 * len(list(self._folder.glob(".*done")))):
            pass
"""
    source = lazy_sink().replace("self._connect()\n", shorter)
    assert "ended before the line" in killed_between_the_lines(tmp_path, source)


@pytest.mark.parametrize(
    ("module", "helper"),
    [("mysink.sink", "mysink.client"), ("lazy_sink", "client"), ("lazy_sink", "helpers.client")],
)
def test_commit_is_killed_in_its_helper_module(tmp_path: Path, module: str, helper: str) -> None:
    """The steps of a commit are often in a client of the same package, or beside the sink."""
    call = f"\n        from {helper} import show; show(self._folder, hidden, done)\n"
    path = tmp_path / f"{helper.replace('.', '/')}.py"
    path.parent.mkdir(exist_ok=True)
    path.write_text(HELPER)
    said = killed_between_the_lines(tmp_path, lazy_sink().replace(TWO_STEPS, call), module)
    assert "too much: {'id': 0" in said


@pytest.mark.parametrize("commit_batch", [IN_A_POOL, IN_AN_OLDER_THREAD])
def test_commit_is_killed_in_its_thread(tmp_path: Path, commit_batch: str) -> None:
    """A commit may run in a thread, made for it or older than it."""
    source = lazy_sink().replace("LazySink(RowSink)", "LazySink(RowSink, CommitsMany)")
    said = killed_between_the_lines(tmp_path, source + commit_batch)
    assert "too much: {'id': 0" in said


def test_lines_at_which_a_commit_is_killed() -> None:
    """All of a few; of many always the same: the last ones, and some before, each place once."""
    assert chosen([0, 1, 1, 1], 12) == [1, 2, 3, 4]
    assert chosen(range(100), 12) == [1, 17, 33, 49, 65, 81, *range(95, 101)]
    rows = [0, *[1, 2] * 1000, 3, 4]
    assert chosen(rows, 12) == [1, 2000, 2001, 2002, 2003]


def test_commit_without_lines_fails(tmp_path: Path) -> None:
    """A commit that can be killed nowhere is not proven, and the contract says so."""
    said = killed_between_the_lines(tmp_path, f"exec({lazy_sink()!r})")
    assert "no line of commit of LazySink was seen" in said


def test_wrong_sink_is_caught(tmp_path: Path) -> None:
    """Each mistake of examples/wrong_sink.py turns tests red; those, and as the guide shows it."""
    (tmp_path / "test_wrong.py").write_text(WRONG)
    failed, said = outcome(tmp_path, "not type")
    shown = (ROOT / "docs" / "howto" / "proving-a-sink.md").read_text().splitlines()
    named = {line.removeprefix("FAILED ") for line in shown if line.startswith("FAILED ")}
    assert failed - RACES == named - RACES, said[-3000:]
    assert said.count("What a sink must do: docs/howto/proving-a-sink.md#checklist") == len(failed)
    for line in shown:
        if line.startswith("E   "):
            assert line.removesuffix("…") in said
