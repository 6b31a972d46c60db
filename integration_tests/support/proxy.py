"""Cuts or spoils the connection between a client and a server at the requests that a test picks.

client ──► Proxy ──► server      lose=holds(b"COMMIT PREPARED"): the server gets the request and
       ◄──  ✘  ◄──               acts on it; the client gets the end of the connection
       ──►  ≠  ──►               spoil=http_request(b"PUT "): one bit of every such body is flipped
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass

Picks = Callable[[bytes], bool]
"""Gets the bytes that a client sends at once, and returns whether they are the request."""

_CHUNK = 1 << 16


@dataclass(frozen=True)
class Swallow:
    """The server never gets the request; the proxy answers it.

    Attributes:
        end: the last bytes of the request.
        answer: the bytes that the client gets.
    """

    end: bytes
    answer: bytes


class Proxy:
    """Forwards bytes to a server on 127.0.0.1.

    Attributes:
        port: the port on which it listens.
        lose: picks the next request whose answer is lost; None again after that.
        swallow: if set, that request is lost too.
        lost: the number of lost answers.
        spoil: picks the HTTP requests in whose body the proxy flips a bit.
        spoiled: the number of bodies in which it did.
    """

    def __init__(self, server_port: int) -> None:
        self._upstream = ("127.0.0.1", server_port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.lose: Picks | None = None
        self.swallow: Swallow | None = None
        self.lost = 0
        self.spoil: Picks | None = None
        self.spoiled = 0
        self._lock = threading.Lock()
        self._sockets: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._threads[0].join()
        self._listener.close()
        for connection in self._sockets:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        for connection in self._sockets:
            connection.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            self._sockets.append(client)
            try:
                server = socket.create_connection(self._upstream)
            except OSError:  # the server is down: refuse the client
                client.shutdown(socket.SHUT_RDWR)
                continue
            self._sockets.append(server)
            losing = threading.Event()
            self._threads += [
                threading.Thread(target=self._requests, args=(client, server, losing)),
                threading.Thread(target=self._answers, args=(server, client, losing)),
            ]
            for thread in self._threads[-2:]:
                thread.start()

    def _requests(
        self, client: socket.socket, server: socket.socket, losing: threading.Event
    ) -> None:
        spoiling = False
        with contextlib.suppress(OSError):
            while data := client.recv(_CHUNK):
                spoiling = spoiling or (self.spoil is not None and self.spoil(data))
                if spoiling and not data.endswith(b"\r\n\r\n"):  # the body has begun
                    data = data[:-1] + bytes([data[-1] ^ 1])
                    self.spoiled += 1
                    spoiling = False
                if self._is_picked(data):
                    losing.set()
                    if self.swallow is not None:
                        while self.swallow.end not in data:
                            data += client.recv(_CHUNK)
                        client.sendall(self.swallow.answer)
                        self.lost += 1
                        break
                server.sendall(data)
        with contextlib.suppress(OSError):
            server.shutdown(socket.SHUT_RDWR)

    def _is_picked(self, data: bytes) -> bool:
        with self._lock:  # once, though several clients may send it
            if self.lose is None or not self.lose(data):
                return False
            self.lose = None
            return True

    def _answers(
        self, server: socket.socket, client: socket.socket, losing: threading.Event
    ) -> None:
        with contextlib.suppress(OSError):
            while data := server.recv(_CHUNK):
                if losing.is_set():
                    if b" 100 " in data.split(b"\r\n", 1)[0]:  # HTTP: the body may come now
                        client.sendall(data)
                        continue
                    self.lost += 1
                    break
                client.sendall(data)
        _hang_up(client, server)


class KafkaProxy(Proxy):
    """Forwards each request after the answer to the one before, as a broker handles them.

    A client does not wait for answers: one read may return several of its requests.
    """

    def _requests(
        self, client: socket.socket, server: socket.socket, losing: threading.Event
    ) -> None:
        with contextlib.suppress(OSError):
            while request := _message(client):
                is_picked = self._is_picked(request)
                server.sendall(request)
                answer = _message(server)
                if is_picked:
                    self.lost += 1
                    break
                client.sendall(answer)
        _hang_up(client, server)

    def _answers(
        self, server: socket.socket, client: socket.socket, losing: threading.Event
    ) -> None:
        """`_requests` forwards the answers."""


def _message(sender: socket.socket) -> bytes:
    """A request or answer of Kafka's protocol, with its length first; empty at the end.

    Raises:
        OSError: the connection ends in the middle of a message.
    """
    message = sender.recv(4, socket.MSG_WAITALL)
    left = int.from_bytes(message, "big")
    while left:
        data = sender.recv(min(left, _CHUNK))
        if not data:
            raise ConnectionResetError
        message += data
        left -= len(data)
    return message


def _hang_up(*ends: socket.socket) -> None:
    for end in ends:
        with contextlib.suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)


def holds(word: bytes) -> Picks:
    """A request that contains `word` anywhere."""
    return lambda data: word in data


def http_request(word: bytes) -> Picks:
    """An HTTP request with `word` in its first line."""

    def picks(data: bytes) -> bool:
        line = data.split(b"\r\n", 1)[0]
        return word in line and line.endswith(b"HTTP/1.1")

    return picks


def kafka_request(api_key: int) -> Picks:
    """A request of Kafka's protocol, as a `KafkaProxy` sees it."""
    return lambda data: data[4:6] == api_key.to_bytes(2, "big")
