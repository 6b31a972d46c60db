"""A Spark standalone cluster: a master and workers as local processes, each with its own folder.

    with start_spark_cluster(workers=2) as cluster:
        SparkSession.builder.master(cluster.master_url).config(map=cluster.driver_conf)
        cluster.workers[0].executors()     # processes, to kill
        cluster.workers[0].kill()          # SIGKILL of the worker and its executors

On a `Network`, each worker is on a host of its own.
"""

from __future__ import annotations

import contextlib
import os
import sysconfig
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

from sparkonce.testing.services.java import JVM_FLAGS, QUICK_START, java
from sparkonce.testing.services.network import Host, Network
from sparkonce.testing.services.process import (
    LOCALHOST,
    Command,
    Guard,
    free_port,
    import_path,
    json_at,
)
from sparkonce.testing.services.server import LocalPlan, LocalRuntime, Server, ServerGroup
from sparkonce.testing.services.services import make_root

_EXECUTOR: Final = "CoarseGrainedExecutorBackend"


class SparkWorker(Server):
    """A worker: start it again after `kill` or `stop`; its executors end with it.

    Attributes:
        folder: its own; executors work in `work/`.
        host: where it runs; None on this machine itself.
    """

    def __init__(self, runtime: LocalRuntime, folder: Path, host: Host | None) -> None:
        super().__init__(runtime)
        self.folder = folder
        self.host = host
        self._runtime = runtime

    def executors(self) -> list[Any]:
        """The executors' JVMs, as `psutil.Process`."""
        return [process for process in self._children() if _EXECUTOR in _words(process)]

    def python_workers(self) -> list[Any]:
        """The Python processes of the executors that run tasks, as `psutil.Process`."""
        names = ("pyspark.daemon", "pyspark/daemon.py")
        daemons = [p for p in self._children() if any(name in _words(p) for name in names)]
        return [child for daemon in daemons for child in daemon.children()]

    def _children(self) -> list[Any]:
        import psutil  # noqa: PLC0415 - an extra

        try:
            return list(psutil.Process(self._runtime.pid).children(recursive=True))
        except psutil.NoSuchProcess:
            return []


class SparkCluster(ServerGroup):
    """A running cluster.

    Attributes:
        master_url: such as ``spark://127.0.0.1:21345``.
        workers: in the order of the network's hosts.
        driver_conf: what a driver in this process must set, so that executors reach it.
    """

    def __init__(
        self, master: Server, workers: Sequence[SparkWorker], address: str, ports: tuple[int, int]
    ) -> None:
        super().__init__([master, *workers])
        self.master = master
        self.workers = tuple(workers)
        self.driver_conf: dict[str, str] = {
            "spark.driver.host": address,
            "spark.driver.bindAddress": address,
        }
        self._address, (port, self._ui_port) = address, ports
        self.master_url = f"spark://{address}:{port}"

    def state(self) -> dict[str, Any]:
        """The master's view: `workers`, `activeapps` and more."""
        return _state_of(self._address, self._ui_port)


def start_spark_cluster(
    workers: int = 2,
    *,
    cores: int = 2,
    memory_mb: int = 1024,
    network: Network | None = None,
    env: Mapping[str, str] | None = None,
) -> SparkCluster:
    """Start a master and workers of the installed PySpark, and wait until the master knows all.

    Args:
        workers: how many; on a network at most its hosts.
        cores: of each worker, for its executors.
        memory_mb: of each worker, for its executors, in MiB.
        network: gives each worker a host of its own; default: all are on 127.0.0.1.
        env: more environment variables of the executors. By default they import what this process
            can import, with the standard library of their own Python.

    Raises:
        ServiceError: a process cannot be started, with the reason. None is left running then.
    """
    address = LOCALHOST if network is None else network.driver_address
    environment = {**spark_environment(), **(env or {})}
    hosts = [None] * workers if network is None else network.hosts[:workers]
    with contextlib.ExitStack() as on_error:
        plan = _Plan(make_root(None), address, environment, on_error)
        master = plan.master()
        master.start()
        made = [plan.worker(n, host, cores, memory_mb) for n, host in enumerate(hosts)]
        with ThreadPoolExecutor(workers) as pool:
            list(pool.map(Server.start, made))
        on_error.pop_all()
    return SparkCluster(master, made, address, (plan.port, plan.ui_port))


@dataclass(frozen=True)
class _Plan:
    """How the processes of one cluster are run."""

    root: Path
    address: str
    environment: Mapping[str, str]
    on_error: contextlib.ExitStack
    port: int = field(default_factory=free_port)
    ui_port: int = field(default_factory=free_port)

    def master(self) -> Server:
        argv = [
            *("org.apache.spark.deploy.master.Master", "--host", self.address),
            *("--port", str(self.port), "--webui-port", str(self.ui_port)),
        ]
        is_ready = partial(_state_of, self.address, self.ui_port)
        return Server(self._runtime("master", argv, None, lambda: bool(is_ready())))

    def worker(self, number: int, host: Host | None, cores: int, memory_mb: int) -> SparkWorker:
        name, port = f"worker{number}", free_port()
        at = LOCALHOST if host is None else host.address
        argv = [
            *("org.apache.spark.deploy.worker.Worker", f"spark://{self.address}:{self.port}"),
            *("--host", at, "--port", str(port), "--webui-port", "0"),
            *("--cores", str(cores), "--memory", f"{memory_mb}m"),
            *("--work-dir", str(self.root / name / "work")),
        ]
        is_ready = partial(_has_worker, self.address, self.ui_port, at, port)
        return SparkWorker(self._runtime(name, argv, host, is_ready), self.root / name, host)

    def _runtime(
        self, name: str, argv: Sequence[str], host: Host | None, is_ready: Callable[[], bool]
    ) -> LocalRuntime:
        folder = self.root / name
        guard = Guard(remove=[folder])
        self.on_error.callback(guard.close)
        (folder / "local").mkdir(parents=True)
        command = [f"{self.environment['SPARK_HOME']}/bin/spark-class", *argv]
        own = {**self.environment, "SPARK_LOCAL_DIRS": str(folder / "local")}
        if host is not None:
            own["SPARK_LOCAL_IP"] = host.address  # its name is in no name server
            host.mounts[folder] = folder
            command = host.enter(command)
        program = Command(command, folder / "log", own)
        return LocalRuntime(LocalPlan(f"Spark's {name}", program, None, is_ready), guard)


def spark_environment() -> dict[str, str]:
    """Environment variables of Spark's processes, which import what this process can import."""
    return {**os.environ, **_import_path(), **_settings()}


def _import_path() -> dict[str, str]:
    """What this process can import, without its standard library: each interpreter has its own."""
    library = Path(sysconfig.get_path("stdlib"))
    zipped = library.with_name(f"python{sysconfig.get_python_version().replace('.', '')}.zip")
    own = {str(library), sysconfig.get_path("platstdlib"), f"{library}/lib-dynload", str(zipped)}
    kept = (path for path in import_path()["PYTHONPATH"].split(os.pathsep) if path not in own)
    return {"PYTHONPATH": os.pathsep.join(kept)}


def _settings() -> dict[str, str]:
    import pyspark  # noqa: PLC0415 - an extra

    java()  # raises where there is none
    return {
        "SPARK_HOME": str(Path(pyspark.__file__).parent),
        "SPARK_DAEMON_MEMORY": "256m",
        "SPARK_DAEMON_JAVA_OPTS": " ".join((*JVM_FLAGS, QUICK_START)),
    }


def _state_of(address: str, ui_port: int) -> dict[str, Any]:
    """The master's state; empty while it does not respond."""
    return json_at(address, ui_port, "json/")


def _has_worker(address: str, ui_port: int, host: str, port: int) -> bool:
    workers = _state_of(address, ui_port).get("workers", [])
    return any((w["host"], w["port"], w["state"]) == (host, port, "ALIVE") for w in workers)


def _words(process: Any) -> str:
    import psutil  # noqa: PLC0415 - an extra

    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""
