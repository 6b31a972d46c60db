"""Three brokers and their controller as local processes, each of which can be killed by itself."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from sparkonce.testing.services.kafka import KafkaVersion, local_kafka, new_cluster_id
from sparkonce.testing.services.process import Guard, free_port
from sparkonce.testing.services.server import KafkaServer, ServerGroup
from sparkonce.testing.services.services import make_root

BROKERS = (1, 2, 3)
CONTROLLER = 9
HEAP = "256m"
SETTINGS: Mapping[str, str] = {
    "default.replication.factor": "3",
    "min.insync.replicas": "2",
    "offsets.topic.num.partitions": "6",
    "offsets.topic.replication.factor": "3",
    "transaction.state.log.num.partitions": "6",
    "transaction.state.log.replication.factor": "3",
    "transaction.state.log.min.isr": "2",
    # Tests move leaders themselves.
    "auto.leader.rebalance.enable": "false",
    "replica.lag.time.max.ms": "3000",
    "controlled.shutdown.enable": "true",
    "num.network.threads": "2",
    "num.io.threads": "4",
}


class KafkaCluster(ServerGroup):
    """Running brokers; their controller is another process, which keeps running.

    Attributes:
        brokers: the servers by node id.
    """

    def __init__(self, controller: KafkaServer, brokers: Mapping[int, KafkaServer]) -> None:
        super().__init__([controller, *brokers.values()])
        self._controller = controller
        self.brokers = dict(brokers)

    @property
    def bootstrap_servers(self) -> str:
        return ",".join(broker.bootstrap_servers for broker in self.brokers.values())

    def start(self) -> None:
        """Start the nodes that do not run, and wait until each broker serves."""
        self._controller.start()
        with ThreadPoolExecutor(len(self.brokers)) as pool:
            list(pool.map(KafkaServer.start, self.brokers.values()))


def start_kafka_cluster(
    config: Mapping[str, str] | None = None,
    *,
    versions: Mapping[int, KafkaVersion] | None = None,
    format_flags: Sequence[str] = (),
) -> KafkaCluster:
    """Start three brokers on free ports of 127.0.0.1, as local processes, and wait for them.

    Args:
        config: more broker settings, as in server.properties.
        versions: versions of single brokers by node id, 1 to 3; the controller has the newest.
        format_flags: arguments of `kafka-storage.sh format`, such as ``--release-version``.

    Raises:
        ServiceError: a node cannot be started, with the reason. None is left running then.
    """
    root = make_root(None)
    controller_port = free_port()
    flags = ("-t", new_cluster_id(), *format_flags)
    common = {
        **SETTINGS,
        "controller.quorum.voters": f"{CONTROLLER}@127.0.0.1:{controller_port}",
        **(config or {}),
    }

    def make(node: int, port: int, own: Mapping[str, str]) -> KafkaServer:
        guard = Guard(remove=[root / str(node)])
        on_error.callback(guard.close)
        (root / str(node)).mkdir()
        return local_kafka(
            *(root / str(node), guard, port, {**common, "node.id": str(node), **own}),
            version=(versions or {}).get(node, "4.3"),
            format_flags=flags,
            heap=HEAP,
        )

    def make_broker(node: int) -> KafkaServer:
        port = free_port()
        listeners = f"PLAINTEXT://127.0.0.1:{port}"
        return make(node, port, {"process.roles": "broker", "listeners": listeners})

    def make_controller() -> KafkaServer:
        own = {
            "process.roles": "controller",
            "listeners": f"CONTROLLER://127.0.0.1:{controller_port}",
            "advertised.listeners": f"CONTROLLER://127.0.0.1:{controller_port}",
        }
        return make(CONTROLLER, controller_port, own)

    with contextlib.ExitStack() as on_error:
        with ThreadPoolExecutor(len(BROKERS) + 1) as pool:
            controller = pool.submit(make_controller)
            brokers = list(pool.map(make_broker, BROKERS))
        cluster = KafkaCluster(controller.result(), dict(zip(BROKERS, brokers, strict=True)))
        cluster.start()
        on_error.pop_all()
    return cluster
