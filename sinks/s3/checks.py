"""What is checked before any data moves: the schema, the server, the bucket, the rights."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import pyarrow as pa
import pyarrow.types as pat
from botocore.exceptions import NoCredentialsError, PartialCredentialsError

from sparkonce.clients.s3 import code_of, status_of
from sparkonce.errors import ConfigurationError
from sparkonce.sinks.arrow_types import zone_of
from sparkonce.sinks.s3.client import S3_ERRORS, Connection, Purpose, describe, is_passing
from sparkonce.sinks.s3.formats import FileFormat
from sparkonce.sinks.s3.layout import Place
from sparkonce.sinks.spark_metadata import SPARK_METADATA, written_by_spark

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client

logger = logging.getLogger("sparkonce")

SAFE_DAYS = 7
"""A lifecycle rule that aborts uploads earlier than this may hit a prepared branch."""


class Purge(NamedTuple):
    """What a server does to open uploads by itself, and where that is set."""

    what: str
    fix: str


_LOST = "a batch that is prepared or decided and not committed by then is lost"

_PURGES = {
    "MinIO": Purge(
        "MinIO deletes open uploads after its stale_uploads_expiry, 24 hours if nobody has changed "
        f"it: {_LOST}. It lists none below a prefix, so orphans are left to that purge",
        f"`mc admin config set ALIAS api stale_uploads_expiry={SAFE_DAYS * 24}h` or more (or "
        "MINIO_API_STALE_UPLOADS_EXPIRY)",
    ),
    "SeaweedFS": Purge(
        "SeaweedFS deletes open uploads by a maintenance script, after 24 hours if nobody has "
        f"changed it: {_LOST}",
        f"write `s3.clean.uploads -timeAgo={SAFE_DAYS * 24}h` or more into the scripts of "
        "[master.maintenance] in master.toml, and into those of its admin server",
    ),
}
"""By the first word of the header Server."""

ResultT = TypeVar("ResultT")

_FORBIDDEN = frozenset({401, 403})

_FOLDER_TYPES: tuple[Callable[[pa.DataType], bool], ...] = (
    pat.is_string,
    pat.is_large_string,
    pat.is_boolean,
    pat.is_integer,
    pat.is_decimal,
    pat.is_date,
    pat.is_timestamp,
)


def check_schema(schema: pa.Schema, file_format: FileFormat) -> None:
    """Refuse columns that cannot become folders, or files."""
    partition_by = file_format.partition_by
    twice = sorted({name for name in schema.names if schema.names.count(name) > 1})
    if twice:
        raise ConfigurationError(
            f"S3Sink: the rows have the columns {twice} more than once: rename them (transform=)"
        )
    missing = [name for name in partition_by if name not in schema.names]
    if missing:
        raise ConfigurationError(
            f"S3Sink: partition_by names {missing}, and the rows have {schema.names}: "
            "name columns of the rows, or add these (transform=)"
        )
    for name in partition_by:
        if name.startswith(("_", ".")):
            raise ConfigurationError(
                f"S3Sink: partition_by column {name!r} makes folders that are hidden, by their "
                "first character, from most readers that list them (pyarrow, Hive, Trino): rename "
                "it in select="
            )
        kind = schema.field(name).type
        if not any(fits(kind) for fits in _FOLDER_TYPES):
            raise ConfigurationError(
                f"S3Sink: partition_by column {name!r} is {kind}, which makes no folder names: "
                "use a string, integer, decimal, boolean, date or timestamp column"
            )
        if pat.is_timestamp(kind) and kind.tz is not None:
            try:
                zone_of(kind.tz)
            except (LookupError, ValueError, OSError) as error:
                raise ConfigurationError(
                    f"S3Sink: partition_by column {name!r} has times of the zone {kind.tz!r}, "
                    "which makes no folder names: Spark knows it, Python and Arrow do not. Set "
                    "spark.sql.session.timeZone to a region such as Europe/Berlin, or to an "
                    "offset such as +08:00"
                ) from error
    rest = [field for field in schema if field.name not in partition_by]
    if not rest:
        raise ConfigurationError(
            f"S3Sink: partition_by={list(partition_by)} takes every column, so that none is left "
            "for the files"
        )
    file_format.check(pa.schema(rest))


def check_server(connection: Connection, place: Place) -> Purge | None:
    """Refuse a server, bucket or account that cannot work; nothing is written.

    Takes a bounded time also when nothing answers.

    Returns:
        What the server has in place of lifecycle rules for uploads; None where it has these.
    """
    client = _asking(lambda: connection.client(Purpose.ASK), connection, place)
    answer = _asking(
        lambda: client.list_multipart_uploads(
            Bucket=place.bucket, Prefix=place.prefix, MaxUploads=1
        ),
        connection,
        place,
    )
    _asking(lambda: _check_proofs(client, place), connection, place)
    _asking(lambda: _check_plain_readers(client, place), connection, place)
    server = answer["ResponseMetadata"]["HTTPHeaders"].get("server", "")
    purge = _PURGES.get(server.partition(" ")[0])
    if purge is not None:
        logger.warning("%s: %s: %s", place, purge.what, purge.fix)
    else:
        _warn_of_lifecycle(client, place)
    return purge


def _check_proofs(client: S3Client, place: Place) -> None:
    """Refuse an account that could not tell whether a branch is committed, or lost."""
    bucket, key = place.bucket, f"{place.prefix}sparkonce.probe"
    # The proof of a commit is a HEAD that tells "absent" (404) from "not allowed" (403), which
    # takes the right to list the bucket.
    try:
        client.head_object(Bucket=bucket, Key=key)
    except S3_ERRORS as error:
        if status_of(error) in _FORBIDDEN:
            raise ConfigurationError(
                f"S3Sink: {place}: cannot tell whether an object is there ({describe(error)}): "
                "grant s3:GetObject and s3:ListBucket"
            ) from error
        if status_of(error) != 404:  # noqa: PLR2004
            raise
    try:
        client.list_parts(Bucket=bucket, Key=key, UploadId="sparkonce.probe")
    except S3_ERRORS as error:  # servers say no to an upload that never was in many ways
        if status_of(error) in _FORBIDDEN:
            raise ConfigurationError(
                f"S3Sink: {place}: cannot tell whether an upload is there ({describe(error)}): "
                "grant s3:ListMultipartUploadParts"
            ) from error


def _check_plain_readers(client: S3Client, place: Place) -> None:
    """Refuse a prefix of which Spark's own readers would see nothing that is written now."""
    # With the slash: a column's folder may begin like it.
    folder = f"{place.prefix}{SPARK_METADATA}/"
    if client.list_objects_v2(Bucket=place.bucket, Prefix=folder, MaxKeys=1).get("Contents"):
        raise written_by_spark(f"S3Sink: {place}", "another prefix (url=)")


def _asking(action: Callable[[], ResultT], connection: Connection, place: Place) -> ResultT:
    """Run the action; turn what goes wrong into the setting at fault."""
    where = connection.endpoint_url or "the AWS endpoint"
    try:
        return action()
    except (NoCredentialsError, PartialCredentialsError) as error:
        raise ConfigurationError(
            "S3Sink: no credentials: give access_key= and secret_key=, or set them where boto3 "
            f"looks (environment, profile, instance role): {error}"
        ) from error
    except (*S3_ERRORS, ValueError) as error:  # boto3 says ValueError to a broken endpoint_url
        code, status = code_of(error), status_of(error)
        if code == "NoSuchBucket":
            fix = f"the bucket {place.bucket!r} does not exist at {where}: make it, or correct url="
        elif code in {"InvalidAccessKeyId", "SignatureDoesNotMatch", "XAdminUserNotFound"}:
            fix = f"{where} refuses the credentials: correct access_key= and secret_key="
        elif status in _FORBIDDEN:
            fix = (
                f"{where} refuses access to {place}: grant s3:ListBucketMultipartUploads, "
                "s3:ListBucket, s3:GetObject, s3:PutObject, s3:ListMultipartUploadParts and "
                "s3:AbortMultipartUpload"
            )
        elif status in {301, 400} and code in {
            "301",  # of a HEAD, whose answer has no body
            "PermanentRedirect",
            "AuthorizationHeaderMalformed",
            "IllegalLocationConstraintException",
        }:
            fix = f"the bucket {place.bucket!r} is in another region: correct region="
        elif status is None:
            fix = f"{where} cannot be reached: correct endpoint_url= and region=, or start it"
        elif is_passing(error):
            fix = f"{where} cannot serve {place} now: start again later"
        else:
            fix = f"{where} does not serve {place}"
        raise ConfigurationError(f"S3Sink: {fix} ({describe(error)})") from error


class AbortRule(NamedTuple):
    """A lifecycle rule that ends uploads `days` after their start, in all of a place or a part."""

    name: str
    days: int
    covers_all: bool


def abort_rules(client: S3Client, place: Place) -> list[AbortRule]:
    """Those that concern the place; raises the server's error where they cannot be read."""
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


def _warn_of_lifecycle(client: S3Client, place: Place) -> None:
    try:
        rules = abort_rules(client, place)
    except S3_ERRORS:
        return  # no such feature, or no right to see the rules
    for rule in rules:
        if rule.days < SAFE_DAYS:
            logger.warning(
                "%s: the bucket's lifecycle rule %r aborts uploads after %d days. A batch that is "
                "decided and not committed by then, because the query is down, is lost: let it "
                "wait %d days or more.",
                place,
                rule.name,
                rule.days,
                SAFE_DAYS,
            )
    if not any(rule.covers_all for rule in rules):
        logger.warning(
            "%s: no lifecycle rule of the bucket aborts uploads here. Ours are aborted when the "
            "query runs again; those of a query that never does stay, and are paid for: add a rule "
            "AbortIncompleteMultipartUpload of %d days or more.",
            place,
            SAFE_DAYS,
        )
