"""What plain clients see of the three sinks while the demo runs."""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import psycopg
from kafka.admin import KafkaAdminClient
from psycopg import sql

from sparkonce.demo.kills import SINKS
from sparkonce.demo.lakes import lake_of
from sparkonce.demo.settings import Job
from sparkonce.testing.checks import (
    CommittedReader,
    Leak,
    open_transactions,
    prepared_and_staged,
    s3_client,
)
from sparkonce.testing.services import S3Server
from sparkonce.words import counted


@dataclass(frozen=True, slots=True)
class Seen:
    """One look.

    Attributes:
        rows: by sink, how many rows its readers get.
        standing: by sink, what is open, prepared or staged.
    """

    rows: Mapping[str, int]
    standing: Mapping[str, Sequence[Leak]]

    @property
    def everything_standing(self) -> list[Leak]:
        return [leak for leaks in self.standing.values() for leak in leaks]


class Outside:
    """Looks at the sinks; from any thread, one at a time."""

    def __init__(self, job: Job, s3: S3Server) -> None:
        self._job = job
        self._lock = threading.Lock()
        self._stack = contextlib.ExitStack()
        with contextlib.ExitStack() as stack:
            self._reader = stack.enter_context(CommittedReader(job.kafka, job.topic))
            self._postgres = stack.enter_context(psycopg.connect(job.postgres, autocommit=True))
            self._s3 = stack.enter_context(contextlib.closing(s3_client(s3)))
            self._kafka = KafkaAdminClient(bootstrap_servers=[job.kafka])
            stack.callback(self._kafka.close)
            self._stack = stack.pop_all()
        self._messages = 0
        self._lake = lake_of(job)

    def look(self) -> Seen:
        job = self._job
        with self._lock:
            standing = {
                "kafka": list(open_transactions(self._kafka)),
                "postgres": list(prepared_and_staged(self._postgres)),
                "s3": list(self._lake.unfinished(self._s3)),
            }
            self._messages += sum(1 for _ in self._reader.read_visible())
            query = sql.SQL("SELECT count(*) FROM {}").format(sql.Identifier(job.table))
            (in_table,) = self._postgres.execute(query).fetchone() or (0,)
            rows = (self._messages, int(in_table), self._lake.count(self._s3))
        return Seen(dict(zip(SINKS, rows, strict=True)), standing)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._stack.close()


def in_words(leaks: Iterable[Leak]) -> str:
    """`4 Kafka transactions, 1 prepared transaction`, or `nothing`."""
    kinds = Counter(leak.kind for leak in leaks)
    return ", ".join(counted(count, kind) for kind, count in kinds.items()) or "nothing"
