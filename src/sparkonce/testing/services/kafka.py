"""A single-node Kafka (KRaft) as a local process."""

from __future__ import annotations

import base64
import socket
import struct
import uuid
from collections.abc import Mapping
from pathlib import Path

from sparkonce.testing.services.errors import ServiceError
from sparkonce.testing.services.java import JVM_FLAGS, QUICK_START, class_path, java
from sparkonce.testing.services.process import Command, Guard, free_port, log_tail
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
    # After a SIGKILL the controller waits this long before the next registration is let in.
    "broker.session.timeout.ms": "1000",
    "broker.heartbeat.interval.ms": "200",
    "transaction.abort.timed.out.transaction.cleanup.interval.ms": "500",
    "log.cleaner.dedupe.buffer.size": "4194304",  # by default 128 MB of a small heap
}
HEAP = "512m"
METADATA_KEY, METADATA_VERSION = 3, 1


def local_kafka(
    folder: Path,
    guard: Guard,
    port: int,
    config: Mapping[str, str] | None = None,
    *,
    quick_start: bool = True,
    protocols: Mapping[str, str] | None = None,
) -> KafkaServer:
    """Make the data folder if it is new, and give the server, not started yet.

    `protocols` names more listeners, each with its security protocol.
    """
    controller = free_port()
    more = {name: f"127.0.0.1:{free_port()}" for name in protocols or {}}
    known = {"PLAINTEXT": "PLAINTEXT", "CONTROLLER": "PLAINTEXT", **(protocols or {})}
    addresses = {"PLAINTEXT": f"127.0.0.1:{port}", **more}
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
        *(java(), f"-Xmx{HEAP}", *JVM_FLAGS, *([QUICK_START] if quick_start else [])),
        "-Dorg.slf4j.simpleLogger.defaultLogLevel=warn",
        *("-cp", class_path("broker", guard)),
    ]
    if not (folder / "data" / "meta.properties").exists():
        cluster_id = "S" + base64.urlsafe_b64encode(uuid.uuid4().bytes).decode()[1:22]
        tool = ["kafka.tools.StorageTool", "format", "-t", cluster_id, "-c", str(properties)]
        if guard.run(Command([*argv, *tool], log=log)) != 0:
            raise ServiceError(f"Kafka's data folder cannot be made: {log_tail(log)}")
    plan = LocalPlan(
        name="Kafka",
        command=Command([*argv, "kafka.Kafka", str(properties)], log=log),
        port=port,
        is_ready=lambda: answers_metadata(port),
    )
    return KafkaServer(LocalRuntime(plan, guard), KafkaSettings(f"127.0.0.1:{port}", more))


def answers_metadata(port: int) -> bool:
    """Whether a Metadata request names a living broker; an open port alone is too early."""
    request = struct.pack(">hhihi", METADATA_KEY, METADATA_VERSION, 1, -1, 0)
    try:
        with socket.create_connection(("127.0.0.1", port), 0.5) as connection:
            connection.settimeout(2)
            connection.sendall(struct.pack(">i", len(request)) + request)
            with connection.makefile("rb") as stream:
                header = stream.read(12)  # length, correlation id, number of brokers
    except OSError:
        return False
    return len(header) == 12 and struct.unpack(">iii", header)[2] >= 1  # noqa: PLR2004
