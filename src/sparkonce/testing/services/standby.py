"""A streaming replica of a local Postgres server, which a test can promote."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Self

import psycopg
from psycopg import sql

from sparkonce.testing.services.postgres import local_postgres
from sparkonce.testing.services.process import Guard, free_port
from sparkonce.testing.services.server import PostgresServer
from sparkonce.testing.services.services import make_root

_RECEIVES = "SELECT count(*) > 0 FROM pg_stat_wal_receiver"


class PostgresPair:
    """A primary and its hot standby. A context manager: the standby ends with its block.

    Args:
        primary: a running local server.
        config: more settings of the standby, as in postgresql.conf.
        version: the primary's major version; default: the newest that is installed.
    """

    def __init__(
        self,
        primary: PostgresServer,
        config: Mapping[str, str] | None = None,
        *,
        version: int | None = None,
    ) -> None:
        self.primary = primary
        self._known = ""
        root = make_root(None)
        guard = Guard(remove=[root])
        with contextlib.ExitStack() as on_error:
            on_error.callback(guard.close)
            folder = root / "standby"
            folder.mkdir()
            self.standby = local_postgres(
                folder, guard, free_port(), config, version=version, copy_of=primary
            )
            self.standby.start()
            on_error.pop_all()

    @property
    def dsn(self) -> str:
        """Connection string that leads to the one of the two that accepts writes."""
        known = [server.settings for server in (self.primary, self.standby)]
        return (
            f"host={','.join(each.host for each in known)} "
            f"port={','.join(str(each.port) for each in known)} "
            f"user={known[0].user} dbname={known[0].database} target_session_attrs=read-write"
        )

    def wait_for_standby(self) -> None:
        """Make each commit on the primary wait until the standby has it."""
        self._change(self.primary, "synchronous_standby_names", "*")

    def cut_off(self) -> None:
        """Wait until the standby has everything from the primary, then cut it off."""
        with psycopg.connect(self.primary.dsn) as connection:
            row = connection.execute("SELECT pg_current_wal_lsn()::text").fetchone()
        reached = "SELECT pg_last_wal_replay_lsn() >= %s::pg_lsn"
        with psycopg.connect(self.standby.dsn, autocommit=True) as connection:
            while connection.execute(reached, row).fetchone() != (True,):
                pass
            (self._known,) = connection.execute("SHOW primary_conninfo").fetchone() or ("",)
            self._change(self.standby, "primary_conninfo", "")
            while connection.execute(_RECEIVES).fetchone() != (False,):
                pass

    def join_again(self) -> None:
        """Let the standby receive from the primary again; return once it does."""
        self._change(self.standby, "primary_conninfo", self._known)
        with psycopg.connect(self.standby.dsn, autocommit=True) as connection:
            while connection.execute(_RECEIVES).fetchone() != (True,):
                pass

    def promote(self) -> None:
        """Make the standby accept writes; return once it does."""
        with psycopg.connect(self.standby.dsn, autocommit=True) as connection:
            connection.execute("SELECT pg_promote()")

    def close(self) -> None:
        self.standby.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @staticmethod
    def _change(server: PostgresServer, setting: str, value: str) -> None:
        with psycopg.connect(server.dsn, autocommit=True) as connection:
            query = sql.SQL("ALTER SYSTEM SET {} = {}")
            connection.execute(query.format(sql.Identifier(setting), sql.Literal(value)))
            connection.execute("SELECT pg_reload_conf()")
