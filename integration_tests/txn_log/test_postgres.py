"""The transaction log in Postgres, on a real server."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from urllib.parse import quote

import psycopg
import pytest
from psycopg import sql

from integration_tests.support.open_logs import open_postgres
from integration_tests.support.postgres import roll_back_all, wal_kept_back
from integration_tests.support.proxy import Proxy, holds
from sparkonce.errors import ConfigurationError, LogUnavailableError
from sparkonce.testing import log_process
from sparkonce.testing.log_cases import claim, deliver, record
from sparkonce.testing.log_contract import LogContract
from sparkonce.testing.services import PostgresServer
from sparkonce.txn_log import TransactionLog, open_log
from sparkonce.txn_log.postgres import PostgresLog

ROLE, PASSWORD = "log_owner", "geh:eim/@1"


def schema_of(address: str) -> str:
    return address.rpartition("schema=")[2]


@pytest.fixture
def fresh_log(
    postgres: PostgresServer, fresh_name: Callable[[], str]
) -> Iterator[Callable[[], str]]:
    """Gives the address of a log in a schema of its own."""
    names = []

    def make() -> str:
        names.append(fresh_name())
        return f"{postgres.dsn}?schema={names[-1]}"

    yield make
    with psycopg.connect(postgres.dsn, autocommit=True) as connection:
        for name in names:
            connection.execute(
                sql.SQL("DROP SCHEMA IF EXISTS {} CASCADE").format(sql.Identifier(name))
            )


class TestPostgresLog(LogContract):
    secrets = (quote(PASSWORD, safe=""), PASSWORD)
    server: PostgresServer

    @pytest.fixture
    def address(self, postgres: PostgresServer, fresh_log: Callable[[], str]) -> str:
        postgres.start()
        type(self).server = postgres
        address = fresh_log()
        with psycopg.connect(postgres.dsn, autocommit=True) as connection:
            connection.execute(
                f"DO $$ BEGIN CREATE ROLE {ROLE} LOGIN SUPERUSER;"
                " EXCEPTION WHEN duplicate_object THEN NULL; END $$"
            )
        return address.replace("postgres@", f"{ROLE}:{quote(PASSWORD, safe='')}@")

    open_log = staticmethod(open_postgres)

    def damage(self, address: str, old: str, new: str) -> None:
        schema = sql.Identifier(schema_of(address))
        with psycopg.connect(self.server.dsn, autocommit=True) as connection:
            for table in ("records", "heads"):
                connection.execute(
                    sql.SQL("UPDATE {}.{} SET body = replace(body, %s, %s)").format(
                        schema, sql.Identifier(table)
                    ),
                    (old, new),
                )

    @contextmanager
    def losing_the_answer(self, address: str) -> Iterator[TransactionLog]:
        port = int(self.server.dsn.rpartition(":")[2].partition("/")[0])
        proxy = Proxy(port)
        log = PostgresLog(address.replace(f":{port}/", f":{proxy.port}/"))
        proxy.lose = holds(b"WITH head AS")
        try:
            yield log
        finally:
            log.close()
            proxy.close()
        assert proxy.lost == 1

    @contextmanager
    def out_of_reach(self, address: str) -> Iterator[None]:
        self.server.kill()
        yield
        self.server.start()

    def remove(self, address: str) -> None:
        with psycopg.connect(self.server.dsn, autocommit=True) as connection:
            schema = sql.Identifier(schema_of(address))
            connection.execute(sql.SQL("DROP SCHEMA {} CASCADE").format(schema))

    def stored_bytes(self, address: str) -> int:
        roll_back_all(self.server.dsn)
        with psycopg.connect(self.server.dsn, autocommit=True) as connection:
            schema = sql.Identifier(schema_of(address))
            connection.execute(sql.SQL("VACUUM {}.records").format(schema))
            connection.execute(sql.SQL("VACUUM {}.heads").format(schema))
            rows = connection.execute(
                "SELECT coalesce(sum(pg_total_relation_size(oid)), 0) FROM pg_class"
                " WHERE relnamespace = %s::regnamespace AND relkind = 'r'",
                (schema_of(address),),
            ).fetchall()
        return int(rows[0][0])

    def test_decision_survives_the_servers_death(self, address: str) -> None:
        """synchronous_commit is on for every write, whatever the role has set."""
        name = sql.Identifier(ROLE)
        with psycopg.connect(self.server.dsn, autocommit=True) as connection:
            connection.execute(sql.SQL("ALTER ROLE {} SET synchronous_commit = off").format(name))
        try:
            with wal_kept_back(self.server):
                log = self.open_log(address)
                incarnation = log.begin(claim())
                done = [deliver(log, incarnation, n) for n in range(20)]
                self.server.kill()
                self.server.start()
                assert list(log.history("orders")) == done[::-1]
                log.close()
        finally:
            with psycopg.connect(self.server.dsn, autocommit=True) as connection:
                connection.execute(sql.SQL("ALTER ROLE {} RESET synchronous_commit").format(name))

    def test_kept_connection_that_died(self, log: TransactionLog, address: str) -> None:
        """A server that was restarted meanwhile is connected to again, in the same call."""
        incarnation = log.begin(claim())
        self.server.kill()
        self.server.start()
        deliver(log, incarnation, 0)

    def test_statement_that_waits_too_long(self, log: TransactionLog, address: str) -> None:
        """Somebody holds a lock: `LogUnavailableError`, nothing written, and later it works."""
        incarnation = log.begin(claim())
        with psycopg.connect(self.server.dsn) as holder:
            holder.execute(
                sql.SQL("LOCK {}.heads IN SHARE MODE").format(sql.Identifier(schema_of(address)))
            )
            with pytest.raises(LogUnavailableError, match="timeout"):
                log.decide(record(incarnation, 0))
            holder.rollback()
        assert log.find(record(incarnation, 0).id) is None
        log.decide(record(incarnation, 0))

    def test_standby_is_unavailable(self, log: TransactionLog, address: str) -> None:
        """Where nothing can be written, nothing is decided."""
        incarnation = log.begin(claim())
        assert isinstance(log, PostgresLog)
        log._session.connect().execute("SET default_transaction_read_only = on")
        with pytest.raises(LogUnavailableError, match="read-only"):
            log.decide(record(incarnation, 0))
        log.decide(record(incarnation, 0))

    def test_serializable_server(self, log: TransactionLog, address: str) -> None:
        """A stricter default isolation changes nothing."""
        separator = "&options=" + quote("-c default_transaction_isolation=serializable")
        strict = self.open_log(address + separator)
        deliver(strict, strict.begin(claim()), 0)
        strict.close()

    def test_newer_schema_is_refused(self, log: TransactionLog, address: str) -> None:
        """An older library does not write into tables that it does not know."""
        with psycopg.connect(self.server.dsn, autocommit=True) as connection:
            connection.execute(
                sql.SQL("UPDATE {}.meta SET value = '99' WHERE key = 'version'").format(
                    sql.Identifier(schema_of(address))
                )
            )
        with pytest.raises(ConfigurationError, match="version 99"):
            self.open_log(address)

    def test_log_that_is_not_there_is_not_made(
        self, postgres: PostgresServer, address: str
    ) -> None:
        """Who looks at a log and mistypes its address is told so."""
        with pytest.raises(
            ConfigurationError, match="there is no transaction log at postgresql://"
        ):
            open_log(address, create=False)
        with psycopg.connect(postgres.dsn) as connection:
            found = connection.execute("SELECT to_regnamespace(%s)", (schema_of(address),))
            assert found.fetchall() == [(None,)]
        log = self.open_log(address)
        again = open_log(address, create=False)
        assert again.log_id == log.log_id
        again.close()
        log.close()

    def test_role_without_rights(self, postgres: PostgresServer, address: str) -> None:
        """Says what to create; with a schema of its own the role needs nothing else."""
        poor = address.replace(f"{ROLE}:", "poor:")
        schema = sql.Identifier(schema_of(address))
        with psycopg.connect(postgres.dsn, autocommit=True) as connection:
            connection.execute(
                "DO $$ BEGIN CREATE ROLE poor LOGIN;"
                " EXCEPTION WHEN duplicate_object THEN NULL; END $$"
            )
            with pytest.raises(ConfigurationError, match="CREATE SCHEMA"):
                self.open_log(poor)
            connection.execute(sql.SQL("CREATE SCHEMA {} AUTHORIZATION poor").format(schema))
        log = self.open_log(poor)
        deliver(log, log.begin(claim()), 0)
        log.close()

    @pytest.mark.parametrize("is_owner", [False, True])
    @pytest.mark.parametrize("tables", [["meta", "heads", "records"], ["records"]])
    def test_records_that_row_security_hides(
        self, postgres: PostgresServer, address: str, tables: list[str], *, is_owner: bool
    ) -> None:
        """Nothing is taken for absent: what a hidden decision names would be swept."""
        poor = address.replace(f"{ROLE}:", "poor:")
        schema = sql.Identifier(schema_of(address))
        log = self.open_log(address)
        incarnation = log.begin(claim())
        decided = log.decide(record(incarnation, 0))
        log.close()
        with psycopg.connect(postgres.dsn, autocommit=True) as connection:

            def run(query: str, **parts: sql.Composable) -> None:
                connection.execute(sql.SQL(query).format(schema=schema, **parts))

            run(
                "DO $$ BEGIN CREATE ROLE poor LOGIN;"
                " EXCEPTION WHEN duplicate_object THEN NULL; END $$"
            )
            for what in ("SCHEMA {schema}", "ALL TABLES IN SCHEMA {schema}"):
                run(f"GRANT ALL ON {what} TO poor")
            log = self.open_log(poor)
            assert log.unfinished("orders") == [decided]
            for table in map(sql.Identifier, tables):
                run("ALTER TABLE {schema}.{table} ENABLE ROW LEVEL SECURITY", table=table)
                if is_owner:
                    run("ALTER TABLE {schema}.{table} FORCE ROW LEVEL SECURITY", table=table)
                    run("ALTER TABLE {schema}.{table} OWNER TO poor", table=table)
            for ask in (
                lambda: log.unfinished("orders"),
                lambda: log.find(decided.id),
                lambda: log.history("orders"),
                lambda: log.complete(decided, incarnation.token),
                lambda: log.begin(claim()),
            ):
                with pytest.raises(LogUnavailableError, match="row security may hide.*BYPASSRLS"):
                    ask()
            if "meta" in tables:
                with pytest.raises(LogUnavailableError, match="row security may hide"):
                    self.open_log(poor)
            for table in map(sql.Identifier, tables):
                run("ALTER TABLE {schema}.{table} DISABLE ROW LEVEL SECURITY", table=table)
        log.complete(decided, incarnation.token)
        assert log.unfinished("orders") == []
        log.close()

    @pytest.mark.parametrize("create", [False, True])
    def test_tables_that_came_without_their_rows(
        self, postgres: PostgresServer, address: str, *, create: bool
    ) -> None:
        """After `pg_dump -s` the log has another server's tables: it is neither new nor absent."""
        self.open_log(address).close()
        schema = sql.Identifier(schema_of(address))
        with psycopg.connect(postgres.dsn, autocommit=True) as connection:
            for table in map(sql.Identifier, ("meta", "heads", "records")):
                connection.execute(sql.SQL("TRUNCATE {}.{}").format(schema, table))
        with pytest.raises(ConfigurationError, match=r"without their rows.*pg_dump -n"):
            PostgresLog(address, create=create)

    def test_drivers_that_start_together(self, postgres: PostgresServer, address: str) -> None:
        """The schema is made once, and all get one log id."""
        racers = [self.start(address, log_process.begin, 1) for _ in range(4)]
        for racer in racers:
            racer.answer()
        log = self.open_log(address)
        head = log.head("orders")
        assert head is not None
        assert head.starts == 4
        log.close()


@pytest.mark.parametrize(
    ("url", "told"),
    [
        ("postgresql://u:p%ZZsecret@host/db", "percent-encoded"),
        ("postgresql://host/db?schema=a-b", "schema=a-b"),
    ],
)
def test_url_that_cannot_be_read(url: str, told: str) -> None:
    """The error names the part, and never the password."""
    with pytest.raises(ConfigurationError, match=told) as error:
        open_log(url)
    assert "secret" not in str(error.value)


def test_server_that_is_not_there() -> None:
    with pytest.raises(LogUnavailableError, match="nothing was written") as error:
        open_log("postgresql://u:secret@127.0.0.1:1/db")
    assert "secret" not in str(error.value)
