"""Failing twins of `LogContract`: each log makes one mistake, and turns one test of it red.

test_log_twins_verbs.py has others; docs/contributing/log-twins.md lists all of them.
"""

from __future__ import annotations

import re
import secrets
import sqlite3
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from sparkonce.errors import DecisionUnknownError, LogUnavailableError
from sparkonce.failpoints import reach
from sparkonce.model import TransactionId
from sparkonce.testing import LogContract
from sparkonce.txn_log.base import ResultT, Store
from sparkonce.txn_log.document import _Pipeline, _Seen
from sparkonce.txn_log.record import Head, TransactionRecord
from sparkonce.txn_log.sealing import seal, unseal
from sparkonce.txn_log.sqlite import _SqliteStore
from tests.support.log_twins import DeletingStore, FolderTwin, SqliteTwin, Twin, caught
from tests.support.twins import name_of, twins_on

# -- records that are lost -------------------------------------------------------------------------


class ForgetsDecided(SqliteTwin):
    """Forgets all that is old, also what is decided and not committed yet."""

    class Store(DeletingStore):
        deleted = (
            "pipeline = :pipeline AND query_id = :query_id AND batch_id < :below"
            " AND state != 'settled'"
        )


class ForgetsOtherQueries(SqliteTwin):
    """Forgets by the number of the batch, whatever the query."""

    class Store(DeletingStore):
        deleted = "pipeline = :pipeline AND batch_id < :below AND state = 'complete'"


class ForgetsByPrefix(SqliteTwin):
    """Forgets in every pipeline whose name begins with that of the pipeline."""

    class Store(DeletingStore):
        deleted = (
            "substr(pipeline, 1, length(:pipeline)) = :pipeline AND batch_id < :below"
            " AND state = 'complete'"
        )


class ListsTheNewest(SqliteTwin):
    """Assumes that only the newest batch can be unfinished."""

    class Store(_SqliteStore):
        def unfinished(self, pipeline: str) -> Sequence[TransactionRecord]:
            return super().unfinished(pipeline)[-1:]


class ListsNewestFirst(SqliteTwin):
    class Store(_SqliteStore):
        def unfinished(self, pipeline: str) -> Sequence[TransactionRecord]:
            return super().unfinished(pipeline)[::-1]


class ListsByText(SqliteTwin):
    """Compares the numbers of batches as text."""

    class Store(_SqliteStore):
        def unfinished(self, pipeline: str) -> Sequence[TransactionRecord]:
            return sorted(super().unfinished(pipeline), key=lambda found: str(found.id.batch_id))


class EmptyWhenAway(FolderTwin):
    """Takes a place that it cannot read for an empty one."""

    def _load(self, pipeline: str, *, is_fresh: bool) -> _Seen:
        try:
            return super()._load(pipeline, is_fresh=is_fresh)
        except LogUnavailableError:
            return _Seen(None, _Pipeline())


class DropsRewinds(SqliteTwin):
    """Has columns for what a head had when the tables were made."""

    class Store(_SqliteStore):
        def put_head(self, head: Head) -> None:
            super().put_head(replace(head, rewound={}, rewinding_to=""))


class WrapsNumbers(SqliteTwin):
    """Has a column of 31 bits for the number of a batch."""

    class Store(_SqliteStore):
        def find(self, transaction_id: TransactionId) -> TransactionRecord | None:
            return super().find(replace(transaction_id, batch_id=transaction_id.batch_id % 2**31))


class MadeAnew(SqliteTwin):
    """Makes the file again when it opens it again and finds none."""

    def _connect(self) -> sqlite3.Connection:
        self._may_create = True
        return super()._connect()

    def _check_is_the_same(self, connection: sqlite3.Connection) -> None:
        pass


# -- steps that are not atomic ---------------------------------------------------------------------


class CommitsEachPut(SqliteTwin):
    """Every statement is a transaction of its own."""

    class Store(_SqliteStore):
        def put(self, record: TransactionRecord) -> None:
            super().put(record)
            self._connection.execute("COMMIT")
            self._connection.execute("BEGIN IMMEDIATE")


class RemembersEarly(SqliteTwin):
    """Remembers a record when a step has put it, and not when that is committed."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._known: dict[TransactionId, TransactionRecord] = {}
        super().__init__(*args, **kwargs)

    def _write(self, step: Callable[[Store], ResultT]) -> ResultT:
        known = self._known

        class Remembering(_SqliteStore):
            def find(self, transaction_id: TransactionId) -> TransactionRecord | None:
                return known.get(transaction_id) or super().find(transaction_id)

            def put(self, record: TransactionRecord) -> None:
                known[record.id] = record
                super().put(record)

        with self._transaction() as connection:
            return step(Remembering(connection, self.address))


class KeepsTheLock(SqliteTwin):
    """Rolls back after an error, and Ctrl-C is none."""

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with self._lock:
            reach("log.before", request="begin")
            with self._named_errors():
                connection = self._connect()
                connection.execute("BEGIN IMMEDIATE")
            try:
                yield connection
                reach("log.before", request="commit")
            except Exception:
                connection.execute("ROLLBACK")
                raise
            try:
                connection.execute("COMMIT")
            except sqlite3.Error as error:
                self.close()
                raise DecisionUnknownError("read the log again") from error
            reach("log.after", request="commit")


# -- several drivers, threads, and what a log object keeps -----------------------------------------


class KeepsItsOwnId(FolderTwin):
    """Makes an id where there is none, and does not look whether another driver was faster."""

    both_have_looked = threading.Barrier(2)

    def _read_or_make_id(self, *, create: bool) -> str:
        text = self._place.read("log.json")
        if text is None:
            with suppress(threading.BrokenBarrierError):
                self.both_have_looked.wait(timeout=2)
            text = seal({"log_id": secrets.token_hex(8)})
            self._place.create("log.json", text)
        return str(unseal(text, "log.json")["log_id"])


class NoLock:
    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...

    def acquire(self) -> None: ...

    def release(self) -> None: ...


class Unlocked(SqliteTwin):
    """Nothing keeps the threads of a process apart, which share the connection."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._lock = NoLock()  # type: ignore[assignment]

    def close(self) -> None:
        """Nothing: SQLite crashes if a connection is closed while another thread uses it."""


class BoundToItsThread(SqliteTwin):
    """Has a client that works only in the thread that opened it."""

    _thread = 0

    def _connect(self) -> sqlite3.Connection:
        if self._open is None:
            self._thread = threading.get_ident()
        if self._thread != threading.get_ident():
            raise sqlite3.ProgrammingError("the connection was opened in another thread")
        return super()._connect()


class StaleOnceClosed(FolderTwin):
    """`close` ends the watch that keeps its cache up to date, and nothing starts it again."""

    _is_closed = False

    def close(self) -> None:
        super().close()
        self._is_closed = True

    def _load(self, pipeline: str, *, is_fresh: bool) -> _Seen:
        return super()._load(pipeline, is_fresh=is_fresh and not self._is_closed)


class ChainsSecrets(FolderTwin):
    """Chains the client's error, which shows the password."""

    secrets = ("hunter2",)

    def _write(self, step: Callable[[Store], ResultT]) -> ResultT:
        try:
            return super()._write(step)
        except LogUnavailableError as error:
            raise LogUnavailableError(str(error)) from ConnectionError("user ann, hunter2")


# -- names -----------------------------------------------------------------------------------------


class NamesAsPatterns(SqliteTwin):
    """Takes the name of a pipeline for a pattern of LIKE, in which _ is any character."""

    class Store(_SqliteStore):
        def _records(self, where: str, *values: object) -> list[TransactionRecord]:
            return super()._records(where.replace("pipeline = ?", "pipeline LIKE ?"), *values)


class IgnoresCase(SqliteTwin):
    """Compares names as some databases do, without upper and lower case."""

    class Store(_SqliteStore):
        def head(self, pipeline: str) -> Head | None:
            names = [name for name in self.pipelines() if name.lower() == pipeline.lower()]
            return super().head(names[0]) if names else None


class CutsNames(SqliteTwin):
    """Has a column of 16 characters for the name of a pipeline."""

    class Store(_SqliteStore):
        def head(self, pipeline: str) -> Head | None:
            names = [name for name in self.pipelines() if name[:16] == pipeline[:16]]
            return super().head(names[0]) if names else None


class ListsOnePage(SqliteTwin):
    """Reads the first page of the list."""

    class Store(_SqliteStore):
        def pipelines(self) -> Sequence[str]:
            return super().pipelines()[:100]


C = LogContract
GONE = "a decided batch was forgotten"
MIXED = "similar names are mixed up"
PAIRS: list[tuple[Twin, Callable[..., None], str]] = [
    (ForgetsDecided, C.test_forget_keeps_what_is_decided, GONE),
    (ForgetsOtherQueries, C.test_forget_spares_other_queries_and_pipelines, "were forgotten too"),
    (ForgetsByPrefix, C.test_forget_spares_other_queries_and_pipelines, "were forgotten too"),
    (ListsTheNewest, C.test_unfinished_are_listed_oldest_first, "in order of batches"),
    (ListsNewestFirst, C.test_unfinished_are_listed_oldest_first, "in order of batches"),
    (ListsByText, C.test_unfinished_are_listed_oldest_first, "in order of batches"),
    (EmptyWhenAway, C.test_log_out_of_reach, "does not read as before"),
    (ChainsSecrets, C.test_log_out_of_reach, "an error shows a secret"),
    (ListsOnePage, C.test_pipelines_are_listed, "some pipelines are not listed"),
    (DropsRewinds, C.test_head_and_record_read_back_equal, "a field of the head is lost"),
    (WrapsNumbers, partial(C.test_large_batch_numbers, edge=2**31), "a batch is not found"),
    (MadeAnew, C.test_deleted_log_does_not_read_as_empty, "DID NOT RAISE"),
    (CommitsEachPut, partial(C.test_interrupted_write, verb="begin"), "half a step landed"),
    (
        CommitsEachPut,
        partial(C.test_process_is_killed_at_every_round_trip, verb="begin"),
        "half a step",
    ),
    (RemembersEarly, partial(C.test_interrupted_write, verb="decide"), "retry was not written"),
    (KeepsTheLock, partial(C.test_interrupted_write, verb="decide"), "holds its lock"),
    (KeepsItsOwnId, C.test_first_drivers_share_one_log_id, "have different ids"),
    (Unlocked, C.test_threads_share_one_log, "transaction|not an intact|not an error"),
    (BoundToItsThread, C.test_threads_share_one_log, "opened in another thread"),
    (StaleOnceClosed, C.test_closed_log_can_be_used_again, "sees an older state"),
    (NamesAsPatterns, C.test_similar_names_are_separate, MIXED),
    (IgnoresCase, C.test_similar_names_are_separate, MIXED),
    (CutsNames, C.test_similar_names_are_separate, MIXED),
]


@pytest.mark.parametrize(
    ("twin", "test", "says"),
    PAIRS,
    ids=[f"{twin.__name__}-{name_of(test)}" for twin, test, _ in PAIRS],
)
def test_mistake_turns_a_test_red(
    tmp_path: Path, twin: Twin, test: Callable[..., None], says: str
) -> None:
    caught(twin, test, tmp_path, says)


def test_every_test_of_the_log_contract_has_a_twin() -> None:
    """The page names a mistake for each, and the test that makes it: both exist."""
    for name, file, text in twins_on("log-twins.md", LogContract):
        assert re.search(rf"\bC\.{name}\b", text), f"{file} does not run {name}"
