"""A log in Postgres that is opened while its server is down or starts up."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import psycopg
import pytest

from sparkonce.errors import LogUnavailableError
from sparkonce.txn_log import open_log

Answer = Callable[[socket.socket], None]


def fatal(state: str, text: str) -> Answer:
    """A server that refuses every session with this error."""

    def answer(client: socket.socket) -> None:
        fields = f"SFATAL\0VFATAL\0C{state}\0M{text}\0\0".encode()
        client.sendall(b"E" + struct.pack("!i", len(fields) + 4) + fields)

    return answer


def hang_up(client: socket.socket) -> None:
    """A server that dies before it answers."""
    client.shutdown(socket.SHUT_RDWR)


@contextmanager
def server_that(answer: Answer) -> Iterator[int]:
    """Gives its port. It refuses TLS and then answers to the startup packet."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                return
            with client:
                (length,) = struct.unpack("!i", client.recv(4, socket.MSG_WAITALL))
                client.recv(length - 4, socket.MSG_WAITALL)
                answer(client)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield listener.getsockname()[1]
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()
        listener.close()


@pytest.mark.parametrize(
    "answer",
    [
        fatal("57P03", "the database system is starting up"),
        fatal("57P03", "the database system is shutting down"),
        fatal("57P01", "terminating connection due to administrator command"),
        fatal("53300", "sorry, too many clients already"),
        hang_up,
    ],
)
@pytest.mark.parametrize("create", [True, False])
def test_server_that_takes_no_session_now(answer: Answer, *, create: bool) -> None:
    """An outage of some seconds is no wrong setting: whoever opens the log tries again."""
    with (
        server_that(answer) as port,
        pytest.raises(LogUnavailableError, match="nothing was written"),
    ):
        open_log(f"postgresql://127.0.0.1:{port}/shop?sslmode=disable", create=create)


def test_server_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    def connect(*_: object, **__: object) -> None:
        raise psycopg.errors.ConnectionTimeout("connection timeout expired")

    monkeypatch.setattr(psycopg, "connect", connect)
    with pytest.raises(LogUnavailableError, match="timeout"):
        open_log("postgresql://127.0.0.1/shop")
