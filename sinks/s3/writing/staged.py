"""A file whose parts are all stored at the server: the values that complete or abort its upload.

StagedFile ─► JSON in a committable ─► any process ─► completion(), etag, checksum
"""

from __future__ import annotations

import base64
import hashlib
from dataclasses import asdict, dataclass, fields
from typing import Any, Self

import google_crc32c

from sparkonce.model import JsonValue


@dataclass(frozen=True, slots=True)
class StagedFile:
    """An upload with all its parts stored, as a committable describes it.

    Attributes:
        key: of the future object.
        upload_id: the server's name for the upload.
        parts: the parts' ETags in order, without quotes.
        etag: the ETag that the object will have; None if it cannot be known, because the server's
            ETags of parts are not MD5s (encryption with KMS keys).
        checksums: the parts' CRC32Cs in order; empty if the server keeps none.
        bytes: size of the object.
        rows: in the file.
    """

    key: str
    upload_id: str
    parts: tuple[str, ...] = ()
    etag: str | None = None
    checksums: tuple[str, ...] = ()
    bytes: int = 0
    rows: int = 0

    @property
    def checksum(self) -> str:
        """The CRC32C that the object will have: of the parts' CRC32Cs, and their number."""
        digests = b"".join(map(base64.b64decode, self.checksums))
        return f"{crc32c(digests)}-{len(self.checksums)}"

    def completion(self) -> dict[str, Any]:
        """The argument of the call that completes the upload."""
        parts: list[dict[str, Any]] = [
            {"PartNumber": number, "ETag": f'"{etag}"'}
            for number, etag in enumerate(self.parts, start=1)
        ]
        if self.checksums:
            for part, checksum in zip(parts, self.checksums, strict=True):
                part["ChecksumCRC32C"] = checksum
        return {"MultipartUpload": {"Parts": parts}}

    def to_json(self) -> dict[str, JsonValue]:
        return {**asdict(self), "parts": list(self.parts), "checksums": list(self.checksums)}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Self:
        known = {f.name: value[f.name] for f in fields(cls) if f.name in value}
        lists = {name: tuple(value.get(name, ())) for name in ("parts", "checksums")}
        return cls(**{**known, **lists})


def etag_of_parts(etags: list[str]) -> str:
    """The ETag that S3 gives to an object made of parts with these MD5s."""
    digest = hashlib.md5(b"".join(map(bytes.fromhex, etags)), usedforsecurity=False)
    return f"{digest.hexdigest()}-{len(etags)}"


def crc32c(data: bytes) -> str:
    """The CRC32C in the form that S3's headers use."""
    return base64.b64encode(google_crc32c.value(data).to_bytes(4, "big")).decode()
