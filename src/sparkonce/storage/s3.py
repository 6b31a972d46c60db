"""A folder in a bucket: a prefix, through boto3.

Each write has a condition, is one request, and is sent once: a second attempt would meet the result
of the first. The error after a failure depends on how far the request got:

    not sent, or the connection failed       nothing was written       LogUnavailableError
    S3 refused it (3xx, 4xx, 501, 503)       nothing was written       LogUnavailableError
    no answer, another server error, or an
    error without S3's own code, such as a
    proxy's                                  it may have been written  DecisionUnknownError
"""

from __future__ import annotations

import base64
import hashlib
import ssl
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

import boto3
from botocore.config import Config
from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    ConnectTimeoutError,
    EndpointConnectionError,
    ProfileNotFound,
    SSLError,
)
from botocore.parsers import ResponseParserError

from sparkonce.clients.s3 import (
    RIGHT_CLOCK,
    SKEWED,
    code_of,
    endpoint_setting,
    has_delete_marker,
    is_of_server,
    require_s3_answers,
    said,
    status_of,
    when_not_valid,
    without_user,
)
from sparkonce.errors import (
    ConfigurationError,
    DecisionUnknownError,
    LogCorruptError,
    LogError,
    LogUnavailableError,
)
from sparkonce.failpoints import reach

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client

ResultT = TypeVar("ResultT")

S3_ERRORS: Final = (BotoCoreError, ClientError, ResponseParserError)
NOT_IMPLEMENTED: Final = 501
THROTTLED: Final = frozenset({429, 503})

_NOT_MET: Final = frozenset({404, 409, 412})
_NOT_CONNECTED: Final = (EndpointConnectionError, ConnectTimeoutError)
_REFUSED: Final = THROTTLED | {NOT_IMPLEMENTED, *range(300, 500)}
_NOT_MODIFIED: Final = 304
_CONNECT_TIMEOUT_S = 5
_READ_TIMEOUT_S = 20
_CONNECTIONS = 12
_MOST_CREATES = 6
_FIRST_PAUSE_S = 0.05


@dataclass(frozen=True, slots=True)
class Server:
    """How to reach the server; None leaves a choice to boto3's own settings.

    Attributes:
        endpoint_url: of a server other than Amazon's.
        region: of the bucket.
        path_style: True puts the bucket's name into the path, False into the host name.
    """

    endpoint_url: str | None = None
    region: str | None = None
    path_style: bool | None = None


class Tagged(NamedTuple):
    """An object as it was read; `text` is None if the reader already knows this entity tag."""

    tag: str
    text: str | None


class S3Folder:
    """Objects under a prefix of a bucket; see `sparkonce.storage.base.Folder`.

    Credentials come from boto3's own chain: the environment, ``~/.aws``, the machine's role.

    `prefix` ends with / unless it is empty; `address` is for messages.

    Raises:
        ConfigurationError: boto3 cannot create a client from these settings.
        LogUnavailableError: boto3 cannot create a client now.
    """

    def __init__(self, bucket: str, prefix: str, server: Server, address: str) -> None:
        self.bucket = bucket
        self.prefix = prefix
        self._server = server
        self._address = address
        self._sending = threading.local()
        try:
            self._client: S3Client | None = self._connect()
        except (ProfileNotFound, ValueError) as error:  # a broken URL is a ValueError
            raise ConfigurationError(
                f"{address}: boto3 cannot create a client ({without_user(str(error))}): correct "
                "its settings, the environment or ~/.aws"
            ) from None
        except BotoCoreError as error:
            raise self._no_client(error) from None

    @property
    def address(self) -> str:
        return self._address

    @property
    def client(self) -> S3Client:
        """The client; it is recreated after the server refused its credentials."""
        client = self._client
        if client is None:
            try:
                client = self._client = self._connect()
            except BotoCoreError as error:  # such as a half-written credentials file
                raise self._no_client(error) from None
        return client

    @property
    def endpoint_url(self) -> str:
        """The server's URL, for messages."""
        return without_user(self.client.meta.endpoint_url)

    def close(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            client.close()

    def _connect(self) -> S3Client:
        style: Any = {}
        if (path_style := self._server.path_style) is not None:  # else boto3's settings decide
            style = {"addressing_style": "path" if path_style else "virtual"}
        client: S3Client = boto3.session.Session().client(
            "s3",
            endpoint_url=self._server.endpoint_url,
            region_name=self._server.region,
            config=Config(
                connect_timeout=_CONNECT_TIMEOUT_S,
                read_timeout=_READ_TIMEOUT_S,
                retries={"mode": "standard", "total_max_attempts": 1},
                max_pool_connections=_CONNECTIONS,
                tcp_keepalive=True,
                s3=style,
                request_checksum_calculation="when_required",
                response_checksum_validation="when_required",
            ),
        )
        when_not_valid(client, self.close)
        require_s3_answers(client)
        client.meta.events.register("before-send.s3.PutObject", self._note_that_it_is_sent)
        return client

    def _note_that_it_is_sent(self, **_: object) -> None:
        self._sending.has_begun = True

    # -- reading -----------------------------------------------------------------------------------

    def read(self, name: str) -> str | None:
        found = self.get(name)
        return None if found is None else found.text

    def get(
        self, name: str, known: str | None = None, *, may_be_deleted: bool = True
    ) -> Tagged | None:
        """Read an object; None only if the server itself reports that it does not exist.

        Args:
            name: of the object.
            known: the entity tag whose text the reader already has.
            may_be_deleted: False refuses a delete marker, which does not prove an absence.
        """
        condition: Any = {} if known is None else {"IfNoneMatch": known}
        reach("log.before", request="get")
        try:
            answer = self.client.get_object(Bucket=self.bucket, Key=self.prefix + name, **condition)
            tag, body = answer["ETag"], answer["Body"].read()
        except S3_ERRORS as error:
            if status_of(error) == _NOT_MODIFIED and known is not None:
                return Tagged(known, None)
            # A 404 without S3's own code may come from a proxy.
            if code_of(error) == "NoSuchKey":
                if may_be_deleted or not has_delete_marker(error):
                    return None
                raise self._deleted(name) from None
            raise self.unavailable(error) from None
        try:
            return Tagged(tag, body.decode())
        except UnicodeDecodeError as error:
            raise LogCorruptError(
                f"{name} in {self.address} is not text; restore it from a copy"
            ) from error

    def _deleted(self, name: str) -> LogUnavailableError:
        return LogUnavailableError(
            f"{self.address}: there is a delete marker at {self.prefix}{name}: somebody deleted "
            "the object, and the bucket keeps its versions; nothing was written. Remove the "
            "marker, or decided batches would be aborted. For a new log choose another prefix"
        )

    def names(self, folder: str) -> Sequence[str]:
        return self.listed(folder)

    def listed(self, folder: str, **settings: Any) -> list[str]:
        """The names of all keys below `folder`; `settings` are those of the request."""

        def ask() -> list[str]:
            pages = self.client.get_paginator("list_objects_v2").paginate(
                Bucket=self.bucket, Prefix=self.prefix + (folder and f"{folder}/"), **settings
            )
            return [
                found["Key"].removeprefix(self.prefix)
                for page in pages
                for found in page.get("Contents", [])
            ]

        return self.ask("list", ask)

    # -- writing -----------------------------------------------------------------------------------

    def create(self, name: str, text: str) -> bool:
        for number in range(_MOST_CREATES):
            tag = self.put(name, text, {"IfNoneMatch": "*"})
            if tag is not None or self.read(name) is not None:
                return tag is not None
            # Another write of the object is in progress, and may still fail.
            time.sleep(_FIRST_PAUSE_S * 2**number)
        raise LogUnavailableError(
            f"{self.address}: {_MOST_CREATES} times the server refused to create "
            f"{self.prefix}{name} because it exists, and then reported that it does not exist; "
            "nothing was written. Look for a proxy that answers in the server's place and for a "
            "bucket that is being deleted or restored, and start again"
        )

    def delete(self, name: str) -> None:
        key = self.prefix + name
        self.ask("delete", lambda: self.client.delete_object(Bucket=self.bucket, Key=key))

    def put(self, name: str, text: str, condition: Mapping[str, str]) -> str | None:
        """Write an object on a condition (``IfMatch`` or ``IfNoneMatch``).

        Returns:
            The new entity tag; None if the condition is not met.

        Raises:
            DecisionUnknownError: the object may have been written.
            LogUnavailableError: it was not written.
        """
        try:
            return self.send(name, text, condition)
        except S3_ERRORS as error:
            if is_not_met(error):
                return None
            raise self.failed_write(error) from None

    def send(self, name: str, text: str, condition: Mapping[str, str]) -> str:
        """Send the request of `put`; raises boto3's own errors."""
        reach("log.before", request="put")
        self._sending.has_begun = False
        body = text.encode()
        md5 = hashlib.md5(body, usedforsecurity=False)
        answer = self.client.put_object(
            Bucket=self.bucket,
            Key=self.prefix + name,
            Body=body,
            # Buckets with Object Lock require it.
            ContentMD5=base64.b64encode(md5.digest()).decode(),
            ContentType="application/json",
            **condition,  # type: ignore[arg-type]
        )
        reach("log.after", request="put")
        return answer["ETag"]

    # -- errors ------------------------------------------------------------------------------------

    def failed_write(self, error: Exception) -> LogError:
        """The error for a failed write: was nothing written, or is that unknown?"""
        status = status_of(error)
        refused = is_of_server(error) and (status or 0) in _REFUSED
        # An earlier failure in boto3, such as missing credentials, never reaches the server.
        if refused or not self._sending.has_begun or _is_not_connected(error):
            return self.unavailable(error)
        return DecisionUnknownError(
            f"{self.address}: nobody knows whether a write has landed ({said(error)}); read the "
            "log again"
        )

    def _no_client(self, error: BotoCoreError) -> LogUnavailableError:
        return LogUnavailableError(
            f"{self.address} cannot be used now ({said(error)}), nothing was written; check "
            "boto3's settings: the environment and ~/.aws"
        )

    def unavailable(self, error: Exception) -> LogUnavailableError:
        """The error for a server that fails; without an answer, it names the server's setting."""
        advice = (
            "check the bucket, its endpoint and the rights to get, put, list and delete objects"
        )
        if status_of(error) is None and self._client is not None:
            setting = endpoint_setting(self._client.meta.endpoint_url, self._server.endpoint_url)
            advice = f"check the server at {self.endpoint_url}, which {setting} names"
        elif code_of(error) == SKEWED:
            advice = RIGHT_CLOCK
        return LogUnavailableError(
            f"{self.address} cannot be used now ({said(error)}), nothing was written; {advice}"
        )

    def ask(self, request: str, action: Callable[[], ResultT]) -> ResultT:
        """Run an action that changes nothing, or that may be repeated."""
        reach("log.before", request=request)
        try:
            return action()
        except S3_ERRORS as error:
            raise self.unavailable(error) from None


def is_not_met(error: Exception) -> bool:
    """Whether the error is the server's answer that the condition of a write is not met."""
    is_answer = is_of_server(error) and code_of(error) != "NoSuchBucket"
    return is_answer and status_of(error) in _NOT_MET


def _is_not_connected(error: Exception) -> bool:
    """Whether there was certainly no connection. One to a proxy may break after the request."""
    if isinstance(error, SSLError):
        cause = error.kwargs["error"].args[0]  # of urllib3's own error
        return isinstance(cause, ssl.SSLCertVerificationError)
    return isinstance(error, _NOT_CONNECTED)
