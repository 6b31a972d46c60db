"""Starts servers, and checks which of them can run here."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from functools import partial
from importlib import metadata
from pathlib import Path
from types import MappingProxyType
from typing import Literal, cast, get_args

from sparkonce.testing.services.containers import choose_backend, container_server
from sparkonce.testing.services.errors import ServiceError
from sparkonce.testing.services.java import check_hadoop, ivy_jar, jar_dir, java
from sparkonce.testing.services.kafka import KafkaVersion, local_kafka
from sparkonce.testing.services.postgres import find_binaries, local_postgres, unprivileged_user
from sparkonce.testing.services.process import LOCALHOST, Guard, free_port, is_port_taken
from sparkonce.testing.services.s3 import go, local_s3mock, local_versitygw, versitygw_dir
from sparkonce.testing.services.server import (
    KafkaServer,
    PostgresServer,
    S3Server,
    Server,
    ServerGroup,
)

ServiceKind = Literal["kafka", "postgres", "s3mock", "versitygw"]
CONNECTOR_NEEDS = (4, 2)
KINDS: tuple[ServiceKind, ...] = get_args(ServiceKind)


class Services(ServerGroup):
    """Running servers, by kind."""

    def __init__(self, servers: Mapping[ServiceKind, Server]) -> None:
        super().__init__(servers.values())
        self._servers = dict(servers)
        self.s3: Mapping[str, S3Server] = MappingProxyType(
            {kind: server for kind, server in servers.items() if isinstance(server, S3Server)}
        )
        """The S3 servers by kind, such as ``services.s3["s3mock"]``."""

    def __getitem__(self, kind: ServiceKind) -> Server:
        if kind not in self._servers:
            raise ServiceError(f"{kind} was not started; start_services([{kind!r}]) starts it.")
        return self._servers[kind]

    @property
    def kafka(self) -> KafkaServer:
        return cast("KafkaServer", self["kafka"])

    @property
    def postgres(self) -> PostgresServer:
        return cast("PostgresServer", self["postgres"])


def start_services(
    kinds: Iterable[ServiceKind] = ("kafka", "postgres", "s3mock"),
    *,
    data_dir: Path | None = None,
    ports: Mapping[str, int] | None = None,
    kafka_config: Mapping[str, str] | None = None,
    postgres_config: Mapping[str, str] | None = None,
    postgres_version: int | None = None,
    kafka_version: KafkaVersion = "4.3",
    quick_start: bool = True,
    kafka_listeners: Mapping[str, str] | None = None,
    host: str = LOCALHOST,
) -> Services:
    """Start servers and wait until each of them serves.

    Args:
        kinds: any of "kafka", "postgres", "s3mock", "versitygw".
        data_dir: keeps the data for the next call; default: a temporary folder, removed at the end.
        ports: by kind; the others get free ports. All listen on `host` only.
        kafka_config: more broker settings, as in server.properties.
        postgres_config: more server settings, as in postgresql.conf.
        postgres_version: the major version, one of `postgres_versions()`; default: the newest.
            Local processes only.
        kafka_version: an older one is downloaded at its first use. Local processes only.
        quick_start: False lets a local Kafka's JVM optimise in full, for benchmarks.
        kafka_listeners: more listeners of a local Kafka: the security protocol by name, such as
            ``{"CLIENTS": "SASL_SSL"}``. `kafka_config` has their settings.
        host: the address that local processes listen on, such as a `Network`'s `server_address`.

    Raises:
        ServiceError: a server cannot be started, with the reason. None is left running then.
    """
    wanted = tuple(dict.fromkeys(kinds))
    chosen = _checked_ports(wanted, ports or {}, host)
    if not wanted:
        return Services({})
    is_usual = kafka_version == "4.3" and postgres_version is None and host == LOCALHOST
    if choose_backend() == "docker" and is_usual:
        if kafka_listeners:
            raise ServiceError(
                "kafka_listeners are for a local Kafka only, and this one is a container; "
                "leave them out, or set SPARKONCE_SERVICES=local."
            )
        return _start_containers(wanted, chosen, data_dir, kafka_config, postgres_config)

    makers: Mapping[ServiceKind, Callable[[Path, Guard, int], Server]] = {
        "kafka": lambda folder, guard, port: local_kafka(
            folder,
            guard,
            port,
            kafka_config,
            quick_start=quick_start,
            protocols=kafka_listeners,
            version=kafka_version,
            host=host,
        ),
        "postgres": lambda folder, guard, port: local_postgres(
            folder, guard, port, postgres_config, version=postgres_version, host=host
        ),
        "s3mock": partial(local_s3mock, host=host),
        "versitygw": partial(local_versitygw, host=host),
    }
    root = make_root(data_dir)

    def start(kind: ServiceKind, guard: Guard) -> Server:
        server = makers[kind](root / kind, guard, chosen[kind] or free_port())
        server.start()
        return server

    with contextlib.ExitStack() as on_error, ThreadPoolExecutor(len(KINDS)) as pool:
        starting: dict[ServiceKind, Future[Server]] = {}
        try:
            for kind in wanted:
                guard = Guard(remove=[] if data_dir else [root / kind])
                on_error.callback(guard.close)
                (root / kind).mkdir(exist_ok=True)
                starting[kind] = pool.submit(start, kind, guard)
            wait(starting.values(), return_when=FIRST_EXCEPTION)
            for future in starting.values():
                if future.done():
                    future.result()
        except BaseException:
            # This also ends the other starts, which the pool waits for.
            on_error.close()
            raise
        on_error.pop_all()
    return Services({kind: future.result() for kind, future in starting.items()})


def _checked_ports(kinds: Iterable[str], ports: Mapping[str, int], host: str) -> dict[str, int]:
    """The port of each kind; 0 means any free port."""
    chosen = {**dict.fromkeys(kinds, 0), **ports}
    for kind, port in chosen.items():
        check_kind(kind)
        if port and is_port_taken(port, host):
            raise ServiceError(
                f"Port {port} on {host}, for {kind}, is taken; "
                "stop the program that listens there, or choose another port."
            )
    return chosen


def check_kind(kind: str) -> None:
    """Raise `ServiceError` if there is no such kind of server."""
    if kind not in KINDS:
        raise ServiceError(f"There is no service {kind!r}; choose from {', '.join(KINDS)}.")


def _start_containers(
    kinds: Iterable[ServiceKind],
    ports: Mapping[str, int],
    data_dir: Path | None,
    kafka_config: Mapping[str, str] | None,
    postgres_config: Mapping[str, str] | None,
) -> Services:
    if data_dir is not None:
        raise ServiceError(
            "data_dir keeps the data of local processes only, and these are containers; "
            "leave it out, or set SPARKONCE_SERVICES=local."
        )
    servers: dict[ServiceKind, Server] = {}
    with contextlib.ExitStack() as on_error:
        for kind in kinds:  # one by one: testcontainers makes its reaper without a lock
            port = ports[kind] or free_port()
            servers[kind] = container_server(kind, port, kafka_config, postgres_config)
            on_error.callback(servers[kind].close)
            servers[kind].start()
        on_error.pop_all()
    return Services(servers)


def make_root(data_dir: Path | None) -> Path:
    if data_dir is not None:
        data_dir.mkdir(parents=True, exist_ok=True)
        return data_dir.absolute()
    root = Path(tempfile.mkdtemp(prefix="sparkonce-services-"))
    if os.geteuid() == 0:  # the user that Postgres runs as must be able to enter
        root.chmod(0o711)
    return root


def unavailable() -> dict[str, str]:
    """The kinds that cannot run here, each with the reason in one sentence."""
    try:
        if choose_backend() == "docker":
            return {}
    except ServiceError as error:
        return dict.fromkeys(KINDS, str(error))
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
    """The jars of Spark's Kafka connector, for `spark.jars`.

    Raises:
        ServiceError: the installed PySpark is older than the connector.
    """
    version = metadata.version("pyspark")
    if tuple(map(int, version.split(".")[:2])) < CONNECTOR_NEEDS:
        raise ServiceError(
            "Spark's Kafka connector is downloaded for Spark "
            f"{'.'.join(map(str, CONNECTOR_NEEDS))}, and pyspark {version} is older; install a "
            "newer one."
        )
    return sorted(jar_dir("connector").glob("*.jar"))


def s3a_jars() -> list[Path]:
    """The jars of Hadoop's S3A, for `spark.jars`.

    Raises:
        ServiceError: the installed PySpark has another version of Hadoop.
    """
    check_hadoop("S3A")
    return sorted(jar_dir("s3a").glob("*.jar"))


def s3a_committer_jars() -> list[Path]:
    """The jar with which Spark uses S3A's magic committer, for `spark.jars` with `s3a_jars`."""
    return sorted(jar_dir("committers").glob("*.jar"))


def spark_jdbc_jars() -> list[Path]:
    """The jar of the Postgres JDBC driver, for `spark.jars`."""
    return sorted(jar_dir("jdbc").glob("*.jar"))
