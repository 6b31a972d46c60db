"""A sink for a database with prepared transactions, as XA defines them; here Postgres.

    beginTransaction   BEGIN; INSERT the proof
    write              INSERT the rows
    preCommit          PREPARE TRANSACTION 'branch id': it survives this process, and the server
    commit             COMMIT PREPARED: rows and proof become visible in one step
    abort              ROLLBACK PREPARED

The proof is a row under a primary key, written in the same transaction as the rows. Nothing else
shows that a branch which the server no longer knows was committed. `PostgresSink` is faster, and
needs no prepared transactions; this one is short, to start from.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from typing import Any, ClassVar

import psycopg
import pyarrow as pa
from psycopg import errors, sql
from psycopg.conninfo import conninfo_to_dict

from sparkonce.errors import (
    CommitUnresolvedError,
    PreparedBranchLostError,
    PrepareRejectedError,
)
from sparkonce.model import BranchId, Committable, Owner
from sparkonce.sinks import FindsBranches, RowSink

PROOFS = sql.Identifier("prepared_sink_commits")


@dataclass
class Session:
    """A task's open transaction. It ends with its connection: nothing may open a second one."""

    branch_id: BranchId
    connection: psycopg.Connection[Any]
    rows: int = 0


class PreparedSink(RowSink[Session], FindsBranches):
    """Inserts rows into a table of the same column names.

    Args:
        dsn: of the database, whose `max_prepared_transactions` is at least the number of tasks.
        table: name of the table.
        name: the sink's permanent name; default: "prepared".
    """

    kind: ClassVar[str] = "prepared"

    def __init__(self, dsn: str, table: str, *, name: str | None = None) -> None:
        super().__init__(name=name)
        self._dsn = dsn
        self._table = table

    @property
    def target(self) -> str:
        # Without host and port, which may change; a DSN may also hold a password.
        return f"table {self._table} in {conninfo_to_dict(self._dsn).get('dbname')}"

    def validate(self, schema: pa.Schema) -> None:
        with self._connect(autocommit=True) as connection:
            connection.execute(
                sql.SQL("CREATE TABLE IF NOT EXISTS {} (branch text PRIMARY KEY)").format(PROOFS)
            )
            names = sql.SQL(", ").join(map(sql.Identifier, schema.names))
            connection.execute(
                sql.SQL("SELECT {} FROM {} LIMIT 0").format(names, sql.Identifier(self._table))
            )

    def beginTransaction(self, branch_id: BranchId) -> Session:
        connection = self._connect()
        connection.execute(sql.SQL("INSERT INTO {} VALUES (%s)").format(PROOFS), [str(branch_id)])
        return Session(branch_id, connection)

    def write_rows(self, handle: Session, rows: Sequence[Mapping[str, Any]]) -> None:
        if not rows:
            return
        names = list(rows[0])
        insert = sql.SQL("INSERT INTO {} ({}) VALUES ({})").format(
            sql.Identifier(self._table),
            sql.SQL(", ").join(map(sql.Identifier, names)),
            sql.SQL(", ").join(map(sql.Placeholder, names)),
        )
        with handle.connection.cursor() as cursor:
            cursor.executemany(insert, rows)
            handle.rows += cursor.rowcount

    def preCommit(self, handle: Session) -> Committable:
        with closing(handle.connection) as connection:
            # In a transaction that has failed, PREPARE rolls back, and is no error.
            tag = connection.execute(
                sql.SQL("PREPARE TRANSACTION {}").format(str(handle.branch_id))
            ).statusmessage
        if tag != "PREPARE TRANSACTION":
            raise PrepareRejectedError(f"the server answered {tag}", handle.branch_id)
        return Committable(handle.branch_id, rows=handle.rows)

    def discard(self, handle: Session) -> None:
        handle.connection.close()  # the server rolls back

    def commit(self, committable: Committable) -> None:
        branch_id = committable.branch_id
        with self._connect(autocommit=True) as connection:
            try:
                connection.execute(sql.SQL("COMMIT PREPARED {}").format(str(branch_id)))
            except errors.ObjectNotInPrerequisiteState as error:  # another session ends it now
                raise CommitUnresolvedError(f"{branch_id} is busy", branch_id) from error
            except errors.UndefinedObject:
                query = sql.SQL("SELECT 1 FROM {} WHERE branch = %s").format(PROOFS)
                if connection.execute(query, [str(branch_id)]).fetchone() is None:
                    raise PreparedBranchLostError(f"{branch_id} is gone", branch_id) from None

    def abort(self, branch: BranchId | Committable) -> None:
        branch_id = branch.branch_id if isinstance(branch, Committable) else branch
        with self._connect(autocommit=True) as connection, suppress(errors.UndefinedObject):
            connection.execute(sql.SQL("ROLLBACK PREPARED {}").format(str(branch_id)))

    def find_branches(self, owner: Owner) -> Iterator[Committable]:
        with self._connect(autocommit=True) as connection:
            names = connection.execute(
                "SELECT gid FROM pg_prepared_xacts WHERE database = current_database()"
            ).fetchall()
        for (name,) in names:
            branch_id = BranchId.from_name(name)
            if branch_id is not None and branch_id.owner == owner:
                yield Committable(branch_id)

    def _connect(self, *, autocommit: bool = False) -> psycopg.Connection[Any]:
        return psycopg.connect(self._dsn, autocommit=autocommit, connect_timeout=10)
