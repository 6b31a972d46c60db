"""Findings of `sparkonce doctor` about a bucket: problems that a pipeline would meet later."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from sparkonce.clients.s3 import status_of
from sparkonce.errors import ConfigurationError, SinkUnavailableError
from sparkonce.finding import Finding, Level
from sparkonce.sinks.s3.connecting.answers import S3_ERRORS, describe
from sparkonce.sinks.s3.connecting.checks import SAFE_DAYS, abort_rules, check_server
from sparkonce.sinks.s3.connecting.client import Clients, Purpose
from sparkonce.sinks.s3.connecting.place import Place

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client

_PRECONDITION_FAILED = 412
_NOT_IMPLEMENTED = 501
_MD5_OF_NOTHING = "1B2M2Y8AsgTpgAmY7PhCfg=="


def diagnose(clients: Clients, place: Place, protection: Mapping[str, Any]) -> Iterator[Finding]:
    """Ask the server; this writes one small object with a unique name, and removes it.

    `protection` holds arguments that the bucket's policy may demand for every object.
    """
    try:
        purge = check_server(clients, place)
    except (ConfigurationError, SinkUnavailableError) as error:
        yield Finding(Level.ERROR, str(error))
        return
    yield Finding(Level.OK, f"{place}: reachable, with every right to read and list")
    client = clients.client(Purpose.ASK)
    if purge is not None:
        yield Finding(Level.WARNING, purge.what, purge.fix)
    else:
        yield from _lifecycle(client, place)
    yield from _conditional_writes(client, place, protection)


def _lifecycle(client: S3Client, place: Place) -> Iterator[Finding]:
    try:
        rules = abort_rules(client, place)
    except S3_ERRORS as error:
        if status_of(error) == _NOT_IMPLEMENTED:
            yield Finding(Level.OK, "the server has no lifecycle rules that could abort uploads")
            return
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
                f"lifecycle rule {rule.name!r} aborts uploads after {rule.days} days: a decided "
                "batch that is not committed by then is lost",
                f"let the rule wait {SAFE_DAYS} days or more",
            )
    if not rules:
        yield Finding(
            Level.OK,
            "no lifecycle rule aborts uploads, so none destroys a prepared batch; a rule that "
            f"waits {SAFE_DAYS} days or more would clean up after a pipeline whose log is lost",
        )


def _conditional_writes(
    client: S3Client, place: Place, protection: Mapping[str, Any]
) -> Iterator[Finding]:
    key = f"{place.prefix}_sparkonce/doctor-{uuid.uuid4().hex}"
    put = partial(
        client.put_object,
        Bucket=place.bucket,
        Key=key,
        Body=b"",
        ContentMD5=_MD5_OF_NOTHING,  # buckets with object lock demand it
        **protection,
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
        found = "the server has no If-None-Match"
    else:
        found = "the server overwrites an object in spite of If-None-Match"
    return Finding(
        Level.WARNING,
        f"{found}: a transaction log in this bucket would be refused, and two runs of one "
        "checkpoint (a copy) could overwrite each other's objects",
        "keep the transaction log elsewhere, or use a newer server",
    )
