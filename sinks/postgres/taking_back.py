"""Removes committed branches of an append, and proves that only their rows go.

    marker row ─► xmin: the transaction that wrote it, and with it the branch's rows
    rows of the target with this xmin ─► as many as the log says ─► DELETE, and the marker's rows: 0

An update gives a row another xmin, and a restored dump gives it to every row. So the number of rows
shows both. The marker stays: a driver that is still in the middle of its commit finds it.

A look does all of this too, and rolls it back. So it shows what would refuse the removal, before
other sinks have lost rows.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import psycopg
from psycopg import errors as pg
from psycopg import sql

from sparkonce.errors import SinkUnavailableError, TakeBackRefusedError
from sparkonce.model import BranchId, Committable
from sparkonce.once import once
from sparkonce.sinks.capabilities import Delivered, Visible
from sparkonce.sinks.committables import check_all_there
from sparkonce.sinks.postgres.loading.direct import PREPARED_VERSION, Prepared
from sparkonce.sinks.postgres.merging.merge import Merge
from sparkonce.sinks.postgres.server.advice import is_transient, next_step
from sparkonce.sinks.postgres.server.connections import Address, PgConnection, Pool, roll_back
from sparkonce.sinks.postgres.server.identity import Server
from sparkonce.sinks.postgres.server.inserted import (
    count_inserted,
    delete_inserted,
    find_cascades,
    find_markers,
    find_rewriting_triggers,
    mark_taken_back,
)
from sparkonce.sinks.postgres.server.outcome import await_standbys
from sparkonce.sinks.postgres.server.sql import (
    CHECK_CONSTRAINTS_NOW,
    COMMIT,
    MARKER_TABLE,
    TO_WRITE,
    Timeouts,
    require_own_transaction,
    script,
    settings,
)


class Place(NamedTuple):
    """Where branches were committed."""

    schema: str
    table: str
    system: str
    database: str


class Marker(NamedTuple):
    """A marker row; `rows` is 0 once the branch is taken back."""

    transaction: str
    rows: int


@dataclass(frozen=True, slots=True)
class Remover:
    """Finds and removes committed branches.

    Attributes:
        where: the target, for messages.
        address: of the server.
        timeouts: of each transaction.
    """

    where: str
    address: Address
    timeouts: Timeouts

    @property
    def pool(self) -> Pool:
        return once(Pool, self.address)

    def find(self, branches: Sequence[Delivered]) -> list[Visible]:
        """What the target has of each branch; see `TakesBack`."""
        found: dict[BranchId, int] = {}
        with self._asking():
            for place, some in _by_place(branches).items():
                found |= self.pool.run(lambda c, p=place, s=some: self._count(c, p, s))  # type: ignore[misc]
        return [Visible(found[committable.branch_id]) for committable, _ in branches]

    def take_back(self, branches: Sequence[Delivered]) -> None:
        """Remove all branches in one transaction; see `TakesBack`."""
        with self._asking():
            for place, some in _by_place(branches).items():
                self.pool.run(lambda c, p=place, s=some: self._remove(c, p, s))  # type: ignore[misc]

    def _count(
        self, connection: PgConnection, place: Place, branches: Sequence[Delivered]
    ) -> dict[BranchId, int]:
        with self._transaction(connection, place, branches) as left:
            counts: dict[str, int] = {}
            if left:
                transactions = [marker.transaction for marker in left.values()]
                query = count_inserted(place.schema, place.table, transactions)
                counts = dict(connection.execute(query).fetchall())
                self._delete(connection, place, left, sum(counts.values()))
        found = dict.fromkeys((committable.branch_id for committable, _ in branches), 0)
        return found | {id_: counts.get(marker.transaction, 0) for id_, marker in left.items()}

    def _remove(
        self, connection: PgConnection, place: Place, branches: Sequence[Delivered]
    ) -> None:
        with self._transaction(connection, place, branches) as left:
            expected = 0
            for committable, rows in branches:
                if (marker := left.get(committable.branch_id)) is not None:
                    check_all_there(self.where, committable.branch_id, marker.rows, rows)
                    expected += rows
            if left:
                self._delete(connection, place, left, expected)
            if (tag := _within(connection, COMMIT).statusmessage) != "COMMIT":
                raise SinkUnavailableError(f"{self.where}: the server answered {tag} to COMMIT")
        newest = branches[0].committable.branch_id
        await_standbys(connection, self.timeouts, place.schema, newest)

    @contextlib.contextmanager
    def _transaction(
        self, connection: PgConnection, place: Place, branches: Sequence[Delivered]
    ) -> Iterator[dict[BranchId, Marker]]:
        """Lock the markers, and yield those whose rows are there; roll back if not committed."""
        self._check_server(connection, place)
        try:
            connection.execute(script(TO_WRITE, settings(self.timeouts)))
            markers = self._markers(connection, place, branches)
            self._check_others(connection, place)
            yield {branch_id: marker for branch_id, marker in markers.items() if marker.rows}
        finally:
            roll_back(connection)

    def _delete(
        self,
        connection: PgConnection,
        place: Place,
        left: Mapping[BranchId, Marker],
        expected: int,
    ) -> None:
        """Delete the rows; nobody can add one with an old xmin, so their number proves them all."""
        transactions = [marker.transaction for marker in left.values()]
        query = delete_inserted(place.schema, place.table, transactions)
        deleted = _within(connection, query).rowcount
        if deleted != expected:
            raise TakeBackRefusedError(
                f"{self.where} gives back {deleted} of the {expected} rows of {len(left)} "
                f"branches, from {min(map(str, left))} on: another writer has changed or removed "
                "some, or a trigger keeps them"
            )
        connection.execute(CHECK_CONSTRAINTS_NOW)
        marked = _within(connection, mark_taken_back(place.schema, list(map(str, left)))).rowcount
        if marked != len(left):
            raise TakeBackRefusedError(
                f"{self.where}: {marked} of {len(left)} rows of {MARKER_TABLE} could be updated"
            )

    def _markers(
        self, connection: PgConnection, place: Place, branches: Sequence[Delivered]
    ) -> dict[BranchId, Marker]:
        ids = [committable.branch_id for committable, _ in branches]
        rows = connection.execute(find_markers(place.schema, ids)).fetchall()
        found = {branch: Marker(transaction, number) for branch, transaction, number in rows}
        for branch_id in ids:
            if str(branch_id) not in found:
                raise TakeBackRefusedError(
                    f"{self.where}: {branch_id} has no row in {place.schema}.{MARKER_TABLE}, which "
                    "shows the transaction of its rows: somebody has deleted it",
                    branch_id,
                )
        return {branch_id: found[str(branch_id)] for branch_id in ids}

    def _check_server(self, connection: PgConnection, place: Place) -> None:
        if reason := Server.ask(connection).why_not(place.system, place.database):
            raise TakeBackRefusedError(f"{self.where}: {reason}")

    def _check_others(self, connection: PgConnection, place: Place) -> None:
        """Check that only the batch's rows would go."""
        found = connection.execute(find_cascades(place.schema, place.table)).fetchall()
        if found:
            raise TakeBackRefusedError(
                f"{self.where}: the foreign key {found[0][0]} would delete or change other rows "
                "with these (ON DELETE CASCADE, SET NULL or SET DEFAULT): drop it first"
            )
        triggers = connection.execute(find_rewriting_triggers(place.schema, place.table)).fetchall()
        if triggers:
            table, name = triggers[0]
            raise TakeBackRefusedError(
                f"{self.where}: the trigger {name} on INSERT may have updated rows that were there "
                "before, and left out the batch's, so the updated ones would go. If it never does "
                f"that: ALTER TABLE {table} DISABLE TRIGGER {name}, until the rows are removed"
            )

    @contextlib.contextmanager
    def _asking(self) -> Iterator[None]:
        try:
            yield
        except pg.ForeignKeyViolation as error:
            raise TakeBackRefusedError(
                f"{self.where}: {self.address.said(error)} (delete the rows that refer to the "
                "batch's first)"
            ) from self.address.cause(error)
        except psycopg.Error as error:
            said = f"{self.where}: {self.address.said(error)}{next_step(error, self.timeouts)}"
            failure = SinkUnavailableError if is_transient(error) else TakeBackRefusedError
            raise failure(said) from self.address.cause(error)


def _within(connection: PgConnection, query: sql.Composable) -> psycopg.Cursor[tuple[Any, ...]]:
    """Run a statement of the transaction that has locked the markers.

    If that was ended unseen, as behind a pooler, the statement would commit by itself.
    """
    cursor = connection.execute(script(require_own_transaction("it was ended unseen"), query))
    cursor.nextset()
    return cursor


def _by_place(branches: Sequence[Delivered]) -> dict[Place, list[Delivered]]:
    found: dict[Place, list[Delivered]] = {}
    for branch in branches:
        found.setdefault(_place_of(branch.committable), []).append(branch)
    return found


def _place_of(committable: Committable) -> Place:
    """Where an append was committed.

    Raises:
        TakeBackRefusedError: it was no append, or had a dead letter table.
    """
    branch_id = committable.branch_id
    if committable.version == PREPARED_VERSION:
        prepared = Prepared.read(committable)
        if prepared.mode == "append":
            return Place(prepared.schema, prepared.table, prepared.system, prepared.database)
        mode = prepared.mode or "unknown, as older versions did not record it"
        raise TakeBackRefusedError(f"{branch_id}: {_only_appends(mode)}", branch_id)
    merge = Merge.read(committable)
    if merge.mode != "append":
        raise TakeBackRefusedError(f"{branch_id}: {_only_appends(merge.mode)}", branch_id)
    if merge.dead_letter is not None:
        raise TakeBackRefusedError(
            f"{branch_id}: with dead_letter=, the transaction does not show which rows are the "
            "batch's",
            branch_id,
        )
    return Place(merge.schema, merge.table, merge.system, merge.database)


def _only_appends(mode: str) -> str:
    return (
        f"only appended rows can be taken back, and write= was {mode}: Postgres does not keep what "
        "a row was before it was updated or deleted"
    )
