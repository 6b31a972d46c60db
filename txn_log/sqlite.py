"""The embedded transaction log: one SQLite file.

The database uses a write-ahead log with ``synchronous=FULL``: a commit is on disk when it returns.
Every write is one ``BEGIN IMMEDIATE`` transaction that checks the token and writes, so SQLite's own
lock orders the writes of all processes.
"""

from __future__ import annotations

import secrets
import sqlite3
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from sparkonce.errors import (
    ConfigurationError,
    DecisionUnknownError,
    LogCorruptError,
    LogUnavailableError,
)
from sparkonce.failpoints import reach
from sparkonce.finding import Finding, Level
from sparkonce.model import TransactionId
from sparkonce.storage import expanded
from sparkonce.txn_log.base import ResultT, Store, TransactionLog, no_log
from sparkonce.txn_log.forks import closed_at_forks
from sparkonce.txn_log.mounts import MOUNTS, network_file_system
from sparkonce.txn_log.record import Head, TransactionRecord

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
    ON sparkonce_records (pipeline, batch_id) WHERE state IN ('prepared', 'decided');
"""

_VERSION = 1
"""Version of the tables. A later version would record itself in sparkonce_meta."""


class SqliteLog(TransactionLog):
    """A transaction log in one file on a local disk.

    Args:
        path: the file; its folder must exist. It is created with mode 0600.
        create: make the log when it does not exist; False leaves the file unchanged.
        busy_timeout_s: how long a write waits for another process's write, in seconds.
        mounts: the system's list of mounted file systems.

    Raises:
        ConfigurationError: the folder does not exist, the file is on a network file system, its
            tables have a newer version, or the log does not exist and `create` is False.
        LogUnavailableError: the file cannot be opened or written now.
        LogCorruptError: the file is not a SQLite database.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        create: bool = True,
        busy_timeout_s: float = 30.0,
        mounts: Path = MOUNTS,
    ) -> None:
        self._path = expanded(path).resolve()
        self._may_create = create
        self._busy_timeout_s = busy_timeout_s
        self._lock = threading.RLock()
        self._open: sqlite3.Connection | None = None
        self._opened: tuple[int, int] | None = None  # see `_inode`
        self._log_id = ""
        closed_at_forks(self)
        if not create and not self._path.is_file():
            raise no_log(self.address)
        if not self._path.parent.is_dir():
            raise ConfigurationError(
                f"log= names {self._path}, but the folder {self._path.parent} does not exist: "
                "create it"
            )
        if kind := network_file_system(self._path, mounts):
            raise ConfigurationError(
                f"log= names {self._path}, which is on a network file system ({kind}): SQLite's "
                "locks do not hold there, so two drivers could both decide. Use a local disk, or "
                "log=postgresql://… or s3://…, which also survive the driver's machine"
            )
        if create:
            with self._transaction() as connection:
                connection.execute(
                    "INSERT OR IGNORE INTO sparkonce_meta VALUES ('log_id', ?)",
                    (secrets.token_hex(8),),
                )
        self._log_id = self._find_id()
        self._may_create = False

    @property
    def log_id(self) -> str:
        return self._log_id

    @property
    def address(self) -> str:
        return f"sqlite:///{self._path}"

    def close(self) -> None:
        with self._lock:
            if self._open is not None:
                self._open.close()
                self._open = None

    def diagnose(self) -> Iterable[Finding]:
        yield Finding(
            Level.WARNING,
            f"{self.address} is on this machine's disk: a driver on another machine does not find "
            "it, and it is lost with the disk",
            "keep it on a disk that moves with the driver, and copy it with sqlite3's .backup (cp "
            "misses what is in the -wal file; remove -wal and -shm before you restore a copy)",
        )

    def _find_id(self) -> str:
        with self._lock, self._named_errors():
            connection = self._connect()
            # The database may be another program's.
            row = connection.execute(
                "SELECT 1 FROM sqlite_master WHERE name = 'sparkonce_meta'"
            ).fetchone()
            found = dict(
                () if row is None else connection.execute("SELECT key, value FROM sparkonce_meta")
            )
        if "log_id" not in found:
            self.close()
            raise no_log(self.address)
        if int(version := found.get("version", _VERSION)) > _VERSION:
            self.close()
            raise ConfigurationError(
                f"{self.address} has version {version} of the log's tables, but this sparkonce "
                f"knows only version {_VERSION}: use a newer one"
            )
        return str(found["log_id"])

    # -- connections and transactions ------------------------------------------------------------

    def _connect(self) -> sqlite3.Connection:
        if self._open is not None and self._inode() != self._opened:
            self.close()  # what is written into a file that was replaced or deleted is lost
        if self._open is None:
            if self._may_create:
                self._path.touch(mode=0o600, exist_ok=True)
            self._opened = self._inode()
            connection = sqlite3.connect(
                f"{self._path.as_uri()}?mode=rw",
                uri=True,
                timeout=self._busy_timeout_s,
                isolation_level=None,  # `_transaction` sends BEGIN and COMMIT itself
                check_same_thread=False,  # guarded by self._lock
            )
            try:
                connection.execute("PRAGMA synchronous = FULL")
                if self._may_create:
                    connection.execute("PRAGMA journal_mode = WAL")
                    connection.executescript(_SCHEMA)
                if self._log_id:
                    self._check_is_the_same(connection)
            except BaseException:
                connection.close()
                raise
            self._open = connection
        return self._open

    def _inode(self) -> tuple[int, int] | None:
        """Device and inode of the file that has the log's name now; None if there is none."""
        try:
            found = self._path.stat()
        except FileNotFoundError:
            return None
        return found.st_dev, found.st_ino

    def _check_is_the_same(self, connection: sqlite3.Connection) -> None:
        """Refuse a log that was created at the mount point while the log's disk was not mounted."""
        found = connection.execute("SELECT value FROM sparkonce_meta WHERE key = 'log_id'")
        if found.fetchone() != (self._log_id,):
            raise LogUnavailableError(
                f"{self.address} is no longer the log with id {self._log_id}, but another one; "
                "nothing was written. Check that its disk is mounted. If the log is lost, stop the "
                "query and restore it from a copy that has the newest batch "
                "(docs/reference/errors/log.md, Restore a log)"
            )

    def _read(self, question: Callable[[Store], ResultT]) -> ResultT:
        with self._lock, self._named_errors():
            return question(_SqliteStore(self._connect(), self.address))

    def _write(self, step: Callable[[Store], ResultT]) -> ResultT:
        with self._transaction() as connection:
            return step(_SqliteStore(connection, self.address))

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with self._lock:
            reach("log.before", request="begin")
            try:
                with self._named_errors():
                    connection = self._connect()
                    connection.execute("BEGIN IMMEDIATE")
                    yield connection
                reach("log.before", request="commit")
                try:
                    connection.execute("COMMIT")
                except sqlite3.Error as error:
                    self.close()
                    raise DecisionUnknownError(
                        f"{self.address} failed while committing ({error}); read the log again"
                    ) from error
            except BaseException:
                # A connection that failed was closed, which rolls back too. One that was
                # interrupted (Ctrl-C) may hold the lock, or have committed.
                if self._open is not None and self._open.in_transaction:
                    self._open.execute("ROLLBACK")
                raise
            reach("log.after", request="commit")

    @contextmanager
    def _named_errors(self) -> Iterator[None]:
        try:
            yield
        except (sqlite3.OperationalError, OSError) as error:
            self.close()
            raise LogUnavailableError(
                f"{self.address} cannot be used now ({error}), nothing was written; check that the "
                "file is there (is its disk mounted?) and writable, the disk is not full, and no "
                "other process holds its lock"
            ) from error
        except sqlite3.DatabaseError as error:
            self.close()
            raise LogCorruptError(
                f"{self.address} is not an intact SQLite database ({error}); restore it from a copy"
            ) from error


class _SqliteStore:
    """The database inside one transaction; see `sparkonce.txn_log.base.Store`."""

    def __init__(self, connection: sqlite3.Connection, address: str) -> None:
        self._connection = connection
        self._address = address

    def pipelines(self) -> Sequence[str]:
        rows = self._connection.execute("SELECT pipeline FROM sparkonce_heads ORDER BY pipeline")
        return [str(pipeline) for (pipeline,) in rows]

    def head(self, pipeline: str) -> Head | None:
        row = self._connection.execute(
            "SELECT token, body FROM sparkonce_heads WHERE pipeline = ?", (pipeline,)
        ).fetchone()
        if row is None:
            return None
        token, body = row
        return Head.of_row(pipeline, token, body, self._address)

    def find(self, transaction_id: TransactionId) -> TransactionRecord | None:
        found = self._records(
            "WHERE pipeline = ? AND query_id = ? AND batch_id = ?", *_key(transaction_id)
        )
        return found[0] if found else None

    def newest(self, pipeline: str, query_id: str) -> TransactionRecord | None:
        found = self._records(
            "WHERE pipeline = ? AND query_id = ? ORDER BY batch_id DESC LIMIT 1", pipeline, query_id
        )
        return found[0] if found else None

    def unfinished(self, pipeline: str) -> Sequence[TransactionRecord]:
        return self._records(
            "WHERE pipeline = ? AND state IN ('prepared', 'decided') ORDER BY batch_id", pipeline
        )

    def history(
        self, pipeline: str, limit: int, query_id: str | None = None, before: int | None = None
    ) -> Sequence[TransactionRecord]:
        asked = {"query_id = ?": query_id, "batch_id < ?": before}
        given = {text: value for text, value in asked.items() if value is not None}
        where = " AND ".join(("WHERE pipeline = ?", *given))
        return self._records(
            f"{where} ORDER BY batch_id DESC LIMIT ?", pipeline, *given.values(), limit
        )

    def put_head(self, head: Head) -> None:
        self._connection.execute(
            "INSERT OR REPLACE INTO sparkonce_heads VALUES (?, ?, ?)",
            (head.pipeline, head.token, head.encode()),
        )

    def put(self, record: TransactionRecord) -> None:
        self._connection.execute(
            "INSERT OR REPLACE INTO sparkonce_records VALUES (?, ?, ?, ?, ?)",
            (*_key(record.id), record.state.value, record.encode()),
        )

    def forget(self, pipeline: str, query_id: str, below: int) -> None:
        self._connection.execute(
            "DELETE FROM sparkonce_records"
            " WHERE pipeline = ? AND query_id = ? AND batch_id < ? AND state = 'complete'",
            (pipeline, query_id, below),
        )

    def _records(self, where: str, *values: object) -> list[TransactionRecord]:
        rows = self._connection.execute(
            "SELECT pipeline, query_id, batch_id, state, body FROM sparkonce_records " + where,
            values,
        ).fetchall()
        return [
            TransactionRecord.of_row(TransactionId(*key), state, body, self._address)
            for *key, state, body in rows
        ]


def _key(transaction_id: TransactionId) -> tuple[str, str, int]:
    return transaction_id.pipeline, transaction_id.query_id, transaction_id.batch_id
