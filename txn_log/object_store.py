"""The transaction log's documents in an object store with conditional writes.

What is swapped is one object, put with ``If-Match`` and the entity tag that was read, so a swap is
one request, and a request that lands late finds another tag and changes nothing. A server that
ignores such a condition, or lets several racing requests meet it, would let two drivers decide:
a race at the start finds out.
"""

from __future__ import annotations

import base64
import hashlib
import secrets
import ssl
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar
from urllib.parse import parse_qsl, urlsplit

import boto3
from botocore.config import Config
from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    ConnectTimeoutError,
    EndpointConnectionError,
    SSLError,
)
from botocore.parsers import ResponseParserError

from sparkonce.credentials import when_not_valid
from sparkonce.errors import (
    ConfigurationError,
    DecisionUnknownError,
    LogCorruptError,
    LogError,
    LogUnavailableError,
)
from sparkonce.failpoints import reach
from sparkonce.s3_errors import check_bucket, code_of, has_delete_marker, said, status_of
from sparkonce.txn_log.document import Found, Version

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client

ResultT = TypeVar("ResultT")

_SETTINGS: Final = ("endpoint_url", "region", "path_style")
_ERRORS = (BotoCoreError, ClientError, ResponseParserError)
_NOT_CONNECTED = (EndpointConnectionError, ConnectTimeoutError)
_NOT_MET = frozenset({404, 409, 412})
_SERVER_ERROR: Final = 500
_NOT_IMPLEMENTED: Final = 501
_THROTTLED: Final = frozenset({429, 503})
_REFUSED: Final = _THROTTLED | {_NOT_IMPLEMENTED}
_NOT_MODIFIED: Final = 304
_CONNECT_TIMEOUT_S = 5
_READ_TIMEOUT_S = 20
_MOST_CREATES = 6
_FIRST_PAUSE_S = 0.05
_THROTTLED_PAUSES_S = (1.0, 2.0, 4.0)
_RACERS = 12
_RACES = 12
_START_S = 30.0
_RACING_BYTES = 1 << 16


class ObjectPlace:
    """Documents under a prefix of a bucket; see `sparkonce.txn_log.document.Place`.

    Args:
        url: ``s3://bucket/prefix?endpoint_url=…&region=…&path_style=true``. Credentials come from
            boto3's own chain: the environment, ``~/.aws``, the machine's role.

    Raises:
        ConfigurationError: the URL cannot be read, the bucket cannot be used, or the server does
            not keep the conditions of a write.
    """

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        settings = dict(parse_qsl(parts.query))
        unknown = sorted(settings.keys() - set(_SETTINGS))
        if unknown or not parts.hostname or "@" in parts.netloc + settings.get("endpoint_url", ""):
            raise ConfigurationError(
                f"log=s3://…: expected s3://bucket/prefix with the settings {', '.join(_SETTINGS)}"
                + (f", not {', '.join(unknown)}" if unknown else "")
                + "; credentials come from the environment, ~/.aws or the machine's role"
            )
        if "#" in url:
            raise ConfigurationError(
                "log=s3://…: a # and what follows it are no part of an address, so that logs which "
                "differ in it alone would share one place: give each log a prefix without it"
            )
        if ":" in parts.netloc:
            raise ConfigurationError(
                "log=s3://…: expected the name of a bucket, not the ARN of an access point: behind "
                "one of several regions two drivers could meet the same condition, each in its own"
            )
        check_bucket(parts.netloc, "log=s3://…")
        if (style := settings.get("path_style", "true").lower()) not in {"true", "false"}:
            raise ConfigurationError(
                f"log=s3://…: path_style={style!r}: give true or false, or leave it out"
            )
        self._bucket = parts.netloc
        self._prefix = parts.path.strip("/") + "/" if parts.path.strip("/") else ""
        self._settings = settings
        self._address = url
        self._sending = threading.local()
        self._client: S3Client | None = self._connect()

    @property
    def address(self) -> str:
        return self._address

    @property
    def client(self) -> S3Client:
        """Made anew after its credentials were refused."""
        client = self._client
        if client is None:
            try:
                client = self._client = self._connect()
            except BotoCoreError as error:  # such as a file of credentials that is half written
                raise self._unavailable(error) from None
        return client

    def close(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            client.close()

    def _connect(self) -> S3Client:
        style: Any = {}
        if (path_style := self._settings.get("path_style")) is not None:  # else boto3's files say
            style = {"addressing_style": "path" if path_style.lower() == "true" else "virtual"}
        client: S3Client = boto3.session.Session().client(
            "s3",
            endpoint_url=self._settings.get("endpoint_url"),
            region_name=self._settings.get("region"),
            config=Config(
                connect_timeout=_CONNECT_TIMEOUT_S,
                read_timeout=_READ_TIMEOUT_S,
                # A second try of a conditional write would meet the first one's result.
                retries={"mode": "standard", "total_max_attempts": 1},
                max_pool_connections=_RACERS,
                tcp_keepalive=True,
                s3=style,
                request_checksum_calculation="when_required",
                response_checksum_validation="when_required",
            ),
        )
        when_not_valid(client, self.close)
        client.meta.events.register("before-send.s3.PutObject", self._note_that_it_is_sent)
        return client

    def _note_that_it_is_sent(self, **_: object) -> None:
        self._sending.has_begun = True

    # -- documents ---------------------------------------------------------------------------------

    def create(self, name: str, text: str) -> bool:
        for number in range(_MOST_CREATES):
            tag = self._put(name, text, {"IfNoneMatch": "*"})
            if tag is not None or self.read(name) is not None:
                return tag is not None
            # Another write of it is under way, and may come to nothing.
            time.sleep(_FIRST_PAUSE_S * 2**number)
        raise LogUnavailableError(
            f"{self.address}: {_MOST_CREATES} times the server refused to create "
            f"{self._prefix}{name} as if it were there, and said to a reader that it is not; "
            "nothing was written. Look for a proxy that answers in the server's place and for a "
            "bucket that is deleted or restored just now, and start again"
        )

    def read(self, name: str) -> str | None:
        found = self._get(name, None, may_be_deleted=True)
        return None if found is None else found.text

    def load(self, name: str, known: Version | None) -> Found | None:
        return self._get(name, known, may_be_deleted=False)

    def _get(self, name: str, known: Version | None, *, may_be_deleted: bool) -> Found | None:
        condition = {} if known is None else {"IfNoneMatch": str(known)}

        def get() -> tuple[str, bytes]:
            answer = self.client.get_object(
                Bucket=self._bucket,
                Key=self._prefix + name,
                **condition,  # type: ignore[arg-type]
            )
            return answer["ETag"], answer["Body"].read()

        reach("log.before", request="get")
        try:
            tag, body = get()
        except _ERRORS as error:
            status = status_of(error)
            if status == _NOT_MODIFIED and known is not None:
                return Found(known, None)
            # A 404 without the server's own word is that of a proxy, say, in its place.
            if code_of(error) == "NoSuchKey":
                if may_be_deleted or not has_delete_marker(error):
                    return None
                raise LogUnavailableError(
                    f"{self.address}: a delete marker stands at {self._prefix}{name}: somebody has "
                    "deleted it, and the bucket keeps its versions; nothing was written. Remove "
                    "the marker, or batches that were decided are aborted. For a new log choose "
                    "another prefix"
                ) from None
            raise self._unavailable(error) from None
        try:
            return Found(tag, body.decode())
        except UnicodeDecodeError as error:
            raise LogCorruptError(
                f"{name} in {self.address} is no text; restore the transaction log from a copy"
            ) from error

    def swap(self, name: str, seen: Version | None, text: str) -> Version | None:
        condition = {"IfNoneMatch": "*"} if seen is None else {"IfMatch": str(seen)}
        return self._put(name, text, condition)

    def names(self, folder: str) -> Sequence[str]:
        def ask() -> list[str]:
            pages = self.client.get_paginator("list_objects_v2").paginate(
                Bucket=self._bucket, Prefix=self._prefix + (folder and f"{folder}/")
            )
            return [
                found["Key"].removeprefix(self._prefix)
                for page in pages
                for found in page.get("Contents", [])
            ]

        return self._ask("list", ask)

    def delete(self, names: Iterable[str]) -> None:
        for name in names:
            key = self._prefix + name
            self._ask("delete", partial(self.client.delete_object, Bucket=self._bucket, Key=key))

    # -- requests ----------------------------------------------------------------------------------

    def _put(self, name: str, text: str, condition: Mapping[str, str]) -> str | None:
        """The new entity tag; None when the condition is not met.

        Raises:
            DecisionUnknownError: it may have been written.
            LogUnavailableError: it was not.
        """
        try:
            return self._send(name, text, condition)
        except _ERRORS as error:
            raise self._failed_write(error) from None

    def _send(self, name: str, text: str, condition: Mapping[str, str]) -> str | None:
        """As `_put`, with the errors of boto3."""
        reach("log.before", request="put")
        self._sending.has_begun = False
        body = text.encode()
        md5 = hashlib.md5(body, usedforsecurity=False)
        try:
            answer = self.client.put_object(
                Bucket=self._bucket,
                Key=self._prefix + name,
                Body=body,
                # Buckets that lock their objects demand it.
                ContentMD5=base64.b64encode(md5.digest()).decode(),
                ContentType="application/json",
                **condition,  # type: ignore[arg-type]
            )
        except _ERRORS as error:
            if status_of(error) in _NOT_MET and code_of(error) != "NoSuchBucket":
                return None
            raise
        reach("log.after", request="put")
        return answer["ETag"]

    def _failed_write(self, error: Exception) -> LogError:
        status = status_of(error)
        refused = status is not None and (status < _SERVER_ERROR or status in _REFUSED)
        # Whatever boto3 meets before, such as no credentials, has not reached the server.
        if refused or not self._sending.has_begun or _is_not_connected(error):
            return self._unavailable(error)
        return DecisionUnknownError(
            f"{self.address} did not answer to a write ({said(error)}); read the log again"
        )

    def _ask(self, request: str, action: Callable[[], ResultT]) -> ResultT:
        reach("log.before", request=request)
        try:
            return action()
        except _ERRORS as error:
            raise self._unavailable(error) from None

    def _unavailable(self, error: Exception) -> LogUnavailableError:
        return LogUnavailableError(
            f"{self.address} cannot be used now ({said(error)}), nothing was written; check the "
            "bucket, its endpoint and the rights to get, put, list and delete objects"
        )

    # -- can the server do it? ---------------------------------------------------------------------

    def check(self) -> None:
        """Race for some objects: of all who meet one condition at the same time, one may succeed.

        Raises:
            ConfigurationError: the server ignores conditions, or several of a race meet one.
        """
        name = f"probe-{secrets.token_hex(8)}"
        try:
            self._check_alone(name)
            self._check_races(name)
        finally:
            self.delete([name])

    def _check_alone(self, name: str) -> None:
        first = self._put_patiently(name, "first", {"IfNoneMatch": "*"})
        second = self._put_patiently(name, "second", {"IfNoneMatch": "*"})
        third = self._put_patiently(
            name, "third", {"IfMatch": '"00000000000000000000000000000000"'}
        )
        if first is None or second is not None or third is not None:
            raise self._refusal("it ignores the condition of a conditional PUT")

    def _put_patiently(self, name: str, text: str, condition: Mapping[str, str]) -> str | None:
        """As `_put`; some servers take one write of an object a second."""
        for pause_s in _THROTTLED_PAUSES_S:
            try:
                return self._send(name, text, condition)
            except _ERRORS as error:
                if status_of(error) == _NOT_IMPLEMENTED:
                    why = f"it has no conditional PUT ({said(error)})"
                    raise self._refusal(why) from None
                if status_of(error) not in _THROTTLED:
                    raise self._failed_write(error) from None
            time.sleep(pause_s)
        return self._put(name, text, condition)

    def _check_races(self, name: str) -> None:
        gate = threading.Barrier(_RACERS, timeout=_START_S)  # one may find no thread to run in

        def put(racer: int, condition: Mapping[str, str]) -> str | None:
            # No two are equal, or a swap would not change the tag; and they are large, so that a
            # server that looks first and writes later shows it.
            text = f"{secrets.token_hex(8)} {racer}".ljust(_RACING_BYTES)
            gate.wait()
            try:
                return self._put(name, text, condition)
            except LogUnavailableError:
                return None  # not written, so it has not won: many servers throttle such a race

        with ThreadPoolExecutor(_RACERS) as pool:
            for number in range(2 * _RACES):
                if number % 2 == 0:
                    self.delete([name])
                    condition = {"IfNoneMatch": "*"}
                won = [tag for tag in pool.map(put, range(_RACERS), [condition] * _RACERS) if tag]
                if len(won) > 1:
                    raise self._refusal(
                        f"{len(won)} of {_RACERS} conditional PUTs that raced for one object were "
                        "told that they had met the condition"
                    )
                condition = {"IfMatch": won[0]} if won else condition

    def _refusal(self, why: str) -> ConfigurationError:
        answer: Any = self.client.list_objects_v2(Bucket=self._bucket, MaxKeys=1)
        server = answer["ResponseMetadata"]["HTTPHeaders"].get("server", "no name given")
        return ConfigurationError(
            f"log={self.address}: the server ({self.client.meta.endpoint_url}, {server}) cannot "
            f"keep a transaction log: {why}. Two drivers could both decide; use "
            "log=postgresql://… or sqlite:///…"
        )


def _is_not_connected(error: Exception) -> bool:
    """Whether it is one of the connection, for sure; a proxy's may come behind the request too."""
    if isinstance(error, SSLError):
        cause = error.kwargs["error"].args[0]  # of urllib3's own error
        return isinstance(cause, ssl.SSLCertVerificationError)
    return isinstance(error, _NOT_CONNECTED)
