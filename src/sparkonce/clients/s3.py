"""boto3's S3 clients: what an answer means, which setting names the server, fresh credentials.

An answer may come from a proxy in the server's place: a login page with status 200 has no keys, and
boto3 returns it as an empty list. So every answer must have what S3 puts into each answer of its
kind.

A boto3 session reads ``~/.aws/credentials`` once; only the next session sees a renewed file. So a
client whose credentials are refused is dropped, and its successor asks boto3's chain again.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final

from botocore.exceptions import ClientError, NoCredentialsError
from botocore.parsers import ResponseParserError

from sparkonce.errors import ConfigurationError

if TYPE_CHECKING:
    from botocore.awsrequest import AWSResponse
    from botocore.model import OperationModel
    from mypy_boto3_s3 import S3Client

SKEWED: Final = "RequestTimeTooSkewed"
"""The code for a request whose time differs from the server's by more than a quarter of an hour."""

RIGHT_CLOCK: Final = "correct the clock of this machine or of the server"

_ENDPOINT_VARIABLES: Final = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")
"""The variables that boto3 reads; the first takes precedence."""

_AMAZONS: Final = (".amazonaws.com", ".amazonaws.com.cn", ".amazonaws.eu", ".api.aws")

_USER: Final = re.compile(r"//[^/@\s]*@")
"""A user and a password in a URL."""

_NOT_VALID: Final = frozenset(
    {
        "ExpiredToken",
        "ExpiredTokenException",
        "InvalidAccessKeyId",
        "InvalidToken",
        "RequestExpired",
        "SignatureDoesNotMatch",  # a new secret for the old key
        "TokenRefreshRequired",
        # The answer to a HEAD has no body; its code is the HTTP status.
        "400",
        "401",
        "403",
    }
)

_ALWAYS: Final = {
    "CompleteMultipartUpload": "ETag",
    "CreateMultipartUpload": "UploadId",
    "GetObject": "ETag",
    "HeadObject": "ETag",
    "ListMultipartUploads": "Bucket",
    "ListObjectsV2": "Name",
    "PutObject": "ETag",
    "UploadPart": "ETag",
}
"""By operation, a field that every successful answer of S3 has."""

_REDIRECTED: Final = 300

_DIRECTORY_BUCKETS = ("--x-s3", "--xa-s3")
"""Suffixes of the names of S3 Express One Zone's buckets, and of access points to them."""


def require_s3_answers(client: S3Client) -> None:
    """Make the client raise `ResponseParserError` for a success that S3 did not send."""

    def look(
        http_response: AWSResponse, parsed: Mapping[str, Any], model: OperationModel, **_: object
    ) -> None:
        wanted = _ALWAYS.get(model.name)
        status = http_response.status_code
        if wanted is not None and status < _REDIRECTED and wanted not in parsed:
            if (body := parsed.get("Body")) is not None:
                body.close()
            raise ResponseParserError(
                f"{model.name} was answered with status {status} and without {wanted}, which S3 "
                "never leaves out: something else, such as a proxy, answered in its place"
            )

    client.meta.events.register("after-call.s3", look)


def when_not_valid(client: S3Client, drop: Callable[[], None]) -> None:
    """Make the client call `drop` after each request that fails because of its credentials."""

    def look(
        parsed: Mapping[str, Any] | None = None, exception: Exception | None = None, **_: object
    ) -> None:
        code = (parsed or {}).get("Error", {}).get("Code")
        # A client created while the file was being written never gets credentials.
        if code in _NOT_VALID or isinstance(exception, NoCredentialsError):
            drop()

    client.meta.events.register("after-call.s3", look)
    client.meta.events.register("after-call-error.s3", look)


def endpoint_setting(endpoint_url: str, given: str | None) -> str:
    """The setting that chose a client's server, for messages about a wrong one.

    Args:
        endpoint_url: of the client, as boto3 resolved it (``client.meta.endpoint_url``).
        given: the ``endpoint_url`` that the user passed, if any.
    """
    if given:
        return "endpoint_url="
    for name in _ENDPOINT_VARIABLES:
        value = os.environ.get(name)
        if value and value.rstrip("/") == endpoint_url.rstrip("/"):
            return f"the environment variable {name}"
    if endpoint_url.rstrip("/").endswith(_AMAZONS):
        return "the region"
    return "endpoint_url in boto3's configuration file (~/.aws/config)"


def check_bucket(bucket: str, setting: str) -> None:
    """Refuse a directory bucket, which rejects the writes that sparkonce sends.

    Raises:
        ConfigurationError: it is a bucket of S3 Express One Zone.
    """
    if bucket.endswith(_DIRECTORY_BUCKETS):
        raise ConfigurationError(
            f"{setting}: {bucket!r} is a directory bucket (S3 Express One Zone), which refuses "
            "Content-MD5: give a general purpose bucket"
        )


def code_of(error: Exception | None) -> str:
    """The server's error code (for a HEAD: the HTTP status); empty if there was no answer."""
    return error.response["Error"].get("Code", "") if isinstance(error, ClientError) else ""


def is_of_server(error: Exception) -> bool:
    """Whether the error is an answer with one of S3's codes; a proxy's has only a status."""
    return re.match("[A-Za-z]", code_of(error)) is not None


def status_of(error: Exception) -> int | None:
    """The HTTP status of the server's answer; None if there was no answer."""
    if isinstance(error, ClientError):
        return error.response["ResponseMetadata"].get("HTTPStatusCode")
    return None


def has_delete_marker(error: Exception) -> bool:
    """Whether the object was deleted from a bucket that keeps versions."""
    if not isinstance(error, ClientError):
        return False
    headers = error.response["ResponseMetadata"].get("HTTPHeaders", {})
    return headers.get("x-amz-delete-marker") == "true"


def said(error: Exception) -> str:
    """One line about an error, without passwords and without the signed request."""
    if isinstance(error, ClientError):
        answer = error.response["Error"]
        return f"{error.operation_name} answered {answer.get('Code')}: {answer.get('Message')}"
    # A page that is no XML is quoted whole, after the first line.
    text = (str(error).splitlines() or [""])[0]
    return f"{type(error).__name__}: {without_user(text)}"


def without_user(text: str) -> str:
    """The text without the user and the password of each URL in it."""
    return _USER.sub("//", text)
