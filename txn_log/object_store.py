"""The transaction log's documents in an object store with conditional writes.

A swapped document is one object, put with ``If-Match`` and the entity tag that was read. So a swap
is one request, and a request that arrives late meets another tag and changes nothing. A server that
ignores such a condition, or lets several racing requests meet it, would let two drivers decide. A
race at the start finds such servers.
"""

from __future__ import annotations

import contextlib
import re
import secrets
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import parse_qsl, urlsplit

from sparkonce.clients.s3 import check_bucket, is_of_server, said, status_of
from sparkonce.errors import ConfigurationError, DecisionUnknownError, LogUnavailableError
from sparkonce.storage.s3 import (
    NOT_IMPLEMENTED,
    S3_ERRORS,
    THROTTLED,
    S3Folder,
    Server,
    is_not_met,
)
from sparkonce.txn_log.place import Found, Version
from sparkonce.txn_log.races import racing

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client

_SETTINGS: Final = ("endpoint_url", "region", "path_style")
_PRECONDITION_FAILED: Final = 412
_THROTTLED_PAUSES_S = (1.0, 2.0, 4.0)
_RACERS = 12
_RACES = 12
_RACING_BYTES = 1 << 16
_NEW: Final = {"IfNoneMatch": "*"}
_CONTROL: Final = re.compile(r"[\x00-\x1f\x7f]")


class ObjectPlace:
    """Documents under a prefix of a bucket; see `sparkonce.txn_log.place.Place`.

    Args:
        url: ``s3://bucket/prefix?endpoint_url=…&region=…&path_style=true``. Credentials come from
            boto3's own chain: the environment, ``~/.aws``, the machine's role.

    Raises:
        ConfigurationError: the URL cannot be read, or the bucket cannot be used.
        LogUnavailableError: boto3 cannot create a client now.
    """

    def __init__(self, url: str) -> None:
        self._folder = _folder_at(url)

    @property
    def address(self) -> str:
        return self._folder.address

    @property
    def client(self) -> S3Client:
        """boto3's client."""
        return self._folder.client

    def close(self) -> None:
        self._folder.close()

    def create(self, name: str, text: str) -> bool:
        return self._folder.create(name, text)

    def read(self, name: str) -> str | None:
        return self._folder.read(name)

    def names(self, folder: str) -> Sequence[str]:
        return self._folder.names(folder)

    def delete(self, names: Iterable[str]) -> None:
        for name in names:
            self._folder.delete(name)

    def load(self, name: str, known: Version | None) -> Found | None:
        tag = None if known is None else str(known)
        found = self._folder.get(name, tag, may_be_deleted=False)
        return None if found is None else Found(*found)

    def swap(self, name: str, seen: Version | None, text: str) -> Version | None:
        return self._folder.put(name, text, _NEW if seen is None else {"IfMatch": str(seen)})

    # -- whether the server can do it --------------------------------------------------------------

    def check(self) -> None:
        """Check that of several writers that meet one condition at once, at most one succeeds.

        Raises:
            ConfigurationError: the server ignores conditions, several racers meet one, or what
                was written is not listed.
            LogUnavailableError: the server did not respond to every request; nothing of the log
                was written.
        """
        folder = f"probe-{secrets.token_hex(8)}"
        name = f"{folder}/probe"
        try:
            self._check_conditions(name)
            self._check_listing(folder, name)
            self._check_races(name)
        except DecisionUnknownError as error:  # it was a probe, so nothing is in doubt
            self._forget(name)
            raise LogUnavailableError(
                f"{error}. It was a probe, so nothing is lost: start again later"
            ) from None
        except BaseException:
            self._forget(name)
            raise
        self._folder.delete(name)

    def _forget(self, name: str) -> None:
        """Remove the probe; the failure before it is the one to report."""
        with contextlib.suppress(LogUnavailableError):
            self._folder.delete(name)

    def _check_conditions(self, name: str) -> None:
        first = self._put_patiently(name, "first", _NEW)
        if not isinstance(first, str):
            if status_of(first) == _PRECONDITION_FAILED:
                raise self._refusal("it refuses to create an object that does not exist")
            raise self._folder.unavailable(first)  # such as 409: the bucket is being created
        second = self._put_patiently(name, "second", _NEW)
        third = self._put_patiently(name, "third", {"IfMatch": f'"{"0" * 32}"'})
        if isinstance(second, str) or isinstance(third, str):
            raise self._refusal(
                "it ignores the condition of a conditional PUT, so two drivers could both decide"
            )

    def _check_listing(self, folder: str, name: str) -> None:
        if name not in self._folder.names(folder):
            raise self._refusal(
                "it does not list an object that it has, so old batches would be missing"
            )

    def _put_patiently(self, name: str, text: str, condition: Mapping[str, str]) -> str | Exception:
        """The new entity tag, or the error that reports that the condition is not met.

        Some servers accept only one write per object and second, so a throttled write is repeated.
        """
        for pause_s in (*_THROTTLED_PAUSES_S, None):
            try:
                return self._folder.send(name, text, condition)
            except S3_ERRORS as error:
                if is_not_met(error):
                    return error
                status = status_of(error) if is_of_server(error) else None
                if status == NOT_IMPLEMENTED:
                    why = f"it has no conditional PUT ({said(error)})"
                    raise self._refusal(why) from None
                if status not in THROTTLED or pause_s is None:
                    raise self._folder.failed_write(error) from None
            time.sleep(pause_s)
        raise AssertionError

    def _check_races(self, name: str) -> None:
        def put(racer: int, condition: Mapping[str, str]) -> str | None:
            # All texts differ, or a swap would not change the tag. They are large, to expose a
            # server that checks the condition first and writes later.
            text = f"{secrets.token_hex(8)} {racer}".ljust(_RACING_BYTES)
            try:
                return self._folder.put(name, text, condition)
            except LogUnavailableError:
                return None  # not written, so it did not win; many servers throttle such a race

        condition: Mapping[str, str] = _NEW
        with racing(_RACERS) as race:
            for number in range(2 * _RACES):
                if number % 2 == 0:
                    self._folder.delete(name)
                    condition = _NEW
                won = [tag for tag in race(put, condition) if tag]
                if len(won) > 1:
                    raise self._refusal(
                        f"{_RACERS} conditional PUTs raced for one object, and the server reported "
                        f"to {len(won)} of them that they met the condition: two drivers could "
                        "both decide"
                    )
                condition = {"IfMatch": won[0]} if won else condition

    def _refusal(self, why: str) -> ConfigurationError:
        server = "no name given"
        with contextlib.suppress(*S3_ERRORS):  # the refusal holds without the server's name
            answer: Any = self.client.list_objects_v2(Bucket=self._folder.bucket, MaxKeys=1)
            server = answer["ResponseMetadata"]["HTTPHeaders"].get("server", server)
        return ConfigurationError(
            f"log={self.address}: the server ({self._folder.endpoint_url}, {server}) cannot "
            f"keep a transaction log: {why}. Use log=postgresql://… or sqlite:///…"
        )


def _folder_at(url: str) -> S3Folder:
    parts = urlsplit(url)
    settings = dict(parse_qsl(parts.query, keep_blank_values=True))
    unknown = sorted(settings.keys() - set(_SETTINGS))
    if unknown or not parts.hostname or "@" in parts.netloc + settings.get("endpoint_url", ""):
        raise ConfigurationError(
            f"log=s3://…: expected s3://bucket/prefix with the settings {', '.join(_SETTINGS)}"
            + (f", not {', '.join(unknown)}" if unknown else "")
            + "; credentials come from the environment, ~/.aws or the machine's role"
        )
    if "#" in url:
        raise ConfigurationError(
            "log=s3://…: # and everything after it is not part of an address, so logs that differ "
            "only there would share one place: give each log a prefix without #"
        )
    if ":" in parts.netloc:
        raise ConfigurationError(
            "log=s3://…: expected the name of a bucket, not the ARN of an access point: with an "
            "access point over several regions, two drivers could meet the same condition, each "
            "in its own region"
        )
    check_bucket(parts.netloc, "log=s3://…")
    prefix = parts.path.removeprefix("/").removesuffix("/")
    is_ambiguous = bool(prefix) and not {"", ".", ".."}.isdisjoint(prefix.split("/"))
    if is_ambiguous or _CONTROL.search(url):
        raise ConfigurationError(
            "log=s3://…: give a prefix without empty parts (//), without parts . and .., and "
            "without control characters: some servers keep objects as files, and would list them "
            "under other keys than those they were put under"
        )
    return S3Folder(parts.netloc, f"{prefix}/" if prefix else "", _server(settings), url)


def _server(settings: Mapping[str, str]) -> Server:
    for name in settings.keys() - {"path_style"}:
        if not settings[name]:
            raise ConfigurationError(f"log=s3://…: {name}= is empty: give a value or leave it out")
    style = settings.get("path_style")
    if style is not None and style.lower() not in {"true", "false"}:
        raise ConfigurationError(
            f"log=s3://…: path_style={style.lower()!r}: give true or false, or leave it out"
        )
    path_style = None if style is None else style.lower() == "true"
    return Server(settings.get("endpoint_url"), settings.get("region"), path_style)
