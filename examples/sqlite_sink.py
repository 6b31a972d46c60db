"""A sink that prepares and commits: SQLite, with a staging table next to the target.

    write       rows ─► sparkonce_ORDERS, tagged with their branch
    commit      one transaction: staging ─► ORDERS, and a row in sparkonce_commits that proves it
    abort       delete the branch's rows from the staging table

The database is one file, so driver and executors run on one machine. The target must exist. Values
of types that SQLite does not have become text, and NaN becomes NULL, as always in SQLite.
`sparkonce_commits` keeps one row for each branch.
"""

from __future__ import annotations

import contextlib
import json
import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pyarrow as pa

from sparkonce.errors import ConfigurationError, PreparedBranchLostError
from sparkonce.model import BranchId, Committable, Owner
from sparkonce.sinks import FindsBranches, Payload, RowSink


@dataclass
class Staging:
    """The handle of a task while it writes."""

    branch_id: BranchId
    rows: int = 0


@dataclass(frozen=True)
class Staged(Payload):
    """What a commit needs in addition to the branch's name."""

    columns: tuple[str, ...]
    rows: int


class SqliteSink(RowSink[Staging], FindsBranches):
    """Writes into a table of an SQLite database; the rows of a Spark task appear together."""

    kind: ClassVar[str] = "sqlite"

    def __init__(self, path: str | Path, table: str, *, name: str | None = None) -> None:
        super().__init__(name=name)
        self._path = Path(path).absolute()
        self._table = table
        self._staging = f"sparkonce_{table}"
        self._columns: tuple[str, ...] = ()

    @property
    def target(self) -> str:
        return f"sqlite table {self._path}:{self._table}"

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        db = sqlite3.connect(self._path, timeout=60, isolation_level=None)
        try:
            # FULL does not sync the folder after it deletes the journal: after a power failure the
            # journal may exist again and roll the commit back.
            db.execute("PRAGMA synchronous = EXTRA")  # SQLite 3.12 or newer
            db.execute("BEGIN IMMEDIATE")
            yield db
            db.execute("COMMIT")
        finally:
            db.close()  # rolls back an open transaction

    # -- before any data moves -------------------------------------------------------------------

    def validate(self, schema: pa.Schema) -> None:
        self._columns = tuple(schema.names)
        with self._transaction() as db:
            existing = {row[1] for row in db.execute(f'PRAGMA table_info("{self._table}")')}
            if missing := set(schema.names) - existing:
                raise ConfigurationError(
                    f"{self.target} has no column {sorted(missing)}: create it, or use select="
                )
            db.execute(
                f'CREATE TABLE IF NOT EXISTS "{self._staging}" AS '
                f"SELECT '' AS sparkonce_branch, * FROM \"{self._table}\" WHERE false"
            )
            staged = {row[1] for row in db.execute(f'PRAGMA table_info("{self._staging}")')}
            for column in sorted(set(schema.names) - staged):  # new in the target
                db.execute(f'ALTER TABLE "{self._staging}" ADD COLUMN "{column}"')
            db.execute("CREATE TABLE IF NOT EXISTS sparkonce_commits (branch TEXT PRIMARY KEY)")

    # -- in a Spark task -------------------------------------------------------------------------

    def beginTransaction(self, branch_id: BranchId) -> Staging:
        return Staging(branch_id)

    def write_rows(self, handle: Staging, rows: Sequence[Mapping[str, Any]]) -> None:
        names = "".join(f', "{column}"' for column in self._columns)
        marks = ", ?" * len(self._columns)
        insert = f'INSERT INTO "{self._staging}" (sparkonce_branch{names}) VALUES (?{marks})'
        branch = str(handle.branch_id)
        values = [[branch, *(_stored(row[column]) for column in self._columns)] for row in rows]
        with self._transaction() as db:
            db.executemany(insert, values)
        handle.rows += len(rows)

    def preCommit(self, handle: Staging) -> Committable:
        return Staged(self._columns, handle.rows).committable(handle.branch_id)

    def discard(self, handle: Staging) -> None:
        self.abort(handle.branch_id)

    # -- in any process --------------------------------------------------------------------------

    def commit(self, committable: Committable) -> None:
        branch, staged = str(committable.branch_id), Staged.of(committable)
        columns = ", ".join(f'"{column}"' for column in staged.columns)
        with self._transaction() as db:
            proof = "SELECT 1 FROM sparkonce_commits WHERE branch = ?"
            if db.execute(proof, [branch]).fetchone():
                return
            moved = db.execute(
                f'INSERT INTO "{self._table}" ({columns}) '
                f'SELECT {columns} FROM "{self._staging}" WHERE sparkonce_branch = ?',
                [branch],
            ).rowcount
            if moved != staged.rows:  # neither committed nor staged: raising rolls back
                raise PreparedBranchLostError(
                    f"{self.target}: {moved} of {staged.rows} staged rows are left of {branch}",
                    committable.branch_id,
                )
            db.execute("INSERT INTO sparkonce_commits VALUES (?)", [branch])
            db.execute(f'DELETE FROM "{self._staging}" WHERE sparkonce_branch = ?', [branch])

    def abort(self, branch: BranchId | Committable) -> None:
        branch_id = branch.branch_id if isinstance(branch, Committable) else branch
        with self._transaction() as db:
            if self._is_staged(db):
                db.execute(
                    f'DELETE FROM "{self._staging}" WHERE sparkonce_branch = ?', [str(branch_id)]
                )

    def find_branches(self, owner: Owner) -> Iterable[Committable]:
        with self._transaction() as db:
            if not self._is_staged(db):
                return []
            names = db.execute(
                f'SELECT DISTINCT sparkonce_branch FROM "{self._staging}"'
            ).fetchall()
        found = (BranchId.from_name(name) for (name,) in names)
        return [Committable(branch) for branch in found if branch and branch.owner == owner]

    def _is_staged(self, db: sqlite3.Connection) -> bool:
        """Whether the staging table exists: a recovery may run before any `validate`."""
        table = "SELECT 1 FROM sqlite_master WHERE name = ?"
        return db.execute(table, [self._staging]).fetchone() is not None


def _stored(value: object) -> object:
    if value is None or isinstance(value, int | float | str | bytes):
        return value
    return json.dumps(value) if isinstance(value, list | dict) else str(value)
