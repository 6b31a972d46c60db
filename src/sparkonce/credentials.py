"""When S3 says that a client's credentials are not valid (any more).

boto3 reads ``~/.aws/credentials`` once for a session. Who renews the file renews it for the next
session, so a client whose credentials are refused is dropped, and the next one asks the chain anew.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final

from botocore.exceptions import NoCredentialsError

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client

_NOT_VALID: Final = frozenset(
    {
        "ExpiredToken",
        "ExpiredTokenException",
        "InvalidAccessKeyId",
        "InvalidToken",
        "RequestExpired",
        "SignatureDoesNotMatch",  # a new secret under the old key
        "TokenRefreshRequired",
        # Of a HEAD, whose answer has no body, the code is the HTTP status.
        "400",
        "401",
        "403",
    }
)


def when_not_valid(client: S3Client, drop: Callable[[], None]) -> None:
    """Let `drop` be called for each call of the client that fails for its credentials."""

    def look(
        parsed: Mapping[str, Any] | None = None, exception: Exception | None = None, **_: object
    ) -> None:
        code = (parsed or {}).get("Error", {}).get("Code")
        # A client that was made while the file was being written has none, for ever.
        if code in _NOT_VALID or isinstance(exception, NoCredentialsError):
            drop()

    client.meta.events.register("after-call.s3", look)
    client.meta.events.register("after-call-error.s3", look)
