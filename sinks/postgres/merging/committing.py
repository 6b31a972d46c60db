"""After the decision: any process makes the merge of a batch visible, once.

The situations of `commit`, and what each proves:

    1  COMMIT PREPARED succeeds             committed
    2  gid unknown, marker row exists       committed before
    3  gid unknown, then no marker row      not committed: merge again from the staging tables, if
                                            these and the target are unchanged since the vote
    4  merging again: the marker's key is   another process committed it meanwhile
       taken
    5  merging again: a staging table is    lost; no merge can be running, since a running merge
       gone, then no marker row             holds a lock that DROP waits for
    6  no answer, or another server         unknown

A merge writes its marker row first. The row's primary key admits only one merge of a branch,
whichever process runs it (I4); the others wait there before they do any work.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Sequence
from typing import NoReturn

import psycopg
from psycopg import errors as pg
from psycopg import sql

from sparkonce.clients.postgres import Statement
from sparkonce.errors import (
    CommitRejectedError,
    CommitUnresolvedError,
    PreparedBranchLostError,
    settle_command,
)
from sparkonce.sinks.postgres.merging.statements import count_rows
from sparkonce.sinks.postgres.merging.work import MergeWork
from sparkonce.sinks.postgres.server.advice import next_step
from sparkonce.sinks.postgres.server.connections import (
    PgConnection,
    ask_as_login,
    retrying,
    roll_back,
)
from sparkonce.sinks.postgres.server.outcome import await_standbys, end_prepared, is_committed
from sparkonce.sinks.postgres.server.sql import (
    COMMIT,
    MARKER_TABLE,
    end_holders,
    require_marker,
    require_own_transaction,
    script,
    staging_name,
)

logger = logging.getLogger("sparkonce")

_REFUSED = ("22", "23", "42", "44", "P0", "0A", "21", "27", "2F", "38", "39")
"""SQLSTATE classes of errors that the same rows cause again, such as data and constraints."""

_ENDED = "the transaction was ended unseen"


class MergeCommitter:
    """Commits one merge, from any process."""

    def __init__(self, work: MergeWork) -> None:
        self._work = work
        self._merge = work.merge
        self._branch_id = work.branch_id

    def commit(self, held: PgConnection | None) -> None:
        """Make the batch visible; idempotent. The module docstring numbers the situations.

        Args:
            held: the connection that has the merge open, if this process holds it.
        """
        is_done = held is not None and self._commit_held(held)
        try:
            ask = end_prepared if self._merge.prepared else is_committed
            if not (is_done or self._answers(ask)):  # 1, 2
                self._merge_again()  # 3
            self._await_standbys()
        except psycopg.Error as error:  # 6
            advice = next_step(error, self._work.timeouts)
            self._unresolved(self._work.address.said(error) + advice, error)

    def commit_with(self, connection: PgConnection, log_write: Statement) -> None:
        """Commit the transaction that this process holds open, with the log's write in it."""
        said = self._work.address.said
        try:
            # Outside of the merge's transaction the script would commit only the log's record.
            is_ours = require_marker(self._merge.schema, self._branch_id, _ENDED)
            tag = _last_tag(connection, script(is_ours, sql.SQL(log_write.sql), COMMIT))
        except psycopg.Error as error:
            self._unresolved(said(error), error)
        finally:
            self._work.give_back(connection)
        if tag != "COMMIT":
            self._unresolved(f"the server answered {tag} to COMMIT")
        try:
            self._await_standbys()  # an interrupted wait of COMMIT is no error
        except psycopg.Error as error:
            self._unresolved(said(error), error)

    def _commit_held(self, connection: PgConnection) -> bool:
        """False if the open transaction was lost."""
        try:
            # COMMIT answers the same if there is no transaction: a pooler may have lost it.
            is_ours = require_marker(self._merge.schema, self._branch_id, _ENDED)
            return _last_tag(connection, script(is_ours, COMMIT)) == "COMMIT"
        except psycopg.Error:
            return False  # it may have committed: the marker row shows that
        finally:
            self._work.give_back(connection)

    def _await_standbys(self) -> None:
        timeouts, schema, branch_id = self._work.timeouts, self._merge.schema, self._branch_id
        self._work.pool.run(lambda c: await_standbys(c, timeouts, schema, branch_id))

    def _answers(self, ask: Callable[..., bool]) -> bool:
        asked = (self._work.timeouts, self._merge, self._work.what, self._branch_id)
        return self._work.pool.run(lambda connection: ask(connection, *asked))

    def _merge_again(self) -> None:
        said = self._work.address.said
        try:
            retrying()(self._work.pool.run, self._attempt)
        except (pg.LockNotAvailable, pg.QueryCanceled) as error:  # whichever timeout is shorter
            self._end_holders()
            if isinstance(error, pg.LockNotAvailable):
                self._unresolved(f"another session holds the lock: {said(error)}", error)
            self._unresolved(said(error) + next_step(error, self._work.timeouts), error)
        except psycopg.Error as error:
            missing = self._work.missing_staging(error)
            if self._answers(is_committed):  # 4
                return
            if missing:
                self._lost(missing, error)  # 5
            if (error.sqlstate or "")[:2] in _REFUSED and _ENDED not in str(error):
                self._refuse(said(error), error)
            raise
        what = "%s was not committed, and was merged again from its staging tables"
        logger.warning(what, self._branch_id)

    def _attempt(self, connection: PgConnection) -> None:
        # Without the transaction each message would be a transaction of its own, and commit the
        # rows without their marker row. A look at the marker row would not show that: another
        # driver may have committed one.
        work, is_ours = self._work, require_own_transaction(_ENDED)
        try:
            work.run(connection, script(*work.opening()))
            rows = connection.execute(count_rows(self._merge)).fetchone()
            if rows != (self._merge.rows,):
                self._refuse(f"its staging tables hold {rows and rows[0]} rows now")
            work.run(connection, script(is_ours, *work.moves()))
            if changed := work.change_of_target(connection):
                self._refuse(f"the table has changed: {changed}")
            work.run(connection, script(is_ours, COMMIT))
        finally:
            roll_back(connection)

    def _end_holders(self) -> None:
        """End a session of a dead driver that still holds this merge open (a cut network).

        This is safe even if its driver is alive: the marker row shows whether it committed first.
        """
        query = end_holders(staging_name(self._branch_id))
        with contextlib.suppress(psycopg.Error):
            self._work.pool.run(lambda c: ask_as_login(c, query))

    def _refuse(self, why: str, error: psycopg.Error | None = None) -> NoReturn:
        raise CommitRejectedError(
            f"{self._work.what}: decided, but its merge of {self._merge.rows} rows was lost with "
            f"its session, and merging it again is refused: {why}. The rows are kept in "
            f"{', '.join(self._merge.staging)}: undo what has changed, or make room for them, and "
            f"start again; or {settle_command(self._branch_id)}",
            self._branch_id,
        ) from (None if error is None else self._work.address.cause(error))

    def _lost(self, missing: Sequence[str], error: psycopg.Error) -> NoReturn:
        also = "the prepared transaction and " if self._merge.prepared else ""
        raise PreparedBranchLostError(
            f"{self._work.what}: decided but lost: {also}{', '.join(missing)} are "
            f"gone, and {self._merge.schema}.{MARKER_TABLE} shows no commit. Did somebody drop "
            "sparkonce_* tables or roll back a prepared transaction?",
            self._branch_id,
        ) from self._work.address.cause(error)

    def _unresolved(self, text: str, error: psycopg.Error | None = None) -> NoReturn:
        raise CommitUnresolvedError(f"{self._work.what}: {text}", self._branch_id) from (
            None if error is None else self._work.address.cause(error)
        )


def _last_tag(connection: PgConnection, query: sql.SQL | sql.Composed) -> str | None:
    """Run statements and return the last one's command tag, which shows what really happened."""
    cursor = connection.execute(query)
    while cursor.nextset():
        pass
    return cursor.statusmessage
