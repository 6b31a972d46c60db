"""Before the decision: the driver merges a batch, and leaves the transaction uncommitted.

marker row ─► staging tables into the target ─► all constraints ─► PREPARE TRANSACTION
                                                                └► or the open transaction
"""

from __future__ import annotations

import contextlib

import psycopg
from psycopg import errors as pg

from sparkonce.errors import PrepareRejectedError
from sparkonce.sinks.postgres.merging.statements import duplicate_key, duplicate_shown
from sparkonce.sinks.postgres.merging.work import MergeWork
from sparkonce.sinks.postgres.server.advice import next_step
from sparkonce.sinks.postgres.server.blockers import blocked_by
from sparkonce.sinks.postgres.server.connections import PASSING, PgConnection, retrying, roll_back
from sparkonce.sinks.postgres.server.outcome import leave_prepared
from sparkonce.sinks.postgres.server.sql import require_system, script
from sparkonce.sinks.postgres.target.shape import table_changed


def prepare(work: MergeWork) -> PgConnection | None:
    """Merge, check every constraint, and leave the transaction prepared or open.

    Returns:
        The connection that holds the open transaction; None if the transaction is prepared.

    Raises:
        PrepareRejectedError: nothing of the merge is left on the server.
    """
    connection: PgConnection | None = None
    try:
        # Asked something, since a kept one may be dead.
        connection, _ = work.pool.lend_in_time(lambda c: c.execute("SELECT"))
        retrying()(_merge_once, work, connection)
    except psycopg.Error as error:
        work.give_back(connection)
        raise PrepareRejectedError(
            f"{work.what}: {_why_refused(work, error)}", work.branch_id
        ) from work.address.cause(error)
    except BaseException:
        work.give_back(connection)
        raise
    if not work.merge.prepared:
        return connection
    work.pool.give(connection)
    return None


def _merge_once(work: MergeWork, connection: PgConnection) -> None:
    merge, branch_id = work.merge, work.branch_id
    try:
        here = require_system(merge.system)
        work.run(connection, script(*work.opening(), *work.moves(), here))
        if changed := work.change_of_target(connection, prepares=merge.prepared):
            raise PrepareRejectedError(f"{work.what}: {table_changed(changed)}", branch_id)
        if merge.prepared and (reason := leave_prepared(connection, str(branch_id))):
            raise PrepareRejectedError(f"{work.what}: {reason}; start the query again", branch_id)
    except PASSING:
        roll_back(connection)
        raise


def _why_refused(work: MergeWork, error: psycopg.Error) -> str:
    said, merge = work.address.said(error), work.merge
    with contextlib.suppress(psycopg.Error):
        if isinstance(error, pg.CardinalityViolation) and merge.key is not None:
            return _duplicate(work) or said
        if isinstance(error, pg.LockNotAvailable):
            blocked = blocked_by(work.pool, work.table, work.branch_id, work.timeouts)
            return f"{said} ({blocked})" if blocked else said + next_step(error, work.timeouts)
        if missing := work.missing_staging(error):
            return (
                f"{said}. {len(missing)} of {len(merge.staging)} staging tables are gone, as after "
                "a crash of the server; start the query again"
            )
        if isinstance(error, pg.UndefinedColumn | pg.UndefinedTable) and (
            changed := work.pool.run(work.change_of_target)
        ):
            return table_changed(changed)
    return said + next_step(error, work.timeouts)


def _duplicate(work: MergeWork) -> str | None:
    query = duplicate_key(work.merge)
    row = work.pool.run(lambda connection: connection.execute(query).fetchone())
    return None if row is None else duplicate_shown(work.merge, row)
