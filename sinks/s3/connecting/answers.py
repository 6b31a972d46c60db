"""What an error of a client means: whether to try again, and how to show it to people.

Every error of a client is one of `S3_ERRORS`. Messages never contain the request, which is signed,
nor the credentials that a URL may contain.
"""

from __future__ import annotations

import re

from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    ConnectionError,  # noqa: A004
    HTTPClientError,
    SSLError,
)
from botocore.parsers import ResponseParserError

from sparkonce.clients.s3 import RIGHT_CLOCK, SKEWED, code_of, said, status_of

S3_ERRORS = (BotoCoreError, ClientError, ResponseParserError)
"""Every error that a call of a client raises."""

_TOO_MANY_REQUESTS = 429
_NEVER = frozenset({501, 505})
"""Statuses from 500 on that a second try does not change."""

_THROTTLED = frozenset({"SlowDown", "RequestTimeout", "Throttling", "ThrottlingException"})

_ADVICE = {
    "ExpiredToken": "the credentials have expired: renew them where boto3's chain finds them, and "
    "the next try reads them; keys in S3Connection do not change",
    SKEWED: RIGHT_CLOCK,
}

_RIGHTS = {
    "ListParts": "s3:ListMultipartUploadParts",
    "CompleteMultipartUpload": "s3:PutObject",
}
"""Without these rights a decided branch waits forever."""

_USER_INFO = re.compile(r"(?<=://)[^/\s\"'@]*@")


def is_transient(error: Exception) -> bool:
    """Whether the same call may succeed a little later."""
    if isinstance(error, ClientError):
        status = status_of(error) or 500
        is_of_server = status >= 500 and status not in _NEVER  # noqa: PLR2004
        return is_of_server or status == _TOO_MANY_REQUESTS or code_of(error) in _THROTTLED
    if isinstance(error, SSLError):  # a wrong certificate stays wrong
        return False
    return isinstance(error, (ConnectionError, HTTPClientError, ResponseParserError))


def describe(error: Exception) -> str:
    """One line for messages, with advice if there is any."""
    advice = _ADVICE.get(code_of(error))
    asked = error.operation_name if isinstance(error, ClientError) else None
    if (code_of(error), asked) == ("NotImplemented", "CreateMultipartUpload"):
        advice = 'if the server has no CRC32C, set S3Objects(checksum="none")'
    if code_of(error) == "AccessDenied" and asked in _RIGHTS:
        advice = f"grant {_RIGHTS[asked]}"
    text = _USER_INFO.sub("", said(error))
    return f"{text}; {advice}" if advice else text
