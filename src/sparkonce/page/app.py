"""The routes, and how they answer."""

from __future__ import annotations

import threading
from http import HTTPStatus
from typing import TYPE_CHECKING, Final
from urllib.parse import quote, urlencode

from jinja2 import PackageLoader
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route

from sparkonce.errors import ConfigurationError, LogUnavailableError
from sparkonce.facts import Facts
from sparkonce.page import html, views
from sparkonce.page.access import Guard
from sparkonce.page.source import Source
from sparkonce.words import age, counted, until, when

if TYPE_CHECKING:
    from starlette.requests import Request


_LONGEST_SEARCH: Final = 1_000


def make_app(source: Source, token: str | None = None) -> Starlette:
    """The page as an ASGI application.

    Args:
        source: what it shows.
        token: without it the page answers only to names of this machine.
    """
    pages = _Pages(source)
    return Starlette(
        routes=[
            Route("/", pages.index),
            Route("/pipelines/{name}", pages.pipeline),
            Route("/pipelines/{name}/search", pages.search),
            Route("/pipelines/{name}/batches/{query_id}/{batch:int}", pages.batch),
            Route("/savepoints", pages.savepoints),
            Route("/doctor", pages.doctor, methods=["GET", "POST"]),
            Route("/style.css", pages.style),
        ],
        middleware=[Middleware(Guard, token=token)],
        exception_handlers={
            HTTPException: pages.not_found,
            ConfigurationError: pages.failed,
            Exception: pages.failed,
        },
    )


class _Pages:
    """One method for each route; Starlette calls them in threads of a pool."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._one_doctor = threading.Lock()
        self._templates = html.templates(PackageLoader("sparkonce.page"))
        self._templates.filters |= {"age": age, "when": when, "until": until, "counted": counted}
        self._templates.globals |= {
            "path": _path,
            "log": source.log.address,
            "has_savepoints": source.savepoints is not None,
        }

    def _show(self, template: str, found: Facts, status: int = 200) -> Response:
        return HTMLResponse(self._templates.get_template(template).render(found), status)

    def index(self, request: Request) -> Response:
        return self._show("index.html", views.index(self._source, _number(request, "page") or 0))

    def pipeline(self, request: Request) -> Response:
        query_id, before = request.query_params.get("query"), _number(request, "before")
        found = views.pipeline(self._source, self._name(request), query_id, before)
        return self._show("pipeline.html", found)

    def batch(self, request: Request) -> Response:
        name, query_id = self._name(request), request.path_params["query_id"]
        number = request.path_params["batch"]
        first = _number(request, "first") or 0
        found = views.batch(self._source, name, query_id, number, first)
        if found is None:
            raise HTTPException(404, f"The log has no batch {number} of this query.")
        return self._show("batch.html", found)

    def search(self, request: Request) -> Response:
        name = self._name(request)
        text = request.query_params.get("q", "").strip()[:_LONGEST_SEARCH]
        query_id, before = request.query_params.get("query"), _number(request, "before")
        found = views.search_page(self._source, name, text, query_id, before)
        return self._show("search.html", {**found, "name": name, "text": text})

    def savepoints(self, request: Request) -> Response:
        page = _number(request, "page") or 0
        return self._show("savepoints.html", views.savepoints(self._source, page))

    def doctor(self, request: Request) -> Response:
        findings = None
        if request.method == "POST":
            with self._one_doctor:
                findings = self._source.doctor()
        return self._show(
            "doctor.html", {"findings": findings, "has_sinks": self._source.has_sinks}
        )

    def style(self, _: Request) -> Response:
        text = html.style()
        return Response(text, media_type="text/css")

    def _name(self, request: Request) -> str:
        name = str(request.path_params["name"])
        if name not in self._source.names():
            raise HTTPException(404, f"There is no pipeline {name!r} here.")
        return name

    def not_found(self, _: Request, error: Exception) -> Response:
        status = error.status_code if isinstance(error, HTTPException) else 404
        what = error.detail if isinstance(error, HTTPException) else str(error)
        return self._show("error.html", {"kind": f"Error {status}", "what": what}, status)

    def failed(self, _: Request, error: Exception) -> Response:
        """What the log or a server reported; only our own errors are known to hold no secret."""
        is_ours = type(error).__module__ == "sparkonce.errors"
        status = HTTPStatus.INTERNAL_SERVER_ERROR
        if isinstance(error, LogUnavailableError):
            status = HTTPStatus.SERVICE_UNAVAILABLE
        what = str(error) if is_ours else "The process's standard error shows what failed."
        return self._show("error.html", {"kind": type(error).__name__, "what": what}, status)


def _path(*parts: object, **parameters: object) -> str:
    """An address of the page: its parts and parameters are quoted."""
    given = {name: value for name, value in parameters.items() if value is not None}
    path = "/" + "/".join(quote(str(part), safe="") for part in parts)
    return path + (f"?{urlencode(given)}" if given else "")


def _number(request: Request, name: str) -> int | None:
    text = request.query_params.get(name, "")
    if not text:
        return None
    if not text.isdecimal() or len(text) > 15:  # noqa: PLR2004 - a batch id has fewer digits
        raise HTTPException(400, f"{name} is not a number.")
    return int(text)
