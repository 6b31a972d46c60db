"""The embedded transaction log: one SQLite file.

Write-ahead log with ``synchronous=FULL``: a commit is on the disk when it returns. Every write is
one ``BEGIN IMMEDIATE`` transaction that reads the token and writes, so SQLite's own lock puts all
writes of all processes into one order.
"""

from __future__ import annotations

import secrets
import sqlite3
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from sparkonce.errors import (
    ConfigurationError,
    DecisionUnknownError,
    FencedError,
    LogCorruptError,
    LogUnavailableError,
    ProtocolError,
)
from sparkonce.model import Owner, TransactionId
from sparkonce.txn_log.base import TransactionLog
from sparkonce.txn_log.identity import Claim, Known, admit
from sparkonce.txn_log.record import Head, Incarnation, State, TransactionRecord

_SCHEMA = """
CREATE TABLE IF NOT EXISTS sparkonce_meta (
    key TEXT PRIMARY KEY, value TEXT NOT NULL
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS sparkonce_heads (
    pipeline TEXT PRIMARY KEY, token INTEGER NOT NULL, body TEXT NOT NULL
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS sparkonce_records (
    pipeline TEXT NOT NULL, query_id TEXT NOT NULL, batch_id INTEGER NOT NULL,
    state TEXT NOT NULL, body TEXT NOT NULL,
    PRIMARY KEY (pipeline, query_id, batch_id)
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS sparkonce_unfinished
    ON sparkonce_records (pipeline, batch_id) WHERE state <> 'complete';
"""


class SqliteLog(TransactionLog):
    """A transaction log in one file on a local disk.

    Args:
        path: the file; its folder must exist. It is created with mode 0600.
        busy_timeout_s: how long a write waits for another process's write, in seconds.

    Raises:
        ConfigurationError: the folder is missing or not writable, or the file is something else.
    """

    def __init__(self, path: str | Path, *, busy_timeout_s: float = 30.0) -> None:
        self._path = Path(path).expanduser().resolve()
        self._busy_timeout_s = busy_timeout_s
        self._lock = threading.RLock()
        self._open: sqlite3.Connection | None = None
        if not self._path.parent.is_dir():
            raise ConfigurationError(
                f"log= names {self._path}, but the folder {self._path.parent} does not exist: "
                "create it"
            )
        with self._write() as connection:
            connection.execute(
                "INSERT OR IGNORE INTO sparkonce_meta VALUES ('log_id', ?)",
                (secrets.token_hex(8),),
            )
            row = connection.execute(
                "SELECT value FROM sparkonce_meta WHERE key = 'log_id'"
            ).fetchone()
            self._log_id = str(row[0])

    @property
    def log_id(self) -> str:
        return self._log_id

    @property
    def address(self) -> str:
        return f"sqlite:///{self._path}"

    def begin(self, claim: Claim) -> Incarnation:
        with self._write() as connection:
            newest = self._records(
                connection,
                "WHERE pipeline = ? AND query_id = ? ORDER BY batch_id DESC LIMIT 1",
                (claim.pipeline, claim.query_id),
            )
            near = self._records(
                connection,
                "WHERE pipeline = ? AND query_id = ? AND batch_id IN (?, ?)",
                (claim.pipeline, claim.query_id, claim.batch_id - 1, claim.batch_id),
            )
            known = Known(
                log_id=self._log_id,
                log=self.address,
                head=self._head(connection, claim.pipeline),
                newest=newest[0] if newest else None,
                records={record.id.batch_id: record for record in near},
                unfinished=self._unfinished(connection, claim.pipeline),
            )
            head = admit(claim, known, time.time())
            connection.execute(
                "INSERT INTO sparkonce_heads VALUES (?, ?, ?) ON CONFLICT (pipeline)"
                " DO UPDATE SET token = excluded.token, body = excluded.body",
                (head.pipeline, head.token, head.encode()),
            )
        return Incarnation(
            claim.pipeline,
            Owner(self._log_id, claim.query_id),
            head.token,
            tuple(Owner(self._log_id, query_id) for query_id in head.retired),
        )

    def head(self, pipeline: str) -> Head | None:
        with self._read() as connection:
            return self._head(connection, pipeline)

    def find(self, transaction_id: TransactionId) -> TransactionRecord | None:
        with self._read() as connection:
            return self._find(connection, transaction_id)

    def decide(self, record: TransactionRecord) -> TransactionRecord:
        with self._write() as connection:
            self._require_token(connection, record.id.pipeline, record.token)
            standing = self._find(connection, record.id)
            if standing is not None:
                return standing
            connection.execute(
                "INSERT INTO sparkonce_records VALUES (?, ?, ?, ?, ?)",
                (
                    record.id.pipeline,
                    record.id.query_id,
                    record.id.batch_id,
                    record.state.value,
                    record.encode(),
                ),
            )
        return record

    def complete(self, record: TransactionRecord, token: int) -> TransactionRecord:
        with self._write() as connection:
            self._require_token(connection, record.id.pipeline, token)
            standing = self._find(connection, record.id)
            if standing is None:
                raise ProtocolError(f"{record.id} cannot be complete: it was never decided")
            if standing.state is State.COMPLETE:
                return standing
            done = standing.completed(time.time())
            connection.execute(
                "UPDATE sparkonce_records SET state = ?, body = ?"
                " WHERE pipeline = ? AND query_id = ? AND batch_id = ?",
                (
                    done.state.value,
                    done.encode(),
                    done.id.pipeline,
                    done.id.query_id,
                    done.id.batch_id,
                ),
            )
        return done

    def unfinished(self, pipeline: str) -> Sequence[TransactionRecord]:
        with self._read() as connection:
            return self._unfinished(connection, pipeline)

    def history(self, pipeline: str, limit: int = 100) -> Sequence[TransactionRecord]:
        with self._read() as connection:
            return self._records(
                connection, "WHERE pipeline = ? ORDER BY batch_id DESC LIMIT ?", (pipeline, limit)
            )

    def forget(self, record: TransactionRecord, token: int, *, retain: int) -> None:
        with self._write() as connection:
            self._require_token(connection, record.id.pipeline, token)
            connection.execute(
                "DELETE FROM sparkonce_records WHERE pipeline = ? AND query_id = ?"
                " AND batch_id <= ? AND batch_id < ? AND state = 'complete'",
                (
                    record.id.pipeline,
                    record.id.query_id,
                    record.id.batch_id - retain,
                    record.id.batch_id,
                ),
            )

    def close(self) -> None:
        with self._lock:
            if self._open is not None:
                self._open.close()
                self._open = None

    def __repr__(self) -> str:
        return f"<SqliteLog {self._path}>"

    # -- one statement each, inside a transaction ------------------------------------------------

    def _head(self, connection: sqlite3.Connection, pipeline: str) -> Head | None:
        row = connection.execute(
            "SELECT token, body FROM sparkonce_heads WHERE pipeline = ?", (pipeline,)
        ).fetchone()
        if row is None:
            return None
        head = Head.decode(row[1], f"the head of pipeline {pipeline!r} in {self.address}")
        if head.token != row[0]:
            raise LogCorruptError(
                f"the head of pipeline {pipeline!r} in {self.address} holds token {row[0]} beside "
                f"{head.token}; restore the transaction log from a copy"
            )
        return head

    def _require_token(self, connection: sqlite3.Connection, pipeline: str, token: int) -> None:
        head = self._head(connection, pipeline)
        if head is None or head.token != token:
            newer = "the log does not know the pipeline" if head is None else _who(head)
            raise FencedError(
                f"this driver holds token {token} of pipeline {pipeline!r}, but {newer}. "
                "It writes nothing more; let the newer driver run, or stop it and start again."
            )

    def _find(self, connection: sqlite3.Connection, tid: TransactionId) -> TransactionRecord | None:
        found = self._records(
            connection,
            "WHERE pipeline = ? AND query_id = ? AND batch_id = ?",
            (tid.pipeline, tid.query_id, tid.batch_id),
        )
        return found[0] if found else None

    def _unfinished(
        self, connection: sqlite3.Connection, pipeline: str
    ) -> Sequence[TransactionRecord]:
        return self._records(
            connection, "WHERE pipeline = ? AND state <> 'complete' ORDER BY batch_id", (pipeline,)
        )

    def _records(
        self, connection: sqlite3.Connection, where: str, values: tuple[object, ...]
    ) -> list[TransactionRecord]:
        rows = connection.execute(
            "SELECT pipeline, query_id, batch_id, state, body FROM sparkonce_records " + where,
            values,
        ).fetchall()
        records = []
        for pipeline, query_id, batch_id, state, body in rows:
            tid = TransactionId(pipeline, query_id, batch_id)
            record = TransactionRecord.decode(body, f"the record of {tid} in {self.address}")
            if (record.id, record.state.value) != (tid, state):
                raise LogCorruptError(
                    f"the record of {tid} in {self.address} is that of {record.id}, "
                    f"{record.state.value}; restore the transaction log from a copy"
                )
            records.append(record)
        return records

    # -- connections and transactions ------------------------------------------------------------

    def _connect(self) -> sqlite3.Connection:
        if self._open is None:
            self._path.touch(mode=0o600, exist_ok=True)
            connection = sqlite3.connect(
                self._path,
                timeout=self._busy_timeout_s,
                isolation_level=None,  # transactions are begun and ended here, by name
                check_same_thread=False,  # guarded by self._lock
            )
            try:
                connection.execute("PRAGMA journal_mode = WAL")
                connection.execute("PRAGMA synchronous = FULL")
                connection.executescript(_SCHEMA)
            except BaseException:
                connection.close()
                raise
            self._open = connection
        return self._open

    @contextmanager
    def _read(self) -> Iterator[sqlite3.Connection]:
        with self._lock, self._named_errors():
            yield self._connect()

    @contextmanager
    def _write(self) -> Iterator[sqlite3.Connection]:
        with self._lock:
            with self._named_errors():
                connection = self._connect()
                connection.execute("BEGIN IMMEDIATE")
            try:
                with self._named_errors():
                    yield connection
            except BaseException:
                # COMMIT was not sent, so nothing is written. A connection that failed is closed
                # already, which rolls back as well.
                if self._open is connection:
                    connection.execute("ROLLBACK")
                raise
            try:
                connection.execute("COMMIT")
            except sqlite3.Error as error:
                self.close()
                raise DecisionUnknownError(
                    f"{self.address} failed while committing ({error}); read the log again"
                ) from error

    @contextmanager
    def _named_errors(self) -> Iterator[None]:
        try:
            yield
        except (sqlite3.OperationalError, OSError) as error:
            self.close()
            raise LogUnavailableError(
                f"{self.address} cannot be used now ({error}), nothing was written; check that the "
                "file is writable, the disk is not full, and no other process holds its lock"
            ) from error
        except sqlite3.DatabaseError as error:
            self.close()
            raise LogCorruptError(
                f"{self.address} is not a whole SQLite database ({error}); restore it from a copy"
            ) from error


def _who(head: Head) -> str:
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(head.started_at))
    return f"{head.driver} took token {head.token} at {when} UTC (run {head.run_id})"
