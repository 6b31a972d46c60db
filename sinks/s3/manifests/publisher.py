"""Writes the manifest of a batch whose objects are all proven, and merges old manifests.

    publish   put if absent ─► exists already? the higher revision counts
    merge     read a hundred ─► put their union ─► delete them

The contents of a batch never change after all of it is proven: every process that publishes the
batch, now or after a pause of hours, writes the same manifest. So merging needs no lock: two
processes that merge the same batches write the same file. A manifest that reappears after it was
merged equals its line in the merged file; the next merge deletes it, and until then readers see
one batch.
"""

from __future__ import annotations

import base64
import functools
import gzip
import hashlib
import logging
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from io import BufferedRandom
from typing import TYPE_CHECKING, Any, Final

from sparkonce.clients.s3 import status_of
from sparkonce.errors import CommitUnresolvedError, ConfigurationError
from sparkonce.sinks.s3.connecting.answers import S3_ERRORS, describe
from sparkonce.sinks.s3.connecting.client import Clients, Purpose
from sparkonce.sinks.s3.connecting.place import Place
from sparkonce.sinks.s3.manifests.manifest import (
    FANOUT,
    SPAN_SIZES,
    Manifest,
    Span,
    decode_file,
    encode_file,
    manifests_in,
)
from sparkonce.sinks.s3.writing.objects import S3Objects

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client

logger = logging.getLogger("sparkonce")

_PARALLEL_READS: Final = 16
_DELETE_AT_ONCE: Final = 1000
_ALREADY_THERE: Final = frozenset({409, 412})
_NOT_IMPLEMENTED: Final = 501


class Publisher:
    """Writes the manifests of one pipeline, query and sink into `manifest.source_folder`."""

    def __init__(self, clients: Clients, place: Place, folder: str, objects: S3Objects) -> None:
        self._objects = objects
        self._clients = clients
        self._bucket = place.bucket
        self._folder = place.prefix + folder

    def publish(self, manifest: Manifest) -> None:
        """Make the batch known to readers. Idempotent.

        Raises:
            CommitUnresolvedError: the manifest may not exist; call it again.
        """
        span = Span(manifest.batch_id, manifest.batch_id)
        try:
            self._put_first(span, manifest)
        except S3_ERRORS as error:
            raise CommitUnresolvedError(
                f"S3: the manifest s3://{self._bucket}/{self._folder}{span.name} is not written "
                f"({describe(error)})"
            ) from error
        if (manifest.batch_id + 1) % FANOUT == 0:
            self._merge_quietly(manifest.batch_id)

    def merge(self, last: int) -> None:
        """Merge manifests into files of 100 and 10,000 batches that batch `last` completes.

        This also finishes earlier merges, as far as the server allows deletes.
        """
        may_delete = True
        for size in SPAN_SIZES:
            groups: dict[int, list[Span]] = {}
            for span in self._spans():
                if span.size <= size:
                    groups.setdefault(span.first // size, []).append(span)
            for number, found in groups.items():
                whole = Span(number * size, (number + 1) * size - 1)
                if whole.last > last or found == [whole]:
                    continue
                spans = found
                if not may_delete:  # all merged manifests stay: read the larger files instead
                    if whole in found:
                        continue
                    merged = {n for s in found if s.size > 1 for n in range(s.first, s.last + 1)}
                    spans = [s for s in found if s.size > 1 or s.first not in merged]
                may_delete = self._merge_group(whole, spans)

    def _merge_quietly(self, last: int) -> None:
        """Merge; readers do not need it, so a failure fails no batch."""
        try:
            self.merge(last)
        except (*S3_ERRORS, ConfigurationError, OSError) as error:
            said = str(error) if isinstance(error, ConfigurationError) else describe(error)
            logger.warning(
                "s3://%s/%s: old manifests could not be merged now (merging needs s3:ListBucket, "
                "s3:DeleteObject and space in the driver's temporary folder); the next attempt is "
                "%d batches later: %s",
                self._bucket,
                self._folder,
                FANOUT,
                said,
            )

    def _merge_group(self, whole: Span, spans: Sequence[Span]) -> bool:
        """Put the union of the files, and delete them; return whether deleting is allowed."""
        # On disk: ten thousand batches of a thousand objects are gigabytes.
        with tempfile.TemporaryFile() as merged:
            with gzip.GzipFile(fileobj=merged, mode="wb", compresslevel=6, mtime=0) as lines:
                seen: set[tuple[int, int]] = set()
                # For a batch that was written again, the smaller file has the line that counts.
                for body, where in self._bodies(sorted(spans, key=lambda span: span.size)):
                    for line, manifest in manifests_in(body, where):
                        # Readers use the highest revision.
                        if (known := (manifest.batch_id, manifest.revision)) not in seen:
                            seen.add(known)
                            lines.write(line)
            self._put(whole, merged)
        names = [self._folder + span.name for span in spans if span != whole]
        for begin in range(0, len(names), _DELETE_AT_ONCE):
            if (refusal := self._delete(names[begin : begin + _DELETE_AT_ONCE])) is not None:
                logger.warning(
                    "s3://%s/%s is merged but could not be deleted (%s): grant s3:DeleteObject on "
                    "the folder _sparkonce/",
                    self._bucket,
                    *refusal,
                )
                return False
        return True

    def _delete(self, keys: Sequence[str]) -> tuple[str, str] | None:
        """The first key that the server does not delete, and the reason."""
        client = self._client()
        try:
            answer = client.delete_objects(
                Bucket=self._bucket,
                Delete={"Objects": [{"Key": key} for key in keys], "Quiet": True},
            )
        except S3_ERRORS:
            # Some servers demand a Content-MD5 with the list, and boto3 no longer sends one.
            for key in keys:
                try:
                    client.delete_object(Bucket=self._bucket, Key=key)
                except S3_ERRORS as error:
                    return key, describe(error)
            return None
        for failed in answer.get("Errors", ()):
            return failed.get("Key", ""), failed.get("Code", "")
        return None

    def _put_first(self, span: Span, manifest: Manifest) -> None:
        """Put if absent; an existing manifest stays, unless its revision is lower."""
        body = encode_file([manifest], span)
        try:
            self._put(span, body, IfNoneMatch="*")
        except S3_ERRORS as error:
            if status_of(error) == _NOT_IMPLEMENTED:
                self._put(span, body)  # every other process puts the same
            elif status_of(error) in _ALREADY_THERE:
                (existing,) = decode_file(*self._get(span))
                if existing.revision < manifest.revision:
                    self._put(span, body)
            else:
                raise

    def _bodies(self, spans: Sequence[Span]) -> Iterator[tuple[bytes, str]]:
        with ThreadPoolExecutor(_PARALLEL_READS) as pool:
            for begin in range(0, len(spans), _PARALLEL_READS):
                yield from pool.map(self._get, spans[begin : begin + _PARALLEL_READS])

    def _put(self, span: Span, body: bytes | BufferedRandom, **condition: Any) -> None:
        new_md5 = functools.partial(hashlib.md5, usedforsecurity=False)
        if isinstance(body, bytes):
            md5 = new_md5(body)
        else:
            body.seek(0)
            md5 = hashlib.file_digest(body, new_md5)
            body.seek(0)
        self._client().put_object(
            Bucket=self._bucket,
            Key=self._folder + span.name,
            Body=body,
            ContentMD5=base64.b64encode(md5.digest()).decode(),
            ContentType="application/gzip" if span.size > 1 else "application/json",
            **self._objects.protection(),
            **condition,
        )

    def _get(self, span: Span) -> tuple[bytes, str]:
        key = self._folder + span.name
        body = self._client().get_object(Bucket=self._bucket, Key=key)["Body"].read()
        return body, f"s3://{self._bucket}/{key}"

    def _spans(self) -> list[Span]:
        pages = self._client().get_paginator("list_objects_v2")
        keys = (
            entry["Key"].removeprefix(self._folder)
            for page in pages.paginate(Bucket=self._bucket, Prefix=self._folder)
            for entry in page.get("Contents", ())
        )
        return [span for key in keys if (span := Span.from_name(key)) is not None]

    def _client(self) -> S3Client:
        return self._clients.client(Purpose.ASK)
