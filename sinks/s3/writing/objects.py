"""The public settings of each stored object: storage class, encryption, ACL, metadata, tags."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal, TypeAlias, get_args
from urllib.parse import urlencode

from sparkonce.errors import ConfigurationError

BRANCH_METADATA: Final = "sparkonce-branch"
"""The object metadata that holds the full branch id."""

ALGORITHM: Final = "CRC32C"

Checksum: TypeAlias = Literal["crc32c", "none"]
Encryption: TypeAlias = Literal["AES256", "aws:kms", "aws:kms:dsse"]
Acl: TypeAlias = Literal[
    "private",
    "public-read",
    "public-read-write",
    "authenticated-read",
    "aws-exec-read",
    "bucket-owner-read",
    "bucket-owner-full-control",
]

_METADATA_NAME = re.compile(r"[A-Za-z0-9_-]+")
_TAG = re.compile(r"[\w .:/=+@-]*")
_MOST_TAGS, _TAG_NAME_LENGTH, _TAG_VALUE_LENGTH = 10, 128, 256
"""S3's limits: docs.aws.amazon.com/AmazonS3/latest/userguide/object-tagging.html."""


@dataclass(frozen=True, slots=True)
class S3Objects:
    """How the objects of a sink are stored.

    Args:
        storage_class: as S3 names it, such as "STANDARD_IA"; default: the server's.
        server_side_encryption: "AES256", "aws:kms" or "aws:kms:dsse"; default: the bucket's.
        sse_kms_key_id: id or ARN of the KMS key, with `server_side_encryption`.
        acl: a canned ACL, such as "bucket-owner-full-control"; default: the bucket's.
        metadata: of each object, in addition to ``sparkonce-branch``.
        tags: of each object.
        checksum: "crc32c" or "none"; of each part, checked by servers that support it.

    Raises:
        ConfigurationError: a setting cannot work.
    """

    storage_class: str | None = None
    server_side_encryption: Encryption | None = None
    sse_kms_key_id: str | None = None
    acl: Acl | None = None
    metadata: Mapping[str, str] = field(default_factory=dict, hash=False)
    tags: Mapping[str, str] = field(default_factory=dict, hash=False)
    checksum: Checksum = "crc32c"

    def __post_init__(self) -> None:
        for name in ("metadata", "tags"):  # a copy, which pickles and which nobody changes
            object.__setattr__(self, name, dict(getattr(self, name)))
        self._check_metadata()
        self._check_tags()
        encryption = self.server_side_encryption
        _check_choice("server_side_encryption", encryption, (None, *get_args(Encryption)))
        _check_choice("acl", self.acl, (None, *get_args(Acl)))
        _check_choice("checksum", self.checksum, get_args(Checksum))
        if self.sse_kms_key_id is not None and (encryption or "AES256") == "AES256":
            raise ConfigurationError(
                "S3Objects: sse_kms_key_id= needs server_side_encryption='aws:kms'"
            )

    def protection(self) -> dict[str, Any]:
        """Arguments that a bucket's policy may demand for every object."""
        wanted = {
            "ServerSideEncryption": self.server_side_encryption,
            "SSEKMSKeyId": self.sse_kms_key_id,
            "ACL": self.acl,
        }
        return {name: value for name, value in wanted.items() if value is not None}

    def arguments(self) -> dict[str, Any]:
        """Arguments of the call that creates an upload, except its metadata."""
        wanted = {
            "StorageClass": self.storage_class,
            "Tagging": urlencode(self.tags) or None,
            "ChecksumAlgorithm": ALGORITHM if self.checksum == "crc32c" else None,
        }
        given = {name: value for name, value in wanted.items() if value is not None}
        return {**self.protection(), **given}

    def _check_metadata(self) -> None:
        for name, value in self.metadata.items():
            is_text = isinstance(name, str) and isinstance(value, str)
            fits = is_text and value.isascii() and value.isprintable()
            if not fits or not _METADATA_NAME.fullmatch(name):
                raise ConfigurationError(
                    f"S3Objects: metadata= contains {name!r}: {value!r}; HTTP headers allow "
                    "letters, digits, '-' and '_' in names, and printable ASCII text in values"
                )
        if BRANCH_METADATA in {name.lower() for name in self.metadata}:
            raise ConfigurationError(
                f"S3Objects: metadata= contains {BRANCH_METADATA!r}, which proves commits: "
                "choose another name"
            )

    def _check_tags(self) -> None:
        if len(self.tags) > _MOST_TAGS:
            raise ConfigurationError(
                f"S3Objects: tags= contains {len(self.tags)} tags; S3 allows {_MOST_TAGS} for each "
                "object"
            )
        for name, value in self.tags.items():
            is_text = isinstance(name, str) and isinstance(value, str)
            fits = is_text and 0 < len(name) <= _TAG_NAME_LENGTH and len(value) <= _TAG_VALUE_LENGTH
            if not (fits and _TAG.fullmatch(name + value)) or name.lower().startswith("aws:"):
                raise ConfigurationError(
                    f"S3Objects: tags= contains {name!r}: {value!r}; S3 allows names of 1 to "
                    f"{_TAG_NAME_LENGTH} characters that do not start with 'aws:', and values of "
                    f"up to {_TAG_VALUE_LENGTH}, of letters, digits, blanks and _ . : / = + - @"
                )


def _check_choice(name: str, value: str | None, choices: tuple[str | None, ...]) -> None:
    if value not in choices:
        known = ", ".join(repr(choice) for choice in choices if choice is not None)
        raise ConfigurationError(f"S3Objects: {name}={value!r}: give one of {known}")
