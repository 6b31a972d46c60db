"""Who may ask: on this machine everybody, elsewhere the holder of a token.

    ?token=…  ─► a cookie, and a redirect to the address without the token
    cookie    ─► the page
    neither   ─► 401

Without a token the page answers only to names of this machine. Otherwise any site in the reader's
browser could read it, by a name of its own that leads to 127.0.0.1.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
from typing import TYPE_CHECKING, Final
from urllib.parse import urlencode, urlsplit

from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

_HEADERS: Final = {
    "cache-control": "no-store",
    "content-security-policy": (
        "default-src 'none'; style-src 'self'; img-src data:; form-action 'self'; "
        "base-uri 'none'; frame-ancestors 'none'"
    ),
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}


def is_local(host: str) -> bool:
    """Whether the name or address is of this machine only."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host.lower() == "localhost"


class Guard:
    """Lets a request through, or answers it.

    Args:
        app: what is guarded.
        token: the access token; None on this machine only.
    """

    def __init__(self, app: ASGIApp, token: str | None) -> None:
        self._app = app
        self._token = None if token is None else token.encode()
        digest = hashlib.sha256(b"sparkonce ui " + (self._token or b"")).hexdigest()
        # A cookie is shared by all ports of a host: each page has a name of its own.
        self._name, self._value = f"sparkonce_{digest[:8]}", digest[8:]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(_HEADERS)
            await send(message)

        answer = self._answer(Request(scope)) or self._app
        await answer(scope, receive, send_with_headers)

    def _answer(self, request: Request) -> Response | None:
        """What to answer in place of the page; None if the request may pass."""
        if request.method not in {"GET", "HEAD"} and _is_from_elsewhere(request):
            return PlainTextResponse("The request comes from another site.\n", 403)
        if self._token is None:
            if is_local(_host(request)):
                return None
            return PlainTextResponse("Without a token the page is for localhost only.\n", 403)
        given = request.query_params.get("token")
        if given is not None and hmac.compare_digest(given.encode(), self._token):
            return self._let_in(request)
        cookie = request.cookies.get(self._name, "")
        if hmac.compare_digest(cookie.encode(), self._value.encode()):
            return None
        return PlainTextResponse(
            "Open the page with the address that `sparkonce ui` printed; if it shows no token, "
            "write after ?token= the value of SPARKONCE_UI_TOKEN.\n",
            401,
        )

    def _let_in(self, request: Request) -> Response:
        left = [(k, v) for k, v in request.query_params.multi_items() if k != "token"]
        path = "/" + request.url.path.lstrip("/")  # never the address of another host
        answer = RedirectResponse(path + (f"?{urlencode(left)}" if left else ""), 303)
        answer.set_cookie(self._name, self._value, httponly=True, samesite="lax")
        return answer


def _host(request: Request) -> str:
    return urlsplit(f"//{request.headers.get('host', '')}").hostname or ""


def _is_from_elsewhere(request: Request) -> bool:
    site = request.headers.get("sec-fetch-site")
    if site is not None:  # its origin may be null, as `referrer-policy` wants it
        return site not in {"same-origin", "none"}
    origin = request.headers.get("origin")
    return origin is not None and urlsplit(origin).netloc != request.headers.get("host")
