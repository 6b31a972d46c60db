"""One connection to a Postgres server that has a log: statements, and what their errors mean.

refused, timeout, "starting up", a standby        nothing was written    LogUnavailableError
a right is missing                                nothing was written    ConfigurationError
the connection broke during the write             it may be written      DecisionUnknownError
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

import psycopg
from psycopg import sql

from sparkonce.errors import ConfigurationError, DecisionUnknownError, LogUnavailableError
from sparkonce.failpoints import reach
from sparkonce.txn_log.postgres_statements import COUNTED, HIDDEN, REQUIRED, SWAP, UNHIDDEN

Connection: TypeAlias = "psycopg.Connection[tuple[Any, ...]]"


class PostgresSession:
    """The log's connection, made again when it has broken. One thread at a time uses it.

    Args:
        connect: opens a connection.
        said: one line about an error, without secrets.
        address: of the log, for messages.
        schema: that has the log's tables.
        timeout_ms: how long one statement may take, and a transaction may be idle.
    """

    def __init__(
        self,
        connect: Callable[[], Connection],
        said: Callable[[psycopg.Error], str],
        *,
        address: str,
        schema: str,
        timeout_ms: int,
    ) -> None:
        self._new_connection = connect
        self.said = said
        self.address = address
        self._schema = schema
        self._timeout_ms = timeout_ms
        self._open: Connection | None = None

    def close(self) -> None:
        if self._open is not None:
            self._open.close()
            self._open = None

    @property
    def opened(self) -> Connection | None:
        """The connection, if there is one that works."""
        return None if self._open is None or self._open.closed else self._open

    def statement(self, text: str, **parts: sql.Composable) -> sql.Composed:
        """The statement for the log's schema."""
        return sql.SQL(text).format(schema=sql.Identifier(self._schema), **parts)

    def connect(self) -> Connection:
        """The connection, which is opened if there is none."""
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

    def ask(self, text: str, *values: object) -> list[tuple[Any, ...]]:
        """The rows; a kept connection that has died since its last use is replaced once."""
        statement = self.statement(text)
        reach("log.before", request=text.split(maxsplit=1)[0].lower())
        had_one = self._open is not None and not self._open.closed
        try:
            return run(self.connect(), statement, values)
        except psycopg.OperationalError:
            if not had_one or self._open is None or not self._open.closed:
                raise
            return run(self.connect(), statement, values)

    def as_sql(self, head: str, values: Mapping[str, object]) -> str:
        """The swap as text, which fails where `swap` would give False."""
        statement = self.statement(SWAP, head=self.statement(head), found=sql.SQL(REQUIRED))
        return psycopg.ClientCursor(self.connect()).mogrify(statement, values)

    def swap(self, head: str, values: Mapping[str, object]) -> bool:
        """Whether the head had the version that was seen, and everything is written."""
        statement = self.statement(
            UNHIDDEN + SWAP, head=self.statement(head), found=sql.SQL(COUNTED)
        )
        reach("log.before", request="swap")
        connection = self.connect()
        warnings: list[psycopg.errors.Diagnostic] = []
        connection.add_notice_handler(warnings.append)
        try:
            ((count, _),) = run(connection, statement, values)
        except (psycopg.errors.SerializationFailure, psycopg.errors.DeadlockDetected):
            return False  # the server undid it, since others wrote at the same time
        except psycopg.Error as error:
            # FATAL may come after the commit too, as when a wait for a standby is ended.
            if not connection.closed and error.diag.severity_nonlocalized == "ERROR":
                raise  # the statement failed, and is undone
            self.close()
            raise DecisionUnknownError(
                f"{self.address} was cut off during a commit ({self.said(error)}); read the "
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
    def named_errors(self) -> Iterator[None]:
        """Around statements: psycopg's errors by what the caller must do next."""
        try:
            yield
        except psycopg.errors.InsufficientPrivilege as error:
            if error.diag.source_function == HIDDEN:
                raise LogUnavailableError(
                    f"{self.address}: {self.said(error)}, nothing was written; row security may "
                    "hide records from this role: ALTER TABLE … DISABLE ROW LEVEL SECURITY, or "
                    "ALTER ROLE … BYPASSRLS"
                ) from None
            raise ConfigurationError(
                f"{self.address}: {self.said(error)}. The log needs a schema in which this role "
                f'may create tables: CREATE SCHEMA "{self._schema}" AUTHORIZATION …'
            ) from None
        except psycopg.Error as error:
            self.close()
            raise LogUnavailableError(
                f"{self.address} cannot be used now ({self.said(error)}), nothing was written; "
                "check that the server runs, takes connections and is no standby"
            ) from None


def run(
    connection: Connection,
    statements: sql.Composed,
    values: Sequence[object] | Mapping[str, object] = (),
) -> list[tuple[Any, ...]]:
    """The rows of the last of several statements, which are one message, and so one transaction."""
    cursor = psycopg.ClientCursor(connection)  # the server binds values to single statements only
    cursor.execute(statements, values or None)
    while cursor.nextset():
        pass
    return cursor.fetchall() if cursor.description else []
