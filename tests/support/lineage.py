"""Receivers of lineage: a transport in memory, and a server of OpenLineage over HTTP."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Self

import jsonschema
import pyarrow as pa
from openlineage.client import OpenLineageClient
from openlineage.client.serde import Serde
from openlineage.client.transport import Transport
from referencing import Registry, Resource

from sparkonce.datasets import Dataset
from sparkonce.observe import OpenLineage
from sparkonce.observing import Facts, Output, Source
from tests.support.telemetry import RUN_ID
from tests.support.world import QUERY_ID

ROOT = Path(__file__).parents[2]
SCHEMAS = (ROOT / "tests/observe/openlineage", ROOT / "docs/assets/openlineage")
SPECIFICATION = "https://openlineage.io/spec/2-0-2/OpenLineage.json"

ROWS = pa.schema([("id", pa.int64()), ("tags", pa.list_(pa.string()))])


class InMemory(Transport):
    """Keeps the events as JSON; `act` is called with each before that."""

    kind = "memory"

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self.act: Callable[[], None] = lambda: None

    def emit(self, event: Any) -> None:
        self.act()
        self.events.append(json.loads(Serde.to_json(event)))


class Lineage:
    """Telemetry of the pipeline "orders" whose events stay in this process."""

    def __init__(self) -> None:
        self.transport = InMemory()
        client = OpenLineageClient(transport=self.transport)
        self.telemetry = OpenLineage("shop", client)
        self.follow()

    def follow(self) -> None:
        self.telemetry.follow("orders", QUERY_ID, RUN_ID)
        self.telemetry.describe("orders", facts())

    def events(self) -> list[dict[str, Any]]:
        self.telemetry.flush()
        return list(self.transport.events)

    def kinds(self) -> list[tuple[str, int, int]]:
        """What was sent, with the batch and the driver's place in the order of their tokens."""
        found = [(e["eventType"], *_attempt(e)) for e in self.events()]
        drivers = sorted({token for _, _, token in found})
        return [(kind, batch, drivers.index(token) + 1) for kind, batch, token in found]


def facts(dataset: Callable[[], Dataset] | None = None) -> Facts:
    left = dataset or (lambda: Dataset("file", "/data/left"))
    right = Dataset("sparkonce", "memory")
    outputs = {"left": Output(left, right, ROWS), "right": Output(lambda: right, right)}
    return Facts(
        outputs,
        lambda: [Source("FileStreamSource[file:/data/in]")],
        lambda batch: (f'{{"upTo":{batch}}}',),
    )


def _attempt(event: dict[str, Any]) -> tuple[int, int]:
    facet = event["run"]["facets"]["sparkonce_transaction"]
    return facet["batchId"], facet["token"]


def check(event: dict[str, Any]) -> None:
    """Check an event, and each of its facets, against the schemas.

    Raises:
        jsonschema.ValidationError: it does not fit.
    """
    _validator(f"{SPECIFICATION}#/$defs/RunEvent").validate(event)
    facets = [event["run"]["facets"], event["job"]["facets"]]
    for dataset in (*event["inputs"], *event["outputs"]):
        facets += [dataset.get(key, {}) for key in ("facets", "inputFacets", "outputFacets")]
    for facet in (facet for found in facets for facet in found.values()):
        address, _, _ = facet["_schemaURL"].rpartition("#")
        name = address.replace(":", "/").rpartition("/")[2].removesuffix(".json")
        schema = next(  # the client may add facets: of tags, of the source code
            json.loads(path.read_text())["$id"]
            for folder in SCHEMAS
            for path in folder.glob(f"{name}.json")
        )
        _validator(f"{schema}#/$defs/{name}").validate(facet)


@cache
def _validator(reference: str) -> jsonschema.Draft202012Validator:
    contents = [json.loads(p.read_text()) for folder in SCHEMAS for p in folder.glob("*.json")]
    registry: Any = Registry().with_resources(
        [(content["$id"], Resource.from_contents(content)) for content in contents]
    )
    return jsonschema.Draft202012Validator(
        {"$schema": "https://json-schema.org/draft/2020-12/schema", "$ref": reference},
        registry=registry,
        format_checker=jsonschema.FormatChecker(),
    )


class Receiver:
    """A server that takes OpenLineage's events over HTTP."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                receiver.events.append(json.loads(body))
                self.send_response(201)
                self.end_headers()

            def log_message(self, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
