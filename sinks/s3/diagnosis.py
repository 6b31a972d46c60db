"""What of a bucket bites a pipeline in a bad hour."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING

from sparkonce.clients.s3 import status_of
from sparkonce.errors import ConfigurationError
from sparkonce.finding import Finding, Level
from sparkonce.sinks.s3.checks import (
    SAFE_DAYS,
    abort_rules,
    check_server,
)
from sparkonce.sinks.s3.client import S3_ERRORS, Connection, Purpose, describe
from sparkonce.sinks.s3.layout import Place
from sparkonce.sinks.s3.upload import ObjectSettings

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client

_PRECONDITION_FAILED = 412
_NOT_IMPLEMENTED = 501
_MD5_OF_NOTHING = "1B2M2Y8AsgTpgAmY7PhCfg=="


def diagnose(connection: Connection, place: Place, settings: ObjectSettings) -> Iterator[Finding]:
    """Ask the server; it writes one small object under a name of its own and removes it."""
    try:
        purge = check_server(connection, place)
    except ConfigurationError as error:
        yield Finding(Level.ERROR, str(error))
        return
    yield Finding(Level.OK, f"{place}: reachable, and every right to read and list is there")
    client = connection.client(Purpose.ASK)
    if purge is not None:
        yield Finding(Level.WARNING, purge.what, purge.fix)
    else:
        yield from _lifecycle(client, place)
    yield from _conditional_writes(client, place, settings)


def _lifecycle(client: S3Client, place: Place) -> Iterator[Finding]:
    try:
        rules = abort_rules(client, place)
    except S3_ERRORS as error:
        yield Finding(
            Level.WARNING,
            f"the bucket's lifecycle rules cannot be read ({describe(error)})",
            "allow s3:GetLifecycleConfiguration, or make sure that no rule aborts uploads "
            f"before {SAFE_DAYS} days",
        )
        return
    for rule in rules:
        if rule.days < SAFE_DAYS:
            yield Finding(
                Level.WARNING,
                f"lifecycle rule {rule.name!r} aborts uploads after {rule.days} days: a batch "
                "that is decided and not committed by then is lost",
                f"let the rule wait {SAFE_DAYS} days or more",
            )
    if not rules:
        yield Finding(
            Level.OK,
            "no lifecycle rule aborts uploads, so none hits a prepared batch; one that waits "
            f"{SAFE_DAYS} days or more would clean up after a pipeline whose log is lost",
        )


def _conditional_writes(
    client: S3Client, place: Place, settings: ObjectSettings
) -> Iterator[Finding]:
    key = f"{place.prefix}_sparkonce/doctor-{uuid.uuid4().hex}"
    put = partial(
        client.put_object,
        Bucket=place.bucket,
        Key=key,
        Body=b"",
        ContentMD5=_MD5_OF_NOTHING,  # buckets that lock their objects demand it
        **settings.protection(),
    )
    try:
        yield _probe(put)
    except S3_ERRORS as error:
        yield Finding(
            Level.ERROR,
            f"a small object cannot be written under {place} ({describe(error)})",
            "grant s3:PutObject on the prefix",
        )
    finally:
        with contextlib.suppress(*S3_ERRORS):
            client.delete_object(Bucket=place.bucket, Key=key)


def _probe(put: Callable[..., object]) -> Finding:
    try:
        put(IfNoneMatch="*")
        put(IfNoneMatch="*")
    except S3_ERRORS as error:
        if status_of(error) == _PRECONDITION_FAILED:
            return Finding(Level.OK, "the server honours If-None-Match")
        if status_of(error) != _NOT_IMPLEMENTED:
            raise
        put()
        said = "the server has no If-None-Match"
    else:
        said = "the server overwrites an object in spite of If-None-Match"
    return Finding(
        Level.WARNING,
        f"{said}: a transaction log in this bucket would be refused (the sink does not need it)",
        "keep the transaction log elsewhere, or use a newer server",
    )
