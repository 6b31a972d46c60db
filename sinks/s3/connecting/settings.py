"""How the sink reaches S3: the public settings, in boto3's own names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, TypeAlias

from sparkonce.errors import ConfigurationError

if TYPE_CHECKING:
    from botocore.config import Config
    from mypy_boto3_s3 import S3Client

AddressingStyle: TypeAlias = Literal["path", "virtual", "auto"]

ClientFactory: TypeAlias = "Callable[[Config], S3Client]"
"""Makes a client for S3 with the given botocore Config, or with one that is merged into it."""


@dataclass(frozen=True, slots=True)
class S3Connection:
    """Where S3 is and how to log in, by the names that boto3's sessions and clients have.

    Everything that is left out comes from boto3's own chain: environment, files and profiles, and
    the role of the machine. The chain runs on the driver and on every executor.

    Args:
        region_name: the bucket's region.
        aws_access_key_id: goes with `aws_secret_access_key`.
        aws_secret_access_key: goes with `aws_access_key_id`.
        aws_session_token: of temporary keys.
        endpoint_url: address of a server other than Amazon's, such as ``http://minio:9000``.
        profile_name: a profile in boto3's files; every executor needs them too.
        verify: False to accept any TLS certificate, or the path of a file with CA certificates.
        addressing_style: "path" puts the bucket into the path, "virtual" into the host name;
            "auto" leaves the choice to boto3. Default: the setting in boto3's files, otherwise
            the path if another server is named.

    Raises:
        ConfigurationError: a setting cannot work.
    """

    region_name: str | None = None
    aws_access_key_id: str | None = field(default=None, repr=False)
    aws_secret_access_key: str | None = field(default=None, repr=False)
    aws_session_token: str | None = field(default=None, repr=False)
    endpoint_url: str | None = None
    profile_name: str | None = None
    verify: bool | str | None = None
    addressing_style: AddressingStyle | None = None

    def __post_init__(self) -> None:
        if (self.aws_access_key_id is None) != (self.aws_secret_access_key is None):
            raise ConfigurationError(
                "S3Connection: give both aws_access_key_id= and aws_secret_access_key=, or neither"
            )
        if self.aws_session_token is not None and self.aws_access_key_id is None:
            raise ConfigurationError(
                "S3Connection: aws_session_token= needs aws_access_key_id= and "
                "aws_secret_access_key="
            )
        url = self.endpoint_url
        if url is not None and ("@" in url or "://" not in url):
            raise ConfigurationError(
                "S3Connection: endpoint_url= must look like http://HOST:PORT; credentials belong "
                "in aws_access_key_id= and aws_secret_access_key="
            )
        if self.addressing_style not in {None, "path", "virtual", "auto"}:
            raise ConfigurationError(
                f"S3Connection: addressing_style={self.addressing_style!r}: give 'path', "
                "'virtual' or 'auto'"
            )
        if not isinstance(self.verify, bool | str | None):
            raise ConfigurationError(
                f"S3Connection: verify={self.verify!r}: give True, False or the path of a file "
                "with CA certificates"
            )
        if isinstance(self.verify, str) and self.verify.lower() in {"true", "false"}:
            raise ConfigurationError(
                f"S3Connection: verify={self.verify!r} would be the path of a file: give True or "
                "False without quotes"
            )
