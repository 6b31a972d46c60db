"""After a lock timeout: finds our own prepared transactions that hold locks on the table.

A driver that was fenced while it prepared leaves a transaction without a decision. It holds its
row locks until a sweep ends it, so the error names it: the batch may succeed after a sweep.
"""

from __future__ import annotations

from typing import Final

from sparkonce.model import BranchId
from sparkonce.sinks.postgres.server.connections import Pool
from sparkonce.sinks.postgres.server.sql import Timeouts

# A transaction's lock on its own id leads to all its locks; a prepared one has no process.
_PREPARED: Final = """
    SELECT p.gid FROM pg_catalog.pg_prepared_xacts p
    WHERE p.database = current_database() AND starts_with(p.gid, 'sparkonce.') AND EXISTS (
        SELECT FROM pg_catalog.pg_locks own JOIN pg_catalog.pg_locks held
            ON held.virtualtransaction = own.virtualtransaction AND held.pid IS NULL
        WHERE own.locktype = 'transactionid' AND own.transactionid = p.transaction
            AND own.pid IS NULL AND held.relation = to_regclass(%s)
    )
    ORDER BY p.prepared, p.gid
"""


def blocked_by(pool: Pool, table: str, waiting: BranchId, timeouts: Timeouts) -> str | None:
    """Text for a lock timeout of `waiting`: other branches, of any pipeline, that hold locks.

    `table` is quoted as in SQL. Returns None if no prepared branch holds a lock on it.
    """
    rows = pool.run(lambda connection: connection.execute(_PREPARED, (table,)).fetchall())
    found = (BranchId.from_name(gid) for (gid,) in rows)
    others = [branch_id for branch_id in found if branch_id is not None and branch_id != waiting]
    if not others:
        return None
    mine = (waiting.owner, waiting.token, waiting.batch_id)
    same_batch = [b.sink for b in others if (b.owner, b.token, b.batch_id) == mine]
    if sinks := [name for name in same_batch if name != waiting.sink]:
        return (
            f"lock_timeout_s={timeouts.lock:g}: locks on the table are held by what this "
            f"pipeline's sink {sinks[0]!r} has prepared of the same batch, and a new start would "
            "meet them again. Write each table through one sink only; if a foreign key joins the "
            "tables of two sinks, drop it, or give each table its own pipeline"
        )
    shown = "; ".join(
        f"the prepared transaction {branch_id} of {_driver(branch_id, waiting)}"
        for branch_id in others[:3]
    )
    return (
        f"lock_timeout_s={timeouts.lock:g}: locks on the table are held by {shown}. Only its own "
        "pipeline may end it (`sparkonce recover JOB`, or its next start); ending it manually "
        "would lose or duplicate its rows"
    )


def _driver(branch_id: BranchId, waiting: BranchId) -> str:
    if branch_id.owner == waiting.owner and branch_id.token == waiting.token:
        return f"this driver (batch {branch_id.batch_id}, sink {branch_id.sink!r})"
    if branch_id.owner == waiting.owner:
        return f"this query's driver with token {branch_id.token}"
    return f"another query, {branch_id.owner.query_id}"
