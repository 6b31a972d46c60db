"""The log's connection to its Postgres server: statements, and what their errors mean.

refused, timeout, "starting up", a standby    nothing was written        LogUnavailableError
a right is missing                            nothing was written        ConfigurationError
the connection broke during the write         it may have been written   DecisionUnknownError
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
    """The log's connection, reopened after it breaks. One thread at a time uses it.

    `said` returns one line about an error, without secrets. `timeout_ms` limits how long a
    statement may take, and how long a transaction may be idle.
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
        """The statement with the log's schema filled in."""
        return sql.SQL(text).format(schema=sql.Identifier(self._schema), **parts)

    def connect(self) -> Connection:
        """The connection; opens it if there is none."""
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
            if asked[0][0]:  # a standby may lack decisions, even where commits wait for it
                connection.close()
                raise LogUnavailableError(
                    f"{self.address} leads to a standby now; let the URL lead to the primary"
                )
            self._open = connection
        return self._open

    def ask(self, text: str, *values: object) -> list[tuple[Any, ...]]:
        """The rows; if the connection died since its last use, a new one asks again, once."""
        statement = self.statement(text)
        reach("log.before", request=text.split(maxsplit=1)[0].lower())
        had_one = self.opened is not None
        try:
            return run(self.connect(), statement, values)
        except psycopg.OperationalError:
            if not had_one or self._open is None or not self._open.closed:
                raise
            return run(self.connect(), statement, values)

    def as_sql(self, head: str, values: Mapping[str, object]) -> str:
        """The SQL text of the swap; it raises an error where `swap` would return False."""
        statement = self.statement(SWAP, head=self.statement(head), found=sql.SQL(REQUIRED))
        return psycopg.ClientCursor(self.connect()).mogrify(statement, values)

    def swap(self, head: str, values: Mapping[str, object]) -> bool:
        """Write everything if the head still has the version that was seen; whether it did."""
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
            return False  # the server rolled it back, because others wrote at the same time
        except psycopg.Error as error:
            # FATAL may also follow the commit, as when a wait for a standby is terminated.
            if not connection.closed and error.diag.severity_nonlocalized == "ERROR":
                raise  # the statement failed, and the server rolled it back
            self.close()
            raise DecisionUnknownError(
                f"{self.address} was cut off during a commit ({self.said(error)}); read the "
                "log again"
            ) from None
        finally:
            connection.remove_notice_handler(warnings.append)
        if warnings:  # the server only warns when a wait for a standby is cancelled
            raise DecisionUnknownError(
                f"{self.address} has committed, but its standbys may not have "
                f"({warnings[0].message_primary}); read the log again"
            )
        reach("log.after", request="swap")
        return bool(count)

    @contextmanager
    def named_errors(self) -> Iterator[None]:
        """Turn psycopg's errors into errors that say what the caller must do next."""
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
    """Run statements as one message, and so in one transaction; return the rows of the last."""
    cursor = psycopg.ClientCursor(connection)  # the server binds values to single statements only
    cursor.execute(statements, values or None)
    while cursor.nextset():
        pass
    return cursor.fetchall() if cursor.description else []
