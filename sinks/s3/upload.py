"""One file of a branch on its way to S3, part by part, while it is being written.

    write(bytes) ─► buffer ─(full)─► pool: [create once] ─► upload part ─► etag
    end()        ─► the rest
    staged()     ─► wait for all ─► StagedFile: all that completes it from anywhere

Memory is bounded whatever the size of the file: the buffer, and the parts in flight, of which a
branch has at most two over all its files. Parts grow with the file, unless they shall have one
size, as some servers demand.

A part carries its CRC32C where the server keeps that, and its MD5 until the server has shown that
it does: a part that arrives damaged is refused.
"""

from __future__ import annotations

import base64
import hashlib
import itertools
import mmap
import re
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Final, Literal, NamedTuple, Self, TypeAlias, TypeVar, get_args
from urllib.parse import urlencode

import google_crc32c
from tenacity import Retrying, retry_if_exception, stop_after_attempt, wait_random_exponential

from sparkonce.errors import ConfigurationError
from sparkonce.model import BranchId, JsonValue
from sparkonce.sinks.s3.client import S3_ERRORS, Connection, Purpose, is_passing

BRANCH_METADATA = "sparkonce-branch"
"""The object metadata that holds the full branch id."""

MAX_PARTS = 10_000
PARTS_IN_FLIGHT = 2
PARTS_PER_SIZE = 1000
"""After how many parts of one size the next ones are twice as large."""

Checksum: TypeAlias = Literal["crc32c", "none"]
_ALGORITHM: Final = "CRC32C"
_CREATE_ATTEMPTS = 4
_MD5 = re.compile(r"[0-9a-f]{32}")
_METADATA_NAME = re.compile(r"[A-Za-z0-9_-]+")
_TAG = re.compile(r"[\w .:/=+@-]*")
_MOST_TAGS, _TAG_NAME_LENGTH, _TAG_VALUE_LENGTH = 10, 128, 256
"""What S3 takes: docs.aws.amazon.com/AmazonS3/latest/userguide/object-tagging.html."""

ResultT = TypeVar("ResultT")


@dataclass(frozen=True, slots=True)
class StagedFile:
    """An upload of which every part is stored, in a committable.

    Attributes:
        key: of the object to be.
        upload_id: the server's name for the upload.
        parts: the parts' ETags in order, without quotes.
        etag: what the object's ETag will be; None where the server's part ETags are not MD5
            (encryption with KMS keys), so that it cannot be known.
        checksums: the parts' CRC32C in order; empty where the server keeps none.
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
        """What the object's CRC32C will be: that of the parts' CRC32Cs, and their number."""
        digests = b"".join(map(base64.b64decode, self.checksums))
        return f"{crc32c(digests)}-{len(self.checksums)}"

    def completion(self) -> dict[str, Any]:
        """The argument that completes the upload."""
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


@dataclass(frozen=True, slots=True)
class ObjectSettings:
    """What every object is stored with, beside its bytes.

    Attributes:
        metadata: of the user, by name.
        tags: by name.
        storage_class: as S3 names it, such as STANDARD_IA.
        encryption: AES256, aws:kms or aws:kms:dsse; None leaves it to the bucket.
        kms_key: id or ARN of the key.
        checksum: that goes with each part, where the server keeps it.

    Raises:
        ConfigurationError: a setting cannot work.
    """

    metadata: Mapping[str, str] = field(default_factory=dict)
    tags: Mapping[str, str] = field(default_factory=dict)
    storage_class: str | None = None
    encryption: str | None = None
    kms_key: str | None = None
    checksum: Checksum = "crc32c"

    def __post_init__(self) -> None:
        for name, value in self.metadata.items():
            is_text = isinstance(name, str) and isinstance(value, str)
            fits = is_text and value.isascii() and value.isprintable()
            if not fits or not _METADATA_NAME.fullmatch(name):
                raise ConfigurationError(
                    f"S3Sink: metadata= holds {name!r}: {value!r}; HTTP headers take letters, "
                    "digits, '-' and '_' in names, and in values text of printable ASCII"
                )
        if BRANCH_METADATA in {name.lower() for name in self.metadata}:
            raise ConfigurationError(
                f"S3Sink: metadata= holds {BRANCH_METADATA!r}, which proves commits: rename it"
            )
        if len(self.tags) > _MOST_TAGS:
            raise ConfigurationError(
                f"S3Sink: tags= holds {len(self.tags)}; S3 takes {_MOST_TAGS} for each object"
            )
        for name, value in self.tags.items():
            is_text = isinstance(name, str) and isinstance(value, str)
            fits = is_text and 0 < len(name) <= _TAG_NAME_LENGTH and len(value) <= _TAG_VALUE_LENGTH
            if not (fits and _TAG.fullmatch(name + value)) or name.lower().startswith("aws:"):
                raise ConfigurationError(
                    f"S3Sink: tags= holds {name!r}: {value!r}; S3 takes names of 1 to "
                    f"{_TAG_NAME_LENGTH} characters, not beginning with 'aws:', and values of up "
                    f"to {_TAG_VALUE_LENGTH}, of letters, digits, blanks and _ . : / = + - @"
                )
        if self.encryption not in {None, "AES256", "aws:kms", "aws:kms:dsse"}:
            raise ConfigurationError(
                f"S3Sink: encryption={self.encryption!r}: give 'AES256', 'aws:kms' or "
                "'aws:kms:dsse'"
            )
        if self.kms_key is not None and (self.encryption or "AES256") == "AES256":
            raise ConfigurationError("S3Sink: kms_key= needs encryption='aws:kms'")
        if self.checksum not in get_args(Checksum):
            raise ConfigurationError(
                f"S3Sink: checksum={self.checksum!r}: give one of {', '.join(get_args(Checksum))}"
            )

    def protection(self) -> dict[str, Any]:
        """Arguments that a bucket's policy may demand of every object."""
        wanted = {"ServerSideEncryption": self.encryption, "SSEKMSKeyId": self.kms_key}
        return {name: value for name, value in wanted.items() if value is not None}

    def arguments(self) -> dict[str, Any]:
        """Of the call that creates an upload, beside its metadata."""
        wanted = {
            "StorageClass": self.storage_class,
            "Tagging": urlencode(self.tags) or None,
            "ChecksumAlgorithm": _ALGORITHM if self.checksum == "crc32c" else None,
        }
        given = {name: value for name, value in wanted.items() if value is not None}
        return {**self.protection(), **given}


def etag_of_parts(etags: list[str]) -> str:
    """The ETag that S3 gives an object made of parts with these MD5s."""
    digest = hashlib.md5(b"".join(map(bytes.fromhex, etags)), usedforsecurity=False)
    return f"{digest.hexdigest()}-{len(etags)}"


def crc32c(data: bytes) -> str:
    """As S3's headers have it."""
    return base64.b64encode(google_crc32c.value(data).to_bytes(4, "big")).decode()


@dataclass(frozen=True, slots=True)
class PartSizes:
    """How large the parts of a file are: twice as large after each thousand, up to a bound.

    Attributes:
        first: bytes of the first parts.
        largest: bytes of no part are more.
    """

    first: int
    largest: int

    def of(self, number: int) -> int:
        """Bytes of a part that is not the last; the first one has the number 1."""
        return min(self.first << (number - 1) // PARTS_PER_SIZE, self.largest)


class _Part(NamedTuple):
    etag: str
    is_md5: bool  # of a part that has carried none: whether it looks like one
    checksum: str | None


class Transfers:
    """The threads of one branch that send parts; a part waits while two are on their way."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(PARTS_IN_FLIGHT, thread_name_prefix="sparkonce-s3")
        self._slots = threading.Semaphore(PARTS_IN_FLIGHT)
        self._failed: BaseException | None = None

    def reserve(self) -> None:
        """Return when a slot is free for the next job; raise if an earlier one has failed."""
        self._slots.acquire()
        if self._failed is not None:
            self._slots.release()
            raise self._failed

    def submit(self, job: Callable[[], ResultT]) -> Future[ResultT]:
        """Run `job` in the slot that was reserved."""
        future = self._pool.submit(job)
        future.add_done_callback(self._done)
        return future

    def close(self) -> None:
        """Return when all threads have ended; what has not begun is dropped."""
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _done(self, future: Future[Any]) -> None:
        if not future.cancelled():
            self._failed = self._failed or future.exception()
        self._slots.release()


class PartStream:
    """A file for `pyarrow.parquet.ParquetWriter` that is stored in parts as it grows.

    The upload is created with the first part. A create whose answer is lost may have happened, so
    it is repeated under the next key: an upload that we do not know of then never stands beside
    the one that is completed.

    Args:
        connection: to the server.
        bucket: the object's bucket.
        branch_id: goes into the object's metadata.
        settings: of the object.
        next_key: gives a key that was never used before.
        part_sizes: of all parts but the last.
        transfers: the branch's threads.
    """

    def __init__(
        self,
        connection: Connection,
        bucket: str,
        branch_id: BranchId,
        settings: ObjectSettings,
        next_key: Callable[[], str],
        *,
        part_sizes: PartSizes,
        transfers: Transfers,
    ) -> None:
        self._connection = connection
        self._bucket = bucket
        self._branch_id = branch_id
        self._settings = settings
        self._next_key = next_key
        self._part_sizes = part_sizes
        self._transfers = transfers
        # Takes memory as it first fills, and is never moved: with many open files a bytearray each
        # takes half as much again.
        self._buffer = mmap.mmap(-1, part_sizes.of(1))
        self._filled = 0
        self._position = 0
        self._parts: list[Future[_Part]] = []
        self._creating = threading.Lock()
        self._created: tuple[str, str] | None = None
        self._keeps_checksums = False
        self._has_shown_checksum = False
        self._discarded = False
        self.closed = False

    @property
    def size(self) -> int:
        """Bytes written so far."""
        return self._position

    @property
    def part_count(self) -> int:
        return len(self._parts)

    def write(self, data: bytes | memoryview) -> int:
        view = memoryview(data).cast("B")
        size = len(view)
        self._position += size
        while len(view) > 0 and not self._discarded:
            piece = view[: len(self._buffer) - self._filled]
            self._buffer[self._filled : self._filled + len(piece)] = piece
            self._filled += len(piece)
            view = view[len(piece) :]
            if self._filled == len(self._buffer):
                self._ship()
        return size

    def tell(self) -> int:
        return self._position

    def flush(self) -> None:
        """Parts leave when they are full."""

    def close(self) -> None:
        self.closed = True

    def end(self) -> None:
        """Send the rest; nothing may be written after it."""
        if self._filled or not self._parts:
            self._ship()
        self._buffer.close()

    def staged(self, rows: int) -> StagedFile:
        """Wait until the server has every part."""
        answers = [part.result() for part in self._parts]
        etags = [part.etag for part in answers]
        key, upload_id = self._upload()
        return StagedFile(
            key=key,
            upload_id=upload_id,
            parts=tuple(etags),
            etag=etag_of_parts(etags) if all(part.is_md5 for part in answers) else None,
            checksums=tuple(part.checksum for part in answers if part.checksum is not None),
            bytes=self._position,
            rows=rows,
        )

    def discard(self) -> None:
        """Swallow what is still written; a Parquet writer ends with a footer in any case."""
        self._discarded = True
        self._buffer.close()

    def abort(self) -> None:
        """Abort the upload, if there is one. Call it when the transfers are closed."""
        if self._created is not None:
            key, upload_id = self._created
            self._connection.client(Purpose.ASK).abort_multipart_upload(
                Bucket=self._bucket, Key=key, UploadId=upload_id
            )

    def _ship(self) -> None:
        # Before the copy, which then takes the memory of a part that has been sent.
        self._transfers.reserve()
        body = self._buffer[: self._filled]
        number = len(self._parts) + 1
        if (size := self._part_sizes.of(number + 1)) != len(self._buffer):
            self._buffer.close()
            self._buffer = mmap.mmap(-1, size)
        self._filled = 0
        self._parts.append(self._transfers.submit(lambda: self._send(number, body)))

    def _send(self, number: int, body: bytes) -> _Part:
        key, upload_id = self._upload()
        checksum = crc32c(body) if self._keeps_checksums else None
        checked: dict[str, Any] = {} if checksum is None else {"ChecksumCRC32C": checksum}
        md5 = None
        if not self._has_shown_checksum:
            md5 = hashlib.md5(body, usedforsecurity=False)
            checked["ContentMD5"] = base64.b64encode(md5.digest()).decode()
        answer = self._connection.client(Purpose.UPLOAD).upload_part(
            Bucket=self._bucket,
            Key=key,
            UploadId=upload_id,
            PartNumber=number,
            Body=body,
            **checked,
        )
        etag = answer["ETag"].strip('"')
        is_md5 = bool(_MD5.fullmatch(etag)) if md5 is None else etag == md5.hexdigest()
        if checksum is not None and answer.get("ChecksumCRC32C") == checksum:
            self._has_shown_checksum = True
        return _Part(etag, is_md5, checksum)

    def _upload(self) -> tuple[str, str]:
        with self._creating:
            if self._created is None:
                retrying = Retrying(
                    retry=retry_if_exception(
                        lambda error: isinstance(error, S3_ERRORS) and is_passing(error)
                    ),
                    stop=stop_after_attempt(_CREATE_ATTEMPTS),
                    wait=wait_random_exponential(multiplier=0.2, max=5),
                    reraise=True,
                )
                self._created = retrying(self._create)
            return self._created

    def _create(self) -> tuple[str, str]:
        key = self._next_key()
        answer = self._connection.client(Purpose.ONCE).create_multipart_upload(
            Bucket=self._bucket,
            Key=key,
            Metadata={**self._settings.metadata, BRANCH_METADATA: str(self._branch_id)},
            **self._settings.arguments(),
        )
        # A server that does not know of checksums passes over the wish, and may refuse them later.
        self._keeps_checksums = answer.get("ChecksumAlgorithm") == _ALGORITHM
        return key, answer["UploadId"]


def numbers() -> Callable[[], int]:
    """A counter that several threads may draw from."""
    counter, lock = itertools.count(), threading.Lock()

    def draw() -> int:
        with lock:
            return next(counter)

    return draw
