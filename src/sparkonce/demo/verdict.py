"""The comparison at the end: every sink with the source, row by row, and what is left over."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from rich.table import Table

from sparkonce.demo.lakes import lake_of, leaks_in
from sparkonce.demo.orders import Order, expected, from_kafka, from_lake, from_postgres
from sparkonce.demo.settings import PIPELINE, Job
from sparkonce.testing.checks import (
    Leak,
    find_leaks,
    multiset_difference,
    read_kafka_committed,
    read_postgres,
)
from sparkonce.testing.services import S3Server
from sparkonce.txn_log import open_log


@dataclass(frozen=True, slots=True)
class SinkVerdict:
    """One sink compared with the source.

    Attributes:
        rows: how many its readers get.
        lost: rows of the source that are missing.
        duplicated: rows that are there more than once, or that the source never had.
        example: one such row.
    """

    rows: int
    lost: int
    duplicated: int
    example: str = ""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the demo has shown."""

    source_rows: int
    sinks: Mapping[str, SinkVerdict]
    leaks: Sequence[Leak]

    @property
    def lost(self) -> int:
        return sum(sink.lost for sink in self.sinks.values())

    @property
    def duplicated(self) -> int:
        return sum(sink.duplicated for sink in self.sinks.values())

    def last_line(self, kills: int) -> str:
        return (
            f"rows {self.source_rows} | kills {kills} | lost {self.lost} | "
            f"duplicated {self.duplicated} | leaked {len(self.leaks)}"
        )

    def table(self) -> Table:
        table = Table("read from", title="compared with the source topic", title_justify="left")
        for name in ("rows", "lost", "duplicated"):
            table.add_column(name, justify="right")
        table.add_row("source topic", f"{self.source_rows:,}", "", "")
        for name, sink in self.sinks.items():
            table.add_row(name, f"{sink.rows:,}", f"{sink.lost:,}", f"{sink.duplicated:,}")
        return table


def compare(wanted: Counter[Order], found: Iterable[Order]) -> SinkVerdict:
    """Compare a sink's rows with the wanted ones, as multisets."""
    actual = Counter(found)
    lost, duplicated = multiset_difference(wanted, actual)
    example = next(iter([*lost, *duplicated]), None)
    return SinkVerdict(
        actual.total(), lost.total(), duplicated.total(), str(example) if example else ""
    )


def judge(job: Job, s3: S3Server) -> Verdict:
    """Read the source and every sink, with readers that know nothing of sparkonce."""
    source = read_kafka_committed(job.kafka, job.source_topic)
    wanted = Counter(expected(message.value or b"") for message in source)
    lake = lake_of(job)
    readers: Mapping[str, Callable[[], Iterable[Order]]] = {
        "kafka, read_committed": lambda: map(
            from_kafka, read_kafka_committed(job.kafka, job.topic)
        ),
        "postgres, SQL": lambda: map(from_postgres, read_postgres(job.postgres, job.table)),
        lake.readers: lambda: map(from_lake, lake.rows(s3)),
    }
    sinks = {name: compare(wanted, read()) for name, read in readers.items()}
    leaks = [*find_leaks(kafka=job.kafka, postgres=job.postgres), *leaks_in(job, s3)]
    if job.writer == "exactly-once":
        log = open_log(job.log)
        leaks += [Leak("unfinished record", str(r.id)) for r in log.unfinished(PIPELINE)]
        log.close()
    return Verdict(len(source), sinks, leaks)


def complaints(writer: str, rows: int, kills: tuple[int, int], verdict: Verdict) -> Iterator[str]:
    """What went wrong, one line each.

    Args:
        writer: "exactly-once", or "naive", which must show duplicates.
        rows: how many orders were sent.
        kills: how many there were, and how many were planned.
        verdict: what the readers found.
    """
    fired, planned = kills
    if fired < planned:
        yield f"only {fired} of {planned} kills"
    if verdict.source_rows != rows:
        yield f"the source topic has {verdict.source_rows} rows, {rows} were sent"
    if verdict.lost:
        yield "rows are lost"
    if writer == "naive":
        if not verdict.duplicated:
            yield "the naive writer made no duplicates, so the contrast is not shown"
        return
    if verdict.duplicated:
        yield "rows are duplicated"
    if verdict.leaks:
        yield "something is left over"
