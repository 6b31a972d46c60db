"""The clients of one process: one for each purpose, shared by all sinks with equal settings.

A client is made at its first use. It never travels to another process, and a forked process makes
its own. If the server refuses the credentials of a client, the client and its session are dropped,
so that the next client asks boto3's chain again.
"""

from __future__ import annotations

import os
import re
import threading
import uuid
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import urlsplit

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError

from sparkonce.clients.s3 import require_s3_answers, when_not_valid
from sparkonce.errors import ConfigurationError
from sparkonce.once import forget, once
from sparkonce.sinks.s3.connecting.settings import ClientFactory, S3Connection

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client

_CONNECT_TIMEOUT_S = 5
_CONNECTIONS = 32
_AMAZONS = (".amazonaws.com", ".amazonaws.com.cn", ".amazonaws.eu", ".api.aws")
_ENDPOINT_VARIABLES = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")
"""Environment variables that name a server, in the order in which boto3 reads them."""


class Purpose(Enum):
    """How patient a client is: (attempts at a call, seconds of silence that end an attempt)."""

    UPLOAD = (6, 30)
    """Parts: sending a part again is harmless, and losing one costs the whole task."""
    ASK = (3, 20)
    """Calls that change nothing, or that may be repeated."""
    ONCE = (1, 20)
    """Calls whose second answer differs from the first: create and complete."""


@dataclass(frozen=True, slots=True)
class Clients:
    """Makes and keeps the clients for these settings.

    Attributes:
        settings: of the connection; the defaults if there is a factory.
        factory: makes the clients in place of boto3 and the settings.
        identity: of the factory; it is pickled with the sink, so that the tasks of one executor
            share the clients.
    """

    settings: S3Connection = field(default_factory=S3Connection)
    factory: ClientFactory | None = field(default=None, compare=False)
    identity: str = ""

    @classmethod
    def made_by(cls, factory: ClientFactory) -> Self:
        """Clients from the user's own factory."""
        return cls(S3Connection(), factory, uuid.uuid4().hex)

    def client(self, purpose: Purpose) -> S3Client:
        """The client of this process; making the first one takes about 0.1 s."""
        return once(_Made, self).client(purpose)

    @property
    def other_server(self) -> str | None:
        """The server, if it is not Amazon's; boto3's own settings may name it too."""
        named = self.settings.endpoint_url
        return server_at(named or self.client(Purpose.ONCE).meta.endpoint_url)

    @property
    def partition(self) -> str | None:
        """Amazon's partition, such as "aws-cn": each has its own names of buckets."""
        if self.other_server is not None:
            return None
        return self.client(Purpose.ONCE).meta.partition

    @property
    def address_setting(self) -> str:
        """The setting that decides which server is asked, for messages."""
        if self.factory is not None:
            return "client="
        if self.settings.endpoint_url is not None:
            return "endpoint_url="
        is_ignored = os.environ.get("AWS_IGNORE_CONFIGURED_ENDPOINT_URLS", "").lower() == "true"
        for name in () if is_ignored else _ENDPOINT_VARIABLES:
            if os.environ.get(name):
                return f"the environment variable {name}"
        try:
            is_amazons = self.other_server is None
        except (BotoCoreError, ValueError):  # no client can be made: a profile is broken
            is_amazons = False
        if not is_amazons:
            chosen = self.settings.profile_name or os.environ.get("AWS_PROFILE") or "default"
            return f"endpoint_url of the profile {chosen!r} in boto3's files"
        return "region_name="

    def close(self) -> None:
        """Close idle connections. Sinks with the same settings connect again when they need to."""
        made = forget(_Made, self)
        if made is not None:
            made.close()


class _Made:
    """The session of one process, and its clients.

    The clients share one session, which reads boto3's description of S3 only once; that takes most
    of the time. A session serves one thread at a time, so clients are made under a lock.
    """

    def __init__(self, recipe: Clients) -> None:
        self._recipe = recipe
        self._settings = recipe.settings
        self._lock = threading.Lock()
        self._clients: dict[Purpose, S3Client] = {}

    @cached_property
    def _session(self) -> boto3.session.Session:
        return boto3.session.Session(profile_name=self._settings.profile_name)

    def client(self, purpose: Purpose) -> S3Client:
        client = self._clients.get(purpose)
        if client is None:
            with self._lock:
                client = self._clients.get(purpose)
                if client is None:
                    client = self._clients[purpose] = self._make(purpose)
        return client

    def close(self) -> None:
        with self._lock:
            for client in self._clients.values():
                client.close()

    def _make(self, purpose: Purpose) -> S3Client:
        style: dict[str, Any] = {}
        if self._settings.addressing_style is not None:
            style = {"addressing_style": self._settings.addressing_style}
        config = _config(purpose, style)
        client = self._built(config)
        _check_config(client, config)
        merged = getattr(client.meta.config, "s3", None) or {}  # with the settings of boto3's files
        signs_payload = merged.get("payload_signing_enabled")
        is_tls = client.meta.endpoint_url.startswith("https:")
        if purpose is Purpose.UPLOAD and is_tls and signs_payload is None:
            # boto3 does the same if a part has an MD5: TLS and a checksum protect the part.
            style["payload_signing_enabled"] = False
            client.close()
            client = self._built(_config(purpose, style))
        if self._settings.aws_access_key_id is None:  # keys in the settings would be refused again
            when_not_valid(client, self._recipe.close)
        require_s3_answers(client)
        return client

    def _built(self, config: Config) -> S3Client:
        if self._recipe.factory is not None:
            return self._recipe.factory(config)
        client = self._of_session(config, self._settings.endpoint_url)
        url = client.meta.endpoint_url
        if "@" in urlsplit(url).netloc:  # S3 ignores a password there, and boto3's errors show it
            client.close()
            client = self._of_session(config, server_at(url))
        return client

    def _of_session(self, config: Config, endpoint_url: str | None) -> S3Client:
        settings = self._settings
        return self._session.client(
            "s3",
            endpoint_url=endpoint_url,
            region_name=settings.region_name,
            aws_access_key_id=settings.aws_access_key_id,
            aws_secret_access_key=settings.aws_secret_access_key,
            aws_session_token=settings.aws_session_token,
            verify=settings.verify,
            config=config,
        )


def _config(purpose: Purpose, style: dict[str, Any]) -> Config:
    attempts, read_timeout_s = purpose.value
    s3: Any = dict(style)
    return Config(
        connect_timeout=_CONNECT_TIMEOUT_S,
        read_timeout=read_timeout_s,
        retries={"mode": "standard", "total_max_attempts": attempts},
        max_pool_connections=_CONNECTIONS,
        tcp_keepalive=True,
        s3=s3,
        # Parts carry the checksums that the server is known to have (writing/upload.py). Servers
        # other than Amazon's fail on the checksums that boto3 would add by itself.
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
    )


def _check_config(client: S3Client, wanted: Config) -> None:
    """Refuse a client of the user's factory that retries or adds checksums by itself."""
    given: Any = client.meta.config
    names = ("request_checksum_calculation", "response_checksum_validation")
    is_merged = all(getattr(given, name, None) == getattr(wanted, name) for name in names)
    attempts = (getattr(given, "retries", None) or {}).get("total_max_attempts")
    most = wanted.retries["total_max_attempts"]  # type: ignore[attr-defined]
    if not is_merged or (most == 1 and attempts != 1):
        raise ConfigurationError(
            "S3Sink: client= made a client without the Config that it was given, which sets the "
            "retries and checksums that the sink relies on: return "
            'boto3.client("s3", config=config), or config.merge(…) with your own settings'
        )


def server_at(url: str | None) -> str | None:
    """The server at an endpoint, in one spelling; None for Amazon's, which is the default."""
    parts = urlsplit(url or "")
    if url is None or _is_amazons(f".{parts.hostname}"):
        return None
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl().rstrip("/")


def _is_amazons(host: str) -> bool:
    """Whether the host is S3 itself, and not somebody's server on one of Amazon's machines."""
    is_s3 = re.search(r"\.s3[.-]", host) is not None and ".elb." not in host
    return is_s3 and host.endswith(_AMAZONS)
