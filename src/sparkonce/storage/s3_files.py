"""A folder in a bucket where others write too, as Spark does through S3A.

A bucket has keys, and no folders. For a folder without files, S3A keeps an empty object whose key
ends with /. Such a marker shows that the folder exists, and is no file.
"""

from __future__ import annotations

import contextlib
import posixpath
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Final

from sparkonce.clients.s3 import check_bucket, code_of, status_of
from sparkonce.errors import ConfigurationError, LogUnavailableError
from sparkonce.storage.base import PIECE_BYTES
from sparkonce.storage.s3 import S3_ERRORS, S3Folder, Server

if TYPE_CHECKING:
    from botocore.response import StreamingBody

_LOCATION: Final = re.compile(r"s3[an]?://(?P<bucket>[^/@:]+)(?P<path>/.*)?", re.DOTALL)
_FILE: Final = re.compile(r"(?:.*/)?[^./][^/]*", re.DOTALL)
"""A name that is neither hidden nor a marker's."""
_NOT_SATISFIABLE: Final = 416


class S3FileFolder(S3Folder):
    """A folder in a bucket; see `sparkonce.storage.base.FileSystemFolder`.

    boto3's own chain names the server, the region and the credentials.

    Args:
        location: ``s3a://bucket/prefix``, also with s3 or s3n.
        address: for messages.

    Raises:
        ConfigurationError: the bucket cannot be used, or boto3 cannot create a client.
        LogUnavailableError: boto3 cannot create a client now.
    """

    def __init__(self, location: str, address: str) -> None:
        found = _LOCATION.fullmatch(location)
        if found is None:
            raise ConfigurationError(
                "the checkpoint's location: expected s3a://bucket/prefix, with the name of a "
                "bucket and without credentials"
            )
        check_bucket(found["bucket"], address)
        # As Hadoop reads a path: single slashes, no dots, and nothing is unquoted.
        path = posixpath.normpath(re.sub("/+", "/", found["path"] or "/")).strip("/")
        super().__init__(found["bucket"], path and f"{path}/", Server(), address)
        self.location = location

    def exists(self, name: str) -> bool:
        # A key comes before all longer keys that begin with it.
        is_file = self._first_key(name) == self.prefix + name
        return is_file or self._first_key(f"{name}/") is not None

    def _first_key(self, start: str) -> str | None:
        def ask() -> str | None:
            answer = self.client.list_objects_v2(
                Bucket=self.bucket, Prefix=self.prefix + start, MaxKeys=1
            )
            return next((found["Key"] for found in answer.get("Contents", [])), None)

        return self.ask("list", ask)

    def files(self, folder: str) -> Sequence[str]:
        names = self.listed(folder, Delimiter="/")
        return [name.rpartition("/")[2] for name in names if not name.endswith("/")]

    def names(self, folder: str) -> Sequence[str]:
        return [name for name in self.listed(folder) if _FILE.fullmatch(name)]

    def pieces(self, name: str) -> Iterator[bytes] | None:
        def ask() -> StreamingBody | None:
            try:
                return self.client.get_object(Bucket=self.bucket, Key=self.prefix + name)["Body"]
            except S3_ERRORS as error:
                if code_of(error) == "NoSuchKey":
                    return None
                raise

        body = self.ask("get", ask)
        return None if body is None else self._pieces_of(body)

    def _pieces_of(self, body: StreamingBody) -> Iterator[bytes]:
        with contextlib.closing(body):
            while piece := self.ask("get", lambda: body.read(PIECE_BYTES)):
                yield piece

    def store(self, name: str, pieces: Callable[[], Iterable[bytes]]) -> None:
        if self.exists(name):
            return
        key = self.prefix + name
        try:
            with tempfile.TemporaryFile() as whole:  # its size decides: one request, or parts
                whole.writelines(pieces())
                whole.seek(0)
                self.ask("put", lambda: self.client.upload_fileobj(whole, self.bucket, key))
        except OSError as error:
            raise LogUnavailableError(
                f"{self.address}: the temporary file for {key} cannot be written ({error}), "
                "nothing was uploaded; make room for it, or let TMPDIR name another folder"
            ) from error

    def read_end(self, name: str, most_bytes: int) -> str | None:
        def ask() -> str | None:
            try:
                answer = self.client.get_object(
                    Bucket=self.bucket, Key=self.prefix + name, Range=f"bytes=-{most_bytes}"
                )
                body = answer["Body"].read()
            except S3_ERRORS as error:
                if code_of(error) == "NoSuchKey":
                    return None
                if status_of(error) == _NOT_SATISFIABLE:  # an empty object has no last byte
                    return ""
                raise
            return body[-most_bytes:].decode(errors="replace")

        return self.ask("get", ask)
