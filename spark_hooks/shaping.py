"""Each sink's columns, and a hash of each row, as Spark makes them.

    one shape     the columns themselves, and their hash
    several       a struct for each distinct select= ("lane"), and a hash for each struct

Sinks that share a pass share one analysis of Spark's plan, so a select= must mean there what it
means alone; where it does not, it is refused before any data moves.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final, cast

import pyarrow as pa
from pyspark.errors import AnalysisException, PySparkTypeError
from pyspark.sql.functions import col
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructField, StructType

from sparkonce.errors import ConfigurationError
from sparkonce.sinks.arrow_types import in_zone
from sparkonce.sinks.base import AnySink
from sparkonce.spark_hooks.fingerprint import free_name, is_plain, row_hash

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_ROW: Final = "sparkonce_row"


_KEEP_ROWS: Final = {"Project", "Window"}
"""Nodes of Spark's plan that make one row of each."""


_MOST_REMEMBERED: Final = 64


class Shapes:
    """The shapes of one query's batches; what Spark's analysis of them found is remembered."""

    def __init__(self) -> None:
        self._misnamed: dict[tuple[str, ...], dict[str, StructType]] = {}
        """By the schemas of a batch and its lanes, and the lanes."""

    def with_hashes(
        self, df: DataFrame, sinks: Sequence[AnySink]
    ) -> tuple[DataFrame, list[int] | None]:
        """The rows with their hashes, and each sink's lane, as `PartitionWriter` wants them.

        A column of structs per distinct shape; the columns themselves where all sinks share one and
        Spark finds columns of such names again.
        """
        distinct = {(sink.select, sink.columns): sink for sink in sinks}
        if len(distinct) == 1:
            rows = shaped(df, sinks[0])
            if is_plain(schema := rows.schema):
                name = free_name(schema.names)
                if any(isinstance(field.dataType, StructType) for field in schema):
                    # `a.b` may be the column b of an alias of the user's, and no field of a.
                    rows = rows.toDF(*schema.names)
                return rows.selectExpr("*", f"{row_hash(schema)} AS {name}"), None
        rows = self._in_lanes(df, list(distinct.values()))
        if any(sink.columns for sink in distinct.values()):
            # In a step of its own: what `select` makes by chance, such as uuid(), is made once.
            lanes = zip(arrow_schema(rows), distinct.values(), strict=True)
            rows = rows.selectExpr(*(_lane(field, sink) for field, sink in lanes))
        hashes = (
            f"{row_hash(cast('StructType', lane.dataType), lane.name)} AS hash{n}"
            for n, lane in enumerate(rows.schema)
        )
        shapes = list(distinct)
        return rows.selectExpr("*", *hashes), [shapes.index((s.select, s.columns)) for s in sinks]

    def _in_lanes(self, df: DataFrame, sinks: Sequence[AnySink]) -> DataFrame:
        """A struct for each sink's `select`, whose fields have the names that `selectExpr` gives.

        Raises:
            ConfigurationError: Spark takes the expressions in a `selectExpr` of their own only.
        """
        lanes = [_struct(sink.select, f"lane{n}") for n, sink in enumerate(sinks)]
        try:
            rows = df.selectExpr(*lanes)
        except AnalysisException as error:
            faulty = [sink for sink in sinks if not _is_analysable(df, sink)]
            raise _not_in_one_pass(faulty or sinks, f"Spark says: {error}") from error
        # `schema` would read the JSON.
        asked = (df._jdf.schema().json(), rows._jdf.schema().json(), *lanes)  # noqa: SLF001
        misnamed = self._misnamed.get(asked)
        if misnamed is None:
            alone = [df if s.select is None else df.selectExpr(*s.select) for s in sinks]
            _check_means_the_same(df, rows, sinks, alone)
            if len(self._misnamed) >= _MOST_REMEMBERED:
                self._misnamed.clear()
            misnamed = self._misnamed[asked] = dict(_find_misnamed(rows, alone))
        if not misnamed:
            return rows
        names = [f"lane{n}" for n in range(len(sinks))]
        return rows.select(
            *(col(n).cast(misnamed[n]).alias(n) if n in misnamed else n for n in names)
        )


def _check_means_the_same(
    df: DataFrame, rows: DataFrame, sinks: Sequence[AnySink], alone: Sequence[DataFrame]
) -> None:
    """See that each `select` makes of the batch, beside the others, what it makes of it `alone`.

    Raises:
        ConfigurationError: Spark takes an alias for what has its name elsewhere, as a variable of
            the session; or makes other rows for all sinks, where a `select` makes one row of many
            (an aggregate), or several or none of each (a window of time).
    """
    makes_rows = {}
    for sink, made in zip(sinks, alone, strict=True):
        steps = _steps(made, df)
        makes_rows[sink.name] = [step for step in steps if step not in _KEEP_ROWS]
        if sink.select and _steps(df.selectExpr(_struct(sink.select, "lane")), df) != steps:
            raise _not_in_one_pass([sink], "Spark would read an alias as something else there")
    together = [step for step in _steps(rows, df) if step not in _KEEP_ROWS]
    if any(steps != together for steps in makes_rows.values()):
        faulty = [sink for sink in sinks if makes_rows[sink.name]]
        raise _not_in_one_pass(faulty, "Spark would make its rows for the others, too")


def _steps(rows: DataFrame, df: DataFrame) -> list[str]:
    """What Spark does to `df` to make `rows` of it: the names of its plan's nodes, the last first.

    Of an alias that another entry uses, alone, a node is made.
    """
    node, first = (frame._jdf.queryExecution().analyzed() for frame in (rows, df))  # noqa: SLF001
    steps = []
    while not node.equals(first):
        steps.append(str(node.nodeName()))
        node = node.children().head()
    return steps


def _not_in_one_pass(faulty: Sequence[AnySink], why: str) -> ConfigurationError:
    return ConfigurationError(
        f"{' and '.join(sink.name for sink in faulty)}: select= cannot be evaluated in one pass "
        "over the batch with the columns of all sinks: let each expression stand for itself, "
        "without the alias of another one, explode, an aggregate or a window of time, or make the "
        f"columns in transform=, which gets a pass of its own. {why}"
    )


def _find_misnamed(rows: DataFrame, alone: Sequence[DataFrame]) -> Iterator[tuple[str, StructType]]:
    """The lanes whose names are not as meant, each with the columns that are, by position.

    In a struct Spark calls CAST(id AS string) col1, and not id.
    """
    for field, made in zip(rows.schema, alone, strict=True):
        if cast("StructType", field.dataType).names != made.schema.names:
            yield field.name, made.schema


def _struct(select: Sequence[str] | None, name: str) -> str:
    expressions = "\n, ".join(select or ["*"])  # each may end with a comment
    return f"struct({expressions}\n) AS {name}"


def _is_analysable(df: DataFrame, sink: AnySink) -> bool:
    try:
        df.selectExpr(_struct(sink.select, "lane"))
    except AnalysisException:
        return False
    return True


def _lane(field: pa.Field[pa.StructType], sink: AnySink) -> str:
    if sink.columns is None:
        return field.name
    columns = sink.columns(pa.schema(list(field.type)), field.name)
    return f"struct({', '.join(columns)}) AS {field.name}"


def shaped(df: DataFrame, sink: AnySink) -> DataFrame:
    """The columns that `write` gets."""
    rows = df if sink.select is None else df.selectExpr(*sink.select)
    if sink.columns is None:
        return rows
    columns = sink.columns(arrow_schema(rows), _ROW)
    return rows.selectExpr(f"struct(*) AS {_ROW}").selectExpr(*columns)


def arrow_schema(df: DataFrame) -> pa.Schema:
    """The schema with which the rows reach a sink on the executors, before it is `loosened`.

    Raises:
        ConfigurationError: Spark has a type that it gives to no Python worker.
    """
    timezone = df.sparkSession.conf.get("spark.sql.session.timeZone")
    # Older versions of PySpark take no zone and show UTC.
    takes_zone = "timezone" in inspect.signature(to_arrow_schema).parameters
    try:
        schema = to_arrow_schema(df.schema, **({"timezone": timezone} if takes_zone else {}))
    except (PySparkTypeError, ValueError) as error:
        field = next(field for field in df.schema if not _has_arrow_type(field))
        raise ConfigurationError(
            f"the column {field.name!r} is {field.dataType.simpleString()}, which Spark gives to "
            f"no Python worker: cast it in the query or in select=, such as to string ({error})"
        ) from error
    return in_zone(schema, timezone)


def _has_arrow_type(field: StructField) -> bool:
    try:
        to_arrow_schema(StructType([field]))
    except (PySparkTypeError, ValueError):  # the latter is of an `array()` without a type
        return False
    return True
