"""Where the files of a branch are stored, and how their keys are read back.

    s3://lake/orders                                        the sink's url
    orders/day=2026-01-01/                                  one folder per value of partition_by
        sparkonce.0a1b2c3d4e5f.s3.t7.b42.p0.a3.n0.parquet   one file of one branch

A file name holds the owner's digest, the sink, the token, the batch, the write pass, the attempt
and a number within the branch, each part with a terminator: no name is the prefix of another one,
and a run of a query never uses a key twice. Folders are named as Spark names them, so that its
readers discover the partitions.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from datetime import date, datetime
from decimal import Decimal

from sparkonce.model import BranchId, Owner
from sparkonce.sinks.s3.connecting.place import Place

NULL_FOLDER = "__HIVE_DEFAULT_PARTITION__"

_NAME = re.compile(
    r"sparkonce\.(?P<digest>[0-9a-f]{12})\.(?P<sink>[A-Za-z0-9_-]{1,32})\.t(?P<token>[0-9]+)"
    r"\.b(?P<batch_id>[0-9]+)\.p(?P<write_pass>[0-9]+)\.a(?P<attempt>[0-9]+)"
    r"\.n[0-9]+\.(?:parquet|(?:json|csv)(?:\.gz|\.zst)?)"
)
MAX_FOLDER_BYTES = 255
"""Of one folder's name. A server that keeps objects as files takes no more."""

# The characters that Spark's ExternalCatalogUtils.escapePathName escapes, and NUL, which such a
# server refuses.
_ESCAPED = re.compile(r"""[\x00-\x1f"#%'*/:=?\\\x7f{\[\]^]""")


def batch_stem(branch_id: BranchId) -> str:
    """The start of every file name of this batch and token, and of no other."""
    return (
        f"sparkonce.{branch_id.owner.digest}.{branch_id.sink}.t{branch_id.token}"
        f".b{branch_id.batch_id}."
    )


def branch_stem(branch_id: BranchId) -> str:
    """The start of every file name of this branch, and of no other branch."""
    return f"{batch_stem(branch_id)}p{branch_id.write_pass}.a{branch_id.attempt}."


def file_key(
    place: Place, folder: str, branch_id: BranchId, number: int, extension: str = "parquet"
) -> str:
    return f"{place.prefix}{folder}{branch_stem(branch_id)}n{number}.{extension}"


def branch_of(key: str, owner: Owner) -> BranchId | None:
    """Read the branch back from the key of a file; None if the file is not the owner's."""
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
    """The value of a partition column as Spark casts it to a string; empty for null."""
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
