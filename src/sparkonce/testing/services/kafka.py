"""One Kafka node (KRaft) as a local process: a whole cluster, or one node of several."""

from __future__ import annotations

import base64
import socket
import struct
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

from sparkonce.testing.services.errors import ServiceError
from sparkonce.testing.services.java import JVM_FLAGS, QUICK_START, class_path, java
from sparkonce.testing.services.process import (
    LOCALHOST,
    Command,
    Guard,
    free_port,
    is_port_taken,
    log_tail,
)
from sparkonce.testing.services.server import KafkaServer, KafkaSettings, LocalPlan, LocalRuntime

SETTINGS: Mapping[str, str] = {
    "process.roles": "broker,controller",
    "node.id": "1",
    "controller.listener.names": "CONTROLLER",
    "inter.broker.listener.name": "PLAINTEXT",
    "num.partitions": "1",
    "offsets.topic.num.partitions": "3",
    "offsets.topic.replication.factor": "1",
    "transaction.state.log.num.partitions": "3",
    "transaction.state.log.replication.factor": "1",
    "transaction.state.log.min.isr": "1",
    "group.initial.rebalance.delay.ms": "0",
    # After a SIGKILL the controller refuses the broker's next registration for this long.
    "broker.session.timeout.ms": "1000",
    "broker.heartbeat.interval.ms": "200",
    "transaction.abort.timed.out.transaction.cleanup.interval.ms": "500",
    "log.cleaner.dedupe.buffer.size": "4194304",  # by default 128 MB of a small heap
}
HEAP = "512m"
KafkaVersion = Literal["4.3", "3.9"]
JARS: Mapping[KafkaVersion, str] = {"4.3": "broker", "3.9": "broker-3.9"}
METADATA_KEY, METADATA_VERSION = 3, 1


def local_kafka(
    folder: Path,
    guard: Guard,
    port: int,
    config: Mapping[str, str] | None = None,
    *,
    quick_start: bool = True,
    protocols: Mapping[str, str] | None = None,
    version: KafkaVersion = "4.3",
    format_flags: Sequence[str] = (),
    heap: str = HEAP,
    host: str = LOCALHOST,
) -> KafkaServer:
    """Make the data folder if it is new, and return the server, not started yet.

    `protocols` names more listeners, each with its security protocol. `format_flags` are arguments
    of `kafka-storage.sh format`; by default the folder gets a new cluster id.
    """
    controller = free_port()
    more = {name: f"{host}:{free_port()}" for name in protocols or {}}
    known = {"PLAINTEXT": "PLAINTEXT", "CONTROLLER": "PLAINTEXT", **(protocols or {})}
    addresses = {"PLAINTEXT": f"{host}:{port}", **more}
    listeners = ",".join(f"{name}://{address}" for name, address in addresses.items())
    settings = {
        **SETTINGS,
        "listeners": f"{listeners},CONTROLLER://127.0.0.1:{controller}",
        "advertised.listeners": listeners,
        "listener.security.protocol.map": ",".join(f"{n}:{p}" for n, p in known.items()),
        "controller.quorum.voters": f"1@127.0.0.1:{controller}",
        "log.dirs": str(folder / "data"),
        **(config or {}),
    }
    properties = folder / "server.properties"
    properties.write_text("".join(f"{key}={value}\n" for key, value in settings.items()))
    log = folder / "kafka.log"
    argv = [
        *(java(), f"-Xmx{heap}", *JVM_FLAGS, *([QUICK_START] if quick_start else [])),
        "-Dorg.slf4j.simpleLogger.defaultLogLevel=warn",
        *("-cp", class_path(JARS[version], guard)),
    ]
    if not (folder / "data" / "meta.properties").exists():
        flags = format_flags or ["-t", new_cluster_id()]
        tool = ["kafka.tools.StorageTool", "format", *flags, "-c", str(properties)]
        if guard.run(Command([*argv, *tool], log=log)) != 0:
            raise ServiceError(f"Kafka's data folder cannot be made: {log_tail(log)}")
    is_ready = is_port_taken if settings["process.roles"] == "controller" else answers_metadata
    plan = LocalPlan(
        name="Kafka",
        command=Command([*argv, "kafka.Kafka", str(properties)], log=log),
        port=port,
        is_ready=lambda: is_ready(port, host),
        host=host,
    )
    return KafkaServer(LocalRuntime(plan, guard), KafkaSettings(f"{host}:{port}", more))


def new_cluster_id() -> str:
    return "S" + base64.urlsafe_b64encode(uuid.uuid4().bytes).decode()[1:22]


def answers_metadata(port: int, host: str = LOCALHOST) -> bool:
    """Whether a Metadata request names a living broker; an open port does not prove that."""
    request = struct.pack(">hhihi", METADATA_KEY, METADATA_VERSION, 1, -1, 0)
    try:
        with socket.create_connection((host, port), 0.5) as connection:
            connection.settimeout(2)
            connection.sendall(struct.pack(">i", len(request)) + request)
            with connection.makefile("rb") as stream:
                header = stream.read(12)  # length, correlation id, number of brokers
    except OSError:
        return False
    return len(header) == 12 and struct.unpack(">iii", header)[2] >= 1  # noqa: PLR2004
