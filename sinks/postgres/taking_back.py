"""Removes committed branches of an append, and proves that only their rows go.

    marker row ─► xmin: the transaction that wrote it, and with it the branch's rows
    rows of the target with this xmin ─► as many as the log says ─► DELETE, and the marker's rows: 0

An update gives a row another xmin, and a restored dump gives it to every row. So the number of rows
shows both. The marker stays: a driver that is still in the middle of its commit finds it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import psycopg

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
from sparkonce.sinks.postgres.server.outcome import await_standbys
from sparkonce.sinks.postgres.server.sql import (
    COMMIT,
    MARKER_TABLE,
    TO_WRITE,
    Timeouts,
    count_inserted,
    delete_inserted,
    find_cascades,
    find_markers,
    mark_taken_back,
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
        self._check_server(connection, place)
        try:
            connection.execute(script(TO_WRITE, settings(self.timeouts)))
            markers = self._markers(connection, place, branches)
            self._check_cascades(connection, place)
            there = [marker.transaction for marker in markers.values() if marker.rows]
            query = count_inserted(place.schema, place.table, there)
            counts: dict[str, int] = dict(connection.execute(query).fetchall()) if there else {}
        finally:
            roll_back(connection)
        return {
            branch_id: counts.get(marker.transaction, 0) if marker.rows else 0
            for branch_id, marker in markers.items()
        }

    def _remove(
        self, connection: PgConnection, place: Place, branches: Sequence[Delivered]
    ) -> None:
        self._check_server(connection, place)
        try:
            connection.execute(script(TO_WRITE, settings(self.timeouts)))
            markers = self._markers(connection, place, branches, locked=True)
            self._check_cascades(connection, place)
            left = {branch: marker for branch, marker in markers.items() if marker.rows}
            expected = 0
            for committable, rows in branches:
                if (marker := left.get(committable.branch_id)) is not None:
                    check_all_there(self.where, committable.branch_id, marker.rows, rows)
                    expected += rows
            if left:
                self._delete(connection, place, left, expected)
            if (tag := connection.execute(COMMIT).statusmessage) != "COMMIT":
                raise SinkUnavailableError(f"{self.where}: the server answered {tag} to COMMIT")
        finally:
            roll_back(connection)
        newest = branches[0].committable.branch_id
        await_standbys(connection, self.timeouts, place.schema, newest)

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
        deleted = connection.execute(query).rowcount
        if deleted != expected:
            raise TakeBackRefusedError(
                f"{self.where} has {deleted} of the {expected} rows of {len(left)} branches, from "
                f"{min(map(str, left))} on: another writer has changed or removed some"
            )
        marked = connection.execute(mark_taken_back(place.schema, list(map(str, left)))).rowcount
        if marked != len(left):
            raise TakeBackRefusedError(
                f"{self.where}: {marked} of {len(left)} rows of {MARKER_TABLE} could be updated"
            )

    def _markers(
        self,
        connection: PgConnection,
        place: Place,
        branches: Sequence[Delivered],
        *,
        locked: bool = False,
    ) -> dict[BranchId, Marker]:
        ids = [committable.branch_id for committable, _ in branches]
        rows = connection.execute(find_markers(place.schema, ids, locked=locked)).fetchall()
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

    def _check_cascades(self, connection: PgConnection, place: Place) -> None:
        found = connection.execute(find_cascades(place.schema, place.table)).fetchall()
        if found:
            raise TakeBackRefusedError(
                f"{self.where}: the foreign key {found[0][0]} would delete or change other rows "
                "with these (ON DELETE CASCADE, SET NULL or SET DEFAULT): drop it first"
            )

    @contextlib.contextmanager
    def _asking(self) -> Iterator[None]:
        try:
            yield
        except psycopg.Error as error:
            said = f"{self.where}: {self.address.said(error)}{next_step(error, self.timeouts)}"
            failure = SinkUnavailableError if is_transient(error) else TakeBackRefusedError
            raise failure(said) from self.address.cause(error)


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
