"""Checks the server before any data moves: the bucket, the rights, and its treatment of uploads.

    check_server ─► list uploads ─► HEAD, ListParts ─► Spark's own folder ─► lifecycle rules
                         └── an error ─► blame: SinkUnavailableError if a later try may succeed,
                                                otherwise ConfigurationError

Nothing is written, and the checks end in a bounded time even if nothing responds.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from botocore.exceptions import (
    BotoCoreError,
    NoCredentialsError,
    PartialCredentialsError,
    ProfileNotFound,
    SSLError,
)

from sparkonce.clients.s3 import SKEWED, code_of, status_of
from sparkonce.errors import ConfigurationError, SinkUnavailableError, SparkOnceError
from sparkonce.sinks.s3.connecting.answers import S3_ERRORS, describe, is_transient
from sparkonce.sinks.s3.connecting.client import Clients, Purpose
from sparkonce.sinks.s3.connecting.place import Place
from sparkonce.sinks.spark_metadata import SPARK_METADATA, written_by_spark

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client

logger = logging.getLogger("sparkonce")

SAFE_DAYS = 7
"""A lifecycle rule that aborts uploads earlier than this may destroy a prepared branch."""


class Purge(NamedTuple):
    """How a server deletes open uploads by itself, and where to change that."""

    what: str
    fix: str


_LOST = "a batch that is prepared or decided, but not committed by then, is lost"

_PURGES = {
    "MinIO": Purge(
        "MinIO deletes open uploads after its stale_uploads_expiry, 24 hours by default: "
        f"{_LOST}. It does not list uploads by prefix, so only that purge removes orphans",
        f"`mc admin config set ALIAS api stale_uploads_expiry={SAFE_DAYS * 24}h` or more (or "
        "MINIO_API_STALE_UPLOADS_EXPIRY)",
    ),
    "SeaweedFS": Purge(
        "SeaweedFS deletes open uploads by a maintenance script, after 24 hours by default: "
        f"{_LOST}",
        f"write `s3.clean.uploads -timeAgo={SAFE_DAYS * 24}h` or more into the scripts of "
        "[master.maintenance] in master.toml, and into those of its admin server",
    ),
}
"""By the first word of the header Server."""

ResultT = TypeVar("ResultT")

_NOT_FOUND = 404
_FORBIDDEN = frozenset({401, 403})
_BAD_KEYS = frozenset({"InvalidAccessKeyId", "SignatureDoesNotMatch", "XAdminUserNotFound"})
_OTHER_REGION = frozenset(
    {
        "301",  # of a HEAD, whose answer has no body
        "PermanentRedirect",
        "AuthorizationHeaderMalformed",
        "IllegalLocationConstraintException",
    }
)


def check_server(clients: Clients, place: Place) -> Purge | None:
    """Refuse a server, bucket or account that cannot work.

    Returns:
        How the server deletes open uploads if it has no lifecycle rules for them; otherwise None.

    Raises:
        SinkUnavailableError: the server cannot be reached or is overloaded; try again.
        ConfigurationError: a setting or a right is wrong.
    """
    client = _asking(lambda: clients.client(Purpose.ASK), clients, place)
    answer = _asking(
        lambda: client.list_multipart_uploads(
            Bucket=place.bucket, Prefix=place.prefix, MaxUploads=1
        ),
        clients,
        place,
    )
    _asking(lambda: _check_proofs(client, place), clients, place)
    _asking(lambda: _check_plain_readers(client, place), clients, place)
    server = answer["ResponseMetadata"]["HTTPHeaders"].get("server", "")
    purge = _PURGES.get(server.partition(" ")[0])
    if purge is not None:
        logger.warning("%s: %s: %s", place, purge.what, purge.fix)
    else:
        _warn_about_lifecycle(client, place)
    return purge


def _check_proofs(client: S3Client, place: Place) -> None:
    """Refuse an account without the rights that prove whether a branch is committed or lost."""
    bucket, key = place.bucket, f"{place.prefix}sparkonce.probe"
    # Only with the right to list the bucket does a HEAD distinguish "absent" (404), which proves
    # that nothing is committed, from "not allowed" (403).
    try:
        client.head_object(Bucket=bucket, Key=key)
    except S3_ERRORS as error:
        if status_of(error) in _FORBIDDEN:
            raise ConfigurationError(
                f"S3Sink: {place}: cannot tell whether an object exists ({describe(error)}): "
                "grant s3:GetObject and s3:ListBucket"
            ) from error
        if status_of(error) != _NOT_FOUND:
            raise
    try:
        client.list_parts(Bucket=bucket, Key=key, UploadId="sparkonce.probe")
    except S3_ERRORS as error:  # servers refuse an unknown upload in many ways
        if status_of(error) in _FORBIDDEN:
            raise ConfigurationError(
                f"S3Sink: {place}: cannot tell whether an upload exists ({describe(error)}): "
                "grant s3:ListMultipartUploadParts"
            ) from error
        if isinstance(error, BotoCoreError):  # no answer at all
            raise


def _check_plain_readers(client: S3Client, place: Place) -> None:
    """Refuse a prefix in which Spark's own readers would see no file of this sink."""
    # With the slash: the folder of a column may start with the same characters.
    folder = f"{place.prefix}{SPARK_METADATA}/"
    if client.list_objects_v2(Bucket=place.bucket, Prefix=folder, MaxKeys=1).get("Contents"):
        raise written_by_spark(f"S3Sink: {place}", "another prefix (url=)")


def _asking(action: Callable[[], ResultT], clients: Clients, place: Place) -> ResultT:
    """Run the action; turn an error of the client into one that names the setting at fault."""
    try:
        return action()
    except S3_ERRORS as error:
        raise blame(error, clients, place) from error
    except ValueError:  # of an address; boto3's text repeats it, perhaps with a password
        raise ConfigurationError(
            f"S3Sink: {clients.address_setting} is not an address that boto3 can use: give one "
            "such as http://HOST:PORT"
        ) from None


def blame(error: Exception, clients: Clients, place: Place) -> SparkOnceError:
    """The sink's error, with the next step, for an error of the client at a start."""
    if isinstance(error, NoCredentialsError | PartialCredentialsError):
        return ConfigurationError(
            "S3Sink: no credentials: set them where boto3 looks for them (environment, profile, "
            "instance role), or give S3Connection(aws_access_key_id=…, aws_secret_access_key=…): "
            f"{error}"
        )
    if isinstance(error, ProfileNotFound):
        return ConfigurationError(
            f"S3Sink: {describe(error)}: correct profile_name= (or AWS_PROFILE), and give every "
            "executor boto3's files"
        )
    where = _where(clients)
    status = status_of(error)
    kind: type[SparkOnceError] = ConfigurationError
    if isinstance(error, SSLError):
        fix = f"TLS with {where} fails: correct verify= or {clients.address_setting}"
    elif is_transient(error):
        kind = SinkUnavailableError
        fix = (
            f"{where} cannot be reached: start it, or correct {clients.address_setting}"
            if status is None
            else f"{where} cannot serve {place} now: try again later"
        )
    elif status is None:  # such as a profile without a login, or a broken file
        fix = "boto3 cannot use its settings or credentials: correct what it names"
    else:
        fix = _fix_of_refusal(code_of(error), status, where, place)
    return kind(f"S3Sink: {fix} ({describe(error)})")


def _fix_of_refusal(code: str, status: int, where: str, place: Place) -> str:
    if code == "NoSuchBucket":
        return f"the bucket {place.bucket!r} does not exist at {where}: create it, or correct url="
    if code in _BAD_KEYS:
        return (
            f"{where} refuses the credentials: correct aws_access_key_id= and "
            "aws_secret_access_key=, or the source in boto3's chain"
        )
    if code == SKEWED:
        return f"{where} refuses requests of this clock"
    if status in _FORBIDDEN:
        return (
            f"{where} refuses access to {place}: grant s3:ListBucketMultipartUploads, "
            "s3:ListBucket, s3:GetObject, s3:PutObject, s3:ListMultipartUploadParts and "
            "s3:AbortMultipartUpload"
        )
    if status in {301, 400} and code in _OTHER_REGION:
        return f"the bucket {place.bucket!r} is in another region: correct region_name="
    return f"{where} does not serve {place}"


def _where(clients: Clients) -> str:
    """The server as messages name it."""
    try:
        url = clients.other_server
    except (*S3_ERRORS, ValueError):  # no client can be made
        return "S3"
    return "Amazon's endpoint" if url is None else f"{url} ({clients.address_setting})"


class AbortRule(NamedTuple):
    """A lifecycle rule that aborts uploads `days` after their start, in a place or part of it."""

    name: str
    days: int
    covers_all: bool


def abort_rules(client: S3Client, place: Place) -> list[AbortRule]:
    """The rules that concern the place; raises the server's error if they cannot be read."""
    try:
        answer = client.get_bucket_lifecycle_configuration(Bucket=place.bucket)
    except S3_ERRORS as error:
        if code_of(error) == "NoSuchLifecycleConfiguration":
            return []
        raise
    found = []
    rules: Sequence[Any] = answer.get("Rules", ())
    for rule in rules:
        days = rule.get("AbortIncompleteMultipartUpload", {}).get("DaysAfterInitiation")
        condition = rule.get("Filter", {})
        prefix = condition.get("Prefix") or condition.get("And", {}).get("Prefix")
        prefix = prefix or rule.get("Prefix") or ""
        covers_all = place.prefix.startswith(prefix)
        concerns = covers_all or prefix.startswith(place.prefix)
        if concerns and days is not None and rule.get("Status") == "Enabled":
            found.append(AbortRule(rule.get("ID", ""), days, covers_all))
    return found


def _warn_about_lifecycle(client: S3Client, place: Place) -> None:
    try:
        rules = abort_rules(client, place)
    except S3_ERRORS:
        return  # no such feature, or no right to see the rules
    for rule in rules:
        if rule.days < SAFE_DAYS:
            logger.warning(
                "%s: the bucket's lifecycle rule %r aborts uploads after %d days. If the query is "
                "down for longer, a decided batch that is not committed yet is lost: let the rule "
                "wait %d days or more.",
                place,
                rule.name,
                rule.days,
                SAFE_DAYS,
            )
    if not any(rule.covers_all for rule in rules):
        logger.warning(
            "%s: no lifecycle rule of the bucket aborts uploads here. A query aborts its own when "
            "it runs again; those of a query that never does stay and cost money: add a rule "
            "AbortIncompleteMultipartUpload of %d days or more.",
            place,
            SAFE_DAYS,
        )
