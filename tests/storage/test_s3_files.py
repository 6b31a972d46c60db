"""A folder in a bucket: answers that the servers of the tests do not give, and its location."""

from __future__ import annotations

import io
import sys
import tempfile
from pathlib import Path

import pytest
from botocore.awsrequest import AWSPreparedRequest, AWSResponse
from botocore.response import StreamingBody
from botocore.stub import Stubber
from urllib3 import HTTPResponse

from sparkonce.errors import ConfigurationError, LogUnavailableError
from sparkonce.storage import open_folder
from sparkonce.storage.s3_files import S3FileFolder


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch) -> S3FileFolder:
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "x")
    return S3FileFolder("s3a://lake/ck", "checkpoint:s3a://lake/ck")


def test_end_of_an_empty_file(folder: S3FileFolder) -> None:
    """Amazon's S3 refuses the range."""
    with Stubber(folder.client) as server:
        server.add_client_error("get_object", "InvalidRange", http_status_code=416)
        assert folder.read_end("log", 5) == ""


def test_server_that_ignores_the_range(folder: S3FileFolder) -> None:
    with Stubber(folder.client) as server:
        body = StreamingBody(io.BytesIO(b"0123456789"), 10)
        server.add_response("get_object", {"Body": body, "ETag": '"1"'})
        assert folder.read_end("log", 3) == "789"


@pytest.mark.parametrize("ask", ["exists", "files", "names", "read"])
def test_bucket_that_does_not_answer_is_not_empty(folder: S3FileFolder, ask: str) -> None:
    """A 404 of a proxy, or of a bucket that is gone, does not prove that a file is absent."""
    for code in ("NoSuchBucket", "404"):
        with Stubber(folder.client) as server:
            for operation in ["get_object"] if ask == "read" else ["list_objects_v2"]:
                server.add_client_error(operation, code, http_status_code=404)
            with pytest.raises(LogUnavailableError, match="cannot be used now"):
                getattr(folder, ask)("commits")
    with pytest.raises(LogUnavailableError, match=r"127\.0\.0\.1:9, which the environment"):
        folder.read_end("commits/1", 5)


@pytest.mark.parametrize("ask", ["exists", "files", "names", "read", "read_end", "pieces"])
@pytest.mark.parametrize("page", ["", "<html><body>Please log in</body></html>"])
def test_login_page_is_no_empty_checkpoint(folder: S3FileFolder, ask: str, page: str) -> None:
    """A proxy answers 200 in the server's place."""

    def answer(request: AWSPreparedRequest, **_: object) -> AWSResponse:
        raw = HTTPResponse(io.BytesIO(page.encode()), {}, 200, preload_content=False)
        return AWSResponse(request.url, 200, {}, raw)

    folder.client.meta.events.register("before-send.s3", answer)
    with pytest.raises(LogUnavailableError, match="nothing was written"):
        getattr(folder, ask)("commits", *([5] if ask == "read_end" else []))


@pytest.mark.parametrize(
    "location", ["s3a://key:secret@lake/ck", "s3a:///ck", "s3a://lake--use1-az4--x-s3/ck"]
)
def test_location_that_cannot_be_used(location: str) -> None:
    """The message shows no secret."""
    with pytest.raises(ConfigurationError, match="bucket") as caught:
        open_folder(location, by_boto3=True)
    assert "secret" not in str(caught.value)


def test_bucket_without_boto3(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "sparkonce.storage.s3_files")
    monkeypatch.setitem(sys.modules, "boto3", None)
    monkeypatch.delitem(sys.modules, "sparkonce.storage.s3")
    with pytest.raises(ConfigurationError, match=r"pip install 'sparkonce\[s3\]'"):
        open_folder("s3a://lake/ck", by_boto3=True)


@pytest.mark.parametrize("size", [1, 100_000])
def test_local_disk_that_is_full(
    folder: S3FileFolder, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    """A file is put together there before it is uploaded; a small one fails at its flush."""
    full = Path("/dev/full")
    monkeypatch.setattr(tempfile, "TemporaryFile", lambda: full.open("r+b"))
    with Stubber(folder.client) as server:
        for _ in range(2):
            server.add_response("list_objects_v2", {"Name": "lake"})
        with pytest.raises(LogUnavailableError, match="No space left.*let TMPDIR name another"):
            folder.store("sst", lambda: [b"x" * size])
