"""Hosts on one machine: localhost is another machine on each of them, and a cable can be cut.

    this process   10.x.y.1 (servers)   10.x.y.2 (the driver)
         └─ veth ─► switch: a bridge in a network namespace of its own
                      ├─ veth ─► host1   10.x.y.11
                      └─ veth ─► host2   10.x.y.12

Each host has its own network, host name, mounts and `/tmp`. The namespaces live as long as one
process that ends with this one, and take their cables with them. Linux only, and root only.
"""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from sparkonce.testing.services.errors import ServiceError
from sparkonce.testing.services.process import POLL_S, Command, Guard, log_tail

_TOOLS = ("hostname", "ip", "mount", "nsenter", "unshare")
_PATIENCE_S = 10.0
_HOLD = 'for _ in $(seq "$1"); do unshare --net --uts sleep infinity & echo $!; done; wait'
_STRICT = "echo 1 > /proc/sys/net/ipv4/conf/all/rp_filter"
"""Lose packets from an address to which there is no route; see `Host.refuse`."""
_TRY = f"""
ip link add name switch type bridge && ip link add one type veth peer name other &&
mount --bind /tmp /tmp && hostname host1 && {_STRICT}
"""
_ENTER = """
while [ "$1" != -- ]; do mount --bind "$1" "$2" && shift 2 || exit 1; done
shift; mount --rbind "$1" /tmp && shift && exec "$@"
"""
_TMP = Path("/tmp")  # noqa: S108


def why_no_network() -> str | None:
    """Why this machine cannot have such a network; None if it can."""
    if sys.platform != "linux":
        return "network namespaces need Linux"
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = [tool for tool in _TOOLS if shutil.which(tool) is None]
    if missing:
        return f"network namespaces need the program {missing[0]}"
    tried = subprocess.run(  # root in a container may not be allowed to
        ["unshare", "--net", "--uts", "--mount", "sh", "-c", _TRY],
        capture_output=True,
        text=True,
        check=False,
    )
    return f"network namespaces: {tried.stderr.strip()}" if tried.returncode else None


@dataclass
class Host:
    """One of the hosts.

    Attributes:
        name: its host name.
        address: its IPv4 address.
        tmp: the folder that is `/tmp` there.
        mounts: folders by the path at which a process that starts there finds them.
    """

    name: str
    address: str
    tmp: Path
    mounts: dict[Path, Path] = field(default_factory=dict)
    _pid: int = 0
    _switch: int = 0

    def enter(self, argv: Sequence[str]) -> list[str]:
        """The command that runs `argv` on this host."""
        binds = []
        for path, folder in self.mounts.items():
            is_in_tmp = path.is_relative_to(_TMP)
            where = self.tmp / path.relative_to(_TMP) if is_in_tmp else path
            where.mkdir(parents=True, exist_ok=True)
            binds += [str(folder), str(where)]
        return [
            *("nsenter", "--target", str(self._pid), "--net", "--uts", "unshare", "--mount"),
            *("sh", "-c", _ENTER, "sh", *binds, "--", str(self.tmp), *argv),
        ]

    def unplug(self) -> None:
        """Cut the host off from everything: packets are lost, no connection is closed."""
        _in_network(self._switch, "link", "set", self.name, "down")

    def plug_in(self) -> None:
        """Undo `unplug`."""
        _in_network(self._switch, "link", "set", self.name, "up")

    def refuse(self, address: str) -> None:
        """Lose what this host and one address, such as the driver's, send to each other."""
        _in_network(self._pid, "route", "add", "blackhole", f"{address}/32")

    def accept(self, address: str) -> None:
        """Undo `refuse`."""
        _in_network(self._pid, "route", "del", "blackhole", f"{address}/32")


class Network:
    """Hosts, numbered from 0, and the two addresses of this process.

    Args:
        hosts: how many.
        folder: for the hosts' `/tmp`; it is not removed.

    Raises:
        ServiceError: this machine cannot have such a network; see `why_no_network`.
    """

    def __init__(self, hosts: int, folder: Path) -> None:
        if (why := why_no_network()) is not None:
            raise ServiceError(f"Hosts with networks of their own cannot be made: {why}.")
        chosen = random.SystemRandom()
        subnet = f"10.{chosen.randrange(200, 250)}.{chosen.randrange(1, 250)}"
        self.server_address, self.driver_address = f"{subnet}.1", f"{subnet}.2"
        self._guard = Guard()
        try:
            switch, *pids = self._hold(hosts + 1, folder / "network.log")
            self.hosts = tuple(
                Host(f"host{n}", f"{subnet}.{10 + n}", folder / f"host{n}" / "tmp", {}, pid, switch)
                for n, pid in enumerate(pids, start=1)
            )
            self._join(switch, f"so{chosen.randrange(16**8):08x}")
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Remove the network. End what runs on the hosts first."""
        self._guard.close()

    def _hold(self, number: int, log: Path) -> list[int]:
        """Processes that only keep a namespace each."""
        self._guard.start(Command(["sh", "-c", _HOLD, "sh", str(number)], log=log))
        deadline, own = time.monotonic() + _PATIENCE_S, _namespace_of(os.getpid())
        while time.monotonic() < deadline:
            pids = [int(line) for line in log.read_text().split() if line.isdecimal()]
            if len(pids) == number and all(_namespace_of(pid) not in {"", own} for pid in pids):
                return pids
            time.sleep(POLL_S)
        raise ServiceError(f"Network namespaces cannot be made: {log_tail(log)}")

    def _join(self, switch: int, cable: str) -> None:
        _in_network(switch, "link", "add", "name", "switch", "type", "bridge")
        _in_network(switch, "link", "set", "switch", "up")
        _ip("link", "add", cable, "type", "veth", "peer", "name", "here", "netns", str(switch))
        for address in (self.server_address, self.driver_address):
            _ip("address", "add", f"{address}/24", "dev", cable)
        _ip("link", "set", cable, "up")
        _in_network(switch, "link", "set", "here", "up", "master", "switch")
        for host in self.hosts:
            host.tmp.mkdir(parents=True)
            host.tmp.chmod(0o1777)
            pid = host._pid  # noqa: SLF001 - its maker
            peer = ("peer", "name", "eth0", "netns", str(pid))
            _in_network(switch, "link", "add", host.name, "type", "veth", *peer)
            _in_network(switch, "link", "set", host.name, "up", "master", "switch")
            _run("nsenter", "--target", str(pid), "--uts", "hostname", host.name)
            _run("nsenter", "--target", str(pid), "--net", "sh", "-c", _STRICT)
            _in_network(pid, "link", "set", "lo", "up")
            _in_network(pid, "address", "add", f"{host.address}/24", "dev", "eth0")
            _in_network(pid, "link", "set", "eth0", "up")


def _namespace_of(pid: int) -> str:
    try:
        return str(Path(f"/proc/{pid}/ns/net").readlink())
    except FileNotFoundError:
        return ""


def _in_network(pid: int, *words: str) -> None:
    _run("nsenter", "--target", str(pid), "--net", "ip", *words)


def _ip(*words: str) -> None:
    _run("ip", *words)


def _run(*argv: str) -> None:
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise ServiceError(f"{' '.join(argv)} failed: {done.stderr.strip()}")
