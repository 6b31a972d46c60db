"""Handles of running servers, and the local processes that they control."""

from __future__ import annotations

import contextlib
import signal
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from sparkonce.testing.services.errors import ServiceError
from sparkonce.testing.services.process import (
    LOCALHOST,
    POLL_S,
    Command,
    Guard,
    is_port_taken,
    log_tail,
)

REGION = "us-east-1"
ACCESS_KEY = "sparkonce"
SECRET_KEY = "sparkonce-secret"  # noqa: S105  # of throw-away servers on 127.0.0.1


class Runtime(ABC):
    """Where a server runs: a local process or a container. Its data and its port stay the same."""

    @abstractmethod
    def start(self) -> None:
        """Start, and wait until it serves. Does nothing while it runs.

        Raises:
            ServiceError: it did not come up; the message has the end of its log.
        """

    @abstractmethod
    def stop(self) -> None:
        """Shut it down in its own orderly way."""

    @abstractmethod
    def kill(self) -> None:
        """SIGKILL it and all its children."""

    @abstractmethod
    def close(self) -> None:
        """End it for good, and remove temporary data."""


@dataclass(frozen=True)
class LocalPlan:
    """How to run one server as a local process.

    `port` is None where it cannot be looked at from this process.
    """

    name: str
    command: Command
    port: int | None
    is_ready: Callable[[], bool]
    stop_signal: int = signal.SIGTERM
    start_timeout_s: float = 90.0
    before_start: Callable[[], None] = field(default=lambda: None)
    host: str = LOCALHOST


class LocalRuntime(Runtime):
    def __init__(self, plan: LocalPlan, guard: Guard) -> None:
        self._plan = plan
        self._guard = guard
        self._running = False

    @property
    def pid(self) -> int | None:
        return self._guard.pid

    @property
    def log(self) -> Path:
        return self._plan.command.log

    def start(self) -> None:
        if self._running and self._guard.status() is None:
            return
        plan = self._plan
        if plan.port is not None and is_port_taken(plan.port, plan.host):
            raise ServiceError(
                f"{plan.name} cannot start: port {plan.port} on {plan.host} is taken; "
                "stop the program that listens there or choose another port."
            )
        plan.before_start()
        log_start = self.log.stat().st_size if self.log.exists() else 0
        self._guard.start(plan.command)
        self._running = True
        deadline = time.monotonic() + plan.start_timeout_s
        while True:
            is_ready = plan.is_ready()
            status = self._guard.status()
            if is_ready and status is None:  # else another process responded
                return
            if status is not None or time.monotonic() > deadline:
                self.kill()
                what = (
                    f"did not answer within {plan.start_timeout_s:.0f} s"
                    if status is None
                    else f"ended at its start with exit code {status}"
                )
                tail = log_tail(self.log, log_start) or "empty"
                raise ServiceError(f"{plan.name} {what}; the end of its log: {tail}")
            time.sleep(POLL_S)

    def stop(self) -> None:
        self._guard.end(self._plan.stop_signal)
        self._running = False

    def kill(self) -> None:
        self._guard.end()
        self._running = False

    def close(self) -> None:
        self._guard.close()


class Server:
    """A running server: end it and start it again, on the same data and the same port."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime

    def start(self) -> None:
        """Start it, and wait until it serves. Does nothing while it runs.

        Raises:
            ServiceError: it did not come up; the message has the end of its log.
        """
        self.runtime.start()

    def stop(self) -> None:
        """Shut it down in its own orderly way."""
        self.runtime.stop()

    def kill(self) -> None:
        """SIGKILL the server and all its children."""
        self.runtime.kill()

    def close(self) -> None:
        """End it for good, and remove temporary data."""
        self.runtime.close()


class ServerGroup:
    """Running servers. A context manager: they end with its block, or with this process."""

    def __init__(self, servers: Iterable[Server]) -> None:
        self._all = tuple(servers)

    def close(self) -> None:
        """End all servers for good, the first one last, and remove temporary data."""
        with contextlib.ExitStack() as stack:  # close the others even if one fails
            for server in self._all:
                stack.callback(server.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclass(frozen=True)
class KafkaSettings:
    bootstrap_servers: str
    listeners: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class PostgresSettings:
    host: str
    port: int
    user: str = "postgres"
    database: str = "postgres"

    @property
    def dsn(self) -> str:
        return f"postgresql://{self.user}@{self.host}:{self.port}/{self.database}"


@dataclass(frozen=True)
class S3Settings:
    endpoint_url: str
    access_key: str = ACCESS_KEY
    secret_key: str = field(default=SECRET_KEY, repr=False)
    region: str = REGION


class KafkaServer(Server):
    def __init__(self, runtime: Runtime, settings: KafkaSettings) -> None:
        super().__init__(runtime)
        self.settings = settings

    @property
    def bootstrap_servers(self) -> str:
        return self.settings.bootstrap_servers

    @property
    def listeners(self) -> Mapping[str, str]:
        """Addresses of the additional listeners, by name."""
        return self.settings.listeners


class PostgresServer(Server):
    def __init__(self, runtime: Runtime, settings: PostgresSettings) -> None:
        super().__init__(runtime)
        self.settings = settings

    @property
    def dsn(self) -> str:
        """Connection URL of a superuser; it needs no password."""
        return self.settings.dsn


class S3Server(Server):
    """An S3 server without buckets; clients must address it by path, not by host name."""

    def __init__(self, runtime: Runtime, settings: S3Settings) -> None:
        super().__init__(runtime)
        self.settings = settings

    @property
    def endpoint_url(self) -> str:
        return self.settings.endpoint_url

    @property
    def access_key(self) -> str:
        return self.settings.access_key

    @property
    def secret_key(self) -> str:
        return self.settings.secret_key

    @property
    def region(self) -> str:
        return self.settings.region

    @property
    def boto3_settings(self) -> dict[str, Any]:
        """Address and keys by boto3's names, for `boto3.client` and `S3Connection`."""
        return {
            "endpoint_url": self.endpoint_url,
            "region_name": self.region,
            "aws_access_key_id": self.access_key,
            "aws_secret_access_key": self.secret_key,
        }
