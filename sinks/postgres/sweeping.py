"""Finds an owner's branches on the server, and aborts those that no decision names.

open sessions ──► merges of the driver         end the session, or roll back
prepared transactions ──► merges, or tasks     ROLLBACK PREPARED, by gid
staging tables ──► tasks                       DROP; last, since merges lock them
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import psycopg

from sparkonce.errors import (
    CommitRejectedError,
    CommitUnresolvedError,
    ConfigurationError,
    settle_command,
)
from sparkonce.model import DRIVER_ATTEMPT, BranchId, Committable, Owner
from sparkonce.once import once
from sparkonce.sinks.postgres.loading.direct import PREPARED_VERSION
from sparkonce.sinks.postgres.loading.finishing import Finisher
from sparkonce.sinks.postgres.merging.held import HeldMerges
from sparkonce.sinks.postgres.merging.merge import Merge
from sparkonce.sinks.postgres.server.connections import (
    Address,
    PgConnection,
    Pool,
    ask_as_login,
    roll_back,
)
from sparkonce.sinks.postgres.server.outcome import abort_prepared
from sparkonce.sinks.postgres.server.sql import (
    COMMIT,
    MARKER_TABLE,
    OPEN,
    PREPARED,
    READ_COMMITTED,
    STAGED,
    Timeouts,
    branch_of_session,
    drop_staging,
    end_holders,
    find_existing,
    find_marker,
    find_schema,
    script,
    settings,
    staging_name,
)

logger = logging.getLogger("sparkonce")

_TIDY_LOCK_S: Final = 1.0
"""How long a drop waits for a reader, such as a backup. A later sweep drops what is left."""

_TIDY_EACH_LOCK_S: Final = 0.01
"""The same for one table, after dropping all of them failed: a backup may lock hundreds."""


@dataclass(frozen=True, slots=True)
class Sweeper:
    """Finds and aborts a sink's branches."""

    sink: str
    where: str  # the target, for messages
    table: str  # the target, as written in SQL
    schema: str | None  # the target's, if `validate` has read it
    address: Address
    timeouts: Timeouts
    held: HeldMerges

    @property
    def pool(self) -> Pool:
        return once(Pool, self.address)

    def find(self, owner: Owner) -> list[Committable]:
        rows = self.pool.run(lambda c: ask_as_login(c, find_existing(owner)))
        return list(self._ours(owner, rows))

    def abort(self, committable: Committable) -> None:
        branch_id, payload = committable.branch_id, committable.payload
        of_task = branch_id.attempt != DRIVER_ATTEMPT
        if of_task and "staging" not in payload:
            Finisher(self.address, self.pool, self.timeouts).roll_back(branch_id)
        if committable.version == PREPARED_VERSION:
            return
        with self._aborting(branch_id):
            if of_task:
                schema = str(payload.get("schema") or self._schema())
                self.drop(schema, [staging_name(branch_id)])
                return
            self._end_merge(branch_id)  # first, since it locks the tables
            if payload:
                merge = Merge.read(committable)
                self.drop(merge.schema, merge.staging)

    def abort_staged(self, staged: Sequence[Committable]) -> dict[BranchId, Exception]:
        """Drop staging tables together, or one by one if a table is in use; return the errors."""
        try:
            for schema in {str(c.payload["schema"]) for c in staged}:
                names = [staging_name(c.branch_id) for c in staged if c.payload["schema"] == schema]
                self.drop(schema, names)
        except psycopg.Error:
            return dict(self._abort_each(staged))
        return {}

    def refuse_committed(self, committable: Committable) -> None:
        """Refuse to write a decided branch again if its rows are committed.

        Raises:
            CommitRejectedError: its marker row exists.
        """
        branch_id = committable.branch_id
        query = find_marker(str(committable.payload["schema"]), branch_id)
        with self._aborting(branch_id):
            row = self.pool.run(lambda c: c.execute(query).fetchone())
        if row is not None:
            raise CommitRejectedError(
                f"{branch_id} is committed, as its row in {MARKER_TABLE} shows, so a rewrite would "
                "duplicate its rows. If a standby must confirm the commit, start the standby; or "
                f"record that it is committed: {settle_command(branch_id, 'committed')}",
                branch_id,
            )

    def tidy(self, merge: Merge) -> None:
        """Drop the staging tables of a committed merge; `find` lists those that stay."""
        try:
            self.drop(merge.schema, merge.staging)
        except psycopg.Error as error:
            logger.debug("%s: staging is left over: %s", self.where, self.address.said(error))

    def drop(self, schema: str, names: Sequence[str], lock_s: float = _TIDY_LOCK_S) -> None:
        """Drop staging tables, without waiting long for their readers."""
        timeouts = Timeouts(min(lock_s, self.timeouts.lock), self.timeouts.statement)

        def drop(connection: PgConnection) -> None:
            for statement in drop_staging(schema, names):
                try:
                    # It waits for no standby: a sweep drops again what a failover brings back.
                    opening = script(READ_COMMITTED, settings(timeouts, is_flushed=False))
                    connection.execute(script(opening, statement, COMMIT))
                finally:
                    roll_back(connection)

        self.pool.run(drop)

    # -- helpers -------------------------------------------------------------------------------

    def _abort_each(self, staged: Sequence[Committable]) -> Iterator[tuple[BranchId, Exception]]:
        for committable in staged:
            branch_id, schema = committable.branch_id, str(committable.payload["schema"])
            try:
                with self._aborting(branch_id):
                    self.drop(schema, [staging_name(branch_id)], _TIDY_EACH_LOCK_S)
            except CommitUnresolvedError as error:
                yield branch_id, error

    def _end_merge(self, branch_id: BranchId) -> None:
        """Roll back the merge, in whichever process it is open; leave a committed one unchanged."""
        held = self.held.take(branch_id)
        if held is not None:
            roll_back(held)
            self.pool.give(held)

        def end(connection: PgConnection) -> None:
            ask_as_login(connection, end_holders(staging_name(branch_id)))
            abort_prepared(connection, branch_id)

        self.pool.run(end)

    @contextlib.contextmanager
    def _aborting(self, branch_id: BranchId) -> Iterator[None]:
        try:
            yield
        except psycopg.Error as error:
            raise CommitUnresolvedError(
                f"{self.where}: {branch_id} could not be aborted: {self.address.said(error)}",
                branch_id,
            ) from self.address.cause(error)

    def _schema(self) -> str:
        if self.schema is not None:
            return self.schema
        row = self.pool.run(lambda c: c.execute(find_schema(self.table)).fetchone())
        if row is None:
            raise ConfigurationError(f"{self.where} does not exist: correct table=")
        return str(row[0])

    def _ours(self, owner: Owner, rows: Iterable[tuple[Any, ...]]) -> Iterator[Committable]:
        """The branches in the order in which to abort them: a merge locks its staging tables."""
        merges = dict.fromkeys(self.held.branches(owner), "an open transaction")
        staged = []
        for place, schema, name, comment in rows:
            if place == OPEN:
                branch_id = branch_of_session(owner, self.sink, name)
            else:
                branch_id = BranchId.from_name(comment or "")
            if branch_id is None or branch_id.owner != owner or branch_id.batch_id is None:
                continue
            prepared = f"prepared transaction {branch_id}"
            if place == PREPARED and branch_id.attempt != DRIVER_ATTEMPT:
                yield Committable(branch_id, version=PREPARED_VERSION, text=prepared)
            elif place != STAGED:
                merges[branch_id] = prepared if place == PREPARED else "an open transaction"
            elif staging_name(branch_id) == name:
                text = f"staging table {schema}.{name}"
                staged.append(
                    Committable(branch_id, {"schema": schema, "staging": name}, text=text)
                )
        for branch_id, text in merges.items():
            yield Committable(branch_id, text=text)
        yield from staged
