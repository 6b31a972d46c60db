"""The statements of a merge, and how to run them; for the first merge and for merging again."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import psycopg
from psycopg import errors as pg
from psycopg import sql

from sparkonce.model import BranchId
from sparkonce.sinks.postgres.merging.dead_letter import REJECTED
from sparkonce.sinks.postgres.merging.merge import Merge
from sparkonce.sinks.postgres.merging.statements import statements
from sparkonce.sinks.postgres.server.connections import Address, PgConnection, Pool, roll_back
from sparkonce.sinks.postgres.server.sql import (
    CHECK_CONSTRAINTS_NOW,
    TO_WRITE,
    Timeouts,
    insert_marker,
    qualified,
    settings,
    staging_name,
)
from sparkonce.sinks.postgres.target.fitness import unfit
from sparkonce.sinks.postgres.target.shape import Shape

logger = logging.getLogger("sparkonce")


class MergeWork:
    """One branch's merge on one server."""

    def __init__(
        self, address: Address, pool: Pool, timeouts: Timeouts, branch_id: BranchId, merge: Merge
    ) -> None:
        self.address = address
        self.pool = pool
        self.timeouts = timeouts
        self.branch_id = branch_id
        self.merge = merge
        self.what = f"batch {branch_id.batch_id}, sink {branch_id.sink!r}, table {merge.shown}"

    @property
    def table(self) -> str:
        """The target, as SQL writes it."""
        return qualified(self.merge.schema, self.merge.table).as_string()

    def opening(self) -> Iterator[sql.Composable]:
        """The marker row comes first: its primary key admits only one merge of a branch."""
        yield TO_WRITE
        yield settings(self.timeouts, staging_name(self.branch_id))
        yield insert_marker(self.merge.schema, self.branch_id, self.merge.rows)

    def moves(self) -> Iterator[sql.Composable]:
        yield from statements(self.merge, self.branch_id)
        yield CHECK_CONSTRAINTS_NOW

    def run(self, connection: PgConnection, query: sql.Composed) -> None:
        """Run the statements of a merge, and log how many rows were rejected."""
        cursor = connection.execute(query)
        while True:
            column = cursor.description[0].name if cursor.description else None
            row = cursor.fetchone() if column == REJECTED else None
            if row is not None and row[0]:
                schema, table = self.merge.dead_letter or ("", "")
                logger.warning(
                    "%s: %s of %d rows are rejected and go to %s.%s",
                    *(self.what, row[0], self.merge.rows, schema, table),
                )
            if not cursor.nextset():
                return

    def change_of_target(self, connection: PgConnection, *, prepares: bool = False) -> str | None:
        """Why the target is no longer usable. Ask after the merge, whose lock prevents changes."""
        shape = Shape.read(connection, self.table, self.merge.columns)
        changed = self.merge.shape.difference(shape)
        return changed or unfit(connection, self.table, self.merge.mode, prepares=prepares)

    def missing_staging(self, error: psycopg.Error) -> list[str]:
        """The missing staging tables, if they may have caused this error of a merge."""
        if not isinstance(error, pg.UndefinedTable):
            return []
        names = sql.SQL(", ").join(map(sql.Literal, self.merge.staging))
        query = sql.SQL(
            "SELECT c.relname FROM pg_catalog.pg_class c "
            "JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace "
            "WHERE n.nspname = {} AND c.relname IN ({})"
        ).format(sql.Literal(self.merge.schema), names)
        existing = self.pool.run(lambda c: {row[0] for row in c.execute(query)})
        return [name for name in self.merge.staging if name not in existing]

    def give_back(self, connection: PgConnection | None) -> None:
        """Roll back an open transaction, and return the connection to the pool."""
        if connection is not None:
            roll_back(connection)
            self.pool.give(connection)
