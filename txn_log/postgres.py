"""The transaction log in its own Postgres schema, which may be in a sink's database.

A write is one message, and so one transaction in one round trip: it changes the pipeline's head
row only if its version is still the one that was read, and the records only if it changed the head.
The log holds no lock between two round trips.

A sink in the same database may run that statement in its own transaction (`shared_write`).
"""

from __future__ import annotations

import logging
import re
import secrets
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Final
from urllib.parse import parse_qsl, quote, urlencode

import psycopg

from sparkonce.clients.postgres import (
    KEPT_ALIVE,
    Database,
    Statement,
    check_service,
    read_conninfo,
    said,
    shown_port,
)
from sparkonce.errors import ConfigurationError
from sparkonce.txn_log import rules
from sparkonce.txn_log.base import ResultT, Store, no_log
from sparkonce.txn_log.forks import closed_at_forks
from sparkonce.txn_log.optimistic import OptimisticLog
from sparkonce.txn_log.postgres_session import Connection, PostgresSession, run
from sparkonce.txn_log.postgres_statements import MIGRATIONS, NEXT_HEAD, PLACE, UNHIDDEN
from sparkonce.txn_log.postgres_view import PostgresView
from sparkonce.txn_log.record import TransactionRecord
from sparkonce.txn_log.shared import SharedTransactions, SharedWrite

logger = logging.getLogger("sparkonce")

_LABEL = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,62}")

_DEFAULTS: Final = {
    **KEPT_ALIVE,
    "application_name": "sparkonce log",
    "target_session_attrs": "primary",  # of several hosts
}


class PostgresLog(OptimisticLog, SharedTransactions):
    """A transaction log in a schema of a Postgres database.

    Args:
        url: ``postgresql://user@host:port/database?schema=sparkonce``; libpq reads everything but
            ``schema``. It also takes a password from ``~/.pgpass`` or ``PGPASSWORD``.
        create: make the log's tables when they do not exist.
        statement_timeout_s: how long one statement may take, including a wait for a lock, in
            seconds.

    Raises:
        ConfigurationError: the URL cannot be read, a right is missing, or the log does not exist
            and `create` is False.
        LogUnavailableError: the server cannot be reached now.
    """

    def __init__(self, url: str, *, create: bool = True, statement_timeout_s: float = 30.0) -> None:
        conninfo, schema = _split(url)
        known = read_conninfo(conninfo, "log=postgresql://… is no URL that libpq reads")
        check_service(known, "log=postgresql://…")
        settings = {key: value for key, value in _DEFAULTS.items() if key not in known}
        host, port = known.get("host", "localhost"), shown_port(known)
        self._schema = schema
        self._lock = threading.RLock()
        # Closures hold the password, so that no dump of this object shows it.
        self._session = PostgresSession(
            lambda: psycopg.connect(
                conninfo,
                autocommit=True,
                prepare_threshold=None,  # poolers lose prepared statements
                client_encoding="UTF8",
                **settings,  # type: ignore[arg-type]
            ),
            lambda error: said(error, known),
            address=f"postgresql://{host}:{port}/{known.get('dbname', '')}?schema={schema}",
            schema=schema,
            timeout_ms=round(statement_timeout_s * 1000),
        )
        closed_at_forks(self)
        try:
            self._log_id = self._prepare_schema(create=create)
        except BaseException:
            self.close()
            raise

    @property
    def log_id(self) -> str:
        return self._log_id

    @property
    def address(self) -> str:
        return self._session.address

    def close(self) -> None:
        with self._lock:
            self._session.close()

    # -- the schema --------------------------------------------------------------------------------

    def _prepare_schema(self, *, create: bool) -> str:
        """Migrate the schema to the newest version; return the log's id."""
        with self._lock, self._session.named_errors():
            connection = self._session.connect()
            found = self._meta(connection)
            if not found and not create:
                raise no_log(self.address)
            if found.get("version") != str(len(MIGRATIONS)):
                connection.execute("BEGIN")
                self._migrate(connection)
                connection.execute("COMMIT")
                found = self._meta(connection)
            for (value,) in connection.execute("SELECT current_setting('fsync')"):
                if value != "on":
                    logger.warning(
                        "%s: the server runs with fsync=%s: a power loss can lose decisions, and "
                        "then rows are lost or repeated",
                        self.address,
                        value,
                    )
            return found["log_id"]

    def _meta(self, connection: Connection) -> dict[str, str]:
        name = f'"{self._schema}".meta'
        if connection.execute("SELECT to_regclass(%s)", (name,)).fetchall() == [(None,)]:
            return {}
        rows = run(
            connection, self._session.statement(UNHIDDEN + "SELECT key, value FROM {schema}.meta")
        )
        found = {str(key): str(value) for key, value in rows}
        if not found:
            raise ConfigurationError(
                f"{self.address} has the log's tables without their rows, as after a dump of the "
                f"schema only: copy the rows too (pg_dump -n {self._schema}). If no pipeline has "
                f'used this log, DROP SCHEMA "{self._schema}" CASCADE'
            )
        if int(found.get("version", 0)) > len(MIGRATIONS):
            raise ConfigurationError(
                f"{self.address} has version {found['version']} of the log's tables, this "
                f"sparkonce knows up to {len(MIGRATIONS)}: use a newer one"
            )
        return found

    def _migrate(self, connection: Connection) -> None:
        # Several drivers may start at once. There is no table to lock yet, so they lock a name.
        connection.execute(
            "SELECT pg_advisory_xact_lock(hashtextextended('sparkonce.log.' || %s, 0))",
            (self._schema,),
        )
        exists = connection.execute("SELECT to_regnamespace(%s)", (f'"{self._schema}"',))
        if exists.fetchall() == [(None,)]:
            connection.execute(self._session.statement("CREATE SCHEMA {schema}"))
        done = int(self._meta(connection).get("version", 0))
        connection.execute(
            self._session.statement(
                "CREATE TABLE IF NOT EXISTS {schema}.meta (key text PRIMARY KEY, value text)"
            )
        )
        for migration in MIGRATIONS[done:]:
            connection.execute(self._session.statement(migration))
        connection.execute(
            self._session.statement(
                "INSERT INTO {schema}.meta VALUES ('version', %s), ('log_id', %s)"
                " ON CONFLICT (key) DO UPDATE SET value = CASE meta.key"
                " WHEN 'version' THEN excluded.value ELSE meta.value END"
            ),
            (str(len(MIGRATIONS)), secrets.token_hex(8)),
        )

    def _view(self) -> PostgresView:
        return PostgresView(self._session)

    def _read(self, question: Callable[[Store], ResultT]) -> ResultT:
        with self._lock, self._session.named_errors():
            self._session.ask(
                "BEGIN ISOLATION LEVEL REPEATABLE READ, READ ONLY;"
                # Decoding a long history takes time, and this transaction blocks nobody.
                " SET LOCAL idle_in_transaction_session_timeout = 0"
            )
            try:
                return question(PostgresView(self._session))
            finally:
                if (connection := self._session.opened) is not None:
                    connection.execute("ROLLBACK")

    def _write(self, step: Callable[[Store], ResultT]) -> ResultT:
        with self._lock, self._session.named_errors():
            return super()._write(step)

    def why_apart(self, database: object) -> str | None:
        if not isinstance(database, Database):
            return "the transaction log is in Postgres, and the sink is not"
        with self._lock:
            try:
                place = self._session.ask(PLACE)
                write = self._session.as_sql(NEXT_HEAD, defaultdict(lambda: None))
            except psycopg.Error as error:
                self.close()
                return f"{self.address}: {self._session.said(error)}"
        if database.ask(PLACE) != place:
            return "the transaction log is in another database"
        database.ask(f"EXPLAIN {write}")  # checks all rights that the write needs
        return None

    def shared_write(self, record: TransactionRecord) -> SharedWrite:
        with self._lock, self._session.named_errors():
            view = PostgresView(self._session)
            done = rules.one_phase(view, record, time.time())
            return SharedWrite(done, Statement(view.as_sql()))


def _split(url: str) -> tuple[str, str]:
    """The URL for libpq, and the schema."""
    server, _, parameters = url.partition("?")
    if "@" in parameters:  # they may hold a password: show nothing of them
        raise ConfigurationError(
            "log=postgresql://… has an @ after a ?: write a ? in a password as %3F, and such "
            "an @ as %40"
        )
    # libpq reads + as a plus sign (in a password, for example), not as a space.
    query = dict(parse_qsl(parameters.replace("+", "%2B"), keep_blank_values=True))
    schema = query.pop("schema", "sparkonce")
    if _LABEL.fullmatch(schema) is None:
        raise ConfigurationError(
            f"log=postgresql://…?schema={schema}: a schema's name has 1 to 63 letters, digits "
            "and _, and does not begin with a digit"
        )
    return f"{server}?{urlencode(query, quote_via=quote)}", schema
