"""What an S3 server has said, or would: read alike by the sink and by a log in a bucket."""

from __future__ import annotations

from botocore.exceptions import ClientError

from sparkonce.errors import ConfigurationError

_DIRECTORY_BUCKETS = ("--x-s3", "--xa-s3")
"""What the names of S3 Express One Zone end in, and those of access points to it."""


def check_bucket(bucket: str, setting: str) -> None:
    """Refuse a bucket into which nothing can be written as it is here.

    Args:
        bucket: its name.
        setting: that has the name, for the message.

    Raises:
        ConfigurationError: it is one of S3 Express One Zone.
    """
    if bucket.endswith(_DIRECTORY_BUCKETS):
        raise ConfigurationError(
            f"{setting}: {bucket!r} is a directory bucket (S3 Express One Zone), which refuses "
            "Content-MD5: give a general purpose bucket"
        )


def code_of(error: Exception | None) -> str:
    """The server's error code (of a HEAD: the HTTP status); empty when it gave no answer."""
    return error.response["Error"].get("Code", "") if isinstance(error, ClientError) else ""


def status_of(error: Exception) -> int | None:
    """The HTTP status of the server's answer; None when it gave none."""
    if isinstance(error, ClientError):
        return error.response["ResponseMetadata"].get("HTTPStatusCode")
    return None


def has_delete_marker(error: Exception) -> bool:
    """Whether the object was deleted in a bucket that keeps versions."""
    if not isinstance(error, ClientError):
        return False
    headers = error.response["ResponseMetadata"].get("HTTPHeaders", {})
    return headers.get("x-amz-delete-marker") == "true"


def said(error: Exception) -> str:
    """One line for messages; without the request, which is signed."""
    if isinstance(error, ClientError):
        told = error.response["Error"]
        return f"{error.operation_name} answered {told.get('Code')}: {told.get('Message')}"
    return f"{type(error).__name__}: {error}"
