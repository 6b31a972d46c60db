"""Who may see the page, what it never shows, and the real command as a process."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import uvicorn
from starlette.testclient import TestClient

from sparkonce.cli.doctor import look, look_at_log
from sparkonce.cli.main import run
from sparkonce.errors import ConfigurationError
from sparkonce.page.access import is_local
from sparkonce.page.serving import TOKEN_VARIABLE, serve, token_for
from sparkonce.page.source import Source
from sparkonce.spark_hooks.jobs import load_job
from sparkonce.txn_log.sqlite import SqliteLog
from tests.support.page_cases import browser, fill, walk

TOKEN = "a-token-of-the-operator-47"
SECRET = "hunter2-of-postgres"


@pytest.fixture
def source(tmp_path: Path) -> Iterator[Source]:
    with closing(SqliteLog(tmp_path / "log.db")) as log:
        fill(log)
        yield Source(log, log.pipelines, "JOB", lambda: look_at_log(log))


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("localhost", True),
        ("127.0.0.1", True),
        ("127.9.9.9", True),
        ("::1", True),
        ("0.0.0.0", False),  # noqa: S104
        ("::", False),
        ("10.0.0.7", False),
        ("localhost.example", False),
        ("", False),
    ],
)
def test_token_is_needed_everywhere_but_on_this_machine(host: str, expected: bool) -> None:
    token, is_new = token_for(host, None)
    assert is_local(host) is expected
    assert (token is None) is expected
    assert is_new is not expected
    assert token is None or len(token) > 40


def test_chosen_token_is_used_on_localhost_too() -> None:
    assert token_for("localhost", TOKEN) == (TOKEN, False)
    with pytest.raises(ConfigurationError, match="fewer than 16"):
        token_for("0.0.0.0", "short")  # noqa: S104


def test_printed_address_asks_for_a_chosen_token_and_does_not_show_it(
    source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(uvicorn.Server, "run", lambda *_, **__: None)
    said: list[str] = []
    for given in (TOKEN, None):
        serve(source, "localhost", 0, given, said.append)
    chosen, without = said
    assert chosen.endswith("/?token=…")
    assert without.endswith("/")


@pytest.mark.parametrize("address", ["/", "/pipelines/orders", "/style.css", "/doctor", "/nothing"])
def test_without_the_token_nothing_is_shown(source: Source, address: str) -> None:
    client = browser(source, TOKEN, "http://etl-3:4059")
    for query in ("", "?token=", "?token=wrong", f"?token={TOKEN}x", "?token=%C3%BC"):
        answer = client.get(address + query)
        assert answer.status_code == 401
        assert f"after ?token= the value of {TOKEN_VARIABLE}" in answer.text
        assert "orders" not in answer.text
        assert not client.cookies
    assert client.post("/doctor").status_code == 401


def test_token_becomes_a_cookie_and_leaves_the_address(source: Source) -> None:
    client = browser(source, TOKEN, "http://etl-3:4059")
    answer = client.get("/pipelines/orders", params={"before": "3", "token": TOKEN})
    assert (answer.status_code, answer.headers["location"]) == (303, "/pipelines/orders?before=3")
    cookie = answer.headers["set-cookie"]
    assert "httponly" in cookie.lower()
    assert "samesite=lax" in cookie.lower()
    assert TOKEN not in cookie
    assert client.get("/pipelines/orders").status_code == 200
    assert {status for _, status, _ in walk(client)} == {200}
    other = browser(source, TOKEN + "-2", "http://etl-3:4059")
    other.cookies = client.cookies
    assert other.get("/").status_code == 401, "of another page"


def test_redirect_stays_on_this_host(source: Source) -> None:
    client = browser(source, TOKEN, "http://etl-3:4059")
    answer = client.get("http://etl-3:4059//evil.example/x", params={"token": TOKEN})
    assert answer.headers["location"] == "/evil.example/x"


@pytest.mark.parametrize("host", ["evil.example", "localhost.evil.example", "10.0.0.7:4059", ""])
def test_other_names_of_this_machine_see_nothing(source: Source, host: str) -> None:
    """A site in the reader's browser may give 127.0.0.1 a name of its own."""
    answer = browser(source).get("/", headers={"host": host})
    assert answer.status_code == 403
    assert "orders" not in answer.text


def test_another_site_presses_no_button(source: Source) -> None:
    client = browser(source)
    assert client.post("/doctor", headers={"origin": "http://evil.example"}).status_code == 403
    assert client.post("/doctor", headers={"sec-fetch-site": "cross-site"}).status_code == 403
    assert client.post("/doctor", headers={"origin": "null"}).status_code == 403
    assert client.post("/doctor", headers={"origin": "http://localhost"}).status_code == 200
    # Browsers send a null origin where the page's policy is to send no referrer.
    own_form = {"origin": "null", "sec-fetch-site": "same-origin"}
    assert client.post("/doctor", headers=own_form).status_code == 200


def test_page_changes_nothing(source: Source) -> None:
    client = browser(source)
    for verb in ("post", "put", "delete", "patch"):
        assert getattr(client, verb)("/pipelines/orders").status_code == 405


def test_browser_is_given_strict_rules(source: Source) -> None:
    for address in ("/", "/style.css", "/nothing"):
        headers = browser(source).get(address).headers
        assert "default-src 'none'" in headers["content-security-policy"]
        assert headers["referrer-policy"] == "no-referrer"
        assert headers["cache-control"] == "no-store"
    page = browser(source).get("/pipelines/orders").text
    assert "style=" not in page, "the rules forbid inline styles"
    assert "<script" not in page


DSN = f"postgresql://ann:{SECRET}@127.0.0.1:1/shop?connect_timeout=1"
JOB = f"""
from sparkonce import ExactlyOnce
from sparkonce.sinks import PostgresSink

pipeline = ExactlyOnce(
    "orders",
    sinks=[PostgresSink("{DSN}", table="orders")],
    log="sqlite:///log.db",
)
"""


def test_password_of_a_sink_is_never_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when doctor reports that its server is unreachable."""
    pytest.importorskip("psycopg")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "secret_job.py").write_text(JOB)
    with closing(SqliteLog(tmp_path / "log.db")) as log:
        fill(log)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    job = load_job("secret_job:pipeline")
    source = Source(
        job.log, lambda: [job.name], "secret_job:pipeline", lambda: look(job, None, None)
    )
    with closing(job):
        client = browser(source)
        texts = [text for _, _, text in walk(client)] + [client.post("/doctor").text]
    sys.modules.pop("secret_job")
    assert "127.0.0.1" in texts[-1]
    assert "error" in texts[-1]
    assert all(SECRET not in text for text in texts)


def test_unexpected_error_shows_no_text_of_its_own(source: Source) -> None:
    from dataclasses import replace

    from sparkonce.page.app import make_app

    def broken() -> list[object]:
        raise RuntimeError(f"postgresql://ann:{SECRET}@shop")

    app = make_app(replace(source, doctor=broken))  # type: ignore[arg-type]
    client = TestClient(app, base_url="http://localhost", raise_server_exceptions=False)
    answer = client.post("/doctor")
    assert answer.status_code == 500
    assert "RuntimeError" in answer.text
    assert SECRET not in answer.text


def test_command_answers_until_it_is_ended(tmp_path: Path) -> None:
    """The real process: it prints its address, answers over HTTP, and ends by SIGTERM."""
    with closing(SqliteLog(tmp_path / "log.db")) as log:
        fill(log)
        address = log.address
    command = [sys.executable, "-m", "sparkonce", "ui", "--log", address, "--port", "0"]
    environment = {k: v for k, v in os.environ.items() if k != TOKEN_VARIABLE}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            found = re.search(r"http://localhost:\d+/", line)
            assert found, line
            with urllib.request.urlopen(f"{found[0]}pipelines/orders", timeout=60) as answer:  # noqa: S310
                assert b"Batch 4" in answer.read()
            process.send_signal(signal.SIGTERM)
            process.wait(60)
        finally:
            process.kill()
        assert process.stderr is not None
        assert process.stderr.read() == ""
    assert process.returncode in {0, -signal.SIGTERM}


def test_port_that_is_taken_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import socket

    with closing(SqliteLog(tmp_path / "log.db")) as log:
        address = log.address
    with closing(socket.create_server(("127.0.0.1", 0))) as taken:
        port = taken.getsockname()[1]
        assert run(["ui", "--log", address, "--host", "127.0.0.1", "--port", str(port)]) == 1
    assert f"cannot listen on 127.0.0.1, port {port}" in capsys.readouterr().err
