"""The demo's orders: made from a seed, sent as JSON, and computed a second time without Spark.

    generate(seed) ─► JSON in the source topic ─► Spark ─► sinks
                                 └─► expected() ─► what every sink must hold

`expected` is the demo's second opinion: plain Python with `decimal`, from the source's own bytes.
"""

from __future__ import annotations

import itertools
import json
import random
import threading
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, date, datetime, timedelta
from decimal import ROUND_HALF_UP, Decimal
from typing import Any, Final, NamedTuple

from confluent_kafka import KafkaException, Message, Producer

from sparkonce.testing.checks import KafkaMessage

SOURCE_SCHEMA: Final = (
    "order_id long, customer string, country string, items int, net decimal(12,2), "
    "tax_rate decimal(4,3), placed_at timestamp, note string"
)
"""Spark's schema of the JSON in the source topic."""

DERIVED: Final = (
    "order_id",
    "customer",
    "country",
    "items",
    "net",
    "CAST(round(net * (1 + tax_rate), 2) AS decimal(12,2)) AS amount",
    "placed_at",
    "CAST(placed_at AS date) AS day",
    "note",
)
"""Spark's expressions for the columns of the sinks."""

KAFKA_COLUMNS: Final = (
    "CAST(order_id AS string) AS key",
    "to_json(struct(customer, country, items, net, amount, placed_at, day, note)) AS value",
)
"""Spark's expressions for the messages of the output topic."""

TABLE_COLUMNS: Final = (
    "order_id bigint, customer text, country text, items integer, net numeric(12,2), "
    "amount numeric(12,2), placed_at timestamptz, day date, note text"
)
"""Postgres' columns, in the order of `Order`."""

TAX_RATES: Final[Mapping[str, str]] = {
    "DE": "0.19",
    "FR": "0.2",
    "JP": "0.1",
    "IN": "0.18",
    "GR": "0.24",
    "IL": "0.17",
    "CH": "0.081",
}
CUSTOMERS: Final[Sequence[str | None]] = (
    None,
    "Anna Müller",
    "Søren Ødegård",
    "Seán O'Brien",
    "Nguyễn Văn An",
    "Ελένη Παπαδοπούλου",
    "Дмитрий Иванов",
    "佐藤 花子",
    "张伟",
    "김민준",
    "محمد علي",
    "יעל כהן",
    "नेहा शर्मा",
    "สมชาย ใจดี",
    "🦊 Fox & Sons",
)
NOTES: Final[Sequence[str | None]] = (
    None,
    None,
    None,
    None,
    "",
    "🎁 gift wrap, please",
    "deliver after 18:00",
    "zweimal klingeln, „oben“",
    "two\nlines and a\ttab",
    'says "hello, world"; it\'s \\N and C:\\new',
    "👩‍👩‍👧 family order",
    "NULL",
)
FIRST_DAY: Final = datetime(2026, 3, 1, tzinfo=UTC)
DAYS: Final = 4

_CENT: Final = Decimal("0.01")


class Order(NamedTuple):
    """One row of a sink."""

    order_id: int
    customer: str | None
    country: str | None
    items: int | None
    net: Decimal | None
    amount: Decimal | None
    placed_at: datetime
    day: date
    note: str | None


# -- the source ------------------------------------------------------------------------------------


def generate(seed: int, count: int) -> Iterator[bytes]:
    """Orders as JSON; the same ones for the same seed."""
    rng = random.Random(seed)  # noqa: S311  # no secrets are made here
    countries = tuple(TAX_RATES)
    for order_id in range(1, count + 1):
        placed_at = FIRST_DAY + timedelta(milliseconds=rng.randrange(DAYS * 86_400_000))
        country = rng.choice(countries)
        order: dict[str, object] = {
            "order_id": order_id,
            "customer": rng.choice(CUSTOMERS),
            "country": country,
            "items": rng.randint(1, 9),
            "net": rng.randint(100, 500_000) / 100,
            "tax_rate": float(TAX_RATES[country]),
            "placed_at": placed_at.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "note": rng.choice(NOTES),
        }
        if rng.random() < 0.05:  # noqa: PLR2004  # some fields are missing, not null
            del order[rng.choice(("customer", "country", "items", "net", "note"))]
        yield json.dumps(order, ensure_ascii=False).encode()


class Feed:
    """Sends the orders to the source topic in a thread of its own, to each partition in turn.

    So every task of a batch has rows, and a seed makes the same batches again.
    """

    def __init__(
        self, bootstrap_servers: str, topic: str, *, partitions: int, seed: int, count: int
    ) -> None:
        self.sent = 0
        self.error: str | None = None
        self._bootstrap_servers = bootstrap_servers
        self._topic = topic
        self._orders = zip(generate(seed, count), itertools.cycle(range(partitions)), strict=False)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Stop sending; returns when the producer is gone."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        settings = {"bootstrap.servers": self._bootstrap_servers, "acks": "all", "linger.ms": 20}
        producer = Producer(settings)
        try:
            for value, partition in self._orders:
                if self._stop.is_set():
                    producer.purge()
                    break
                self._send(producer, value, partition)
            producer.flush()
        except KafkaException as error:
            self.error = f"the source topic takes no more orders: {error}"

    def _send(self, producer: Producer, value: bytes, partition: int) -> None:
        while True:
            try:
                producer.produce(
                    self._topic, value, partition=partition, on_delivery=self._delivered
                )
            except BufferError:
                producer.poll(0.1)
            else:
                producer.poll(0)
                return

    def _delivered(self, error: object, _: Message) -> None:
        if error is None:
            self.sent += 1
        elif not self._stop.is_set():
            self.error = f"the source topic lost an order: {error}"


# -- the same order, as the source and each sink hold it -------------------------------------------


def expected(source: bytes) -> Order:
    """What the sinks must hold for one message of the source topic."""
    order = json.loads(source, parse_float=Decimal)
    placed_at = datetime.fromisoformat(order["placed_at"])
    net = None if order.get("net") is None else Decimal(order["net"])
    amount = None if net is None else net * (1 + order["tax_rate"])
    return Order(
        order_id=order["order_id"],
        customer=order.get("customer"),
        country=order.get("country"),
        items=order.get("items"),
        net=net,
        amount=None if amount is None else amount.quantize(_CENT, ROUND_HALF_UP),
        placed_at=placed_at,
        day=placed_at.date(),
        note=order.get("note"),
    )


def from_kafka(message: KafkaMessage) -> Order:
    """An order of the output topic: its id is the key, all else the value."""
    order = json.loads(message.value or b"{}", parse_float=Decimal)
    net, amount = order.get("net"), order.get("amount")
    return Order(
        order_id=int(message.key or b"0"),
        customer=order.get("customer"),
        country=order.get("country"),
        items=order.get("items"),
        net=None if net is None else Decimal(net),
        amount=None if amount is None else Decimal(amount),
        placed_at=datetime.fromisoformat(order["placed_at"]),
        day=date.fromisoformat(order["day"]),
        note=order.get("note"),
    )


def from_postgres(row: tuple[Any, ...]) -> Order:
    return Order(*row)


def from_lake(row: Mapping[str, Any]) -> Order:
    values = {name: row[name] for name in Order._fields}
    day = row["day"]  # text where it is the name of a folder
    return Order(**{**values, "day": date.fromisoformat(day) if isinstance(day, str) else day})
