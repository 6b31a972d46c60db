"""The same servers as containers, through testcontainers, if a Docker engine responds.

The authors have not run this: their machines have no Docker engine. Unit tests check the choice of
backend, every container's settings, and the container's life through a fake of testcontainers.

A container that is killed and started again keeps its file system, so its data stays. Ports are
published on 127.0.0.1 only. testcontainers' reaper removes the containers when this process dies.
"""

from __future__ import annotations

import gc
import os
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from sparkonce.once import once
from sparkonce.testing.services import kafka, postgres, s3
from sparkonce.testing.services.errors import ServiceError
from sparkonce.testing.services.process import POLL_S
from sparkonce.testing.services.server import (
    KafkaServer,
    KafkaSettings,
    PostgresServer,
    PostgresSettings,
    Runtime,
    S3Server,
    S3Settings,
)

KAFKA_IMAGE = "apache/kafka:4.3.1"
POSTGRES_IMAGE = "postgres:18"
S3MOCK_IMAGE = "adobe/s3mock:5.2.0"
VERSITYGW_IMAGE = "versity/versitygw:v1.8.0"
CONTROLLER_PORT = 9093
ENGINE_TIMEOUT_S = 2
STOP_TIMEOUT_S = 10
LOG_TAIL_LINES = 12

Backend = Literal["docker", "local"]


def choose_backend() -> Backend:
    """Docker if an engine responds, else local; `$SPARKONCE_SERVICES` overrides.

    Raises:
        ServiceError: the variable has another value, or wants an engine that does not respond.
    """
    wanted = os.environ.get("SPARKONCE_SERVICES", "")
    if wanted == "local":
        return "local"
    if wanted not in ("", "docker"):
        raise ServiceError(f"SPARKONCE_SERVICES must be docker or local, and it is {wanted!r}.")
    if once(engine_answers):
        return "docker"
    if wanted == "docker":
        raise ServiceError(
            "SPARKONCE_SERVICES is docker, and no Docker engine responds; start one, "
            "or set the variable to local."
        )
    return "local"


def engine_answers() -> bool:
    """Whether a Docker engine responds to a ping."""
    try:
        from testcontainers.core.docker_client import DockerClient  # noqa: PLC0415
    except ImportError:
        return False
    with warnings.catch_warnings():
        # Without an engine, the client leaves its socket open.
        warnings.simplefilter("ignore", ResourceWarning)
        try:
            client = DockerClient(timeout=ENGINE_TIMEOUT_S).client
            client.ping()
        except Exception:  # noqa: BLE001  # any error means that no engine responds
            answers = False
        else:
            answers = True
            client.close()
        gc.collect()
    return answers


@dataclass(frozen=True)
class ContainerPlan:
    """How to run one server as a container."""

    name: str
    image: str
    container_port: int
    port: int
    is_ready: Callable[[], bool]
    environment: Mapping[str, str] = field(default_factory=dict)
    command: Sequence[str] = ()
    entrypoint: Sequence[str] | None = None
    start_timeout_s: float = 120.0


class ContainerRuntime(Runtime):
    """`make` turns the name of an image into a testcontainers `DockerContainer`."""

    def __init__(self, plan: ContainerPlan, make: Callable[[str], Any] | None = None) -> None:
        self._plan = plan
        self._make = make or _docker_container
        self._container: Any = None

    def start(self) -> None:
        plan = self._plan
        if self._status() == "running":
            return
        try:
            if self._container is None:
                self._container = self._new()
                self._container.start()
            else:
                self._container.get_wrapped_container().start()
        except Exception as error:
            raise ServiceError(f"{plan.name}'s container does not start: {error}.") from error
        deadline = time.monotonic() + plan.start_timeout_s
        while not plan.is_ready():
            status = self._status()
            if status == "exited" or time.monotonic() > deadline:
                tail = self._log_tail()
                raise ServiceError(
                    f"{plan.name}'s container does not serve (it is {status}); "
                    f"the end of its log: {tail}"
                )
            time.sleep(POLL_S)

    def stop(self) -> None:
        if self._status() == "running":
            self._container.get_wrapped_container().stop(timeout=STOP_TIMEOUT_S)

    def kill(self) -> None:
        # When the first process of a container dies, the kernel kills all others.
        if self._status() == "running":
            container = self._container.get_wrapped_container()
            container.kill()
            container.wait()

    def close(self) -> None:
        if self._container is not None:
            self._container.stop()
            self._container = None

    def _new(self) -> Any:
        plan = self._plan
        container = self._make(plan.image)
        for key, value in plan.environment.items():
            container.with_env(key, value)
        container.with_command(list(plan.command))
        if plan.entrypoint is not None:
            container.with_kwargs(entrypoint=list(plan.entrypoint))
        # with_bind_ports would publish it on all interfaces.
        container.ports[f"{plan.container_port}/tcp"] = ("127.0.0.1", plan.port)
        return container

    def _status(self) -> str:
        if self._container is None:
            return "not made"
        container = self._container.get_wrapped_container()
        container.reload()
        return str(container.status)

    def _log_tail(self) -> str:
        output: bytes = self._container.get_wrapped_container().logs(tail=LOG_TAIL_LINES)
        lines = output.decode(errors="replace").splitlines()
        return " | ".join(line.strip() for line in lines) or "empty"


def _docker_container(image: str) -> Any:
    from testcontainers.core.container import DockerContainer  # noqa: PLC0415

    return DockerContainer(image)


def kafka_plan(port: int, config: Mapping[str, str] | None = None) -> ContainerPlan:
    settings = {
        **kafka.SETTINGS,
        "listeners": f"PLAINTEXT://:9092,CONTROLLER://:{CONTROLLER_PORT}",
        "advertised.listeners": f"PLAINTEXT://127.0.0.1:{port}",
        "listener.security.protocol.map": "PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT",
        "controller.quorum.voters": f"1@localhost:{CONTROLLER_PORT}",
        "log.dirs": "/tmp/kafka",  # noqa: S108  # inside the container
        **(config or {}),
    }
    environment = {kafka_variable(key): value for key, value in settings.items()}
    return ContainerPlan(
        name="Kafka",
        image=KAFKA_IMAGE,
        container_port=9092,
        port=port,
        environment={**environment, "KAFKA_HEAP_OPTS": f"-Xmx{kafka.HEAP}"},
        is_ready=lambda: kafka.answers_metadata(port),
    )


def kafka_variable(setting: str) -> str:
    """The environment variable of the image for a setting: KAFKA_LOG_DIRS for log.dirs."""
    escaped = setting.replace("_", "__").replace("-", "___").replace(".", "_")
    return f"KAFKA_{escaped.upper()}"


def postgres_plan(port: int, config: Mapping[str, str] | None = None) -> ContainerPlan:
    settings = {
        "max_connections": postgres.SETTINGS["max_connections"],
        "max_prepared_transactions": postgres.SETTINGS["max_prepared_transactions"],
        "shared_buffers": postgres.SETTINGS["shared_buffers"],
        **(config or {}),
    }
    command: list[str] = []
    for key, value in settings.items():
        command += ["-c", f"{key}={value}"]
    dsn = PostgresSettings("127.0.0.1", port).dsn
    return ContainerPlan(
        name="Postgres",
        image=POSTGRES_IMAGE,
        container_port=5432,
        port=port,
        environment={"POSTGRES_HOST_AUTH_METHOD": "trust"},
        command=command,
        is_ready=lambda: postgres.answers_query(dsn),
    )


def s3mock_plan(port: int) -> ContainerPlan:
    settings = S3Settings(f"http://127.0.0.1:{port}")
    return ContainerPlan(
        name="S3Mock",
        image=S3MOCK_IMAGE,
        container_port=9090,
        port=port,
        environment={
            "COM_ADOBE_TESTING_S3MOCK_STORE_REGION": settings.region,
            "COM_ADOBE_TESTING_S3MOCK_STORE_ROOT": "/s3mockroot",
            "COM_ADOBE_TESTING_S3MOCK_STORE_RETAIN_FILES_ON_EXIT": "true",
        },
        is_ready=lambda: s3.answers_http(settings.endpoint_url),
    )


def versitygw_plan(port: int) -> ContainerPlan:
    settings = S3Settings(f"http://127.0.0.1:{port}")
    # The same repair as `s3.repair_uploads`, which cannot reach into a container.
    script = """
    mkdir -p /data
    for stuck in /data/*/.sgwtmp/multipart/*/*.inprogress; do
      upload="${stuck%/*}/$(basename "$stuck" | cut -d. -f1)"
      if [ -e "$stuck" ] && [ ! -e "$upload" ]; then mv "$stuck" "$upload"; fi
    done
    exec versitygw --quiet posix /data
    """
    return ContainerPlan(
        name="versitygw",
        image=VERSITYGW_IMAGE,
        container_port=7070,
        port=port,
        environment={
            "ROOT_ACCESS_KEY": settings.access_key,
            "ROOT_SECRET_KEY": settings.secret_key,
            "VGW_REGION": settings.region,
        },
        entrypoint=("/bin/sh", "-c"),
        command=(script,),
        is_ready=lambda: s3.answers_http(settings.endpoint_url),
    )


def container_server(
    kind: str,
    port: int,
    kafka_config: Mapping[str, str] | None = None,
    postgres_config: Mapping[str, str] | None = None,
) -> KafkaServer | PostgresServer | S3Server:
    """The server of a kind, not started yet."""
    if kind == "kafka":
        runtime = ContainerRuntime(kafka_plan(port, kafka_config))
        return KafkaServer(runtime, KafkaSettings(f"127.0.0.1:{port}"))
    if kind == "postgres":
        runtime = ContainerRuntime(postgres_plan(port, postgres_config))
        return PostgresServer(runtime, PostgresSettings("127.0.0.1", port))
    plan = s3mock_plan(port) if kind == "s3mock" else versitygw_plan(port)
    return S3Server(ContainerRuntime(plan), S3Settings(f"http://127.0.0.1:{port}"))
