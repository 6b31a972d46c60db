"""What Iceberg's and Delta's libraries must know of a local S3 server."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sparkonce.testing.services import S3Server


def iceberg_settings(server: S3Server) -> dict[str, str]:
    """pyiceberg's settings of a catalog, for its files."""
    return {
        "s3.endpoint": server.endpoint_url,
        "s3.access-key-id": server.access_key,
        "s3.secret-access-key": server.secret_key,
        "s3.region": server.region,
    }


def delta_options(server: S3Server) -> dict[str, str]:
    """The storage options of deltalake."""
    return {
        "AWS_ENDPOINT_URL": server.endpoint_url,
        "AWS_ACCESS_KEY_ID": server.access_key,
        "AWS_SECRET_ACCESS_KEY": server.secret_key,
        "AWS_REGION": server.region,
        "AWS_ALLOW_HTTP": "true",
    }
