"""Two S3 servers as local processes; each has its own bugs, so tests run on both."""

from __future__ import annotations

import os
import re
import shutil
import urllib.error
import urllib.request
from pathlib import Path

from sparkonce.testing.services.cache import SCRATCH, cache_dir, cached, progress
from sparkonce.testing.services.errors import ServiceError
from sparkonce.testing.services.java import JVM_FLAGS, QUICK_START, class_path, java
from sparkonce.testing.services.process import LOCALHOST, Command, Guard, log_tail, own_guard
from sparkonce.testing.services.server import LocalPlan, LocalRuntime, S3Server, S3Settings

S3MOCK_BEANS = Path(__file__).with_name("s3mock.xml")
VERSITYGW = "github.com/versity/versitygw/cmd/versitygw"
VERSITYGW_VERSION = "v1.8.0"


def local_s3mock(folder: Path, guard: Guard, port: int, host: str = LOCALHOST) -> S3Server:
    """Run S3Mock, which keeps its objects in a folder and checks no credentials."""
    settings = S3Settings(f"http://{host}:{port}")
    store = folder / "data"
    store.mkdir(exist_ok=True)
    argv = [
        *(java(), "-Xmx512m", *JVM_FLAGS, QUICK_START, "-cp", class_path("s3mock", guard)),
        "com.adobe.testing.s3mock.S3MockApplication",
        *(f"--server.address={host}", f"--server.port={port}", "--server.ssl.enabled=false"),
        f"--com.adobe.testing.s3mock.store.root={store}",
        f"--com.adobe.testing.s3mock.store.region={settings.region}",
        "--com.adobe.testing.s3mock.store.retain-files-on-exit=true",
        "--com.adobe.testing.s3mock.http-port=0",
        "--spring.main.allow-bean-definition-overriding=true",
        f"--spring.main.sources={S3MOCK_BEANS.as_uri()}",
        *("--spring.main.banner-mode=off", "--logging.level.root=warn"),
    ]
    plan = LocalPlan(
        name="S3Mock",
        command=Command(argv, log=folder / "s3mock.log"),
        port=port,
        host=host,
        is_ready=lambda: answers_http(settings.endpoint_url),
    )
    return S3Server(LocalRuntime(plan, guard), settings)


def local_versitygw(folder: Path, guard: Guard, port: int, host: str = LOCALHOST) -> S3Server:
    """Run versitygw, a real S3 server that keeps its objects in a folder."""
    settings = S3Settings(f"http://{host}:{port}")
    root = folder / "data"
    root.mkdir(exist_ok=True)
    argv = [
        *(str(versitygw_program(guard)), "--port", f"{host}:{port}"),
        *("--region", settings.region, "--quiet", "posix"),
    ]
    if not has_extended_attributes(root):
        (folder / "attributes").mkdir(exist_ok=True)
        argv += ["--sidecar", str(folder / "attributes")]
    credentials = {
        "ROOT_ACCESS_KEY": settings.access_key,
        "ROOT_SECRET_KEY": settings.secret_key,
    }
    plan = LocalPlan(
        name="versitygw",
        command=Command(
            [*argv, str(root)], log=folder / "versitygw.log", env={**os.environ, **credentials}
        ),
        port=port,
        host=host,
        is_ready=lambda: answers_http(settings.endpoint_url),
        before_start=lambda: repair_uploads(root),
    )
    return S3Server(LocalRuntime(plan, guard), settings)


def repair_uploads(root: Path) -> None:
    """Restore the names of uploads after a crash inside CompleteMultipartUpload.

    versitygw 1.8.0 first renames the upload `<id>` to `<id>.<etag>.inprogress`, and does not rename
    it back after a crash. The upload could then never be completed, listed or aborted.
    """
    for stuck in root.glob("*/.sgwtmp/multipart/*/*.inprogress"):
        upload = stuck.with_name(stuck.name.split(".")[0])
        if not upload.exists():
            stuck.rename(upload)


def has_extended_attributes(folder: Path) -> bool:
    """Whether the file system keeps the attributes in which versitygw stores metadata."""
    if not hasattr(os, "setxattr"):
        return False
    probe = folder / ".attribute-probe"
    probe.touch()
    try:
        os.setxattr(probe, "user.probe", b"1")
    except OSError:
        return False
    finally:
        probe.unlink()
    return True


def answers_http(url: str) -> bool:
    """Whether an HTTP server responds with any status below 500, such as 403."""
    try:
        with urllib.request.urlopen(url, timeout=5):  # noqa: S310  # http://127.0.0.1
            return True
    except urllib.error.HTTPError as answer:
        answer.close()
        return answer.code < 500  # noqa: PLR2004
    except OSError:
        return False


def versitygw_dir() -> Path:
    return cache_dir() / f"versitygw-{VERSITYGW_VERSION}"


def go() -> str:
    found = shutil.which("go")
    if found is None:
        raise ServiceError(
            "versitygw is built from source, and there is no go on the PATH; install Go."
        )
    return found


def versitygw_program(guard: Guard | None = None) -> Path:
    """The program, built at the first call (minutes)."""

    def build(folder: Path) -> None:
        scratch = folder / SCRATCH
        log = scratch / "log"
        what = "building versitygw from source, about 3 minutes"
        with own_guard(guard) as runner, progress(what, scratch) as tick:
            env = {**os.environ, "GOBIN": str(folder), "GOTMPDIR": str(scratch)}
            argv = [go(), "install", f"{VERSITYGW}@{VERSITYGW_VERSION}"]
            if runner.run(Command(argv, log=log, env=env), tick=tick) != 0:
                tail = re.sub(r"go: downloading \S+ \S+( \| )?", "", log_tail(log))
                raise ServiceError(f"versitygw cannot be built; the end of go's output: {tail}")

    return cached(versitygw_dir(), build) / "versitygw"
