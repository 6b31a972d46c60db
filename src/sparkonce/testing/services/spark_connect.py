"""A Spark Connect server as a local process.

server = start_spark_connect()
SparkSession.builder.remote(server.address)
server.kill()     # SIGKILL of the JVM and its Python processes
server.start()    # again, at the same address
server.close()
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from sparkonce.testing.services.process import LOCALHOST, Command, Guard, free_port, is_port_taken
from sparkonce.testing.services.server import LocalPlan, LocalRuntime, Server
from sparkonce.testing.services.services import make_root
from sparkonce.testing.services.spark_cluster import spark_environment

_MEMORY: Final = "1g"
_CLASS: Final = "org.apache.spark.sql.connect.service.SparkConnectServer"


class SparkConnectServer(Server):
    """The server.

    Attributes:
        address: for ``SparkSession.builder.remote``.
    """

    def __init__(self, runtime: LocalRuntime, port: int) -> None:
        super().__init__(runtime)
        self.address = f"sc://{LOCALHOST}:{port}"


def start_spark_connect(
    master: str = "local[2]",
    *,
    conf: Mapping[str, str] | None = None,
    env: Mapping[str, str] | None = None,
) -> SparkConnectServer:
    """Start a server of the installed PySpark, and wait until it listens.

    Args:
        master: Spark's.
        conf: more of Spark's settings.
        env: more environment variables; its Python processes have them too. By default they import
            what this process can import.

    Raises:
        ServiceError: it cannot be started, with the reason. Nothing is left running then.
    """
    root, port = make_root(None), free_port()
    guard = Guard(remove=[root])
    settings = {
        "spark.connect.grpc.binding.address": LOCALHOST,
        "spark.connect.grpc.binding.port": str(port),
        "spark.driver.host": LOCALHOST,
        "spark.driver.bindAddress": LOCALHOST,
        "spark.ui.enabled": "false",
        "spark.sql.warehouse.dir": str(root / "warehouse"),
        **(conf or {}),
    }
    environment = {**spark_environment(), "SPARK_DAEMON_MEMORY": _MEMORY, **(env or {})}
    argv = [
        f"{environment['SPARK_HOME']}/bin/spark-class",
        *("org.apache.spark.deploy.SparkSubmit", "--class", _CLASS, "--master", master),
        *(word for name, value in settings.items() for word in ("--conf", f"{name}={value}")),
        "spark-internal",
    ]
    (root / "local").mkdir(parents=True)
    command = Command(argv, root / "log", {**environment, "SPARK_LOCAL_DIRS": str(root / "local")})
    plan = LocalPlan("the Spark Connect server", command, None, lambda: is_port_taken(port))
    server = SparkConnectServer(LocalRuntime(plan, guard), port)
    try:
        server.start()
    except BaseException:
        guard.close()
        raise
    return server
