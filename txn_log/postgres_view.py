"""One pipeline's rows in Postgres, as one step of the log reads and changes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from sparkonce.errors import LogCorruptError
from sparkonce.model import TransactionId
from sparkonce.txn_log.postgres_session import PostgresSession
from sparkonce.txn_log.postgres_statements import FIRST_HEAD, NEXT_HEAD, SAME_HEAD, UNHIDDEN
from sparkonce.txn_log.record import Head, TransactionRecord


class PostgresView:
    """The rows of one pipeline; see `sparkonce.txn_log.optimistic.View`."""

    def __init__(self, session: PostgresSession) -> None:
        self._session = session
        self._pipeline: str | None = None
        self._version: int | None = None
        self._head: Head | None = None
        self._new_head: Head | None = None
        self._puts: list[TransactionRecord] = []
        self._forgets: list[tuple[str, int]] = []

    # -- reading -----------------------------------------------------------------------------------

    def pipelines(self) -> Sequence[str]:
        rows = self._session.ask(UNHIDDEN + "SELECT pipeline FROM {schema}.heads ORDER BY pipeline")
        return [str(pipeline) for (pipeline,) in rows]

    def head(self, pipeline: str) -> Head | None:
        self._load(pipeline)
        return self._head

    def find(self, transaction_id: TransactionId) -> TransactionRecord | None:
        found = self._records(
            transaction_id.pipeline,
            "AND query_id = %s AND batch_id = %s",
            transaction_id.query_id,
            transaction_id.batch_id,
        )
        return found[0] if found else None

    def newest(self, pipeline: str, query_id: str) -> TransactionRecord | None:
        found = self._records(
            pipeline, "AND query_id = %s ORDER BY batch_id DESC LIMIT 1", query_id
        )
        return found[0] if found else None

    def unfinished(self, pipeline: str) -> Sequence[TransactionRecord]:
        return self._records(pipeline, "AND state IN ('prepared', 'decided') ORDER BY batch_id")

    def history(
        self, pipeline: str, limit: int, query_id: str | None = None, before: int | None = None
    ) -> Sequence[TransactionRecord]:
        asked = {"AND query_id = %s": query_id, "AND batch_id < %s": before}
        given = {text: value for text, value in asked.items() if value is not None}
        return self._records(
            pipeline, f"{' '.join(given)} ORDER BY batch_id DESC LIMIT %s", *given.values(), limit
        )

    def _load(self, pipeline: str) -> None:
        if self._pipeline is None:
            self._pipeline = pipeline
            self._version, self._head = self._seen(pipeline)

    def _seen(self, pipeline: str) -> tuple[int | None, Head | None]:
        rows = self._session.ask(
            UNHIDDEN + "SELECT version, token, body FROM {schema}.heads WHERE pipeline = %s",
            pipeline,
        )
        for version, token, body in rows:
            return version, Head.of_row(pipeline, token, body, self._session.address)
        return None, None

    def _records(self, pipeline: str, where: str, *values: object) -> list[TransactionRecord]:
        self._load(pipeline)
        rows = self._session.ask(
            UNHIDDEN
            + "SELECT query_id, batch_id, state, body FROM {schema}.records WHERE pipeline = %s "
            + where,
            pipeline,
            *values,
        )
        return [
            TransactionRecord.of_row(
                TransactionId(pipeline, query_id, batch_id), state, body, self._session.address
            )
            for query_id, batch_id, state, body in rows
        ]

    # -- writing -----------------------------------------------------------------------------------

    def put_head(self, head: Head) -> None:
        self._load(head.pipeline)
        self._new_head = head

    def put(self, record: TransactionRecord) -> None:
        self._load(record.id.pipeline)
        self._puts.append(record)

    def forget(self, pipeline: str, query_id: str, below: int) -> None:
        self._load(pipeline)
        self._forgets.append((query_id, below))

    @property
    def is_changed(self) -> bool:
        return bool(self._new_head or self._puts or self._forgets)

    def is_current(self) -> bool:
        if self._pipeline is None:
            return True
        if self._version is None:
            return self._seen(self._pipeline)[0] is None
        return self._session.swap(SAME_HEAD, self._changes()[1])

    def swap(self) -> bool:
        return self._session.swap(*self._changes())

    def as_sql(self) -> str:
        return self._session.as_sql(*self._changes())

    def _changes(self) -> tuple[str, Mapping[str, object]]:
        """The head's statement, and the values of the whole write."""
        head = self._new_head or self._head
        if head is None:
            raise LogCorruptError(
                f"{self._session.address} has records of pipeline {self._pipeline!r} but no head; "
                "restore the transaction log from a copy"
            )
        values: dict[str, object] = {
            "pipeline": self._pipeline,
            "version": self._version,
            "token": head.token,
            "body": head.encode(),
            "pipelines": [record.id.pipeline for record in self._puts],
            "queries": [record.id.query_id for record in self._puts],
            "batches": [record.id.batch_id for record in self._puts],
            "states": [record.state.value for record in self._puts],
            "bodies": [record.encode() for record in self._puts],
            "old_queries": [query_id for query_id, _ in self._forgets],
            "below": [below for _, below in self._forgets],
        }
        return FIRST_HEAD if self._version is None else NEXT_HEAD, values
