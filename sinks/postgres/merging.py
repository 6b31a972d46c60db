"""The driver's one transaction per batch: staging tables ──► target, with the marker row.

What `Merge.commit` may meet, and what each proves:

    1  COMMIT PREPARED answers yes          committed
    2  gid unknown, marker there            committed before
    3  gid unknown, then marker absent      not committed: merge again, from the staging tables, if
                                            these and the target are still what was voted for
    4  merging again: marker's key taken    somebody else committed it meanwhile
    5  merging again: staging table gone,   lost; nothing can be under way any more, since whoever
       then marker absent                   merges holds a lock that a DROP waits for
    6  no answer, or another server         unknown

The marker row is the first thing that a merge writes. Its primary key lets one merge of a branch
through, whoever tries (I4), and makes the others wait there before they do any work.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import NoReturn

import psycopg
from psycopg import errors as pg
from psycopg import sql

from sparkonce.errors import (
    CommitRejectedError,
    CommitUnresolvedError,
    PreparedBranchLostError,
    PrepareRejectedError,
    settle_command,
)
from sparkonce.model import BranchId
from sparkonce.sinks.postgres.advice import next_step
from sparkonce.sinks.postgres.attaching import unseen
from sparkonce.sinks.postgres.connections import (
    PASSING,
    Address,
    PgConnection,
    Pool,
    ask_as_login,
    retrying,
    roll_back,
)
from sparkonce.sinks.postgres.fitness import unfit
from sparkonce.sinks.postgres.merge import (
    REJECTED,
    Merge,
    count_rows,
    duplicate_key,
    duplicate_told,
    statements,
)
from sparkonce.sinks.postgres.server import (
    await_standbys,
    end_prepared,
    is_committed,
    leave_prepared,
)
from sparkonce.sinks.postgres.shape import Shape
from sparkonce.sinks.postgres.sql import (
    CHECK_CONSTRAINTS_NOW,
    COMMIT,
    MARKER_TABLE,
    TO_WRITE,
    Timeouts,
    end_holders,
    insert_marker,
    qualified,
    require_marker,
    require_own_transaction,
    require_system,
    script,
    settings,
    staging_name,
)

logger = logging.getLogger("sparkonce")

_REFUSED = ("22", "23", "42", "44", "P0", "0A", "21", "27", "2F", "38", "39")
"""Classes of SQLSTATE that come again with the same rows: data, constraints, rights, triggers."""

_ENDED = "the transaction was ended unseen"


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
            connection, _ = self._pool.lend(lambda c: c.execute("SELECT"))  # a kept one may be dead
            retrying()(self._merge_once, connection)
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

    def _end(self, connection: PgConnection | None) -> None:
        if connection is not None:
            roll_back(connection)
            self._pool.give(connection)

    def _merge_once(self, connection: PgConnection) -> None:
        try:
            here = require_system(self._merge.system)
            self._run(connection, script(*self._opening(), *self._moves(), here))
            if told := self._changed(connection, prepares=self._merge.prepared):
                raise PrepareRejectedError(
                    f"{self._what}: the table has changed since the query began: {told}; start "
                    "the query again",
                    self._branch_id,
                )
            if not self._merge.prepared:
                return
            if told := leave_prepared(connection, str(self._branch_id)):
                raise PrepareRejectedError(
                    f"{self._what}: {told}; start the query again", self._branch_id
                )
        except PASSING:
            roll_back(connection)
            raise

    def _changed(self, connection: PgConnection, *, prepares: bool = False) -> str | None:
        """Why the target does not serve any more; after the merge, whose lock keeps it as it is."""
        columns = self._merge.columns
        table = qualified(self._merge.schema, self._merge.table).as_string()
        told = self._merge.shape.difference(Shape.read(connection, table, columns))
        told = told or unfit(connection, table, self._merge.mode, prepares=prepares)
        if told is None and self._merge.attached:
            told = unseen(connection, table, columns)
        return told

    def _opening(self) -> Iterator[sql.Composable]:
        merged, branch_id = self._merge, self._branch_id
        yield TO_WRITE
        yield settings(self._timeouts, staging_name(branch_id))
        yield insert_marker(merged.schema, branch_id, merged.rows)

    def _moves(self) -> Iterator[sql.Composable]:
        yield from statements(self._merge, self._branch_id)
        yield CHECK_CONSTRAINTS_NOW

    def _run(self, connection: PgConnection, query: sql.Composed) -> None:
        """Run the statements of a merge, and tell of rows that are refused."""
        cursor = connection.execute(query)
        while True:
            column = cursor.description[0].name if cursor.description else None
            row = cursor.fetchone() if column == REJECTED else None
            if row is not None and row[0]:
                schema, table = self._merge.dead_letter or ("", "")
                logger.warning(
                    "%s: %s of %d rows are refused and go to %s.%s",
                    *(self._what, row[0], self._merge.rows, schema, table),
                )
            if not cursor.nextset():
                return

    def _why_refused(self, error: psycopg.Error) -> str:
        said = self._address.said(error)
        if isinstance(error, pg.CardinalityViolation) and self._merge.key is not None:
            return self._duplicate() or said
        with contextlib.suppress(psycopg.Error):
            if missing := self._missing_staging(error):
                return (
                    f"{said}. {len(missing)} of {len(self._merge.staging)} staging tables are "
                    "gone, as when the server has crashed; start the query again"
                )
        return said + next_step(error, self._timeouts)

    def _duplicate(self) -> str | None:
        query = duplicate_key(self._merge)
        with contextlib.suppress(psycopg.Error):
            row = self._pool.run(lambda connection: connection.execute(query).fetchone())
            if row is not None:
                return duplicate_told(self._merge, row)
        return None

    # -- after the decision ----------------------------------------------------------------------

    def _commit_held(self, connection: PgConnection) -> bool:
        """False when the open transaction was lost."""
        try:
            # Outside of its transaction COMMIT answers the same: a pooler may have lost that one.
            is_ours = require_marker(self._merge.schema, self._branch_id, _ENDED)
            return _last_tag(connection, script(is_ours, COMMIT)) == "COMMIT"
        except psycopg.Error:
            return False  # or it was not: the marker tells
        finally:
            self._end(connection)

    def commit_with(self, connection: PgConnection, log_write: str) -> None:
        """Commit the transaction that this process holds open, and the log's write in it."""
        try:
            # Outside of its transaction the script would be one by itself: the record alone.
            is_ours = require_marker(self._merge.schema, self._branch_id, _ENDED)
            tag = _last_tag(connection, script(is_ours, sql.SQL(log_write), COMMIT))
        except psycopg.Error as error:
            self._unresolved(self._address.said(error), error)
        finally:
            self._end(connection)
        if tag != "COMMIT":
            self._unresolved(f"the server answered {tag} to COMMIT")
        try:
            self._await_standbys()  # a wait of COMMIT that is cut short is no error
        except psycopg.Error as error:
            self._unresolved(self._address.said(error), error)

    def commit(self, held: PgConnection | None) -> None:
        """Make the batch visible; idempotent. The situations are numbered in the module's text.

        Args:
            held: has the merge open, if this process holds it.
        """
        is_done = held is not None and self._commit_held(held)
        try:
            ask = end_prepared if self._merge.prepared else is_committed
            if not (is_done or self._answers(ask)):  # 1, 2
                self._merge_again()  # 3
            self._await_standbys()
        except psycopg.Error as error:  # 6
            self._unresolved(self._address.said(error) + next_step(error, self._timeouts), error)

    def _await_standbys(self) -> None:
        schema, branch_id = self._merge.schema, self._branch_id
        self._pool.run(lambda c: await_standbys(c, self._timeouts, schema, branch_id))

    def _answers(self, ask: Callable[..., bool]) -> bool:
        asked = (self._timeouts, self._merge, self._what, self._branch_id)
        return self._pool.run(lambda connection: ask(connection, *asked))

    def _merge_again(self) -> None:
        # Outside of its transaction each message would be one by itself: the rows alone. That the
        # marker is there would not tell: another driver may have committed it meanwhile.
        is_ours = require_own_transaction(_ENDED)

        def attempt(connection: PgConnection) -> None:
            try:
                self._run(connection, script(*self._opening()))
                rows = connection.execute(count_rows(self._merge)).fetchone()
                if rows != (self._merge.rows,):
                    self._refuse(f"its staging tables hold {rows and rows[0]} rows now")
                self._run(connection, script(is_ours, *self._moves()))
                if told := self._changed(connection):
                    self._refuse(f"the table has changed: {told}")
                self._run(connection, script(is_ours, COMMIT))
            finally:
                roll_back(connection)

        try:
            retrying()(self._pool.run, attempt)
        except (pg.LockNotAvailable, pg.QueryCanceled) as error:  # whichever timeout is shorter
            self._end_holders()
            said = self._address.said(error)
            if isinstance(error, pg.LockNotAvailable):
                self._unresolved(f"another session is at it: {said}", error)
            self._unresolved(said + next_step(error, self._timeouts), error)
        except psycopg.Error as error:
            missing = self._missing_staging(error)
            if self._answers(is_committed):  # 4
                return
            if missing:
                self._lost(missing, error)  # 5
            if (error.sqlstate or "")[:2] in _REFUSED and _ENDED not in str(error):
                self._refuse(self._address.said(error), error)
            raise

    def _refuse(self, why: str, error: psycopg.Error | None = None) -> NoReturn:
        raise CommitRejectedError(
            f"{self._what}: decided, its merge of {self._merge.rows} rows was lost with its "
            f"session, and merging it again is refused: {why}. The rows are kept in "
            f"{', '.join(self._merge.staging)}: undo what has changed, or make room for them, and "
            f"start again; or "
            f"{settle_command(self._branch_id)}",
            self._branch_id,
        ) from (None if error is None else self._address.cause(error))

    def _end_holders(self) -> None:
        """End a session of a dead driver that still holds this merge open (a cut network).

        Whether it commits first or not, the marker row tells which; so this is safe even where
        that driver is alive after all.
        """
        with contextlib.suppress(psycopg.Error):
            self._pool.run(lambda c: ask_as_login(c, end_holders(staging_name(self._branch_id))))

    def _missing_staging(self, error: psycopg.Error) -> list[str]:
        """The staging tables that this error of a merge may be about."""
        if not isinstance(error, pg.UndefinedTable):
            return []
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
            "sparkonce_* tables or roll back a prepared transaction?",
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
