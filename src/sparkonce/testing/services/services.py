"""Starts the servers that were asked for, and holds them."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Literal, Self, cast, get_args

from sparkonce.testing.services.errors import ServiceError
from sparkonce.testing.services.java import ivy_jar, jar_dir, java
from sparkonce.testing.services.kafka import local_kafka
from sparkonce.testing.services.postgres import find_binaries, local_postgres, unprivileged_user
from sparkonce.testing.services.process import Guard, free_port, is_port_taken
from sparkonce.testing.services.s3 import go, local_s3mock, local_versitygw, versitygw_dir
from sparkonce.testing.services.server import KafkaServer, PostgresServer, S3Server, Server

ServiceKind = Literal["kafka", "postgres", "s3mock", "versitygw"]
KINDS: tuple[ServiceKind, ...] = get_args(ServiceKind)


class Services:
    """Running servers. A context manager: they end with its block, and at the latest with us."""

    def __init__(self, servers: Mapping[ServiceKind, Server]) -> None:
        self._servers = dict(servers)
        self.s3: Mapping[str, S3Server] = MappingProxyType(
            {kind: server for kind, server in servers.items() if isinstance(server, S3Server)}
        )
        """The S3 servers by kind."""

    def __getitem__(self, kind: ServiceKind) -> Server:
        try:
            return self._servers[kind]
        except KeyError:
            raise ServiceError(
                f"{kind} was not asked for; start_services([{kind!r}]) starts it."
            ) from None

    @property
    def kafka(self) -> KafkaServer:
        return cast("KafkaServer", self["kafka"])

    @property
    def postgres(self) -> PostgresServer:
        return cast("PostgresServer", self["postgres"])

    def close(self) -> None:
        """End all servers for good. Temporary data is removed."""
        with contextlib.ExitStack() as stack:  # one that fails does not keep the others alive
            for server in self._servers.values():
                stack.callback(server.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def start_services(
    kinds: Iterable[ServiceKind] = ("kafka", "postgres", "s3mock"),
    *,
    data_dir: Path | None = None,
    ports: Mapping[str, int] | None = None,
    kafka_config: Mapping[str, str] | None = None,
    postgres_config: Mapping[str, str] | None = None,
) -> Services:
    """Start servers and wait until each of them serves.

    Args:
        kinds: of "kafka", "postgres", "s3mock", "versitygw".
        data_dir: keeps the data, for the next call too; else it is temporary and goes at the end.
        ports: by kind; free ones are taken for the others. All listen on 127.0.0.1 only.
        kafka_config: more broker settings, as in server.properties.
        postgres_config: more server settings, as in postgresql.conf.

    Raises:
        ServiceError: a server is not to be had, with the reason. None is left running then.
    """
    wanted = tuple(dict.fromkeys(kinds))
    ports = ports or {}
    for kind in (*wanted, *ports):
        if kind not in KINDS:
            raise ServiceError(f"There is no service {kind!r}; there are {', '.join(KINDS)}.")
    root = _make_root(data_dir)
    makers: Mapping[ServiceKind, Callable[[Path, Guard, int], Server]] = {
        "kafka": lambda folder, guard, port: local_kafka(folder, guard, port, kafka_config),
        "postgres": lambda folder, guard, port: local_postgres(
            folder, guard, port, postgres_config
        ),
        "s3mock": local_s3mock,
        "versitygw": local_versitygw,
    }

    def start(kind: ServiceKind) -> Server:
        folder = root / kind
        folder.mkdir(exist_ok=True)
        guard = Guard(remove=[] if data_dir else [folder])
        try:
            server = makers[kind](folder, guard, ports.get(kind) or free_port())
            server.start()
        except BaseException:
            guard.close()
            raise
        return server

    for kind in wanted:
        if kind in ports and is_port_taken(ports[kind]):
            raise ServiceError(
                f"Port {ports[kind]} on 127.0.0.1, for {kind}, is taken; "
                "stop what listens there or choose another port."
            )
    with ThreadPoolExecutor(max_workers=len(wanted) or 1) as pool:
        starting = {kind: pool.submit(start, kind) for kind in wanted}
    services = Services(
        {kind: future.result() for kind, future in starting.items() if not future.exception()}
    )
    for future in starting.values():
        if error := future.exception():
            services.close()
            raise error
    return services


def _make_root(data_dir: Path | None) -> Path:
    if data_dir is not None:
        data_dir.mkdir(parents=True, exist_ok=True)
        return data_dir.absolute()
    root = Path(tempfile.mkdtemp(prefix="sparkonce-services-"))
    if os.geteuid() == 0:  # the user that Postgres runs as must get in
        root.chmod(0o711)
    return root


def unavailable() -> dict[str, str]:
    """The kinds that cannot run here, each with the reason in one sentence."""
    checks: Mapping[ServiceKind, tuple[Callable[[], object], ...]] = {
        "kafka": (java, ivy_jar),
        "postgres": (find_binaries, unprivileged_user),
        "s3mock": (java, ivy_jar),
        "versitygw": () if versitygw_dir().exists() else (go,),
    }
    reasons: dict[str, str] = {}
    for kind, needs in checks.items():
        try:
            for need in needs:
                need()
        except ServiceError as error:
            reasons[kind] = str(error)
    return reasons


def spark_kafka_jars() -> list[Path]:
    """The jars of Spark's Kafka connector, for `spark.jars`."""
    return sorted(jar_dir("connector").glob("*.jar"))


def s3a_jars() -> list[Path]:
    """The jars of Hadoop's S3A, for `spark.jars`."""
    return sorted(jar_dir("s3a").glob("*.jar"))
