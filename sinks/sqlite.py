"""A table of an SQLite database, with a staging table in the same file.

    write       rows ─► sparkonce_staging_ORDERS, tagged with their branch
    commit      one transaction: staging ─► ORDERS, and a row in sparkonce_commits that proves it
    abort       delete the branch's rows from the staging table

`sparkonce_commits` keeps one row for each branch. `sparkonce_database` holds the id of the file,
which every committable names: another file at the same path, such as one on the empty mount point
of an unmounted disk, proves nothing.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import socket
import sqlite3
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from sparkonce.datasets import Dataset
from sparkonce.errors import (
    CommitRejectedError,
    CommitUnresolvedError,
    ConfigurationError,
    PreparedBranchLostError,
    PrepareRejectedError,
    SinkUnavailableError,
    settle_command,
)
from sparkonce.model import BranchId, Committable, Owner
from sparkonce.sinks.base import Transform
from sparkonce.sinks.capabilities import (
    AbortsDecided,
    ChecksOthers,
    FindsBranches,
    ForgetsProofs,
    NamesDatasets,
    Votes,
)
from sparkonce.sinks.committables import name_used_before
from sparkonce.sinks.payload import Payload
from sparkonce.sinks.rows import RowSink
from sparkonce.sinks.sqlite_tables import (
    BRANCH,
    columns_of,
    folded,
    is_constrained,
    move,
    prepare_staging,
    prepare_target,
    quoted,
)
from sparkonce.storage.local import expanded

if TYPE_CHECKING:
    import pyarrow as pa


@dataclass
class Staging:
    """The handle of a task while it writes."""

    branch_id: BranchId
    rows: int = 0


@dataclass(frozen=True)
class Staged(Payload):
    """What a commit needs in addition to the branch's name.

    Attributes:
        columns: of the staged rows.
        rows: number of rows.
        database: id of the database that has them; None if the sink was never validated.
    """

    columns: tuple[str, ...]
    rows: int
    database: str | None


class _OwnsTable(NamesDatasets, ChecksOthers):
    name: str
    _path: Path
    _table: str

    def dataset(self) -> Dataset:
        return Dataset(f"sqlite://{self._path}", self._table)

    def check_others(self, others: Sequence[object]) -> None:
        mine = (self._path, self._table)
        for other in others:
            if isinstance(other, _OwnsTable) and (other._path, other._table) == mine:  # noqa: SLF001
                with contextlib.closing(sqlite3.connect(self._path)) as db:
                    if is_constrained(db, self._table):
                        raise ConfigurationError(
                            f"the sinks {self.name!r} and {other.name!r} both write into the table "
                            f"{self._table} of {self._path}, whose constraints or triggers would "
                            "see the rows of one of them only after the decision: use one sink"
                        )


class SqliteSink(RowSink[Staging], Votes, AbortsDecided, FindsBranches, ForgetsProofs, _OwnsTable):
    """Appends to a table of an SQLite database; the rows of a Spark task appear together.

    Driver and executors run on one machine, and the database is on its local disk: SQLite's locks
    do not hold on network file systems.

    A table that does not exist is created from the columns of the query, without constraints:
    whole numbers and booleans become INTEGER, floating-point numbers REAL, binaries BLOB, all
    others TEXT. A table that exists needs a column for each column of the query. What SQLite has no
    type for is stored as text: decimals with all their digits, dates, instants with their UTC
    offset; lists, maps and structs as JSON. NaN becomes NULL, as always in SQLite.

    Args:
        path: the database; it is created when it does not exist, and its folder is not.
        table: the table's name.
        name: see `TwoPhaseCommitSink`, also for `select`, `transform` and `writers`; writers=1
            makes the whole batch appear at once.
    """

    kind: ClassVar[str] = "sqlite"
    why_kept: ClassVar[str] = "cannot take rows back: SQLite does not keep what inserted them"

    def __init__(
        self,
        path: str | os.PathLike[str],
        table: str,
        *,
        name: str | None = None,
        select: Sequence[str] | None = None,
        transform: Transform | None = None,
        writers: int | None = None,
    ) -> None:
        super().__init__(name=name, select=select, transform=transform, writers=writers)
        self._path = expanded(path).absolute()
        self._table = table
        self._staging = f"sparkonce_staging_{table}"
        self._columns: tuple[str, ...] = ()
        self._id: str | None = None

    @property
    def target(self) -> str:
        return f"sqlite table {self._path}:{self._table}"

    @contextlib.contextmanager
    def _transaction(self, *, create: bool = False) -> Iterator[sqlite3.Connection]:
        # Only `validate` creates a file: in any other verb, a missing one is a disk that is gone.
        address = f"{self._path.as_uri()}?mode={'rwc' if create else 'rw'}"
        db = sqlite3.connect(address, uri=True, timeout=60, isolation_level=None)
        try:
            # FULL does not sync the folder after it deletes the journal: after a power failure the
            # journal may exist again and roll the commit back.
            db.execute("PRAGMA synchronous = EXTRA")  # SQLite 3.12 or newer
            db.execute("BEGIN IMMEDIATE")
            yield db
            if db.in_transaction:
                db.execute("COMMIT")
        finally:
            db.close()  # rolls back an open transaction

    # -- before any data moves -------------------------------------------------------------------

    def validate(self, schema: pa.Schema) -> None:
        names = [folded(name) for name in schema.names]
        if not names or len({*names, BRANCH}) <= len(names):
            raise ConfigurationError(
                f"SqliteSink: the columns {schema.names} need at least one name, each once and "
                f"none of them {BRANCH}: choose other ones (select=)"
            )
        self._columns = tuple(schema.names)
        try:
            with self._transaction(create=True) as db:
                prepare_target(db, self._table, schema, self.target)
                prepare_staging(db, self._staging, self._columns)
                self._prepare_proofs(db)
        except sqlite3.Error as error:
            if "locked" in str(error):
                raise SinkUnavailableError(f"{self.target}: {error}") from error
            raise ConfigurationError(
                f"SqliteSink: cannot use {self.target} ({error}): its folder must exist and be "
                "writable, and the file must be an SQLite database or absent"
            ) from error

    def _prepare_proofs(self, db: sqlite3.Connection) -> None:
        db.execute("CREATE TABLE IF NOT EXISTS sparkonce_commits (branch TEXT PRIMARY KEY)")
        db.execute("CREATE TABLE IF NOT EXISTS sparkonce_database (id TEXT)")
        self._id = _id_of(db)
        if self._id is None:
            self._id = uuid.uuid4().hex
            db.execute("INSERT INTO sparkonce_database VALUES (?)", [self._id])

    # -- in a Spark task -------------------------------------------------------------------------

    def beginTransaction(self, branch_id: BranchId) -> Staging:
        if self._id is not None and not self._is_here():
            raise PrepareRejectedError(
                f"{self._path} on {socket.gethostname()} is not the database that the driver uses: "
                "SqliteSink needs driver and executors on one machine",
                branch_id,
            )
        return Staging(branch_id)

    def write_rows(self, handle: Staging, rows: Sequence[Mapping[str, Any]]) -> None:
        names = ", ".join(map(quoted, (BRANCH, *self._columns)))
        marks = ", ?" * len(self._columns)
        insert = f"INSERT INTO {quoted(self._staging)} ({names}) VALUES (?{marks})"
        branch = str(handle.branch_id)
        values = [[branch, *(_stored(row[column]) for column in self._columns)] for row in rows]
        with self._transaction() as db:
            db.executemany(insert, values)
        handle.rows += len(rows)

    def preCommit(self, handle: Staging) -> Committable:
        staged = Staged(self._columns, handle.rows, self._id)
        return staged.committable(handle.branch_id, text=f"staged in {self._staging}")

    def discard(self, handle: Staging) -> None:
        with contextlib.suppress(sqlite3.Error):  # a later sweep finds what is left
            self.abort(handle.branch_id)

    # -- in any process --------------------------------------------------------------------------

    def vote(
        self, branch_id: BranchId, committables: Sequence[Committable]
    ) -> Sequence[Committable]:
        """Insert the batch and roll back, where a constraint or a trigger may refuse a row."""
        with self._transaction() as db:
            for committable in committables:
                if _is_committed(db, committable.branch_id):
                    raise name_used_before(self.target, committable.branch_id)
            if committables and is_constrained(db, self._table):
                try:
                    for committable in committables:
                        self._move(db, committable)
                except sqlite3.IntegrityError as error:
                    raise PrepareRejectedError(
                        f"{self.target} does not take the rows of batch {branch_id.batch_id} "
                        f"({error}): change the query, or the table's constraints and triggers",
                        branch_id,
                    ) from error
            db.execute("ROLLBACK")
        return committables

    def commit(self, committable: Committable) -> None:
        branch_id, staged = committable.branch_id, Staged.of(committable)
        branch = str(branch_id)
        with self._transaction() as db:
            self._check_database(db, staged, branch_id)
            if _is_committed(db, branch_id):
                return
            try:
                left = self._move(db, committable)
            except sqlite3.IntegrityError as error:
                raise CommitRejectedError(
                    f"{self.target} refuses rows of the decided {branch} ({error}). Its rows are "
                    f"in {self._staging}. Make room for them and start again, or "
                    f"{settle_command(branch_id)}",
                    branch_id,
                ) from error
            if left != staged.rows:  # neither committed nor staged: raising rolls back
                raise PreparedBranchLostError(
                    f"{self.target}: {left} of {staged.rows} staged rows are left of {branch}",
                    branch_id,
                )
            db.execute("INSERT INTO sparkonce_commits VALUES (?)", [branch])
            self._drop(db, branch_id)

    def abort(self, branch: BranchId | Committable) -> None:
        branch_id = branch.branch_id if isinstance(branch, Committable) else branch
        with self._transaction() as db:
            if self._is_staged(db):
                if isinstance(branch, Committable) and branch.payload:
                    self._check_database(db, Staged.of(branch), branch_id)
                self._drop(db, branch_id)

    def abort_decided(self, committable: Committable) -> None:
        branch_id = committable.branch_id
        with self._transaction() as db:
            self._check_database(db, Staged.of(committable), branch_id)
            if _is_committed(db, branch_id):
                raise CommitRejectedError(
                    f"{branch_id} is committed: its rows are in {self.target}, and a rewrite would "
                    f"duplicate them: {settle_command(branch_id, 'committed')}",
                    branch_id,
                )
            self._drop(db, branch_id)

    def find_branches(self, owner: Owner) -> Iterable[Committable]:
        if not self._path.exists():
            return []
        with self._transaction() as db:
            if not self._is_staged(db):
                return []
            names = db.execute(f"SELECT DISTINCT {BRANCH} FROM {quoted(self._staging)}").fetchall()
        found = (BranchId.from_name(name) for (name,) in names)
        return [Committable(branch) for branch in found if branch and branch.owner == owner]

    def forget_proofs(self, owner: Owner, below: int) -> None:
        with self._transaction() as db:
            if not self._is_staged(db):
                return
            # The prefix ends with a dot, and holds no character that GLOB treats in a special way.
            query = "SELECT branch FROM sparkonce_commits WHERE branch GLOB ?"
            names = [name for (name,) in db.execute(query, [f"{owner.prefix}*"])]
            old = [
                [name]
                for name in names
                if (branch := BranchId.from_name(name))
                and branch.sink == self.name
                and (branch.batch_id or 0) < below
            ]
            db.executemany("DELETE FROM sparkonce_commits WHERE branch = ?", old)

    # -- inside a transaction --------------------------------------------------------------------

    def _move(self, db: sqlite3.Connection, committable: Committable) -> int:
        staged, branch = Staged.of(committable), str(committable.branch_id)
        return move(db, (self._staging, self._table), staged.columns, branch, staged.rows)

    def _drop(self, db: sqlite3.Connection, branch_id: BranchId) -> None:
        db.execute(f"DELETE FROM {quoted(self._staging)} WHERE {BRANCH} = ?", [str(branch_id)])

    def _check_database(self, db: sqlite3.Connection, staged: Staged, branch_id: BranchId) -> None:
        if staged.database is not None and staged.database != _id_of(db):
            raise CommitUnresolvedError(
                f"{self._path} is not the database into which SqliteSink wrote batch "
                f"{branch_id.batch_id}: put that one back, or, if it is permanently lost, "
                f"{settle_command(branch_id)}",
                branch_id,
            )

    def _is_here(self) -> bool:
        if not self._path.exists():
            return False
        with self._transaction() as db:
            return _id_of(db) == self._id

    def _is_staged(self, db: sqlite3.Connection) -> bool:
        """Whether the staging table exists: a recovery may run before any `validate`."""
        return bool(columns_of(db, self._staging))


def _is_committed(db: sqlite3.Connection, branch_id: BranchId) -> bool:
    proof = "SELECT 1 FROM sparkonce_commits WHERE branch = ?"
    return db.execute(proof, [str(branch_id)]).fetchone() is not None


def _id_of(db: sqlite3.Connection) -> str | None:
    if not columns_of(db, "sparkonce_database"):
        return None
    row = db.execute("SELECT id FROM sparkonce_database").fetchone()
    return None if row is None else str(row[0])


def _stored(value: object) -> object:
    if value is None or isinstance(value, int | float | str | bytes):
        return value
    if isinstance(value, Decimal):
        return f"{value:f}"
    return json.dumps(_in_json(value)) if isinstance(value, list | dict) else str(value)


def _in_json(value: object) -> object:
    """What JSON has for it; NaN and the infinities, which JSON does not have, become null."""
    if isinstance(value, list | tuple):
        return [_in_json(item) for item in value]
    if isinstance(value, dict):
        return {key: _in_json(item) for key, item in value.items()}
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value.hex() if isinstance(value, bytes) else _stored(value)
