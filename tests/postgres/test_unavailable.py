"""`validate` tells a server that cannot be used now from settings that cannot work."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Iterator

import psycopg
import pyarrow as pa
import pytest
from psycopg import errors as pg

from sparkonce.errors import ConfigurationError, SinkUnavailableError
from sparkonce.sinks import PostgresSink
from sparkonce.sinks.postgres.server.advice import is_transient

SCHEMA = pa.schema([("id", pa.int64())])
SECRET = "pass-word-9"


class Refusing:
    """A server that answers each start of a session with one error, or never."""

    def __init__(self, code: str | None, message: str = "") -> None:
        self._listening = socket.create_server(("127.0.0.1", 0))
        self._answer = None if code is None else _error(code, message)
        self._open: list[socket.socket] = []
        threading.Thread(target=self._serve, daemon=True).start()

    def sink(self, options: str = "") -> PostgresSink:
        port = self._listening.getsockname()[1]
        plain = "sslmode=disable gssencmode=disable"
        return PostgresSink(
            f"host=127.0.0.1 port={port} dbname=shop user=me password={SECRET} {plain} {options}",
            table="orders",
        )

    def _serve(self) -> None:
        while True:
            try:
                client, _ = self._listening.accept()
            except OSError:
                return
            self._open.append(client)
            if self._answer is not None:
                client.recv(4096)
                client.sendall(self._answer)
                client.close()

    def close(self) -> None:
        self._listening.close()
        for client in self._open:
            client.close()


def _error(code: str, message: str) -> bytes:
    fields = {"S": "FATAL", "V": "FATAL", "C": code, "M": message}
    body = b"".join(f"{key}{value}\0".encode() for key, value in fields.items()) + b"\0"
    return b"E" + struct.pack("!I", len(body) + 4) + body


@pytest.fixture
def servers() -> Iterator[list[Refusing]]:
    made: list[Refusing] = []
    yield made
    for server in made:
        server.close()


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("57P03", "the database system is starting up"),
        ("57P03", "the database system is shutting down"),
        ("57P03", "the database system is not yet accepting connections"),
        ("53300", "sorry, too many clients already"),
        ("53300", 'too many connections for role "me"'),
        ("53300", "remaining connection slots are reserved for roles with the SUPERUSER attribute"),
    ],
)
def test_server_that_takes_no_session_now(servers: list[Refusing], code: str, message: str) -> None:
    servers.append(server := Refusing(code, message))
    with pytest.raises(SinkUnavailableError, match="is unavailable now") as caught:
        server.sink().validate(SCHEMA)
    assert message in str(caught.value)
    assert SECRET not in f"{caught.value} {caught.value.__cause__}"


def test_server_that_does_not_answer(servers: list[Refusing]) -> None:
    servers.append(server := Refusing(None))
    with pytest.raises(SinkUnavailableError, match="timeout"):
        server.sink("connect_timeout=2").validate(SCHEMA)


def test_server_that_does_not_listen() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    sink = PostgresSink(f"postgresql://me:{SECRET}@127.0.0.1:{port}/shop", table="orders")
    with pytest.raises(SinkUnavailableError, match=f"127.0.0.1:{port} is unavailable") as caught:
        sink.validate(SCHEMA)
    assert SECRET not in f"{caught.value} {caught.value.__cause__}"


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("28P01", 'password authentication failed for user "me"'),
        ("3D000", 'database "shop" does not exist'),
        ("28000", 'no pg_hba.conf entry for host "127.0.0.1"'),
    ],
)
def test_setting_that_cannot_work(servers: list[Refusing], code: str, message: str) -> None:
    servers.append(server := Refusing(code, message))
    with pytest.raises(ConfigurationError, match="cannot be used"):
        server.sink().validate(SCHEMA)


@pytest.mark.parametrize(
    ("error", "is_one"),
    [
        (pg.AdminShutdown("terminating connection due to administrator command"), True),
        (pg.CannotConnectNow("the database system is starting up"), True),
        (pg.QueryCanceled("canceling statement due to statement timeout"), True),
        (pg.LockNotAvailable("canceling statement due to lock timeout"), True),
        (pg.ConnectionTimeout("connection timeout expired"), True),
        (psycopg.OperationalError("server closed the connection unexpectedly"), True),
        (pg.InsufficientPrivilege("permission denied"), False),
        (pg.UndefinedTable("no such table"), False),
        (psycopg.OperationalError('password authentication failed for user "me"'), False),
    ],
)
def test_what_another_try_may_not_meet(error: psycopg.Error, is_one: bool) -> None:
    assert is_transient(error) is is_one
