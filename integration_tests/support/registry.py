"""A schema registry in this process, with Confluent's protocol over HTTP.

An id belongs to a schema in all its subjects; a version belongs to a subject. A new version must be
able to read the rows of the newest one (BACKWARD, the protocol's default). Responses and error
codes follow Confluent's API reference.
"""

from __future__ import annotations

import base64
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar
from urllib.parse import unquote, urlsplit

CONTENT_TYPE = "application/vnd.schemaregistry.v1+json"


class ApiError(Exception):
    def __init__(self, status: int, code: int, message: str) -> None:
        super().__init__(message)
        self.status, self.code = status, code


class Registry:
    """The registered schemas, and a list of every request.

    Attributes:
        login: the "user:password" that requests must carry; None accepts every request.
        failing: if set, the HTTP status of every response.
    """

    def __init__(self) -> None:
        self.url = ""
        self.login: str | None = None
        self.failing: int | None = None
        self.requests: list[str] = []
        self._schemas: list[Any] = []
        self._subjects: dict[str, list[int]] = {}
        self._lock = threading.Lock()

    def versions(self, subject: str) -> list[Any]:
        """The subject's schemas, parsed."""
        return [self._schemas[i - 1] for i in self._subjects.get(subject, [])]

    def answer(self, method: str, path: str, body: dict[str, Any]) -> Any:
        with self._lock:
            self.requests.append(f"{method} {path}")
            if self.failing is not None:
                raise ApiError(self.failing, self.failing, "It is meant to fail")
            for route, pattern, act in self._ROUTES:
                found = re.fullmatch(pattern, path)
                if method == route and found is not None:
                    return act(self, body, *map(unquote, found.groups()))
        raise ApiError(404, 404, "HTTP 404 Not Found")

    def register(self, body: dict[str, Any], subject: str) -> Any:
        schema = self._parsed(body)
        known = self.versions(subject)
        if schema in known:
            return {"id": self._schemas.index(schema) + 1}
        if known and (reason := incompatible(schema, known[-1])):
            raise ApiError(
                409,
                409,
                f"Schema being registered is incompatible with an earlier schema for "
                f'subject "{subject}", details: [{reason}]',
            )
        if schema not in self._schemas:
            self._schemas.append(schema)
        number = self._schemas.index(schema) + 1
        self._subjects.setdefault(subject, []).append(number)
        return {"id": number}

    def look_up(self, body: dict[str, Any], subject: str) -> Any:
        schema = self._parsed(body)
        known = self._known(subject)
        if schema not in known:
            raise ApiError(404, 40403, "Schema not found")
        return self._version(subject, known.index(schema))

    def latest(self, _body: dict[str, Any], subject: str) -> Any:
        return self._version(subject, len(self._known(subject)) - 1)

    def by_id(self, _body: dict[str, Any], number: str) -> Any:
        if not 0 < int(number) <= len(self._schemas):
            raise ApiError(404, 40403, f"Schema {number} not found")
        return {"schema": json.dumps(self._schemas[int(number) - 1])}

    def _known(self, subject: str) -> list[Any]:
        if subject not in self._subjects:
            raise ApiError(404, 40401, f"Subject '{subject}' not found.")
        return self.versions(subject)

    def _version(self, subject: str, index: int) -> Any:
        number = self._subjects[subject][index]
        text = json.dumps(self._schemas[number - 1])
        return {"subject": subject, "id": number, "version": index + 1, "schema": text}

    def _parsed(self, body: dict[str, Any]) -> Any:
        if body.get("schemaType", "AVRO") != "AVRO":
            raise ApiError(422, 42201, "Invalid schema type")
        try:
            return json.loads(body["schema"])
        except ValueError:
            raise ApiError(422, 42201, "Invalid schema") from None

    _ROUTES: ClassVar[Any] = (
        ("POST", r"/subjects/([^/]+)/versions", register),
        ("POST", r"/subjects/([^/]+)", look_up),
        ("GET", r"/subjects/([^/]+)/versions/latest", latest),
        ("GET", r"/schemas/ids/(\d+)", by_id),
    )


def incompatible(new: Any, old: Any) -> str | None:
    """Why a reader with `new` cannot read rows written with `old`; only for flat records."""
    if not (
        isinstance(new, dict) and isinstance(old, dict) and "fields" in new and "fields" in old
    ):
        return None if new == old else "TYPE_MISMATCH"
    before = {item["name"]: item for item in old["fields"]}
    for item in new["fields"]:
        if item["name"] not in before:
            if "default" not in item:
                return f"READER_FIELD_MISSING_DEFAULT_VALUE, {item['name']}"
        elif item["type"] != before[item["name"]]["type"]:
            return f"TYPE_MISMATCH, {item['name']}"
    return None


@contextmanager
def running() -> Iterator[Registry]:
    """A registry on a free port of this machine."""
    registry = Registry()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._serve("GET")

        def do_POST(self) -> None:
            self._serve("POST")

        def _serve(self, method: str) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            try:
                self._authenticate()
                path = urlsplit(self.path).path
                status, answer = 200, registry.answer(method, path, json.loads(body or b"{}"))
            except ApiError as error:
                status, answer = error.status, {"error_code": error.code, "message": str(error)}
            text = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Type", CONTENT_TYPE)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def _authenticate(self) -> None:
            shown = self.headers.get("Authorization", "").removeprefix("Basic ")
            login = base64.b64decode(shown).decode()
            if registry.login is not None and login != registry.login:
                # It repeats the login, so that a test can check that our error does not.
                raise ApiError(401, 401, f"Unauthorized: {login}")

        def log_message(self, format: str, *args: Any) -> None: ...  # noqa: A002

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        registry.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield registry
        finally:
            server.shutdown()
            thread.join()
