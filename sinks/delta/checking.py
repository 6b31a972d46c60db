"""Can the table take these rows? Asked before any data moves."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from threading import Barrier
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
from deltalake import CommitProperties, Schema
from deltalake.exceptions import CommitFailedError, DeltaError

from sparkonce.errors import ConfigurationError
from sparkonce.finding import Finding, Level
from sparkonce.sinks.arrow_types import in_zone
from sparkonce.sinks.delta.table import MARKS, DeltaVersion, unsupported
from sparkonce.sinks.lakehouse import missing
from sparkonce.sinks.lakehouse.columns import MOST_TRIES, lacking
from sparkonce.sinks.lakehouse.outages import is_outage

if TYPE_CHECKING:
    from sparkonce.sinks.delta.places import Place

_RACERS: Final = 8
_ROUNDS: Final = 3
_AS_PARTITION = (
    pa.types.is_string,
    pa.types.is_integer,
    pa.types.is_boolean,
    pa.types.is_date,
)


def create(place: Place, schema: pa.Schema, where: str) -> None:
    """Create the table, if nobody else did meanwhile.

    Raises:
        ConfigurationError: Delta has no type for a column.
    """
    try:
        place.create(in_zone(schema, "UTC"))
    except Exception as error:  # deltalake raises a bare Exception here
        if place.load() is not None:
            return
        raise ConfigurationError(
            f"{where} cannot be created with these columns ({_first_line(error)}): cast or leave "
            "them out (select=)"
        ) from error


def add_columns(place: Place, rows: pa.Schema, where: str) -> None:
    """Add the columns that the table lacks.

    Raises:
        ConfigurationError: Delta has no type for a column.
    """
    for _ in range(MOST_TRIES):
        table = place.load()
        if table is None:
            return
        has = [field.name for field in table.schema().fields]
        if not (new := lacking(rows, has)):
            return
        try:
            fields = Schema.from_arrow(new).fields
        except Exception as error:  # deltalake raises a bare Exception here
            raise ConfigurationError(
                f"{where} cannot get the columns {', '.join(new.names)} ({_first_line(error)}): "
                "cast or leave them out (select=)"
            ) from error
        with suppress(CommitFailedError):  # somebody else changed the table
            table.alter.add_columns(fields)


def check_table(version: DeltaVersion, place: Place, schema: pa.Schema, where: str) -> None:
    """Compare the table with the rows, and try out its storage.

    Raises:
        ConfigurationError: naming the column, or what else cannot work, and the fix.
    """
    _check_kind(version, where)
    table = version.layout().schema
    if problems := list(_misfits(pa.struct(list(in_zone(schema, "UTC"))), pa.struct(list(table)))):
        raise ConfigurationError(
            f"{where} does not take these columns; cast or leave them out (select=), or change the "
            f"table: {'; '.join(problems)}"
        )
    try:
        version.marks.try_out(MARKS)
    except (OSError, pa.ArrowException) as error:
        if is_outage(error):
            raise
        raise ConfigurationError(
            f"{where}: a file cannot be written, listed and deleted below it ({error}): give the "
            "driver these rights"
        ) from error
    check_commits(place, where)


def check_commits(place: Place, where: str) -> None:
    """Try out, in a table of its own, whether one of several commits of a version succeeds only.

    They race, as deltalake looks for newer versions before it writes. So a storage that overwrites
    is found with near certainty, not with certainty.

    Raises:
        ConfigurationError: several do, or none can.
    """
    name = f"{MARKS}/trial-{uuid.uuid4().hex}"
    trial, storage = place.below(name), place.storage()
    try:
        for _ in range(_ROUNDS):
            trial.create(pa.schema([("id", pa.int64())]))
            winners = _race(trial)
            storage.remove_folder(name)
            if winners != 1:
                break
    except (DeltaError, OSError) as error:
        raise ConfigurationError(
            f"{where}: a commit cannot be tried out below {MARKS}/ ({_first_line(error)}): give "
            "the driver the right to write, list, read and delete there"
        ) from error
    finally:
        storage.remove_folder(name)
    if winners != 1:
        raise ConfigurationError(
            f"{where}: the storage lets several writers commit the same version, and a batch would "
            "be lost: use a server with conditional writes (If-None-Match), or set "
            "AWS_S3_LOCKING_PROVIDER in storage_options"
        )


def _race(trial: Place) -> int:
    """How many of several commits of one version succeed."""
    gate = Barrier(_RACERS)

    def commit(_: int) -> bool:
        try:
            table = trial.load()
        finally:
            gate.wait()
        if table is None:
            raise FileNotFoundError(f"{trial.uri} was written and is not there")
        try:
            table.create_write_transaction(
                [],
                "append",
                table.schema(),
                commit_properties=CommitProperties(max_commit_retries=0),
            )
        except CommitFailedError:
            return False
        return True

    with ThreadPoolExecutor(_RACERS) as pool:
        return sum(pool.map(commit, range(_RACERS)))


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]


def diagnose(place: Place, where: str, *, creates: bool) -> Iterator[Finding]:
    """Can the table be read, and batches be committed? For `sparkonce doctor`."""
    table = place.load()
    if table is None:
        yield missing.finding(where, creates=creates)
        return
    version = DeltaVersion(table, place.storage())
    try:
        _check_kind(version, where)
        check_commits(place, where)
    except ConfigurationError as error:
        yield Finding(Level.ERROR, str(error))
        return
    version.marks.try_out(MARKS)
    yield Finding(Level.OK, f"{where} can be read, and files and commits be written")


def _check_kind(version: DeltaVersion, where: str) -> None:
    if reason := unsupported(version.table):
        raise ConfigurationError(f"{where} {reason}")
    layout = version.layout()
    for column in layout.columns:
        kind = layout.schema.field(column).type
        if not any(is_kind(kind) for is_kind in _AS_PARTITION):
            raise ConfigurationError(
                f"{where} is partitioned by {column}, whose values ({kind}) have no exact text: "
                "partition it by another column"
            )


def _misfits(given: pa.DataType, wanted: pa.DataType, path: str = "") -> Iterator[str]:
    """What of these types does not fit, at any depth."""
    if pa.types.is_struct(given) and pa.types.is_struct(wanted):
        yield from _misfits_of_fields(given, wanted, path)
    elif given.num_fields and given.id == wanted.id:
        for n in range(given.num_fields):
            yield from _misfits(given.field(n).type, wanted.field(n).type, path)
    elif given != wanted and not _is_wider(wanted, given):
        yield f"{path} is {given}, and {wanted} in the table"


def _misfits_of_fields(given: pa.DataType, wanted: pa.DataType, path: str) -> Iterator[str]:
    names = [wanted.field(n).name for n in range(wanted.num_fields)]
    has = [given.field(n).name for n in range(given.num_fields)]
    for n, name in enumerate(has):
        where = f"{path}.{name}".lstrip(".")
        if name not in names:
            yield f"{where} is not in the table"
        else:
            yield from _misfits(given.field(n).type, wanted.field(names.index(name)).type, where)
    for n, name in enumerate(names):
        if name not in has and not wanted.field(n).nullable:
            yield f"{path}.{name} is missing".lstrip(".")


def _is_wider(wanted: Any, given: Any) -> bool:
    """Whether a type holds all values of another one."""
    if pa.types.is_integer(given) and pa.types.is_integer(wanted):
        return bool(wanted.bit_width > given.bit_width)
    if pa.types.is_float32(given):
        return pa.types.is_float64(wanted)
    if pa.types.is_decimal(given) and pa.types.is_decimal(wanted):
        whole = wanted.precision - wanted.scale >= given.precision - given.scale
        return bool(whole and wanted.scale >= given.scale)
    return False
