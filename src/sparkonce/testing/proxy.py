"""A TCP proxy between a sink and its server, which loses or delays requests and answers.

    sink ──► Proxy ──► server        a lost request:  the server never gets it
         ◄──   ✘   ◄──               a lost answer:   the server acts on it, the sink cannot know
         ──►   …   ──►               a late one:      held back until the test lets it go

A *request* is what a client sends on one connection, first of all or after an answer. So the proxy
knows no protocol, and works with TLS.

Only sinks that are made within `in_between` pass it: it takes time, and races would hide in it.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal, Self, TypeAlias

_CHUNK = 1 << 16
_QUIET_S = 0.02
_MOST_QUIET_S = 1.0
_CONNECT_S = 10.0

FaultKind: TypeAlias = Literal["request lost", "answer lost", "request late", "answer late"]
"""What happens to one request. When one is lost, all connections end, as if a network were cut; new
ones work. When one is late, all other connections work on."""


@dataclass(eq=False)
class Fault:
    """One fault of the network.

    Attributes:
        kind: what happens; None if the proxy only counts requests.
        at: which request it happens to; the first one is 1.
        requests: how many requests came while the fault was armed.
        has_happened: whether it has happened.
    """

    kind: FaultKind | None
    at: int
    requests: int = 0
    has_happened: bool = False
    _released: threading.Event = field(default_factory=threading.Event)

    def __str__(self) -> str:
        what, _, how = (self.kind or "no request").partition(" ")
        return f"a {how} {what} ({self.at} of this call)"

    def release(self) -> None:
        """Let a late request or answer go."""
        self._released.set()

    def wait_for_release(self) -> None:
        self.has_happened = True
        self._released.wait()


@dataclass(eq=False)
class _Connection:
    client: socket.socket
    server: socket.socket
    is_asking: bool = False
    fault: Fault | None = None

    def end(self) -> None:
        for side in (self.client, self.server):
            with contextlib.suppress(OSError):
                side.shutdown(socket.SHUT_RDWR)


class Proxy:
    """Forwards every connection to a server.

    Use it as a context, and let the function that makes the sink read `address`, or `host` and
    `port`, each time: they are the proxy's within `in_between`, and otherwise the server's.

    Args:
        port: of the server.
        host: of the server.
        listen: where the proxy listens on 127.0.0.1; 0: any free port.

    Raises:
        OSError: nothing can listen on 127.0.0.1.
    """

    def __init__(self, port: int, host: str = "127.0.0.1", *, listen: int = 0) -> None:
        self._upstream = (host, port)
        self._listener = socket.create_server(("127.0.0.1", listen))
        self._own: tuple[str, int] = self._listener.getsockname()
        self._is_in_between = False
        self._last_data = 0.0
        self._lock = threading.Lock()
        self._fault = Fault(None, 0)
        self._is_away = False
        self._connections: set[_Connection] = set()
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    @property
    def host(self) -> str:
        """The host to connect to now."""
        return (self._own if self._is_in_between else self._upstream)[0]

    @property
    def port(self) -> int:
        """The port to connect to now."""
        return (self._own if self._is_in_between else self._upstream)[1]

    @property
    def address(self) -> str:
        """Host and port to connect to now, as `127.0.0.1:40123`."""
        return f"{self.host}:{self.port}"

    @contextlib.contextmanager
    def in_between(self) -> Iterator[Self]:
        """Sinks that are made in this context pass the proxy."""
        self._is_in_between = True
        try:
            yield self
        finally:
            self._is_in_between = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End all connections, and listen no more."""
        self._fault.release()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._threads[0].join()
        self.cut()
        for thread in self._threads[1:]:
            thread.join()

    def cut(self) -> None:
        """End all connections; new ones work."""
        with self._lock:
            connections = list(self._connections)
        for connection in connections:
            connection.end()

    @contextlib.contextmanager
    def away(self) -> Iterator[None]:
        """End all connections, and every new one at once."""
        self._is_away = True
        self.cut()
        try:
            yield
        finally:
            self._is_away = False

    @contextlib.contextmanager
    def fault(self, kind: FaultKind | None = None, at: int = 0) -> Iterator[Fault]:
        """Let a fault happen to one of the next requests; at the end, a late one is let go.

        What earlier calls still send, such as a goodbye, arrives before.
        """
        fault = Fault(kind, at)
        deadline = time.monotonic() + _MOST_QUIET_S
        while time.monotonic() < min(deadline, self._last_data + _QUIET_S):
            time.sleep(_QUIET_S / 4)
        with self._lock:
            self._fault = fault
        try:
            yield fault
        finally:
            with self._lock:
                self._fault = Fault(None, 0)
            fault.release()

    # -- one thread for each direction of a connection ---------------------------------------------

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:  # closed
                return
            try:
                if self._is_away:
                    raise ConnectionRefusedError
                server = socket.create_connection(self._upstream, timeout=_CONNECT_S)
                server.settimeout(None)
                connection = _Connection(client, server)
            except OSError:
                client.close()
                continue
            for end in (connection.client, connection.server):
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with self._lock:
                self._connections.add(connection)
            requests = threading.Thread(target=self._requests, args=[connection], daemon=True)
            requests.start()
            self._threads = [t for t in self._threads if t.is_alive()] + [requests]

    def _requests(self, connection: _Connection) -> None:
        answers = threading.Thread(target=self._answers, args=[connection], daemon=True)
        answers.start()
        with contextlib.suppress(OSError):
            while data := connection.client.recv(_CHUNK):
                self._last_data = time.monotonic()
                if not self._lets_pass(connection):
                    break
                connection.server.sendall(data)
        connection.end()
        answers.join()
        with self._lock:
            self._connections.discard(connection)
        connection.client.close()
        connection.server.close()

    def _lets_pass(self, connection: _Connection) -> bool:
        """Count a request; False if it is the one to lose."""
        with self._lock:
            if connection.is_asking:
                return True
            connection.is_asking = True
            fault = self._fault
            fault.requests += 1
            if fault.kind is None or fault.requests != fault.at:
                return True
        if fault.kind == "request lost":
            fault.has_happened = True
            self.cut()
            return False
        if fault.kind == "request late":
            fault.wait_for_release()
        else:
            connection.fault = fault
        return True

    def _answers(self, connection: _Connection) -> None:
        with contextlib.suppress(OSError):
            while data := connection.server.recv(_CHUNK):
                fault, connection.fault = connection.fault, None
                if fault is not None and fault.kind == "answer lost":
                    fault.has_happened = True
                    self.cut()
                    break
                if fault is not None:
                    fault.wait_for_release()
                connection.is_asking = False
                connection.client.sendall(data)
        connection.end()
