"""The user's `oauth_cb`, as each of the two clients calls it for a token.

    oauth_cb ──► TokenCallback ──► librdkafka, on executors and driver, whenever it needs a token
             └─► TokenProvider ──► kafka-python, on the driver, at every connection: it keeps one

The same function serves both. It is called with the text of `sasl.oauthbearer.config` (None without
it) and returns (token, expiry in Unix seconds), optionally with (…, principal, extensions).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Final, TypeAlias

from kafka.net.sasl.oauth import AbstractTokenProvider

from sparkonce.sinks.kafka.connecting.refused import RefusedError

OAuthCallback: TypeAlias = "Callable[[str | None], Any]"

RENEWED_AFTER: Final = 0.8
"""The share of a token's life after which it is renewed, as in librdkafka."""

_MOST_S: Final = 1e12
"""Larger than any real expiry in seconds, and smaller than the present time in milliseconds."""

_EXPECTED: Final = "(token, expiry in Unix seconds[, principal, {extension: value}])"


@dataclass(frozen=True, slots=True)
class Token:
    """What `oauth_cb` returned, checked. Its `repr` does not show the token."""

    text: str
    expires_at: float
    principal: str
    extensions: Mapping[str, str]

    def __repr__(self) -> str:
        return f"Token(expires_at={self.expires_at})"


def fetch(callback: OAuthCallback, argument: str | None) -> Token:
    """Get a token and check it.

    Raises:
        RefusedError: the callback failed, returned something else, or returned a token that has
            expired or never expires. The message leaves out the callback's own message, which may
            hold a secret.
    """
    try:
        value = callback(argument)
    except Exception as error:  # noqa: BLE001 - it is the user's code
        raise RefusedError(
            f"config['oauth_cb'] raised {type(error).__name__}{_place(error.__traceback__)}; call "
            "it manually to see why"
        ) from None
    try:
        text, expires_at, *more = value
        given = dict(more[1]) if len(more) > 1 and more[1] else {}
        extensions = {str(name): str(value) for name, value in given.items()}
        principal = str(more[0]) if more and more[0] else ""
        token = Token(_text(text), float(expires_at), principal, extensions)
        "".join((principal, *extensions, *extensions.values())).encode()  # no surrogates
    except (TypeError, ValueError):
        raise RefusedError(
            f"config['oauth_cb'] returned {type(value).__name__}, not {_EXPECTED}"
        ) from None
    now = time.time()
    if not token.expires_at > now:  # this also refuses NaN
        raise RefusedError(
            f"config['oauth_cb'] returned a token that expired at {token.expires_at:.0f}; it must "
            "return its expiry in Unix seconds, not the seconds that remain. Here it is "
            f"{now:.0f}: is this machine's clock right?"
        )
    if token.expires_at > _MOST_S:
        raise RefusedError(
            f"config['oauth_cb'] returned a token that expires at {token.expires_at:.0f}; it must "
            "return its expiry in Unix seconds, not milliseconds"
        )
    return token


class TokenCallback:
    """For librdkafka. It keeps the reason of a failure, which librdkafka does not report."""

    def __init__(self, callback: OAuthCallback) -> None:
        self._callback = callback
        self.failure: str | None = None

    def __call__(self, argument: str | None) -> Token:
        try:
            token = fetch(self._callback, argument)
        except RefusedError as error:
            self.failure = str(error)
            raise
        self.failure = None
        return token


class TokenProvider(AbstractTokenProvider):  # type: ignore[misc] # kafka-python has no types for it
    """For kafka-python, which calls it from its one I/O thread."""

    def __init__(self, callback: OAuthCallback, argument: str | None) -> None:
        super().__init__()
        self._callback = callback
        self._argument = argument
        self._token: Token | None = None
        self._renew_at = self._renew_at_steady = 0.0

    def token(self) -> str:
        now, steady = time.time(), time.monotonic()
        # Both clocks count: one may be set back, the other stops while the machine is suspended.
        if self._token is None or now >= self._renew_at or steady >= self._renew_at_steady:
            self._token = fetch(self._callback, self._argument)
            kept_s = (self._token.expires_at - now) * RENEWED_AFTER
            self._renew_at, self._renew_at_steady = now + kept_s, steady + kept_s
        return self._token.text

    def extensions(self) -> Mapping[str, str]:
        return {} if self._token is None else self._token.extensions


def _text(token: object) -> str:
    if not isinstance(token, str) or not token.isascii() or not token:
        raise TypeError
    return token


def _place(trace: TracebackType | None) -> str:
    """Where the callback failed: file and line of the innermost call."""
    if trace is None or trace.tb_next is None:  # the first frame is ours
        return ""
    while trace.tb_next is not None:
        trace = trace.tb_next
    return f" in {Path(trace.tb_frame.f_code.co_filename).name}, line {trace.tb_lineno}"
