"""The pipeline that writes the orders; Spark's Python processes import it, too."""

from __future__ import annotations

from pathlib import Path

from sparkonce import ExactlyOnce
from sparkonce.sinks import FileSink, SqliteSink

FOLDER = Path("/tmp/orders")
SINKS = [
    FileSink(FOLDER / "out"),
    SqliteSink(FOLDER / "shop.db", table="orders", select=["id", "amount"]),
]


def pipeline() -> ExactlyOnce:
    return ExactlyOnce("orders", sinks=SINKS, log=f"sqlite:///{FOLDER}/txn.db")
