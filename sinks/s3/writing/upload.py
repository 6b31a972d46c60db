"""One file of a branch on its way to S3, part by part, while it is being written.

    write(bytes) ─► buffer ─(full)─► pool: [create once] ─► upload part ─► etag
    end()        ─► the rest
    staged()     ─► wait for all ─► StagedFile: everything that completes the upload from anywhere

Memory is bounded for files of any size: the buffer, and the parts in flight, of which a branch has
at most two over all its files. Parts grow with the file, unless the server needs parts of one size.

A part carries its CRC32C if the server keeps it, and its MD5 until the server has shown that it
does: the server refuses a part that arrives damaged.
"""

from __future__ import annotations

import base64
import hashlib
import itertools
import mmap
import re
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from tenacity import Retrying, retry_if_exception, stop_after_attempt, wait_random_exponential

from sparkonce.model import BranchId
from sparkonce.sinks.s3.connecting.answers import S3_ERRORS, is_transient
from sparkonce.sinks.s3.connecting.client import Clients, Purpose
from sparkonce.sinks.s3.writing.objects import ALGORITHM, BRANCH_METADATA, S3Objects
from sparkonce.sinks.s3.writing.staged import StagedFile, crc32c, etag_of_parts

MAX_PARTS = 10_000
PARTS_IN_FLIGHT = 2
PARTS_PER_SIZE = 1000
"""After this number of parts of one size, the next parts are twice as large."""

_CREATE_ATTEMPTS = 4
_MD5 = re.compile(r"[0-9a-f]{32}")

ResultT = TypeVar("ResultT")


@dataclass(frozen=True, slots=True)
class PartSizes:
    """Sizes of a file's parts, in bytes: they double after each thousand parts, up to a bound."""

    first: int
    largest: int

    def of(self, number: int) -> int:
        """Bytes of a part, unless it is the last; the first part has the number 1."""
        return min(self.first << (number - 1) // PARTS_PER_SIZE, self.largest)


class _Part(NamedTuple):
    etag: str
    is_md5: bool  # if the part carried no MD5: whether the ETag looks like one
    checksum: str | None


class Transfers:
    """The threads of one branch that send parts; a part waits while two others are sent."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(PARTS_IN_FLIGHT, thread_name_prefix="sparkonce-s3")
        self._slots = threading.Semaphore(PARTS_IN_FLIGHT)
        self._failed: BaseException | None = None

    def reserve(self) -> None:
        """Return when a slot is free for the next job; raise if an earlier job failed."""
        self._slots.acquire()
        if self._failed is not None:
            self._slots.release()
            raise self._failed

    def submit(self, job: Callable[[], ResultT]) -> Future[ResultT]:
        """Run `job` in the reserved slot."""
        future = self._pool.submit(job)
        future.add_done_callback(self._done)
        return future

    def close(self) -> None:
        """Return when all threads have ended; jobs that have not begun are dropped."""
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _done(self, future: Future[Any]) -> None:
        if not future.cancelled():
            self._failed = self._failed or future.exception()
        self._slots.release()


class PartStream:
    """A file for `pyarrow.parquet.ParquetWriter` that is stored in parts as it grows.

    The first part creates the upload. A create whose answer is lost may have succeeded, so it is
    repeated under the next key: an upload that nobody knows never shares a key with the upload
    that is completed. `next_key` returns a key that was never used before.
    """

    def __init__(
        self,
        clients: Clients,
        bucket: str,
        branch_id: BranchId,
        objects: S3Objects,
        next_key: Callable[[], str],
        *,
        part_sizes: PartSizes,
        transfers: Transfers,
    ) -> None:
        self._clients = clients
        self._bucket = bucket
        self._branch_id = branch_id
        self._objects = objects
        self._next_key = next_key
        self._part_sizes = part_sizes
        self._transfers = transfers
        # A map takes memory only as it fills, and never moves: with many open files, bytearrays
        # would take 50 % more.
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
        """Do nothing: a part is sent when it is full."""

    def close(self) -> None:
        self.closed = True

    def end(self) -> None:
        """Send the rest; nothing may be written afterwards."""
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
        """Ignore further writes: a Parquet writer always ends with a footer."""
        self._discarded = True
        self._buffer.close()

    def abort(self) -> None:
        """Abort the upload, if there is one. Call this after the transfers are closed."""
        if self._created is not None:
            key, upload_id = self._created
            self._clients.client(Purpose.ASK).abort_multipart_upload(
                Bucket=self._bucket, Key=key, UploadId=upload_id
            )

    def _ship(self) -> None:
        # Before the copy, so that the copy reuses the memory of a part that has been sent.
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
        answer = self._clients.client(Purpose.UPLOAD).upload_part(
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
                        lambda error: isinstance(error, S3_ERRORS) and is_transient(error)
                    ),
                    stop=stop_after_attempt(_CREATE_ATTEMPTS),
                    wait=wait_random_exponential(multiplier=0.2, max=5),
                    reraise=True,
                )
                self._created = retrying(self._create)
            return self._created

    def _create(self) -> tuple[str, str]:
        key = self._next_key()
        answer = self._clients.client(Purpose.ONCE).create_multipart_upload(
            Bucket=self._bucket,
            Key=key,
            Metadata={**self._objects.metadata, BRANCH_METADATA: str(self._branch_id)},
            **self._objects.arguments(),
        )
        # A server that does not know checksums ignores the request, and may refuse them later.
        self._keeps_checksums = answer.get("ChecksumAlgorithm") == ALGORITHM
        return key, answer["UploadId"]


def numbers() -> Callable[[], int]:
    """A counter that several threads may use."""
    counter, lock = itertools.count(), threading.Lock()

    def draw() -> int:
        with lock:
            return next(counter)

    return draw
