"""What of a bucket bites a pipeline in a bad hour."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from sparkonce.errors import ConfigurationError
from sparkonce.sinks.finding import Finding, Level
from sparkonce.sinks.s3.checks import SAFE_DAYS, check_server
from sparkonce.sinks.s3.client import S3_ERRORS, Connection, Purpose, code_of, describe, status_of
from sparkonce.sinks.s3.layout import Place

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client

_PRECONDITION_FAILED = 412


def diagnose(connection: Connection, place: Place) -> Iterator[Finding]:
    """Ask the server; it writes one small object under a name of its own and removes it."""
    try:
        check_server(connection, place)
    except ConfigurationError as error:
        yield Finding(Level.ERROR, str(error))
        return
    yield Finding(Level.OK, f"{place}: reachable, and every right to read and list is there")
    client = connection.client(Purpose.ASK)
    yield from _lifecycle(client, place)
    yield from _conditional_writes(client, place)


def _lifecycle(client: S3Client, place: Place) -> Iterator[Finding]:
    try:
        rules: list[Any] = client.get_bucket_lifecycle_configuration(Bucket=place.bucket)["Rules"]
    except S3_ERRORS as error:
        if code_of(error) == "NoSuchLifecycleConfiguration":
            rules = []
        else:
            yield Finding(
                Level.WARNING,
                f"the bucket's lifecycle rules cannot be read ({describe(error)})",
                "allow s3:GetLifecycleConfiguration, or make sure that no rule aborts uploads "
                f"before {SAFE_DAYS} days",
            )
            return
    enabled = [rule for rule in rules if rule.get("Status") == "Enabled"]
    aborting = [
        (rule, days)
        for rule in enabled
        if (days := rule.get("AbortIncompleteMultipartUpload", {}).get("DaysAfterInitiation"))
        and _concerns(rule, place)
    ]
    for rule, days in aborting:
        if days < SAFE_DAYS:
            yield Finding(
                Level.WARNING,
                f"lifecycle rule {rule.get('ID', '')!r} aborts uploads after {days} days: a batch "
                "that is decided and not committed by then is lost",
                f"let the rule wait {SAFE_DAYS} days or more",
            )
    if not aborting:
        yield Finding(
            Level.OK,
            "no lifecycle rule aborts uploads, so none hits a prepared batch; one that waits "
            f"{SAFE_DAYS} days or more would clean up after a pipeline whose log is lost",
        )


def _concerns(rule: Any, place: Place) -> bool:
    condition = rule.get("Filter", {})
    prefix = condition.get("Prefix") or condition.get("And", {}).get("Prefix")
    prefix = prefix or rule.get("Prefix") or ""
    return bool(prefix.startswith(place.prefix) or place.prefix.startswith(prefix))


def _conditional_writes(client: S3Client, place: Place) -> Iterator[Finding]:
    key = f"{place.prefix}_sparkonce/doctor-{uuid.uuid4().hex}"
    try:
        client.put_object(Bucket=place.bucket, Key=key, Body=b"", IfNoneMatch="*")
        try:
            client.put_object(Bucket=place.bucket, Key=key, Body=b"", IfNoneMatch="*")
        except S3_ERRORS as error:
            if status_of(error) != _PRECONDITION_FAILED:
                raise
            yield Finding(Level.OK, "the server honours If-None-Match")
        else:
            yield Finding(
                Level.WARNING,
                "the server overwrites an object in spite of If-None-Match: a transaction log in "
                "this bucket would be refused (the sink does not need it)",
                "keep the transaction log elsewhere, or use a newer server",
            )
    except S3_ERRORS as error:
        yield Finding(
            Level.ERROR,
            f"a small object cannot be written under {place} ({describe(error)})",
            "grant s3:PutObject on the prefix",
        )
    finally:
        with contextlib.suppress(*S3_ERRORS):
            client.delete_object(Bucket=place.bucket, Key=key)
