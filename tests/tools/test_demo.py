"""The demo's own parts: orders, comparison, leaks, plan and plain display. No server, no Spark."""

from __future__ import annotations

import json
from collections import Counter
from datetime import UTC, date, datetime, timedelta, timezone
from decimal import Decimal
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparkonce.demo import __main__ as program
from sparkonce.demo.kills import PLANS, SINKS
from sparkonce.demo.orders import (
    Order,
    expected,
    from_kafka,
    from_lake,
    from_postgres,
    generate,
)
from sparkonce.demo.outside import Seen, in_words
from sparkonce.demo.screen import PLAIN_EVERY_S, Screen, View
from sparkonce.demo.show import BATCHES
from sparkonce.demo.verdict import SinkVerdict, Verdict, compare, complaints
from sparkonce.steps import POINTS
from sparkonce.testing.checks import (
    KafkaMessage,
    Leak,
    folder_values,
    multiset_difference,
    open_transactions,
    open_uploads,
)

MORNING = datetime(2026, 3, 2, 7, 30, tzinfo=UTC)
ORDER = Order(
    7, "佐藤 花子", None, 3, Decimal("19.90"), Decimal("23.68"), MORNING, MORNING.date(), "🎁"
)


# -- orders ----------------------------------------------------------------------------------------


def test_a_seed_makes_the_same_orders_again() -> None:
    """A run can be repeated with the seed that it printed."""
    assert list(generate(5, 200)) == list(generate(5, 200))
    assert list(generate(5, 200)) != list(generate(6, 200))


def test_orders_have_nulls_missing_fields_and_many_scripts() -> None:
    """What breaks careless writers is among the first thousand orders."""
    orders = [json.loads(value) for value in generate(1, 1000)]
    assert [order["order_id"] for order in orders] == list(range(1, 1001))
    assert any(order.get("customer", "") is None for order in orders)
    assert any("net" not in order for order in orders)
    text = "".join(str(order.get("customer")) + str(order.get("note")) for order in orders)
    assert all(character in text for character in 'ü佐김عДλश🦊\n\t\\"')


def test_tax_is_rounded_half_up() -> None:
    """As Spark's `round` does it, not as Python's."""
    source = {"order_id": 1, "net": 0.5, "tax_rate": 0.19, "placed_at": "2026-03-01T00:00:00.000Z"}
    assert expected(json.dumps(source).encode()).amount == Decimal("0.60")


def test_a_missing_net_gives_no_amount() -> None:
    """Nulls stay nulls through the derived columns."""
    source = {"order_id": 1, "tax_rate": 0.19, "placed_at": "2026-03-01T23:59:59.999Z"}
    order = expected(json.dumps(source).encode())
    assert (order.net, order.amount, order.customer, order.day) == (
        None,
        None,
        None,
        date(2026, 3, 1),
    )


def test_an_order_is_the_same_in_every_sink() -> None:
    """Number of decimals, time zone and absent nulls make no difference."""
    value = {
        "customer": "佐藤 花子",
        "items": 3,
        "net": 19.9,
        "amount": 23.68,
        "placed_at": "2026-03-02T07:30:00.000Z",
        "day": "2026-03-02",
        "note": "🎁",
    }
    in_tokyo = MORNING.astimezone(timezone(timedelta(hours=9)))
    row = {**ORDER._asdict(), "day": "2026-03-02"}
    orders = [
        ORDER,
        from_kafka(KafkaMessage(b"7", json.dumps(value).encode())),
        from_postgres(tuple(ORDER._replace(placed_at=in_tokyo))),
        from_lake(row),
        from_lake(ORDER._asdict()),
    ]
    assert Counter(orders) == {ORDER: 5}


# -- comparison ------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 5)), st.lists(st.integers(0, 5)))
def test_the_difference_explains_the_rows_that_are_there(want: list[int], have: list[int]) -> None:
    """What was sent, less what is lost, with what is there too often, is what is there."""
    lost, duplicated = multiset_difference(want, have)
    assert Counter(want) - lost + duplicated == Counter(have)
    assert not lost & duplicated


def test_a_changed_row_is_lost_and_surplus() -> None:
    """A row that differs in one column is never taken for the row that was sent."""
    changed = ORDER._replace(note=None)
    verdict = compare(Counter([ORDER]), [changed])
    assert (verdict.rows, verdict.lost, verdict.duplicated) == (1, 1, 1)
    assert "佐藤" in verdict.example


def verdict(lost: int = 0, duplicated: int = 0, *leaks: Leak, rows: int = 10) -> Verdict:
    return Verdict(rows, {"kafka": SinkVerdict(rows, lost, duplicated)}, leaks)


LEAK = Leak("open upload", "orders/x")


@pytest.mark.parametrize(
    ("found", "kills", "said"),
    [
        (verdict(), (4, 4), []),
        (verdict(), (3, 4), ["only 3 of 4 kills"]),
        (verdict(1), (4, 4), ["rows are lost"]),
        (verdict(0, 1), (4, 4), ["rows are duplicated"]),
        (verdict(0, 0, LEAK), (4, 4), ["something is left over"]),
        (verdict(rows=9), (4, 4), ["the source topic has 9 rows, 10 were sent"]),
    ],
)
def test_what_is_off_with_sparkonce(
    found: Verdict, kills: tuple[int, int], said: list[str]
) -> None:
    """The demo fails for each of them alone."""
    assert list(complaints("exactly-once", 10, kills, found)) == said


def test_the_contrast_needs_duplicates_and_no_loss() -> None:
    """The naive run fails when it shows nothing."""
    assert list(complaints("naive", 10, (4, 4), verdict(0, 5))) == []
    assert "no duplicates" in next(complaints("naive", 10, (4, 4), verdict()))
    assert list(complaints("naive", 10, (4, 4), verdict(1, 5))) == ["rows are lost"]


def test_the_last_line() -> None:
    """Scripts read it."""
    line = verdict(1, 2, LEAK).last_line(4)
    assert line == "rows 10 | kills 4 | lost 1 | duplicated 2 | leaked 1"


# -- leaks -----------------------------------------------------------------------------------------


def test_only_our_transactions_count_as_ours() -> None:
    """Another application's open transaction is no leak of ours."""
    names = ["sparkonce.aa.q.t1.kafka.p0.a1.", "shop-7", "xsparkonce.aa."]
    listed = {1: [SimpleNamespace(transactional_id=name) for name in names]}
    admin = SimpleNamespace(list_transactions=lambda state_filters: listed)
    assert list(open_transactions(admin)) == [Leak("Kafka transaction", names[0])]


def test_uploads_are_listed_page_by_page() -> None:
    """S3 gives a thousand at once."""
    pages = {"": (["a", "b"], True), "b": (["c"], False)}

    def page(**request: Any) -> dict[str, Any]:
        keys, more = pages[request["KeyMarker"]]
        return {"Uploads": [{"Key": key} for key in keys], "IsTruncated": more}

    client: Any = SimpleNamespace(list_multipart_uploads=page)
    assert [leak.name for leak in open_uploads(client, "lake")] == ["a", "b", "c"]


def test_leaks_in_words() -> None:
    """One line tells what stands open."""
    leaks = [LEAK, Leak("staging table", "t"), LEAK]
    assert in_words(leaks) == "2 open uploads, 1 staging table"
    assert in_words([]) == "nothing"


def test_folders_are_read_as_spark_writes_them() -> None:
    """Escapes and the folder of nulls included."""
    key = "orders/day=2026-03-01/who=a%2Fb/no=__HIVE_DEFAULT_PARTITION__/x=1.parquet"
    assert folder_values(key) == {"day": "2026-03-01", "who": "a/b", "no": None}


# -- plan, display, program ------------------------------------------------------------------------


@pytest.mark.parametrize("writer", PLANS)
def test_the_plan_has_four_kills_at_points_that_exist(writer: str) -> None:
    """Each at a batch of its own, and all of them before the last batch."""
    plan = PLANS[writer]
    assert len(plan) >= 4
    assert {point for kill in plan for point, _ in kill.points} <= set(POINTS)
    batches = [kill.batch for kill in plan]
    assert batches == sorted(set(batches))
    assert batches[-1] < BATCHES - 1


def test_plain_output_has_no_control_characters(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where stdout is no terminal, each event is one whole line."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    view = View("exactly-once", 10, 4)
    with Screen(view) as screen:
        screen.say("a long line " * 30, "bold red")
        view.seen = Seen(dict.fromkeys(SINKS, 5), {sink: [LEAK] for sink in SINKS})
        screen.tick()
        screen._said_at -= PLAIN_EVERY_S + 1
        screen.tick()
    first, second = capsys.readouterr().out.splitlines()
    assert first.count("a long line") == 30
    assert "kafka 5 postgres 5 s3 5" in second
    assert all(character.isprintable() for character in first + second)


def test_naive_writer_knows_no_tables(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        program.main(["--writer", "naive", "--lake", "delta"])
    assert "--writer naive writes files only" in capsys.readouterr().err


def test_too_few_rows_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """Every task of every batch needs rows, or a kill would wait in vain."""
    with pytest.raises(SystemExit):
        program.main(["--rows", "10"])
    assert str(program.FEWEST_ROWS) in capsys.readouterr().err
