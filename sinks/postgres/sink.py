"""`PostgresSink`: the verbs of the contract, each a few lines over the modules beside it.

executors   COPY ─► staging table per task                     (staging)
driver      prepareBatch: staging ─► target + marker row       (merging)
            commit: COMMIT PREPARED, or COMMIT; staging dropped
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import psycopg

from sparkonce.errors import (
    CommitUnresolvedError,
    ConfigurationError,
    ProtocolError,
)
from sparkonce.model import DRIVER_ATTEMPT, BranchId, Committable, Owner
from sparkonce.sinks.base import Transform, TwoPhaseCommitSink
from sparkonce.sinks.finding import Finding
from sparkonce.sinks.postgres.catalog import Target, resolve
from sparkonce.sinks.postgres.connections import Address, PgConnection, Pool, roll_back
from sparkonce.sinks.postgres.diagnosis import diagnose
from sparkonce.sinks.postgres.merging import PAYLOAD_VERSION, Merge, Merger
from sparkonce.sinks.postgres.sql import (
    COMMIT,
    OPEN,
    READ_COMMITTED,
    STAGED,
    Timeouts,
    branch_of_session,
    drop_staging,
    end_holders,
    find_schema,
    find_standing,
    rollback_prepared,
    script,
    settings,
    staging_name,
)
from sparkonce.sinks.postgres.staging import StagingWriter

if TYPE_CHECKING:
    import pyarrow as pa

logger = logging.getLogger("sparkonce")

_TIDY_LOCK_S = 1.0
"""A commit does not wait long for whoever reads the staging tables, such as a backup."""


class PostgresSink(TwoPhaseCommitSink[StagingWriter]):
    """Writes each batch into a Postgres table, visible as a whole.

    Tasks COPY into staging tables beside the target. Before the decision the driver merges them in
    one transaction, in which every constraint is checked, and leaves it as a prepared one; where
    the server allows none (max_prepared_transactions = 0) it keeps the transaction open and, if its
    connection is lost, merges again from the staging tables. `validate` logs which of them holds.

    The table ``sparkonce_commits`` in the target's schema has a row for each committed batch.

    Args:
        conninfo: as psycopg takes it: a URL, or ``host=… dbname=…``. It reaches the executors,
            and no message.
        table: the target, written as in SQL: ``orders``, ``shop.orders``, ``"Mixed Case"``. The
            batch's columns go by their exact names; other columns get their defaults.
        key: columns of an upsert: a row whose key is there updates that row in the batch's columns.
            A unique index must cover exactly these columns, and a key may come once in a batch.
            As always in SQL, keys with a NULL equal no other key. Default: append.
        name: see `TwoPhaseCommitSink`.
        select: see `TwoPhaseCommitSink`.
        transform: see `TwoPhaseCommitSink`.
        writers: see `TwoPhaseCommitSink`.
        lock_timeout: how long a statement waits for a lock, in seconds.
        statement_timeout: how long the merge of a batch may take, in seconds.

    Raises:
        ConfigurationError: a setting cannot work.
    """

    kind: ClassVar[str] = "postgres"

    def __init__(
        self,
        conninfo: str,
        *,
        table: str,
        key: Sequence[str] | None = None,
        name: str | None = None,
        select: Sequence[str] | None = None,
        transform: Transform | None = None,
        writers: Literal[1] | None = None,
        lock_timeout: float = 30.0,
        statement_timeout: float = 600.0,
    ) -> None:
        super().__init__(name=name, select=select, transform=transform, writers=writers)
        if key is not None and (isinstance(key, str) or not key or len(set(key)) != len(key)):
            raise ConfigurationError(
                f"{self.name}: key={key!r} must be a list of different columns, or be left out"
            )
        if lock_timeout <= 0 or statement_timeout <= 0:
            raise ConfigurationError(
                f"{self.name}: lock_timeout={lock_timeout} and "
                f"statement_timeout={statement_timeout} must be positive"
            )
        self._address = Address.read(conninfo)
        self._table = table
        self._key = None if key is None else tuple(key)
        self._timeouts = Timeouts(lock_timeout, statement_timeout)
        self._target: Target | None = None
        self._start()

    def _start(self) -> None:
        self._pool = Pool(self._address)
        self._lock = threading.Lock()
        self._held: dict[str, PgConnection] = {}
        """Merges that wait in an open transaction, by their full branch id."""

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in self.__dict__.items() if k not in {"_pool", "_lock", "_held"}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._start()

    @property
    def target(self) -> str:
        return f"postgres table {self._address.database}.{self._table}"

    @property
    def where(self) -> str:
        return f"{self.target} at {self._address.shown}"

    # -- on the executors ------------------------------------------------------------------------

    def beginTransaction(self, branch_id: BranchId) -> StagingWriter:
        target = self._validated(branch_id)
        # COPY lasts as long as the task feeds it: no limit on the statement.
        timeouts = Timeouts(self._timeouts.lock, 0)
        return StagingWriter(self._address, target, branch_id, timeouts)

    def write(self, handle: StagingWriter, batch: pa.RecordBatch) -> None:
        handle.write(batch)

    def preCommit(self, handle: StagingWriter) -> Committable:
        handle.finish()
        return Committable(
            handle.branch_id,
            {"schema": handle.schema, "staging": handle.name, "rows": handle.rows},
            PAYLOAD_VERSION,
        )

    def discard(self, handle: StagingWriter) -> None:
        handle.discard()

    # -- on the driver ---------------------------------------------------------------------------

    def validate(self, schema: pa.Schema) -> None:
        try:
            target = self._pool.run(lambda c: resolve(c, self._table, self._key, schema))
        except psycopg.Error as error:
            raise ConfigurationError(
                f"PostgresSink: {self.where} cannot be used: {self._address.said(error)}"
            ) from self._address.cause(error)
        held_as = (
            "a prepared transaction"
            if target.can_prepare
            else "an open transaction, since max_prepared_transactions is 0: a decided batch that "
            "is lost with its connection is merged again, and may be refused then"
        )
        logger.info("%s: a merged batch waits for the decision as %s", self.where, held_as)
        self._target = target

    def diagnose(self) -> Iterable[Finding]:
        return diagnose(self._pool, self._address, self._table, upserts=self._key is not None)

    def prepareBatch(
        self, branch_id: BranchId, committables: Sequence[Committable]
    ) -> Sequence[Committable]:
        if not committables:
            return ()
        merge = Merge.of(self._validated(branch_id), self._key, committables)
        held = self._merger(branch_id, merge).prepare()
        if held is not None:
            with self._lock:
                self._held[str(branch_id)] = held
        return (Committable(branch_id, merge.to_payload(), PAYLOAD_VERSION),)

    def commit(self, committable: Committable) -> None:
        merge = Merge.read(committable)
        merger = self._merger(committable.branch_id, merge)
        held = self._take_held(committable.branch_id)
        if held is None or not merger.commit_held(held):
            merger.commit()
        try:
            self._drop(
                merge.schema, merge.staging, Timeouts(_TIDY_LOCK_S, self._timeouts.statement)
            )
        except psycopg.Error as error:
            # Committed all the same; `find_branches` will see what is left.
            logger.debug("%s: staging is left over: %s", self.where, self._address.said(error))

    def abort(self, branch: BranchId | Committable) -> None:
        committable = Committable(branch) if isinstance(branch, BranchId) else branch
        branch_id, payload = committable.branch_id, committable.payload
        try:
            if branch_id.attempt != DRIVER_ATTEMPT:
                schema = str(payload.get("schema") or self._schema())
                self._drop(schema, [staging_name(branch_id)])
                return
            self._end_merge(branch_id)  # first, since it locks the tables
            if payload:
                merge = Merge.read(committable)
                self._drop(merge.schema, merge.staging)
        except psycopg.Error as error:
            raise CommitUnresolvedError(
                f"{self.where}: {branch_id} could not be aborted: {self._address.said(error)}",
                branch_id,
            ) from self._address.cause(error)

    def find_branches(self, owner: Owner) -> Iterable[Committable]:
        table = self._table if self._target is None else self._target.shown
        rows = self._pool.run(lambda c: c.execute(find_standing(owner, table)).fetchall())
        return list(self._ours(owner, rows))

    def close(self) -> None:
        with self._lock:
            held, self._held = self._held, {}
        for connection in held.values():
            connection.close()  # rolls back; a decided one is merged again
        self._pool.close()

    # -- helpers ---------------------------------------------------------------------------------

    def _validated(self, branch_id: BranchId) -> Target:
        if self._target is None:
            raise ProtocolError(f"{branch_id}: validate() comes before the first batch")
        return self._target

    def _merger(self, branch_id: BranchId, merge: Merge) -> Merger:
        return Merger(self._address, self._pool, self._timeouts, branch_id, merge)

    def _take_held(self, branch_id: BranchId) -> PgConnection | None:
        with self._lock:
            return self._held.pop(str(branch_id), None)

    def _end_merge(self, branch_id: BranchId) -> None:
        """Roll the merge back, whoever holds it; one that is committed is not touched."""
        held = self._take_held(branch_id)
        if held is not None:
            roll_back(held)
            self._pool.give(held)

        def end(connection: PgConnection) -> None:
            connection.execute(end_holders(staging_name(branch_id)))
            with contextlib.suppress(psycopg.errors.UndefinedObject):  # never prepared, or ended
                connection.execute(rollback_prepared(str(branch_id)))

        self._pool.run(end)

    def _drop(self, schema: str, names: Sequence[str], timeouts: Timeouts | None = None) -> None:
        def drop(connection: PgConnection) -> None:
            for statement in drop_staging(schema, names):
                try:
                    connection.execute(
                        script(
                            READ_COMMITTED, settings(timeouts or self._timeouts), statement, COMMIT
                        )
                    )
                finally:
                    roll_back(connection)

        self._pool.run(drop)

    def _schema(self) -> str:
        if self._target is not None:
            return self._target.schema
        row = self._pool.run(lambda c: c.execute(find_schema(self._table)).fetchone())
        if row is None:
            raise ConfigurationError(f"{self.where} does not exist: correct table=")
        return str(row[0])

    def _ours(self, owner: Owner, rows: Iterable[tuple[Any, ...]]) -> Iterator[Committable]:
        """In the order in which they must be aborted: a merge locks its staging tables."""
        with self._lock:
            held = [BranchId.from_name(name) for name in self._held]
        merges = {branch_id: None for branch_id in held if branch_id and branch_id.owner == owner}
        staged = []
        for place, schema, name, comment in rows:
            if place == OPEN:
                branch_id = branch_of_session(owner, self.name, name)
            else:
                branch_id = BranchId.from_name(comment or "")
            if branch_id is None or branch_id.owner != owner or branch_id.batch_id is None:
                continue
            if place != STAGED:
                merges[branch_id] = None
            elif staging_name(branch_id) == name:
                staged.append(Committable(branch_id, {"schema": schema, "staging": name}))
        yield from map(Committable, merges)
        yield from staged
