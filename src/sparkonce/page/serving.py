"""The server: it listens, prints the address, and ends by SIGTERM or Ctrl-C."""

from __future__ import annotations

import contextlib
import secrets
import socket
from collections.abc import Callable
from typing import Final

import uvicorn

from sparkonce.errors import ConfigurationError
from sparkonce.page.access import is_local
from sparkonce.page.app import make_app
from sparkonce.page.source import Source

TOKEN_VARIABLE: Final = "SPARKONCE_UI_TOKEN"  # noqa: S105 - a name
_SHORTEST_TOKEN: Final = 16
_EVERYWHERE: Final = {"0.0.0.0", "::"}  # noqa: S104 - where it is asked for
"""Nobody can open these: the page is then shown under the machine's name."""


def token_for(host: str, given: str | None) -> tuple[str | None, bool]:
    """The access token, and whether it was made here and must be shown.

    Raises:
        ConfigurationError: the given one is too short.
    """
    if given:
        if len(given) < _SHORTEST_TOKEN:
            raise ConfigurationError(
                f"{TOKEN_VARIABLE} has fewer than {_SHORTEST_TOKEN} characters: use a longer one, "
                "or unset it to have one made"
            )
        return given, False
    return (None, False) if is_local(host) else (secrets.token_urlsafe(32), True)


def serve(
    source: Source, host: str, port: int, given: str | None, say: Callable[[str], None]
) -> None:
    """Answer until the process is asked to end.

    Args:
        source: what the page shows.
        host: the name or address to listen on.
        port: 0 for a free one.
        given: the access token that the operator chose.
        say: gets the address, once the page can be opened.

    Raises:
        ConfigurationError: it cannot listen there.
    """
    token, is_new = token_for(host, given)
    config = uvicorn.Config(
        make_app(source, token),
        log_level="warning",
        access_log=False,  # it would show the token
        proxy_headers=False,
        server_header=False,
        lifespan="off",
        timeout_graceful_shutdown=3,
    )
    with contextlib.closing(_listening(host, port)) as listening:
        named = socket.gethostname() if host in _EVERYWHERE else host
        shown = f"[{named}]" if ":" in named else named
        query = "" if token is None else f"?token={token if is_new else '…'}"
        say(f"http://{shown}:{listening.getsockname()[1]}/{query}")
        uvicorn.Server(config).run(sockets=[listening])


def _listening(host: str, port: int) -> socket.socket:
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(address[:2], family=family)
    except OSError as error:
        raise ConfigurationError(
            f"the page cannot listen on {host}, port {port} ({error}): choose another --port, or "
            "an address of this machine as --host"
        ) from error
