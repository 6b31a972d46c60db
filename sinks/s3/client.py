"""Connections to S3: the settings, one client per process and purpose, and what errors mean.

Clients are made at their first use in a process and shared by all its sinks with equal settings;
a client never travels to another process, and a forked process makes its own. One whose credentials
are refused is dropped with its session, so that the next asks boto3's chain anew.
"""

from __future__ import annotations

import os
import re
import threading
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError, ConnectionError, HTTPClientError  # noqa: A004
from botocore.parsers import ResponseParserError

from sparkonce.clients.s3 import code_of, said, status_of, when_not_valid

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client

S3_ERRORS = (BotoCoreError, ClientError, ResponseParserError)
"""All that a call of a client raises."""

_CONNECT_TIMEOUT_S = 5
_CONNECTIONS = 32
_AMAZONS = (".amazonaws.com", ".amazonaws.com.cn", ".amazonaws.eu", ".api.aws")
_THROTTLED = frozenset({"SlowDown", "RequestTimeout", "Throttling", "ThrottlingException"})

_ADVICE = {
    "ExpiredToken": "the credentials have expired: renew them where boto3's chain finds them, and "
    "the next try reads them; those in the sink's settings stay as they are",
    "RequestTimeTooSkewed": "correct the clock of this machine or of the server",
}

_RIGHTS = {
    "ListParts": "s3:ListMultipartUploadParts",
    "CompleteMultipartUpload": "s3:PutObject",
}
"""Without which a branch that is decided waits for ever."""


class Purpose(Enum):
    """How patient a client is: (attempts at a call, seconds of silence that end an attempt)."""

    UPLOAD = (6, 30)
    """Parts: sending one again is harmless, and its loss costs the whole task."""
    ASK = (3, 20)
    """Calls that change nothing, or that may be repeated."""
    ONCE = (1, 20)
    """Calls whose second answer differs from the first: create and complete."""


@dataclass(frozen=True, slots=True)
class Connection:
    """How to reach the server. Without keys, boto3's own credential chain is asked.

    Attributes:
        path_style: the bucket in the path, or in the host name. None leaves it to boto3, which
            goes by its files, and without them puts it into the path of another server's address.
    """

    endpoint_url: str | None = None
    region: str | None = None
    access_key: str | None = field(default=None, repr=False)
    secret_key: str | None = field(default=None, repr=False)
    session_token: str | None = field(default=None, repr=False)
    path_style: bool | None = None

    def client(self, purpose: Purpose) -> S3Client:
        """The client of this process; making the first one takes about 0.1 s."""
        key = (os.getpid(), self, purpose)
        client = _clients.get(key)
        if client is None:
            with _lock:
                client = _clients.get(key)
                if client is None:
                    client = _clients[key] = self._make(purpose)
        return client

    @property
    def other_server(self) -> str | None:
        """The endpoint of another server than Amazon's, also where boto3's own settings name it."""
        return server_at(self.endpoint_url or self.client(Purpose.ONCE).meta.endpoint_url)

    @property
    def partition(self) -> str | None:
        """That of Amazon's, such as "aws-cn": names of buckets are unique in each alone."""
        if self.other_server is not None:
            return None
        return self.client(Purpose.ONCE).meta.partition

    def close(self) -> None:
        """Close idle connections. Sinks that use the same ones connect again when they need to."""
        _sessions.pop((os.getpid(), self), None)
        for purpose in Purpose:
            client = _clients.pop((os.getpid(), self, purpose), None)
            if client is not None:
                client.close()

    def _make(self, purpose: Purpose) -> S3Client:
        attempts, read_timeout_s = purpose.value
        # Its clients share one reading of boto3's description of S3, which takes most of the time.
        # Sessions take one thread at a time: the lock is held here.
        session = _sessions.get((os.getpid(), self))
        if session is None:
            session = _sessions[os.getpid(), self] = boto3.session.Session()
        style: Any = {}
        if self.path_style is not None:
            style = {"addressing_style": "path" if self.path_style else "virtual"}
        config = Config(
            connect_timeout=_CONNECT_TIMEOUT_S,
            read_timeout=read_timeout_s,
            retries={"mode": "standard", "total_max_attempts": attempts},
            max_pool_connections=_CONNECTIONS,
            tcp_keepalive=True,
            s3=style,
            # Parts carry the checksums that the server is known to have (upload.py); others
            # than Amazon's trip over those that boto3 would add of its own accord.
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
        )

        def make(config: Config) -> S3Client:
            return session.client(
                "s3",
                endpoint_url=self.endpoint_url,
                region_name=self.region,
                aws_access_key_id=self.access_key,
                aws_secret_access_key=self.secret_key,
                aws_session_token=self.session_token,
                config=config,
            )

        client = make(config)
        merged = getattr(client.meta.config, "s3", None) or {}  # with what boto3's own files say
        signs_payload = merged.get("payload_signing_enabled")
        is_tls = client.meta.endpoint_url.startswith("https:")
        if purpose is Purpose.UPLOAD and is_tls and signs_payload is None:
            # As boto3 does by itself where a part has an MD5: TLS and a checksum protect it.
            style["payload_signing_enabled"] = False
            client.close()
            client = make(config.merge(Config(s3=style)))
        if self.access_key is None:  # those of the settings would be the same again
            when_not_valid(client, self.close)
        return client


_clients: dict[tuple[int, Connection, Purpose], S3Client] = {}
_sessions: dict[tuple[int, Connection], boto3.session.Session] = {}
_lock = threading.Lock()


def _renew_lock() -> None:
    global _lock  # noqa: PLW0603  # a fork may copy it while another thread holds it
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_renew_lock)


def server_at(url: str | None) -> str | None:
    """The server at an endpoint, however that is spelled; None for Amazon's.

    Args:
        url: of the endpoint; None for that which Amazon has for the region.
    """
    parts = urlsplit(url or "")
    if url is None or _is_amazons(f".{parts.hostname}"):
        return None
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl().rstrip("/")


def _is_amazons(host: str) -> bool:
    """Whether S3 itself answers there: a server of anybody's may run on one of its machines."""
    is_s3 = re.search(r"\.s3[.-]", host) is not None and ".elb." not in host
    return is_s3 and host.endswith(_AMAZONS)


def is_passing(error: Exception) -> bool:
    """Whether the same call may work a little later."""
    if isinstance(error, ClientError):
        return (status_of(error) or 500) >= 500 or code_of(error) in _THROTTLED  # noqa: PLR2004
    return isinstance(error, (ConnectionError, HTTPClientError, ResponseParserError))


def describe(error: Exception) -> str:
    """One line for messages; without the request, which is signed."""
    advice = _ADVICE.get(code_of(error))
    asked = error.operation_name if isinstance(error, ClientError) else None
    if (code_of(error), asked) == ("NotImplemented", "CreateMultipartUpload"):
        advice = 'a server that has no CRC32C may need checksum="none"'
    if code_of(error) == "AccessDenied" and asked in _RIGHTS:
        advice = f"grant {_RIGHTS[asked]}"
    return f"{said(error)}; {advice}" if advice else said(error)
