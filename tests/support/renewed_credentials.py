"""A server that takes one session token, and the file in which a sidecar renews it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest

EXPIRED = b"<Error><Code>ExpiredToken</Code><Message>The token has expired.</Message></Error>"
SECRET = "not-to-be-shown"


class Sidecar:
    """Writes the file that boto3's chain reads."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._file = folder / "credentials"
        monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(self._file))
        monkeypatch.setenv("AWS_CONFIG_FILE", str(folder / "config"))
        monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"):
            monkeypatch.delenv(name, raising=False)

    def clear(self) -> None:
        self._file.write_text("")

    def write(self, token: str) -> None:
        self._file.write_text(
            f"[default]\naws_access_key_id=key\naws_secret_access_key={SECRET}\n"
            f"aws_session_token={SECRET}-{token}\n"
        )


@contextmanager
def server_that_takes(token: str, headers: Mapping[str, str]) -> Iterator[str]:
    """Gives its address. It answers to all requests with these headers and an empty body."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def answer(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length") or 0))
            is_valid = self.headers["X-Amz-Security-Token"] == f"{SECRET}-{token}"
            body = b"" if is_valid else EXPIRED
            self.send_response(200 if is_valid else 400)
            for name, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = answer  # noqa: N815

        def log_message(self, *_: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()
