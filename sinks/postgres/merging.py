"""The driver's one transaction per batch: staging tables ──► target, with the marker row.

What `Merge.commit` may meet, and what each proves:

    1  COMMIT PREPARED answers yes          committed
    2  gid unknown, marker there            committed before
    3  gid unknown, then marker absent      not committed: merge again, from the staging tables
    4  merging again: marker's key taken    somebody else committed it meanwhile
    5  merging again: staging table gone,   lost; nothing can be under way any more, since whoever
       then marker absent                   merges holds a lock that a DROP waits for
    6  no answer, or another server         unknown

The marker row is the first thing that a merge writes. Its primary key lets one merge of a branch
through, whoever tries (I4), and makes the others wait there before they do any work.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NoReturn, Self, cast

import psycopg
from psycopg import errors as pg
from psycopg import sql
from tenacity import Retrying, retry_if_exception_type, stop_after_attempt, wait_random_exponential

from sparkonce.errors import (
    CommitRejectedError,
    CommitUnresolvedError,
    PreparedBranchLostError,
    PrepareRejectedError,
    settle_command,
)
from sparkonce.model import BranchId, Committable, JsonValue
from sparkonce.sinks.postgres.catalog import Target, system_identifier
from sparkonce.sinks.postgres.connections import Address, PgConnection, Pool, roll_back
from sparkonce.sinks.postgres.sql import (
    CHECK_CONSTRAINTS_NOW,
    COMMIT,
    MARKER_TABLE,
    READ_COMMITTED,
    Timeouts,
    commit_prepared,
    duplicate_key,
    end_holders,
    find_marker,
    insert_marker,
    merge,
    prepare,
    script,
    settings,
    staging_name,
)

PAYLOAD_VERSION = 1

_TRIES = 5
_PASSING = (pg.DeadlockDetected, pg.SerializationFailure)
"""Nobody's fault: the same statement may well succeed when it is sent again."""

_REFUSED = ("22", "23", "42", "44", "P0", "0A", "21", "27", "2F", "38", "39")
"""Classes of SQLSTATE that come again with the same rows: data, constraints, rights, triggers."""


@dataclass(frozen=True, slots=True)
class Merge:
    """All that any process needs to merge one batch.

    Attributes:
        schema: of the target, of the staging tables and of the marker table.
        table: the target.
        columns: which the batch fills.
        key: of an upsert; None to append.
        staging: names of the staging tables.
        rows: how many rows they hold together.
        system: the server's own identifier; empty where it may not be read.
        database: the database's name.
        prepared: left as a prepared transaction, whose gid is the full branch id; else as an open
            one in the process that made it.
    """

    schema: str
    table: str
    columns: tuple[str, ...]
    key: tuple[str, ...] | None
    staging: tuple[str, ...]
    rows: int
    system: str
    database: str
    prepared: bool

    @classmethod
    def of(cls, target: Target, key: Sequence[str] | None, staged: Sequence[Committable]) -> Self:
        return cls(
            target.schema,
            target.table,
            target.names,
            None if key is None else tuple(key),
            tuple(sorted(str(committable.payload["staging"]) for committable in staged)),
            sum(cast("int", committable.payload["rows"]) for committable in staged),
            target.system,
            target.database,
            target.can_prepare,
        )

    @classmethod
    def read(cls, committable: Committable) -> Self:
        """From a committable of this version or an older one."""
        if committable.version != PAYLOAD_VERSION or "columns" not in committable.payload:
            raise CommitUnresolvedError(
                f"PostgresSink: the record of {committable.branch_id} has version "
                f"{committable.version}, which this version of sparkonce cannot read: upgrade it",
                committable.branch_id,
            )
        payload: dict[str, Any] = dict(committable.payload)
        for name in ("columns", "staging", "key"):
            payload[name] = None if payload[name] is None else tuple(payload[name])
        return cls(**payload)

    def to_payload(self) -> dict[str, JsonValue]:
        return {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in asdict(self).items()
        }

    @property
    def shown(self) -> str:
        return f"{self.database}.{self.schema}.{self.table}"


class Merger:
    """Prepares and commits the merge of one branch.

    Args:
        address: of the server.
        pool: the driver's connections.
        timeouts: of every transaction.
        branch_id: the driver's own branch.
        merge: what it holds.
    """

    def __init__(
        self, address: Address, pool: Pool, timeouts: Timeouts, branch_id: BranchId, merge: Merge
    ) -> None:
        self._address = address
        self._pool = pool
        self._timeouts = timeouts
        self._branch_id = branch_id
        self._merge = merge
        self._what = f"batch {branch_id.batch_id}, sink {branch_id.sink!r}, table {merge.shown}"

    # -- before the decision ---------------------------------------------------------------------

    def prepare(self) -> PgConnection | None:
        """Merge, check every constraint, and leave it to be committed.

        Returns:
            The connection that holds the open transaction; None where it is a prepared one.

        Raises:
            PrepareRejectedError: nothing stands.
        """
        connection: PgConnection | None = None
        try:
            connection = self._take_living()
            self._retrying()(self._merge_once, connection)
        except psycopg.Error as error:
            self._end(connection)
            raise PrepareRejectedError(
                f"{self._what}: {self._why_refused(error)}", self._branch_id
            ) from self._address.cause(error)
        except BaseException:
            self._end(connection)
            raise
        if not self._merge.prepared:
            return connection
        self._pool.give(connection)
        return None

    def _take_living(self) -> PgConnection:
        """A connection that answers: a kept one may have died since the last batch."""
        while True:
            connection, is_new = self._pool.take()
            try:
                connection.execute(sql.SQL("SELECT"))
            except psycopg.OperationalError:
                self._pool.give(connection)
                if is_new:
                    raise
            else:
                return connection

    def _end(self, connection: PgConnection | None) -> None:
        if connection is not None:
            roll_back(connection)
            self._pool.give(connection)

    def _merge_once(self, connection: PgConnection) -> None:
        statements = list(self._statements())
        if self._merge.prepared:
            statements.append(prepare(str(self._branch_id)))
        try:
            tag = _last_tag(connection, script(*statements))
        except _PASSING:
            roll_back(connection)
            raise
        # A failed transaction answers PREPARE TRANSACTION with ROLLBACK, and no error.
        if self._merge.prepared and tag != "PREPARE TRANSACTION":
            raise PrepareRejectedError(
                f"{self._what}: the server answered {tag} to PREPARE TRANSACTION", self._branch_id
            )

    def _statements(self) -> Iterator[sql.Composable]:
        merged, branch_id = self._merge, self._branch_id
        yield READ_COMMITTED
        yield settings(self._timeouts, staging_name(branch_id))
        yield insert_marker(merged.schema, branch_id, merged.rows)
        yield merge(merged.schema, merged.table, merged.columns, merged.key, merged.staging)
        yield CHECK_CONSTRAINTS_NOW

    def _why_refused(self, error: psycopg.Error) -> str:
        said = self._address.said(error)
        if isinstance(error, pg.CardinalityViolation) and self._merge.key is not None:
            return self._duplicate() or said
        if isinstance(error, pg.LockNotAvailable):
            return f"{said} (lock_timeout={self._timeouts.lock:g} s)"
        if isinstance(error, pg.QueryCanceled):
            return f"{said} (statement_timeout={self._timeouts.statement:g} s)"
        if isinstance(error, pg.OutOfMemory) and self._merge.prepared:
            return f"{said}; raise max_prepared_transactions"
        if isinstance(error, pg.FeatureNotSupported) and self._merge.prepared:
            return f"{said} (does a trigger use NOTIFY or a temporary table?)"
        return said

    def _duplicate(self) -> str | None:
        merged = self._merge
        key = cast("tuple[str, ...]", merged.key)
        query = duplicate_key(merged.schema, key, merged.staging)
        with contextlib.suppress(psycopg.Error):
            row = self._pool.run(lambda connection: connection.execute(query).fetchone())
            if row is not None:
                example = ", ".join(
                    f"{name} = {value}" for name, value in zip(key, row, strict=True)
                )
                return (
                    f"key={list(key)} comes more than once in the batch, for example {example}; an "
                    "upsert needs one row for each key: aggregate or deduplicate with transform="
                )
        return None

    def _retrying(self) -> Retrying:
        return Retrying(
            retry=retry_if_exception_type(_PASSING),
            wait=wait_random_exponential(multiplier=0.05, max=1.0),
            stop=stop_after_attempt(_TRIES),
            reraise=True,
        )

    # -- after the decision ----------------------------------------------------------------------

    def commit_held(self, connection: PgConnection) -> bool:
        """Commit the transaction that this process holds open; False when it was lost."""
        try:
            return _last_tag(connection, COMMIT) == "COMMIT"
        except psycopg.Error:
            return False  # or it was not: the marker tells
        finally:
            self._end(connection)

    def commit(self) -> None:
        """Make the batch visible; idempotent. The situations are numbered in the module's text."""
        try:
            if self._merge.prepared and self._commit_prepared():  # 1
                return
            self._check_server()
            if self._is_committed():  # 2
                return
            self._merge_again()  # 3
        except psycopg.Error as error:  # 6
            self._unresolved(self._address.said(error), error)

    def _commit_prepared(self) -> bool:
        """False when there is no such prepared transaction, so that the marker row is final."""
        try:
            self._pool.run(lambda c: c.execute(commit_prepared(str(self._branch_id))))
        except pg.UndefinedObject:
            return False
        except pg.FeatureNotSupported:  # it stands, in another database
            self._check_server()
            raise
        return True

    def _is_committed(self) -> bool:
        query = find_marker(self._merge.schema, self._branch_id)
        return self._pool.run(lambda c: c.execute(query).fetchone()) is not None

    def _check_server(self) -> None:
        """What is absent here proves something only on the server that held it."""

        def ask(connection: PgConnection) -> tuple[str, str]:
            row = connection.execute("SELECT current_database()").fetchone()
            return system_identifier(connection), "" if row is None else str(row[0])

        system, database = self._pool.run(ask)
        if database != self._merge.database or (
            system and self._merge.system and system != self._merge.system
        ):
            self._unresolved(
                f"conninfo= leads to database {database!r} of the server with system identifier "
                f"{system}, and the batch was prepared in {self._merge.database!r} of "
                f"{self._merge.system}; let it lead there again"
            )

    def _merge_again(self) -> None:
        query = script(*self._statements(), COMMIT)

        def attempt(connection: PgConnection) -> None:
            try:
                connection.execute(query)
            finally:
                roll_back(connection)

        try:
            self._retrying()(self._pool.run, attempt)
        except pg.LockNotAvailable as error:
            self._end_holders()
            self._unresolved(f"another session is at it: {self._address.said(error)}", error)
        except psycopg.Error as error:
            missing = self._missing_staging() if isinstance(error, pg.UndefinedTable) else []
            if self._is_committed():  # 4
                return
            if missing:
                self._lost(missing, error)  # 5
            if (error.sqlstate or "")[:2] in _REFUSED:
                raise CommitRejectedError(
                    f"{self._what}: decided, its merge was lost with its session, and merging it "
                    f"again is refused: {self._address.said(error)}. The rows are kept in "
                    f"{', '.join(self._merge.staging)}: make room for them and start "
                    f"again; or {settle_command(self._branch_id)}",
                    self._branch_id,
                ) from self._address.cause(error)
            raise

    def _end_holders(self) -> None:
        """End a session of a dead driver that still holds this merge open (a cut network).

        Whether it commits first or not, the marker row tells which; so this is safe even where
        that driver is alive after all.
        """
        with contextlib.suppress(psycopg.Error):
            self._pool.run(lambda c: c.execute(end_holders(staging_name(self._branch_id))))

    def _missing_staging(self) -> list[str]:
        names = sql.SQL(", ").join(map(sql.Literal, self._merge.staging))
        query = sql.SQL(
            "SELECT c.relname FROM pg_catalog.pg_class c "
            "JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace "
            "WHERE n.nspname = {} AND c.relname IN ({})"
        ).format(sql.Literal(self._merge.schema), names)
        standing = self._pool.run(lambda c: {row[0] for row in c.execute(query)})
        return [name for name in self._merge.staging if name not in standing]

    def _lost(self, missing: Sequence[str], error: psycopg.Error) -> NoReturn:
        also = "the prepared transaction and " if self._merge.prepared else ""
        raise PreparedBranchLostError(
            f"{self._what}: decided, and lost from outside: {also}{', '.join(missing)} are gone, "
            f"and {self._merge.schema}.{MARKER_TABLE} shows no commit. Did somebody drop "
            "sparkonce_* tables or roll back a prepared transaction? Let Spark replay the batch, "
            "or restore the tables from a backup",
            self._branch_id,
        ) from self._address.cause(error)

    def _unresolved(self, text: str, error: psycopg.Error | None = None) -> NoReturn:
        raise CommitUnresolvedError(f"{self._what}: {text}", self._branch_id) from (
            None if error is None else self._address.cause(error)
        )


def _last_tag(connection: PgConnection, query: sql.SQL | sql.Composed) -> str | None:
    """Run statements and give the command tag of the last: what really happened."""
    cursor = connection.execute(query)
    while cursor.nextset():
        pass
    return cursor.statusmessage
