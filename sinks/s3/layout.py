"""Where the files of a branch stand, and how their keys are read back.

    s3://lake/orders                                        the sink's url
    orders/day=2026-01-01/                                  one folder per value of partition_by
        sparkonce.0a1b2c3d4e5f.s3.t7.b42.p0.a3.n0.parquet   one file of one branch

A file name holds the owner's digest, the sink, the token, the batch, the write pass, the attempt
and a number within the branch, each part with a terminator: no name is the prefix of another one,
and no key is ever used twice. Folders are named as Spark names them, so that its readers discover
the partitions.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import date, datetime
from decimal import Decimal
from typing import Self

from sparkonce.clients.s3 import check_bucket
from sparkonce.errors import ConfigurationError
from sparkonce.model import BranchId, Owner

NULL_FOLDER = "__HIVE_DEFAULT_PARTITION__"
MAX_KEY_BYTES = 1024
_MAX_PREFIX_BYTES = 900
"""With the longest names of pipeline and sink, the key of a manifest has 123 more."""

_URL = re.compile(
    r"s3a?://(?P<bucket>[A-Za-z0-9][A-Za-z0-9._-]{1,254})(?:/(?P<prefix>.*))?", re.DOTALL
)
# What logs and readers take in their urls, and the argument of the sink.
_IN_ARGUMENTS = {
    **{name: name for name in ("region", "path_style", "endpoint_url")},
    **{name: name for name in ("access_key", "secret_key", "session_token")},
    "endpoint_override": "endpoint_url",
    "scheme": "endpoint_url",
}
_SETTING = re.compile(rf"[?&]({'|'.join(_IN_ARGUMENTS)})=")
_NAME = re.compile(
    r"sparkonce\.(?P<digest>[0-9a-f]{12})\.(?P<sink>[A-Za-z0-9_-]{1,32})\.t(?P<token>[0-9]+)"
    r"\.b(?P<batch_id>[0-9]+)\.p(?P<write_pass>[0-9]+)\.a(?P<attempt>[0-9]+)"
    r"\.n[0-9]+\.(?:parquet|(?:json|csv)(?:\.gz|\.zst)?)"
)
# As in Spark's ExternalCatalogUtils.escapePathName.
_ESCAPED = re.compile(r"""[\x01-\x1f"#%'*/:=?\\\x7f{\[\]^]""")


@dataclass(frozen=True, slots=True)
class Place:
    """A bucket and a key prefix, which is empty or ends with a slash."""

    bucket: str
    prefix: str

    @classmethod
    def from_url(cls, url: str) -> Self:
        if found := _SETTING.search(url):
            raise ConfigurationError(
                f"S3Sink: url= has the setting {found[1]!r}, which would be a part of the prefix: "
                f"give it as the argument {_IN_ARGUMENTS[found[1]]}="
            )
        match = _URL.fullmatch(url)
        segments = (match["prefix"] or "").strip("/").split("/") if match else []
        if match is None or {".", ".."} & set(segments) or "" in segments[1:]:
            # A url with an @ may hold a secret, so it is not repeated.
            said = "url=..." if "@" in url else f"url={url!r}"
            raise ConfigurationError(
                f"S3Sink: {said}: give s3://BUCKET/PREFIX, without empty segments, '.' and '..'"
            )
        check_bucket(match["bucket"], "S3Sink: url=")
        prefix = "/".join(segments)
        if (length := len(f"{prefix}/".encode())) > _MAX_PREFIX_BYTES:
            raise ConfigurationError(
                f"S3Sink: url= has a prefix of {length} bytes: S3's keys have {MAX_KEY_BYTES} in "
                f"all, so give one of {_MAX_PREFIX_BYTES} or less"
            )
        return cls(match["bucket"], f"{prefix}/" if prefix else "")

    def __str__(self) -> str:
        return f"s3://{self.bucket}/{self.prefix}".rstrip("/")


def branch_stem(branch_id: BranchId) -> str:
    """What the names of all files of this branch, and of no other, start with."""
    return (
        f"sparkonce.{branch_id.owner.digest}.{branch_id.sink}.t{branch_id.token}"
        f".b{branch_id.batch_id}.p{branch_id.write_pass}.a{branch_id.attempt}."
    )


def file_key(
    place: Place, folder: str, branch_id: BranchId, number: int, extension: str = "parquet"
) -> str:
    return f"{place.prefix}{folder}{branch_stem(branch_id)}n{number}.{extension}"


def branch_of(key: str, owner: Owner) -> BranchId | None:
    """Read the branch back from a file's key; None when the file is not the owner's."""
    match = _NAME.fullmatch(key.rpartition("/")[2])
    if match is None or match["digest"] != owner.digest:
        return None
    return BranchId(
        owner=owner,
        batch_id=int(match["batch_id"]),
        token=int(match["token"]),
        sink=match["sink"],
        write_pass=int(match["write_pass"]),
        attempt=int(match["attempt"]),
    )


def folder_name(columns: Sequence[str], values: Iterable[object]) -> str:
    """`day=2026-01-01/country=__HIVE_DEFAULT_PARTITION__/`, as Spark writes it."""
    return "".join(
        f"{_escape(column)}={_escape(text) if (text := value_text(value)) else NULL_FOLDER}/"
        for column, value in zip(columns, values, strict=True)
    )


def value_text(value: object) -> str:
    """A partition value as Spark casts it to a string; empty for null."""
    match value:
        case None:
            return ""
        case bool():
            return "true" if value else "false"
        case datetime():
            text = value.replace(tzinfo=None).isoformat(sep=" ")
            return text.rstrip("0") if "." in text else text
        case date():
            return value.isoformat()
        case Decimal():
            return format(value, "f")
        case _:
            return str(value)


def _escape(text: str) -> str:
    return _ESCAPED.sub(lambda match: f"%{ord(match[0]):02X}", text)
