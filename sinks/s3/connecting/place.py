"""Where a sink writes: a bucket and a key prefix, read from ``s3://BUCKET/PREFIX``."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final, Self

from sparkonce.clients.s3 import check_bucket
from sparkonce.errors import ConfigurationError

MAX_KEY_BYTES: Final = 1024
_MAX_PREFIX_BYTES: Final = 900
"""The name of a file adds up to 110 bytes, and folders of partitions add more."""

_URL: Final = re.compile(
    r"s3a?://(?P<bucket>[A-Za-z0-9][A-Za-z0-9._-]{1,254})(?:/(?P<prefix>.*))?", re.DOTALL
)
# The settings that logs and readers accept in their URLs, and those of S3Connection.
_IN_CONNECTION: Final = {
    "region": "region_name",
    "endpoint_url": "endpoint_url",
    "endpoint_override": "endpoint_url",
    "scheme": "endpoint_url",
    "path_style": "addressing_style",
    "access_key": "aws_access_key_id",
    "secret_key": "aws_secret_access_key",
    "session_token": "aws_session_token",
}
_SETTING: Final = re.compile(rf"[?&]({'|'.join({*_IN_CONNECTION, *_IN_CONNECTION.values()})})=")


@dataclass(frozen=True, slots=True)
class Place:
    """A bucket and a key prefix, which is empty or ends with a slash."""

    bucket: str
    prefix: str

    @classmethod
    def from_url(cls, url: str) -> Self:
        """Read the sink's url.

        Raises:
            ConfigurationError: it is not an S3 url, has settings, or is too long.
        """
        if found := _SETTING.search(url):
            setting = _IN_CONNECTION.get(found[1], found[1])
            raise ConfigurationError(
                f"S3Sink: url= contains the setting {found[1]!r}, which would become part of the "
                f"prefix: give connection=S3Connection({setting}=…) instead"
            )
        match = _URL.fullmatch(url)
        segments = (match["prefix"] or "").strip("/").split("/") if match else []
        if match is None or {".", ".."} & set(segments) or "" in segments[1:]:
            # A url with an @ may contain a secret, so the message does not repeat it.
            shown = "url=..." if "@" in url else f"url={url!r}"
            raise ConfigurationError(
                f"S3Sink: {shown}: give s3://BUCKET/PREFIX, without empty segments, '.' and '..'"
            )
        check_bucket(match["bucket"], "S3Sink: url=")
        prefix = "/".join(segments)
        if (length := len(f"{prefix}/".encode())) > _MAX_PREFIX_BYTES:
            raise ConfigurationError(
                f"S3Sink: the prefix in url= has {length} bytes: a whole key of S3 has at most "
                f"{MAX_KEY_BYTES}, so give a prefix of {_MAX_PREFIX_BYTES} bytes or less"
            )
        return cls(match["bucket"], f"{prefix}/" if prefix else "")

    def __str__(self) -> str:
        return f"s3://{self.bucket}/{self.prefix}".rstrip("/")
