"""The transaction log in a Postgres schema of its own; it may be a sink's database.

A write is one message, and so one transaction in one round trip: it changes the pipeline's head
row only if its version is still the one that was read, and the records only if it changed the head.
No lock is held between two round trips.

A sink in the same database may run that statement in its own transaction (`shared_write`).
"""

from __future__ import annotations

import logging
import re
import secrets
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final, TypeAlias
from urllib.parse import parse_qsl, quote, urlencode

import psycopg
from psycopg import sql

from sparkonce.clients.postgres import (
    KEPT_ALIVE,
    Database,
    Statement,
    check_service,
    read_conninfo,
    said,
    shown_port,
)
from sparkonce.errors import (
    ConfigurationError,
    DecisionUnknownError,
    LogCorruptError,
    LogUnavailableError,
)
from sparkonce.failpoints import reach
from sparkonce.model import TransactionId
from sparkonce.txn_log.base import ResultT, Store, no_log
from sparkonce.txn_log.forks import closed_at_forks
from sparkonce.txn_log.optimistic import OptimisticLog
from sparkonce.txn_log.record import Head, TransactionRecord
from sparkonce.txn_log.shared import SharedTransactions, SharedWrite

logger = logging.getLogger("sparkonce")

_Connection: TypeAlias = "psycopg.Connection[tuple[Any, ...]]"

_LABEL = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,62}")

_DEFAULTS: Final = {
    **KEPT_ALIVE,
    "application_name": "sparkonce log",
    "target_session_attrs": "primary",  # of several hosts
}

_MIGRATIONS: Final = (
    """
    CREATE TABLE {schema}.heads (
        pipeline text PRIMARY KEY, version bigint NOT NULL, token bigint NOT NULL,
        body text NOT NULL
    );
    CREATE TABLE {schema}.records (
        pipeline text NOT NULL, query_id text NOT NULL, batch_id bigint NOT NULL,
        state text NOT NULL, body text NOT NULL,
        PRIMARY KEY (pipeline, query_id, batch_id)
    );
    CREATE INDEX records_unfinished ON {schema}.records (pipeline, batch_id)
        WHERE state IN ('prepared', 'decided');
    CREATE INDEX records_newest ON {schema}.records (pipeline, batch_id DESC);
    """,
)
"""Number n, from 1, takes the schema from version n-1 to n. Never changed, only added to."""

_SWAP = """
WITH head AS ({head}),
put AS (
    INSERT INTO {schema}.records
    SELECT new.* FROM head, unnest(
        %(pipelines)s::text[], %(queries)s::text[], %(batches)s::bigint[], %(states)s::text[],
        %(bodies)s::text[]
    ) AS new
    ON CONFLICT (pipeline, query_id, batch_id)
    DO UPDATE SET state = excluded.state, body = excluded.body
),
gone AS (
    DELETE FROM {schema}.records AS old
    USING head, unnest(%(old_queries)s::text[], %(below)s::bigint[]) AS asked (query_id, below)
    WHERE old.pipeline = %(pipeline)s AND old.query_id = asked.query_id
        AND old.batch_id < asked.below AND old.state = 'complete'
)
SELECT {found}, set_config('synchronous_commit',
    CASE current_setting('synchronous_commit') WHEN 'remote_apply' THEN 'remote_apply'
    ELSE 'on' END, true)
"""
"""The setting holds for this transaction: a decision is on the disk before it is answered."""

_UNHIDDEN = "SELECT set_config('row_security', 'off', true);"
"""Before a statement, in its message and so in its transaction, also behind a pooler: row security
then ends it, instead of leaving records out."""

_HIDDEN = "check_enable_rls"
"""The function of the server that says so; its words differ with the server's language."""

_COUNTED = "(SELECT count(*) FROM head)"
_REQUIRED = """
    CASE (SELECT count(*) FROM head)
    WHEN 0 THEN concat('another driver has written the log')::int END
"""
"""Ends the transaction where the head was not changed. (`concat`, since a constant would be cast
when the statement is planned.)"""

_PLACE = """
    SELECT system_identifier, oid, extract(epoch FROM pg_postmaster_start_time())::numeric
    FROM pg_catalog.pg_control_system(), pg_catalog.pg_database WHERE datname = current_database()
"""
"""One database of one running server: a copy of it has the same identifiers, and not the start."""

_FIRST_HEAD = """
    INSERT INTO {schema}.heads VALUES (%(pipeline)s, 1, %(token)s, %(body)s)
    ON CONFLICT DO NOTHING RETURNING 1
"""
_NEXT_HEAD = """
    UPDATE {schema}.heads SET version = version + 1, token = %(token)s, body = %(body)s
    WHERE pipeline = %(pipeline)s AND version = %(version)s RETURNING 1
"""
_SAME_HEAD = """
    UPDATE {schema}.heads SET version = version
    WHERE pipeline = %(pipeline)s AND version = %(version)s RETURNING 1
"""
"""Standbys confirm it after all that was seen, which may have been committed without them."""


class PostgresLog(OptimisticLog, SharedTransactions):
    """A transaction log in a schema of a Postgres database.

    Args:
        url: ``postgresql://user@host:port/database?schema=sparkonce``; everything but ``schema``
            is for libpq, which takes a password from ``~/.pgpass`` or ``PGPASSWORD`` too.
        create: make the log's tables when they are not there.
        statement_timeout_s: how long one statement may take, a wait for a lock among it, in
            seconds.

    Raises:
        ConfigurationError: the URL cannot be read, a right is missing, or there is no log and none
            may be made.
        LogUnavailableError: the server does not answer.
    """

    def __init__(self, url: str, *, create: bool = True, statement_timeout_s: float = 30.0) -> None:
        server, _, parameters = url.partition("?")
        if "@" in parameters:  # nothing of it is shown
            raise ConfigurationError(
                "log=postgresql://… has an @ behind a ?: write a ? in a password as %3F, and such "
                "an @ as %40"
            )
        # To libpq a + is one, as in a password, and no blank.
        query = dict(parse_qsl(parameters.replace("+", "%2B"), keep_blank_values=True))
        schema = query.pop("schema", "sparkonce")
        if _LABEL.fullmatch(schema) is None:
            raise ConfigurationError(
                f"log=postgresql://…?schema={schema}: a schema's name has 1 to 63 letters, digits "
                "and _, and does not begin with a digit"
            )
        conninfo = f"{server}?{urlencode(query, quote_via=quote)}"
        known = read_conninfo(conninfo, "log=postgresql://… is no URL that libpq reads")
        check_service(known, "log=postgresql://…")
        settings = {key: value for key, value in _DEFAULTS.items() if key not in known}
        # In closures, so that no dump of the object shows the password.
        self._new_connection: Callable[[], _Connection] = lambda: psycopg.connect(
            conninfo,
            autocommit=True,
            prepare_threshold=None,  # poolers forget prepared statements
            client_encoding="UTF8",
            **settings,  # type: ignore[arg-type]
        )
        self._said: Callable[[psycopg.Error], str] = lambda error: said(error, known)
        self._timeout_ms = round(statement_timeout_s * 1000)
        self._schema = schema
        self._open: _Connection | None = None
        self._lock = threading.RLock()
        closed_at_forks(self)
        host, port = known.get("host", "localhost"), shown_port(known)
        self._address = f"postgresql://{host}:{port}/{known.get('dbname', '')}?schema={schema}"
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
        return self._address

    def close(self) -> None:
        with self._lock:
            if self._open is not None:
                self._open.close()
                self._open = None

    def __repr__(self) -> str:
        return f"<PostgresLog {self._address}>"

    # -- the schema --------------------------------------------------------------------------------

    def _prepare_schema(self, *, create: bool) -> str:
        """Bring the schema to the newest version; returns the log's id."""
        with self._lock, self._named_errors():
            connection = self._connect()
            found = self._meta(connection)
            if not found and not create:
                raise no_log(self.address)
            if found.get("version") != str(len(_MIGRATIONS)):
                connection.execute("BEGIN")
                self._migrate(connection)
                connection.execute("COMMIT")
                found = self._meta(connection)
            for (value,) in connection.execute("SELECT current_setting('fsync')"):
                if value != "on":
                    logger.warning(
                        "%s: the server runs with fsync=%s: a power loss can lose decisions, and "
                        "so lose or repeat rows",
                        self.address,
                        value,
                    )
            return found["log_id"]

    def _meta(self, connection: _Connection) -> dict[str, str]:
        name = f'"{self._schema}".meta'
        if connection.execute("SELECT to_regclass(%s)", (name,)).fetchall() == [(None,)]:
            return {}
        rows = _run(connection, self._sql(_UNHIDDEN + "SELECT key, value FROM {schema}.meta"))
        found = {str(key): str(value) for key, value in rows}
        if int(found.get("version", 0)) > len(_MIGRATIONS):
            raise ConfigurationError(
                f"{self.address} has version {found['version']} of the log's tables, this "
                f"sparkonce knows up to {len(_MIGRATIONS)}: use a newer one"
            )
        return found

    def _migrate(self, connection: _Connection) -> None:
        # Several drivers may start at once; a lock by name, since there is no table yet.
        connection.execute(
            "SELECT pg_advisory_xact_lock(hashtextextended('sparkonce.log.' || %s, 0))",
            (self._schema,),
        )
        exists = connection.execute("SELECT to_regnamespace(%s)", (f'"{self._schema}"',))
        if exists.fetchall() == [(None,)]:
            connection.execute(self._sql("CREATE SCHEMA {schema}"))
        connection.execute(
            self._sql("CREATE TABLE IF NOT EXISTS {schema}.meta (key text PRIMARY KEY, value text)")
        )
        done = int(self._meta(connection).get("version", 0))
        for migration in _MIGRATIONS[done:]:
            connection.execute(self._sql(migration))
        connection.execute(
            self._sql(
                "INSERT INTO {schema}.meta VALUES ('version', %s), ('log_id', %s)"
                " ON CONFLICT (key) DO UPDATE SET value = CASE meta.key"
                " WHEN 'version' THEN excluded.value ELSE meta.value END"
            ),
            (str(len(_MIGRATIONS)), secrets.token_hex(8)),
        )

    # -- connections and statements ----------------------------------------------------------------

    def _sql(self, text: str, **parts: sql.Composable) -> sql.Composed:
        return sql.SQL(text).format(schema=sql.Identifier(self._schema), **parts)

    def _connect(self) -> _Connection:
        if self._open is None or self._open.closed:
            connection = self._new_connection()
            try:
                asked = connection.execute(
                    "SELECT pg_is_in_recovery(),"
                    " set_config('client_min_messages', 'warning', false),"
                    " set_config('statement_timeout', %(ms)s, false),"
                    " set_config('idle_in_transaction_session_timeout', %(ms)s, false)",
                    {"ms": str(self._timeout_ms)},
                ).fetchall()
            except BaseException:
                connection.close()
                raise
            if asked[0][0]:  # it may not have what is decided, not even where commits wait for it
                connection.close()
                raise LogUnavailableError(
                    f"{self.address} leads to a standby now; let the URL lead to the primary"
                )
            self._open = connection
        return self._open

    def _view(self) -> _PostgresView:
        return _PostgresView(self)

    def _read(self, question: Callable[[Store], ResultT]) -> ResultT:
        with self._lock, self._named_errors():
            self._ask(
                "BEGIN ISOLATION LEVEL REPEATABLE READ, READ ONLY;"
                # It keeps nobody waiting while a long history is decoded.
                " SET LOCAL idle_in_transaction_session_timeout = 0"
            )
            try:
                return question(_PostgresView(self))
            finally:
                if self._open is not None and not self._open.closed:
                    self._open.execute("ROLLBACK")

    def _write(self, step: Callable[[Store], ResultT]) -> ResultT:
        with self._lock, self._named_errors():
            return super()._write(step)

    def _ask(self, text: str, *values: object) -> list[tuple[Any, ...]]:
        """Ask once more on a new connection if the kept one has died since its last use."""
        statement = self._sql(text)
        reach("log.before", request=text.split(maxsplit=1)[0].lower())
        had_one = self._open is not None and not self._open.closed
        try:
            return _run(self._connect(), statement, values)
        except psycopg.OperationalError:
            if not had_one or self._open is None or not self._open.closed:
                raise
            return _run(self._connect(), statement, values)

    def why_apart(self, database: object) -> str | None:
        if not isinstance(database, Database):
            return "the transaction log is in Postgres, and the sink is not"
        with self._lock:
            try:
                place = self._ask(_PLACE)
                write = self._as_sql(_NEXT_HEAD, defaultdict(lambda: None))
            except psycopg.Error as error:
                self.close()
                return f"{self.address}: {self._said(error)}"
        if database.ask(_PLACE) != place:
            return "the transaction log is in another database"
        database.ask(f"EXPLAIN {write}")  # which checks all rights that the write needs
        return None

    def shared_write(self, record: TransactionRecord) -> SharedWrite:
        with self._lock, self._named_errors():
            view = _PostgresView(self)
            done = self._one_phase(view, record)
            return SharedWrite(done, Statement(view.as_sql()))

    def _as_sql(self, head: str, values: Mapping[str, object]) -> str:
        """The swap as text, which fails where `_swap` would give False."""
        statement = self._sql(_SWAP, head=self._sql(head), found=sql.SQL(_REQUIRED))
        return psycopg.ClientCursor(self._connect()).mogrify(statement, values)

    def _swap(self, head: str, values: Mapping[str, object]) -> bool:
        """Whether the head had the version that was seen, and everything is written."""
        statement = self._sql(_UNHIDDEN + _SWAP, head=self._sql(head), found=sql.SQL(_COUNTED))
        reach("log.before", request="swap")
        connection = self._connect()
        warnings: list[psycopg.errors.Diagnostic] = []
        connection.add_notice_handler(warnings.append)
        try:
            ((count, _),) = _run(connection, statement, values)
        except (psycopg.errors.SerializationFailure, psycopg.errors.DeadlockDetected):
            return False  # the server undid it, since others wrote at the same time
        except psycopg.Error as error:
            # FATAL may come after the commit too, as when a wait for a standby is ended.
            if not connection.closed and error.diag.severity_nonlocalized == "ERROR":
                raise  # the statement failed, and is undone
            self.close()
            raise DecisionUnknownError(
                f"{self.address} was cut off while it committed ({self._said(error)}); read the "
                "log again"
            ) from None
        finally:
            connection.remove_notice_handler(warnings.append)
        if warnings:  # a wait for a standby that is cancelled is no error
            raise DecisionUnknownError(
                f"{self.address} has committed, and it is not known whether its standbys have "
                f"({warnings[0].message_primary}); read the log again"
            )
        reach("log.after", request="swap")
        return bool(count)

    @contextmanager
    def _named_errors(self) -> Iterator[None]:
        try:
            yield
        except psycopg.errors.InsufficientPrivilege as error:
            if error.diag.source_function == _HIDDEN:
                raise LogUnavailableError(
                    f"{self.address}: {self._said(error)}, nothing was written; row security may "
                    "hide records from this role: ALTER TABLE … DISABLE ROW LEVEL SECURITY, or "
                    "ALTER ROLE … BYPASSRLS"
                ) from None
            raise ConfigurationError(
                f"{self.address}: {self._said(error)}. The log needs a schema in which this role "
                f'may create tables: CREATE SCHEMA "{self._schema}" AUTHORIZATION …'
            ) from None
        except psycopg.Error as error:
            self.close()
            raise LogUnavailableError(
                f"{self.address} cannot be used now ({self._said(error)}), nothing was written; "
                "check that the server runs, takes connections and is no standby"
            ) from None


class _PostgresView:
    """The rows of one pipeline; see `sparkonce.txn_log.optimistic.View`."""

    def __init__(self, log: PostgresLog) -> None:
        self._log = log
        self._pipeline: str | None = None
        self._version: int | None = None
        self._head: Head | None = None
        self._new_head: Head | None = None
        self._puts: list[TransactionRecord] = []
        self._forgets: list[tuple[str, int]] = []

    # -- reading -----------------------------------------------------------------------------------

    def pipelines(self) -> Sequence[str]:
        rows = self._log._ask(  # noqa: SLF001 - one module
            _UNHIDDEN + "SELECT pipeline FROM {schema}.heads ORDER BY pipeline"
        )
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
        self, pipeline: str, limit: int, query_id: str | None = None
    ) -> Sequence[TransactionRecord]:
        of_query, values = ("", ()) if query_id is None else ("AND query_id = %s", (query_id,))
        return self._records(
            pipeline, f"{of_query} ORDER BY batch_id DESC LIMIT %s", *values, limit
        )

    def _load(self, pipeline: str) -> None:
        if self._pipeline is None:
            self._pipeline = pipeline
            self._version, self._head = self._seen(pipeline)

    def _seen(self, pipeline: str) -> tuple[int | None, Head | None]:
        rows = self._log._ask(  # noqa: SLF001 - one module
            _UNHIDDEN + "SELECT version, token, body FROM {schema}.heads WHERE pipeline = %s",
            pipeline,
        )
        for version, token, body in rows:
            return version, Head.of_row(pipeline, token, body, self._log.address)
        return None, None

    def _records(self, pipeline: str, where: str, *values: object) -> list[TransactionRecord]:
        self._load(pipeline)
        rows = self._log._ask(  # noqa: SLF001
            _UNHIDDEN
            + "SELECT query_id, batch_id, state, body FROM {schema}.records WHERE pipeline = %s "
            + where,
            pipeline,
            *values,
        )
        return [
            TransactionRecord.of_row(
                TransactionId(pipeline, query_id, batch_id), state, body, self._log.address
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
        return self._log._swap(_SAME_HEAD, self._changes()[1])  # noqa: SLF001 - one module

    def swap(self) -> bool:
        return self._log._swap(*self._changes())  # noqa: SLF001

    def as_sql(self) -> str:
        return self._log._as_sql(*self._changes())  # noqa: SLF001

    def _changes(self) -> tuple[str, Mapping[str, object]]:
        """The statement for the head, and the values of the whole write."""
        head = self._new_head or self._head
        if head is None:
            raise LogCorruptError(
                f"{self._log.address} has records of pipeline {self._pipeline!r} and no head; "
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
        return _FIRST_HEAD if self._version is None else _NEXT_HEAD, values


def _run(
    connection: _Connection,
    statements: sql.Composed,
    values: Sequence[object] | Mapping[str, object] = (),
) -> list[tuple[Any, ...]]:
    """The rows of the last of several statements, which are one message, and so one transaction."""
    cursor = psycopg.ClientCursor(connection)  # the server binds values to single statements only
    cursor.execute(statements, values or None)
    while cursor.nextset():
        pass
    return cursor.fetchall() if cursor.description else []
