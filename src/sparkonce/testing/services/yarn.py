"""YARN: a ResourceManager and NodeManagers as local processes, on an HDFS.

    with start_hdfs() as hdfs, start_yarn(hdfs) as yarn:
        yarn.env                    # HADOOP_CONF_DIR, for spark-submit --master yarn
        yarn.nodes[0].kill()        # SIGKILL of a NodeManager and its containers

Their folders, with the containers' logs, are removed at the end.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final
from xml.sax.saxutils import escape

from sparkonce.testing.services.hdfs import Hdfs
from sparkonce.testing.services.java import JVM_FLAGS, QUICK_START, class_path, ivy_jar, java
from sparkonce.testing.services.process import LOCALHOST, Command, Guard, free_port, json_at
from sparkonce.testing.services.server import LocalPlan, LocalRuntime, Server, ServerGroup
from sparkonce.testing.services.services import make_root

_SERVER: Final = "org.apache.hadoop.yarn.server"
_QUEUES: Final = {
    "yarn.scheduler.capacity.root.queues": "default",
    "yarn.scheduler.capacity.root.default.capacity": "100",
    "yarn.scheduler.capacity.maximum-am-resource-percent": "1.0",
}


class YarnNode(Server):
    """A NodeManager; its containers end with `kill` and `stop`.

    Attributes:
        folder: its own; the containers' output is in `logs/`.
    """

    def __init__(self, runtime: LocalRuntime, folder: Path) -> None:
        super().__init__(runtime)
        self.folder = folder
        self._runtime = runtime

    def containers(self, main: str) -> list[Any]:
        """The JVMs of its containers with the main class `main`, as `psutil.Process`."""
        import psutil  # noqa: PLC0415 - an extra

        found = []
        with contextlib.suppress(psutil.NoSuchProcess):
            for process in psutil.Process(self._runtime.pid).children(recursive=True):
                with contextlib.suppress(psutil.Error):
                    if process.name() == "java" and main in process.cmdline():
                        found.append(process)
        return found


class Yarn(ServerGroup):
    """A running YARN.

    Attributes:
        nodes: the NodeManagers.
        env: environment variables with which Spark finds it.
    """

    def __init__(self, manager: Server, nodes: Sequence[YarnNode], settings: Path) -> None:
        super().__init__([manager, *nodes])
        self.nodes = tuple(nodes)
        self.env = {"HADOOP_CONF_DIR": str(settings)}


def start_yarn(hdfs: Hdfs, nodes: int = 2, *, cores: int = 4, memory_mb: int = 4096) -> Yarn:
    """Start it, and wait until the ResourceManager knows all nodes.

    Args:
        hdfs: the default file system.
        nodes: how many NodeManagers.
        cores: of each node, for its containers.
        memory_mb: of each node, for its containers, in MiB.

    Raises:
        ServiceError: a process cannot be started, with the reason. None is left running then.
    """
    with contextlib.ExitStack() as on_error:
        plan = _Plan(make_root(None), on_error)
        plan.write_settings(hdfs)
        manager = plan.manager()
        manager.start()
        made = [plan.node(number, cores, memory_mb) for number in range(nodes)]
        for node in made:
            node.start()
        on_error.pop_all()
    return Yarn(manager, made, plan.settings)


@dataclass(frozen=True)
class _Plan:
    """How the processes of one YARN are run."""

    root: Path
    on_error: contextlib.ExitStack
    web_port: int = field(default_factory=free_port)

    @property
    def settings(self) -> Path:
        return self.root / "conf"

    def write_settings(self, hdfs: Hdfs) -> None:
        self.settings.mkdir(parents=True)
        _write(self.settings / "core-site.xml", {"fs.defaultFS": hdfs.url})
        _write(self.settings / "capacity-scheduler.xml", _QUEUES)
        _write(self.settings / "yarn-site.xml", self._settings())

    def _settings(self) -> dict[str, str]:
        roles = ("address", "scheduler.address", "resource-tracker.address", "admin.address")
        return {
            **{f"yarn.resourcemanager.{role}": f"{LOCALHOST}:{free_port()}" for role in roles},
            "yarn.resourcemanager.webapp.address": f"{LOCALHOST}:{self.web_port}",
            "yarn.scheduler.minimum-allocation-mb": "128",
            "yarn.resourcemanager.am.max-attempts": "4",
            # Soon after a node has died, its containers are placed elsewhere.
            "yarn.nm.liveness-monitor.expiry-interval-ms": "15000",
            "yarn.resourcemanager.nodemanagers.heartbeat-interval-ms": "200",
            "yarn.nodemanager.vmem-check-enabled": "false",
            "yarn.nodemanager.pmem-check-enabled": "false",
            "yarn.nodemanager.disk-health-checker.enable": "false",
            "yarn.nodemanager.delete.debug-delay-sec": "600",  # the logs outlive the containers
            "yarn.nodemanager.env-whitelist": "JAVA_HOME,PATH,LANG",
        }

    def manager(self) -> Server:
        argv = [f"{_SERVER}.resourcemanager.ResourceManager"]
        ready = partial(self._state, "info")
        return Server(self._runtime("manager", argv, ready, remove=self.root))

    def node(self, number: int, cores: int, memory_mb: int) -> YarnNode:
        name, address = f"node{number}", f"{LOCALHOST}:{free_port()}"
        folder = self.root / name
        settings = {
            "address": address,
            "localizer.address": f"{LOCALHOST}:{free_port()}",
            "collector-service.address": f"{LOCALHOST}:{free_port()}",
            "webapp.address": f"{LOCALHOST}:{free_port()}",
            "local-dirs": str(folder / "local"),
            "log-dirs": str(folder / "logs"),
            "resource.cpu-vcores": str(cores),
            "resource.memory-mb": str(memory_mb),
        }
        options = [f"-Dyarn.nodemanager.{key}={value}" for key, value in settings.items()]
        argv = [f"{_SERVER}.nodemanager.NodeManager", *options]
        return YarnNode(self._runtime(name, argv, partial(self._knows, address)), folder)

    def _runtime(
        self, name: str, argv: Sequence[str], is_ready: Any, *, remove: Path | None = None
    ) -> LocalRuntime:
        folder = self.root / name
        folder.mkdir()
        guard = Guard(remove=[remove or folder])
        self.on_error.callback(guard.close)
        jars = [class_path("hadoop", guard), f"{ivy_jar().parent}/*"]
        command = [
            *(java(), *JVM_FLAGS, QUICK_START, "-Xmx256m"),
            *("--add-opens", "java.base/java.lang=ALL-UNNAMED"),
            *("-cp", os.pathsep.join([str(self.settings), *jars]), *argv),
        ]
        program = Command(command, folder / "log")
        return LocalRuntime(
            LocalPlan(f"YARN's {name}", program, None, lambda: bool(is_ready())), guard
        )

    def _state(self, what: str) -> dict[str, Any]:
        """Part of what the ResourceManager shows; empty while it does not respond."""
        return json_at(LOCALHOST, self.web_port, f"ws/v1/cluster/{what}")

    def _knows(self, address: str) -> bool:
        nodes = (self._state("nodes").get("nodes") or {}).get("node", [])
        ids = {node["id"] for node in nodes if node["state"] == "RUNNING"}
        return address.replace(LOCALHOST, "localhost") in ids or address in ids


def _write(file: Path, settings: Mapping[str, str]) -> None:
    lines = [
        f"<property><name>{key}</name><value>{escape(value)}</value></property>"
        for key, value in settings.items()
    ]
    file.write_text("\n".join(["<configuration>", *lines, "</configuration>"]))
