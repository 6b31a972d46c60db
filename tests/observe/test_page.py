"""The page of `sparkonce ui` over real logs in SQLite, without a network."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sparkonce import facts
from sparkonce.cli.doctor import look_at_log
from sparkonce.errors import LogUnavailableError
from sparkonce.model import TransactionId
from sparkonce.page import views
from sparkonce.page.provenance import READ_AT_ONCE
from sparkonce.page.source import Source
from sparkonce.spark_hooks.savepoints import Manifest, Savepoints
from sparkonce.testing.log_cases import OTHER_QUERY, QUERY, claim
from sparkonce.txn_log import TransactionLog
from sparkonce.txn_log.record import State, TransactionRecord
from sparkonce.txn_log.settlement import Ruling, Settlement
from sparkonce.txn_log.sqlite import SqliteLog
from sparkonce.words import when
from tests.support.page_cases import batch_record, browser, fill, fill_far, links, text_of, walk

BATCHES = "/pipelines/orders/batches"


def source_of(log: TransactionLog, **changes: Any) -> Source:
    values: dict[str, Any] = {
        "log": log,
        "names": log.pipelines,
        "job": "jobs.orders:pipeline",
        "doctor": lambda: look_at_log(log),
    }
    return Source(**{**values, **changes})


@pytest.fixture
def log(tmp_path: Path) -> Iterator[SqliteLog]:
    with closing(SqliteLog(tmp_path / "log.db")) as log:
        yield log


def leaves(value: object, key: str = "") -> Iterator[tuple[str, object]]:
    if isinstance(value, dict):
        for name, item in value.items():
            yield from leaves(item, name)
    elif isinstance(value, list):
        for item in value:
            yield from leaves(item, key)
    elif value is not None:
        yield key, value


def test_every_link_leads_somewhere(log: SqliteLog) -> None:
    fill(log)
    log.begin(claim(pipeline="clicks", query_id=OTHER_QUERY))
    seen = {address: status for address, status, _ in walk(browser(source_of(log)))}
    assert set(seen.values()) == {200}, seen
    assert len(seen) > 20
    assert {f"{BATCHES}/{QUERY}/{n}" for n in range(5)} <= seen.keys()


@pytest.mark.parametrize("batch", range(5))
def test_every_fact_of_a_batch_is_shown(log: SqliteLog, batch: int) -> None:
    fill(log)
    record = log.find(TransactionId("orders", QUERY, batch))
    assert record is not None
    shown = text_of(browser(source_of(log)).get(f"{BATCHES}/{QUERY}/{batch}").text)
    for key, value in leaves(facts.record(record)):
        is_time = isinstance(value, str) and len(value) == 20 and value.endswith("Z")
        number = f"{value:,}" if isinstance(value, int) and key in {"rows", "bytes"} else value
        assert (when(str(value)) if is_time else str(number)) in shown, key


def test_waterfall_shows_how_long_each_step_took(log: SqliteLog) -> None:
    """Up to the end of the batch before: the log does not know when a batch began."""
    incarnation = log.begin(claim())
    for n, times in enumerate(
        (
            {State.DECIDED: 100.0, State.COMPLETE: 101.0},
            {State.PREPARED: 103.0, State.DECIDED: 103.25, State.COMPLETE: 143.25},
        )
    ):
        decided = log.decide(batch_record(incarnation, n))
        log.complete(decided, incarnation.token)
        set_times(log, decided.id, times)
    shown = text_of(browser(source_of(log)).get(f"{BATCHES}/{QUERY}/1").text)
    assert "since batch 0 ended: waiting for data, and writing: 2.0 s" in shown
    assert "in doubt, until Spark's checkpoint showed that it commits: 250 ms" in shown
    assert "committing in every sink: 40.0 s" in shown


def set_times(log: SqliteLog, batch: TransactionId, times: dict[State, float]) -> None:
    def step(store: Any) -> None:
        store.put(replace(store.find(batch), times=times))

    log._write(step)


def test_batch_in_doubt_shows_the_command_that_ends_it(log: SqliteLog) -> None:
    fill(log)
    client = browser(source_of(log))
    for page in ("/pipelines/orders", f"{BATCHES}/{QUERY}/4"):
        shown = text_of(client.get(page).text)
        assert "sparkonce recover jobs.orders:pipeline" in shown
        assert "sparkonce settle" not in shown, "no branch of it is lost"
    assert "sparkonce recover" not in client.get(f"{BATCHES}/{QUERY}/3").text


def test_branch_whose_time_has_passed_is_named_until_it_is_ruled_on(log: SqliteLog) -> None:
    """The healthy branch of the other sink is not: a ruling on it would double or lose its rows."""
    incarnation = log.begin(claim())
    record = batch_record(incarnation, 0)
    kafka = record.shares["kafka"]
    (branch,) = kafka.committables
    late = replace(kafka, committables=(replace(branch, safe_until=1.0),))
    log.decide(replace(record, shares={**record.shares, "kafka": late}))
    client = browser(source_of(log))
    shown = text_of(client.get("/pipelines/orders").text)
    assert f"A server may have dropped {branch.branch_id.short}" in shown
    settle = f"sparkonce settle jobs.orders:pipeline 0 --branch {branch.branch_id.short} --as"
    assert settle in shown
    assert f"t{incarnation.token}.files" not in shown
    ruling = Settlement(
        str(branch.branch_id), Ruling.COMMITTED, "ann@host", "timeout", 7.5, incarnation.token
    )
    log.settle(record.id, [ruling], incarnation.token)
    shown = text_of(client.get("/pipelines/orders").text)
    assert "Operators have ruled on it" in shown
    assert "sparkonce settle" not in shown


def test_prepared_batch_shows_what_ends_it(log: SqliteLog) -> None:
    log.prepare(batch_record(log.begin(claim()), 0))
    shown = text_of(browser(source_of(log)).get("/pipelines/orders").text)
    assert "in doubt" in shown
    assert "sparkonce recover jobs.orders:pipeline --abandon 0" in shown
    assert "sparkonce settle" not in shown, "only a decided batch can be settled"


# -- search ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "batch"),
    [
        ("3", 3),
        ("sparkonce.{id}.{query}.t{token}.files.p0.a2.b1.", 1),
        ("s3://bucket/out/sparkonce.{id}.{query}.t{token}.files.p0.a2.b1.parquet", 1),
        ("/srv/out/sparkonce.{id}.{query}.t{token}.files.p0.a4.b2.parquet", 2),
        ("t{token}.files.p0.a8", 4),
        ("sparkonce.{id}.{query}.t{token}.files.p0.a6.b3.", 3),  # a lost branch, rewritten
        ("orders:0:0", 0),
        ("orders:0:99", 0),
        ("orders:0:100", 1),
        ("orders:1: 1399", 3),
        ('{{"orders": {{"0": 300, "1": 1300}}}}', 2),
    ],
)
def test_search_finds_the_batch(log: SqliteLog, asked: str, batch: int) -> None:
    """By its number, a branch, an object, a lost branch, an offset."""
    token = fill(log).token
    text = asked.format(id=log.log_id, query=QUERY, token=token)
    found = browser(source_of(log)).get("/pipelines/orders/search", params={"q": text})
    assert [x for x in links(found.text) if x.startswith(BATCHES)] == [f"{BATCHES}/{QUERY}/{batch}"]


def test_transaction_id_finds_every_batch_that_had_it(log: SqliteLog) -> None:
    """Kafka's transactional ids do not contain the batch, and come again."""
    token = fill(log).token
    text = f"sparkonce.{log.log_id}.{QUERY}.t{token}.kafka.p0.a7."
    found = browser(source_of(log)).get("/pipelines/orders/search", params={"q": text})
    hits = {x for x in links(found.text) if x.startswith(BATCHES)}
    assert hits == {f"{BATCHES}/{QUERY}/{n}" for n in range(5)}


@pytest.mark.parametrize("asked", ["nothing like it", "orders:0:500", "clicks:0:1", "9", "%_"])
def test_search_that_finds_nothing(log: SqliteLog, asked: str) -> None:
    fill(log)
    found = browser(source_of(log)).get("/pipelines/orders/search", params={"q": asked})
    assert "No batch was found" in found.text
    assert "Look through older batches" not in found.text


def test_offsets_and_objects_lead_to_each_other(log: SqliteLog) -> None:
    """From a batch's offsets and names, links search for them, and find the same batch."""
    fill(log)
    client = browser(source_of(log))
    page = f"{BATCHES}/{QUERY}/3"
    searches = [x for x in links(client.get(page).text) if "/search?" in x]
    assert len(searches) == 4, "two partitions, two branches"
    for search in searches:
        assert page in links(client.get(search).text)


# -- a long history --------------------------------------------------------------------------------


class Counting(SqliteLog):
    """Counts the records that it reads."""

    read = 0

    def history(self, *arguments: Any, **more: Any) -> Any:
        found = super().history(*arguments, **more)
        self.read += len(found)
        return found

    def find(self, transaction_id: TransactionId) -> TransactionRecord | None:
        self.read += 1
        return super().find(transaction_id)

    def newest(self, pipeline: str, query_id: str) -> TransactionRecord | None:
        self.read += 1
        return super().newest(pipeline, query_id)


MANY = 20_000


@pytest.fixture(scope="module")
def long_log(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Counting]:
    path = tmp_path_factory.mktemp("long") / "log.db"
    with closing(Counting(path)) as log:
        fill_far(path, log.begin(claim()), MANY)
        yield log


@pytest.mark.parametrize(
    ("address", "most"),
    [
        ("/", 110),
        ("/pipelines/orders", 170),
        ("/pipelines/orders?before=10000", 170),
        (f"{BATCHES}/{QUERY}/15555", 10),
        ("/pipelines/orders/search?q=orders:0:1000050", 40),
        ("/pipelines/orders/search?q=nothing", READ_AT_ONCE),
        (f"/pipelines/orders/search?q=nothing&query={QUERY}&before=14000", READ_AT_ONCE),
        ("/pipelines/orders/search?q=files.p0.a24690", READ_AT_ONCE + 20),
    ],
)
def test_a_page_reads_few_of_many_records(long_log: Counting, address: str, most: int) -> None:
    long_log.read = 0
    answer = browser(source_of(long_log)).get(address)
    assert answer.status_code == 200
    assert 0 < long_log.read <= most


def test_pages_of_many_batches_follow_each_other(long_log: Counting) -> None:
    client = browser(source_of(long_log))

    def batches(address: str) -> tuple[list[int], dict[str, str]]:
        text = client.get(address).text
        shown = [int(x.rpartition("/")[2]) for x in links(text) if x.startswith(BATCHES)]
        pages = [x for x in links(text) if x.startswith("/pipelines/orders?")]
        names = ["Older"] if len(pages) == 1 else ["Newest", "Newer", "Older"]
        return shown[-views.BATCHES :], dict(zip(names, pages, strict=False))

    newest, pages = batches("/pipelines/orders")
    assert newest == list(range(MANY - 1, MANY - 51, -1))
    older, pages = batches(pages["Older"])
    assert older == list(range(MANY - 51, MANY - 101, -1))
    assert batches(pages["Newer"])[0] == newest
    assert batches("/pipelines/orders?before=3")[0] == [2, 1, 0]


def test_search_continues_where_it_ended(long_log: Counting) -> None:
    client = browser(source_of(long_log))
    page = client.get("/pipelines/orders/search", params={"q": "nothing"}).text
    (older,) = (x for x in links(page) if "before=" in x)
    assert f"before={MANY - READ_AT_ONCE}" in older
    long_log.read = 0
    assert f"{READ_AT_ONCE} records" in client.get(older).text


def test_object_of_an_old_batch_is_found_at_once(long_log: Counting) -> None:
    """Its name has the batch's number."""
    (record,) = long_log.history("orders", limit=1)
    text = f"sparkonce.{long_log.log_id}.{QUERY}.t{record.token}.files.p0.a2468.b1234.parquet"
    long_log.read = 0
    page = browser(source_of(long_log)).get("/pipelines/orders/search", params={"q": text}).text
    assert f"{BATCHES}/{QUERY}/1234" in links(page)
    assert long_log.read < 20


# -- what must not be shown, and errors ------------------------------------------------------------


def test_markup_in_names_is_text(log: SqliteLog) -> None:
    evil = "<script>alert(1)"
    fill(log, pipeline=evil, files="<script>f", topic="<script>t")

    def sick() -> list[Any]:
        return [{"about": evil, "level": "error", "what": evil, "fix": evil}]

    client = browser(source_of(log, doctor=sick))
    pages = [text for _, status, text in walk(client) if status == 200]
    pages += [client.post("/doctor").text]
    pages += [client.get("/pipelines/x", params={"before": evil}).text]
    found = client.get("/pipelines/%3Cscript%3Ealert(1)/search", params={"q": f'"{evil}'})
    pages += [found.text, client.get("/pipelines/<script>no").text]
    assert len(pages) > 15
    assert all("<script" not in text for text in pages)
    assert sum("&lt;script&gt;" in text for text in pages) > 10


@pytest.mark.parametrize(
    ("address", "status"),
    [
        ("/nothing", 404),
        ("/pipelines/clicks", 404),
        (f"{BATCHES}/{QUERY}/99", 404),
        (f"{BATCHES}/none/0", 404),
        ("/pipelines/orders?before=x", 400),
        ("/pipelines/orders?before=9999999999999999", 400),
        ("/?page=7", 200),
    ],
)
def test_wrong_addresses_are_answered(log: SqliteLog, address: str, status: int) -> None:
    fill(log)
    answer = browser(source_of(log)).get(address)
    assert answer.status_code == status
    assert "<h1>" in answer.text


def test_log_that_is_unreachable_is_reported(log: SqliteLog) -> None:
    class Silent(SqliteLog):
        def pipelines(self) -> Any:
            raise LogUnavailableError("the log's disk is gone: mount it")

    silent = Silent(log._path, create=False)
    from starlette.testclient import TestClient

    from sparkonce.page.app import make_app

    client = TestClient(
        make_app(source_of(silent)), base_url="http://localhost", raise_server_exceptions=False
    )
    answer = client.get("/")
    assert answer.status_code == 503
    assert "disk is gone: mount it" in text_of(answer.text)
    silent.close()


def test_doctor_asks_only_when_it_is_asked(log: SqliteLog) -> None:
    """A link opens no connection; the button does."""
    fill(log)
    asked: list[str] = []

    def doctor() -> list[Any]:
        asked.append("now")
        return look_at_log(log)

    client = browser(source_of(log, doctor=doctor))
    assert all(status == 200 for _, status, _ in walk(client))
    assert asked == []
    shown = text_of(client.post("/doctor").text)
    assert asked == ["now"]
    assert "is on this machine's disk" in shown
    assert "warning" in shown


def test_queries_of_before_are_shown(log: SqliteLog) -> None:
    """A name that another query has taken over keeps the batches of the first one."""
    first = log.begin(claim())
    log.complete(log.decide(batch_record(first, 0)), first.token)
    second = log.begin(claim(query_id=OTHER_QUERY, replaces=QUERY))
    log.complete(log.decide(batch_record(second, 0)), second.token)
    client = browser(source_of(log))
    assert {status for _, status, _ in walk(client)} == {200}
    earlier = client.get("/pipelines/orders", params={"query": QUERY}).text
    assert f"{BATCHES}/{QUERY}/0" in links(earlier)
    found = client.get("/pipelines/orders/search", params={"q": "orders:0:50"}).text
    assert {f"{BATCHES}/{q}/0" for q in (QUERY, OTHER_QUERY)} <= set(links(found))


def test_savepoints_are_shown(log: SqliteLog, tmp_path: Path) -> None:
    """Every fact of each one; a damaged one does not hide the others."""
    fill(log)
    head, record = log.head("orders"), log.find(TransactionId("orders", QUERY, 3))
    assert head is not None
    assert record is not None
    made = Manifest(
        "before-upgrade", 1.7e9, head, record, log.log_id, log.address, "4.1.0", "0.1", {}, {}
    )
    place = Savepoints.at(str(tmp_path / "saved"), create=True)
    (tmp_path / "saved" / "before-upgrade.json").write_text(made.encode())
    (tmp_path / "saved" / "damaged.json").write_text("{}")
    client = browser(source_of(log, savepoints=place))
    assert {status for _, status, _ in walk(client)} == {200}
    shown = text_of(client.get("/savepoints").text)
    for key, value in leaves(facts.savepoint(made)):
        assert (when(str(value)) if key == "made_at" else str(value)) in shown, key
    assert "damaged" in shown
