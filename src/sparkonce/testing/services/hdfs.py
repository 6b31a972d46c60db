"""HDFS, a NameNode and a DataNode in one process, for checkpoints and logs.

    with start_hdfs() as hdfs:
        hdfs.url        # hdfs://127.0.0.1:15321
        hdfs.kill()     # SIGKILL; the files stay
        hdfs.start()    # again, on the same port

The files are removed at the end.
"""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import Final

from sparkonce.testing.services.java import (
    JVM_FLAGS,
    QUICK_START,
    check_hadoop,
    class_path,
    ivy_jar,
    java,
)
from sparkonce.testing.services.process import LOCALHOST, Command, Guard, free_port
from sparkonce.testing.services.server import LocalPlan, LocalRuntime, Server, ServerGroup
from sparkonce.testing.services.services import make_root

_MAIN: Final = "org.apache.hadoop.test.MiniDFSClusterManager"


class Hdfs(ServerGroup):
    """A running HDFS.

    Attributes:
        url: of its root.
    """

    def __init__(self, server: Server, port: int) -> None:
        super().__init__([server])
        self.url = f"hdfs://{LOCALHOST}:{port}"
        self.start, self.kill = server.start, server.kill


def start_hdfs() -> Hdfs:
    """Start it, and wait until it serves; its files are removed at the end.

    Raises:
        ServiceError: it cannot be started, with the reason.
    """
    check_hadoop("HDFS")
    folder, port = make_root(None), free_port()
    guard = Guard(remove=[folder])
    try:
        server = Server(LocalRuntime(_plan(folder, port, guard), guard))
        server.start()
    except BaseException:
        guard.close()
        raise
    return Hdfs(server, port)


def _plan(folder: Path, port: int, guard: Guard) -> LocalPlan:
    data, started = folder / "data", folder / "started.json"
    jars = ivy_jar().parent
    argv = [
        *(java(), *JVM_FLAGS, QUICK_START, "-Xmx512m"),
        *("--add-opens", "java.base/java.lang=ALL-UNNAMED"),
        *("-cp", f"{class_path('hadoop', guard)}{os.pathsep}{jars}/*", _MAIN),
        *("-D", f"hdfs.minidfs.basedir={data}", "-nnport", str(port)),
        *("-writeDetails", str(started)),
    ]
    # Only an empty folder is formatted. The cluster writes into its working directory, too.
    format_once = f"[ -e {shlex.quote(str(data))} ] || set -- -format"
    script = f'cd {shlex.quote(str(folder))}; {format_once}; exec {shlex.join(argv)} "$@"'
    return LocalPlan(
        name="HDFS",
        command=Command(["sh", "-c", script], log=folder / "hdfs.log"),
        port=port,
        is_ready=started.exists,
        before_start=lambda: started.unlink(missing_ok=True),
    )
