"""examples/prepared_sink.py on a real server, and sinks with one mistake each: the contract is red.

The mistakes are those of sessions and networks. tests/sinks/test_faulty.py has the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from typing import Any

import psycopg
import pyarrow as pa
import pytest
from examples.prepared_sink import PROOFS, PreparedSink, Session
from psycopg import errors, sql

from integration_tests.support.postgres import commits_hang
from sparkonce.errors import PreparedBranchLostError, SparkOnceError
from sparkonce.model import BranchId, Committable
from sparkonce.sinks.base import AnySink
from sparkonce.testing import Proxy, SinkContract, SinkWorld, checks
from sparkonce.testing.services import PostgresServer
from sparkonce.testing.sink_network import LOST
from sparkonce.testing.sink_world import SCHEMA, Stage

MakeWorld = Callable[..., SinkWorld]
SECRET = "s3cr3t"
"""A password, which this server does not ask for."""


@pytest.fixture
def world_of(postgres: PostgresServer, fresh_name: Callable[[], str]) -> Iterator[MakeWorld]:
    """A world of a sink class, with a database of its own."""
    name = fresh_name()
    with psycopg.connect(postgres.dsn, autocommit=True) as connection:
        connection.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name)))
    direct = psycopg.conninfo.make_conninfo(postgres.dsn, dbname=name)
    proxy = Proxy(int(str(psycopg.conninfo.conninfo_to_dict(direct)["port"])))

    def make(schema: pa.Schema, kind: type[PreparedSink] = PreparedSink) -> SinkWorld:
        columns = "id bigint, name text CHECK (length(name) < 30)"
        with psycopg.connect(direct, autocommit=True) as connection:
            connection.execute(f"CREATE TABLE orders ({columns})")

        def rows() -> list[dict[str, Any]]:
            return [
                dict(zip(SCHEMA.names, row, strict=True))
                for row in checks.read_postgres(direct, "orders")
            ]

        def unfinished() -> list[str]:
            with psycopg.connect(direct) as connection:
                found = connection.execute(
                    "SELECT gid FROM pg_prepared_xacts WHERE database = current_database()"
                )
                return [row[0] for row in found]

        def lose(committable: Committable) -> None:
            with psycopg.connect(direct, autocommit=True) as connection:
                gid = sql.Literal(str(committable.branch_id))
                connection.execute(sql.SQL("ROLLBACK PREPARED {}").format(gid))

        return SinkWorld(
            sink=lambda: kind(
                psycopg.conninfo.make_conninfo(direct, port=proxy.port, password=SECRET), "orders"
            ),
            visible=rows,
            unfinished=unfinished,
            lose=lose,
            proxy=proxy,
            stalled=lambda: commits_hang(direct),
            secrets=[SECRET],
            refused=pa.record_batch([[1], ["n" * 30]], schema=SCHEMA),
        )

    yield make
    proxy.close()
    # Names of prepared transactions are the server's, and keep the database.
    with psycopg.connect(direct, autocommit=True) as connection:
        found = "SELECT gid FROM pg_prepared_xacts WHERE database = current_database()"
        for (gid,) in connection.execute(found).fetchall():
            connection.execute(sql.SQL("ROLLBACK PREPARED {}").format(sql.Literal(gid)))
    with psycopg.connect(postgres.dsn, autocommit=True) as connection:
        drop = sql.SQL("DROP DATABASE {} WITH (FORCE)").format(sql.Identifier(name))
        connection.execute(drop)


class TestPreparedSink(SinkContract):
    race_rounds = 40
    many_branches = 50  # each is a prepared transaction, and the server allows 64

    @pytest.fixture
    def make_world(self, world_of: MakeWorld) -> MakeWorld:
        return world_of

    @pytest.mark.parametrize("name", [])
    def test_rows_of_type(self, name: str) -> None:
        """Its table has two columns; PostgresSink shows the types."""


class TrustsSilence(PreparedSink):
    """Takes a broken connection for success."""

    def commit(self, committable: Committable) -> None:
        with suppress(psycopg.OperationalError):
            super().commit(committable)


class AbortsInSilence(PreparedSink):
    def abort(self, branch: BranchId | Committable) -> None:
        with suppress(psycopg.OperationalError):
            super().abort(branch)


class SilenceIsLoss(PreparedSink):
    """Takes a broken connection for a branch that is gone."""

    def commit(self, committable: Committable) -> None:
        try:
            super().commit(committable)
        except psycopg.OperationalError as error:
            raise PreparedBranchLostError("gone", committable.branch_id) from error


class PreparesInSilence(PreparedSink):
    def preCommit(self, handle: Session) -> Committable:
        with suppress(psycopg.OperationalError):
            return super().preCommit(handle)
        return Committable(handle.branch_id)


class Reconnects(PreparedSink):
    """Its client opens a new session, and a new transaction, when the old one ends."""

    def write_rows(self, handle: Session, rows: Sequence[Mapping[str, Any]]) -> None:
        try:
            super().write_rows(handle, rows)
        except psycopg.OperationalError:
            handle.connection = self.beginTransaction(handle.branch_id).connection
            super().write_rows(handle, rows)


class ReconnectsWithoutTransaction(PreparedSink):
    """As clients do that know nothing of transactions: the rest of the rows is visible at once."""

    def write_rows(self, handle: Session, rows: Sequence[Mapping[str, Any]]) -> None:
        try:
            super().write_rows(handle, rows)
        except psycopg.OperationalError:
            handle.connection = self._connect(autocommit=True)
            super().write_rows(handle, rows)


class BusyIsLost(PreparedSink):
    """Takes a branch that another session ends at this moment for a lost one."""

    def commit(self, committable: Committable) -> None:
        branch_id = committable.branch_id
        with self._connect(autocommit=True) as connection:
            try:
                connection.execute(sql.SQL("COMMIT PREPARED {}").format(str(branch_id)))
            except (errors.ObjectNotInPrerequisiteState, errors.UndefinedObject) as error:
                query = sql.SQL("SELECT 1 FROM {} WHERE branch = %s").format(PROOFS)
                if connection.execute(query, [str(branch_id)]).fetchone() is None:
                    raise PreparedBranchLostError("gone", branch_id) from error


class BusyIsGone(PreparedSink):
    """Its abort takes a branch that another session ends at this moment for one that is gone."""

    def abort(self, branch: BranchId | Committable) -> None:
        with suppress(errors.ObjectNotInPrerequisiteState):
            super().abort(branch)


class CutsText(PreparedSink):
    """As MySQL does without its strict mode."""

    def write_rows(self, handle: Session, rows: Sequence[Mapping[str, Any]]) -> None:
        super().write_rows(handle, [{**row, "name": (row["name"] or "")[:29]} for row in rows])


class IgnoresRefusedRows(PreparedSink):
    """As `INSERT IGNORE` does; and it does not count."""

    def write_rows(self, handle: Session, rows: Sequence[Mapping[str, Any]]) -> None:
        super().write_rows(handle, [row for row in rows if len(row["name"] or "") < 30])

    def preCommit(self, handle: Session) -> Committable:
        return Committable(super().preCommit(handle).branch_id)


def _in_commit(contract: SinkContract, stage: Stage, sink: AnySink) -> None:
    for kind in LOST:
        contract.test_network_fails_in_commit(stage, kind, is_repeated=False)


def _in_repeated_commit(contract: SinkContract, stage: Stage, sink: AnySink) -> None:
    for kind in LOST:
        contract.test_network_fails_in_commit(stage, kind, is_repeated=True)


def _in_abort(contract: SinkContract, stage: Stage, sink: AnySink) -> None:
    contract.test_network_fails_in_abort(stage, "request lost")


def _in_task(contract: SinkContract, stage: Stage, sink: AnySink) -> None:
    contract.test_network_fails_in_a_task(stage, "request lost")


def _abort_in_a_stall(contract: SinkContract, stage: Stage, sink: AnySink) -> None:
    contract.test_abort_while_a_commit_hangs(stage, sink, "abort")


def _between_writes(contract: SinkContract, stage: Stage, sink: AnySink) -> None:
    contract.test_connections_end_between_two_writes(stage, "commit")


@pytest.mark.parametrize(
    ("kind", "test"),
    [
        (TrustsSilence, _in_commit),
        (SilenceIsLoss, _in_commit),
        (SilenceIsLoss, _in_repeated_commit),
        (AbortsInSilence, _in_abort),
        (PreparesInSilence, _in_task),
        (Reconnects, _between_writes),
        (ReconnectsWithoutTransaction, _between_writes),
        (BusyIsLost, SinkContract.test_commits_race),
        (BusyIsLost, SinkContract.test_commit_while_another_one_hangs),
        (BusyIsGone, _abort_in_a_stall),
        (CutsText, SinkContract.test_refused_rows),
        (IgnoresRefusedRows, SinkContract.test_refused_rows),
    ],
)
def test_mistake_is_caught(
    world_of: MakeWorld,
    kind: type[PreparedSink],
    test: Callable[[SinkContract, Stage, AnySink], None],
) -> None:
    with closing(Stage(world_of(SCHEMA, kind))) as stage:
        with pytest.raises((AssertionError, SparkOnceError)) as said:
            test(SinkContract(), stage, stage.sink())
    print(said.value)
