"""An idempotent sink: an HTTP API that accepts a batch of rows under a key once.

    PUT  /batches/KEY   stores the rows under the key; the same key again changes nothing
    HEAD /batches/KEY   200 if the API has the key
    GET  /rows          the rows that readers get

The API has no transaction to prepare, so the rows wait in files until the batch is decided
(`IdempotentSink`). The server stores the key together with the rows, which makes the commit
idempotent. `serve` starts such an API of a few lines, for tests.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar
from urllib.error import HTTPError
from urllib.parse import quote
from urllib.request import Request, urlopen

import pyarrow as pa

from sparkonce.errors import CommitRejectedError
from sparkonce.model import BranchId
from sparkonce.sinks import IdempotentSink

TIMEOUT_S = 30


class HttpSink(IdempotentSink):
    """Sends the rows of each Spark task as JSON lines, in one request."""

    kind: ClassVar[str] = "http"

    def __init__(self, url: str, *, stage: str | Path, name: str | None = None) -> None:
        super().__init__(stage, name=name)
        self._url = url.rstrip("/")

    @property
    def target(self) -> str:
        return f"rows of an API by stage {self._stage}"

    @property
    def where(self) -> str:
        return f"{self.target} at {self._url}"

    def put(self, branch_id: BranchId, rows: Iterator[pa.RecordBatch]) -> None:
        lines = [json.dumps(row, default=str) for batch in rows for row in batch.to_pylist()]
        try:
            self._ask("PUT", branch_id, "\n".join(lines).encode())
        except HTTPError as error:
            if error.code in {400, 413, 422}:
                raise CommitRejectedError(
                    f"{self.where} refuses {len(lines)} rows ({error}): make it accept them",
                    branch_id,
                ) from error
            raise  # the outcome is unknown: the sink sends the rows again

    def has(self, branch_id: BranchId) -> bool | None:
        try:
            self._ask("HEAD", branch_id)
        except HTTPError as error:
            if error.code == 404:
                return None  # unknown: a request of a dead driver may still arrive
            raise
        return True

    def _ask(self, method: str, branch_id: BranchId, body: bytes | None = None) -> None:
        url = f"{self._url}/batches/{quote(str(branch_id))}"
        try:
            urlopen(Request(url, body, method=method), timeout=TIMEOUT_S).close()
        except HTTPError as error:
            error.close()  # it holds the connection
            raise


class Api(ThreadingHTTPServer):
    """The API, in memory."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.batches: dict[str, list[Any]] = {}
        self.lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    server: Api

    def do_PUT(self) -> None:
        lines = self.rfile.read(int(self.headers["Content-Length"])).splitlines()
        with self.server.lock:  # storing key and rows in one step makes it idempotent
            self.server.batches.setdefault(self.path, [json.loads(line) for line in lines])
        self._answer(201)

    def do_HEAD(self) -> None:
        self._answer(200 if self.path in self.server.batches else 404)

    def do_GET(self) -> None:
        with self.server.lock:
            rows = [row for batch in self.server.batches.values() for row in batch]
        self._answer(200, json.dumps(rows).encode())

    def _answer(self, status: int, body: bytes = b"") -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None: ...


def serve() -> Api:
    """Start the API in a thread; stop it with `shutdown` and `server_close`."""
    api = Api()
    threading.Thread(target=api.serve_forever, daemon=True).start()
    return api
