"""Each sink's columns, and a hash of each row, as Spark computes them.

    one shape     the columns themselves, and their hash
    several       a struct for each shape, then a hash for each struct

A shape is a sink's select= and the columns that the sink makes of it. Sinks that share a pass
share one plan in Spark. A select= that means something else in that plan than in a `selectExpr` of
its own is refused before any data moves.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final, TypeAlias, cast

import pyarrow as pa
import pyspark
from pyspark.errors import AnalysisException, PySparkTypeError
from pyspark.sql.functions import col
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructField, StructType

from sparkonce.errors import ConfigurationError
from sparkonce.sinks.arrow_types import in_zone
from sparkonce.sinks.base import AnySink, Columns
from sparkonce.spark_hooks.fingerprint import free_name, is_plain, row_hash

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_ROW: Final = "sparkonce_row"

Shape: TypeAlias = "tuple[Sequence[str] | None, Columns | None]"
"""A sink's select=, and the columns that the sink makes of it."""

_NODE: Final = re.compile(r"^[ :|+-]*([A-Z][A-Za-z]+)", re.MULTILINE)
"""A node's name in a line of an explained plan."""

_KEEP_ROWS: Final = {"Project", "Window"}
"""Nodes of Spark's plan that make one row of each row."""

_MOST_REMEMBERED: Final = 64

NESTED_MAPS_CRASH: Final = tuple(map(int, pyspark.__version__.split(".")[:2])) < (4, 2)
"""Arrow Java before 19, which Spark 4.0 and 4.1 have, leaves out the offsets of such a map."""


class Shapes:
    """The shapes of one query's batches; what Spark's analysis of them found is remembered."""

    def __init__(self) -> None:
        self._misnamed: dict[tuple[str, ...], dict[str, StructType]] = {}
        """What `_find_misnamed` found, by the schemas and the SQL."""

    def with_hashes(
        self, df: DataFrame, sinks: Sequence[AnySink]
    ) -> tuple[DataFrame, list[int] | None]:
        """The rows with their hashes, and the number of each sink's shape, for `PartitionWriter`.

        The numbers are None where all sinks share one shape and its columns have plain names: then
        the rows are those columns and one hash.
        """
        distinct = distinct_shapes(sinks)
        if len(distinct) == 1:
            rows = shaped(df, sinks[0])
            if is_plain(schema := rows.schema):
                name = free_name(schema.names)
                if any(isinstance(field.dataType, StructType) for field in schema):
                    # Drops the user's aliases: `a.b` must be field b of column a, not b of alias a.
                    rows = rows.toDF(*schema.names)
                return rows.selectExpr("*", f"{row_hash(schema)} AS {name}"), None
        rows = self._in_structs(df, list(distinct.values()))
        if any(sink.columns for sink in distinct.values()):
            # A projection of its own: random values in `select`, such as uuid(), are made once.
            structs = zip(arrow_schema(rows), distinct.values(), strict=True)
            rows = rows.selectExpr(*(_with_columns(field, sink) for field, sink in structs))
        hashes = (
            f"{row_hash(cast('StructType', field.dataType), field.name)} AS hash{n}"
            for n, field in enumerate(rows.schema)
        )
        shapes = list(distinct)
        return rows.selectExpr("*", *hashes), [shapes.index((s.select, s.columns)) for s in sinks]

    def _in_structs(self, df: DataFrame, sinks: Sequence[AnySink]) -> DataFrame:
        """A struct for each sink's `select`, whose fields have the names that `selectExpr` gives.

        Raises:
            ConfigurationError: Spark accepts the expressions only in a `selectExpr` of their own.
        """
        structs = [_struct(sink.select, f"shape{n}") for n, sink in enumerate(sinks)]
        try:
            rows = _analysed(df.selectExpr(*structs))
        except AnalysisException as error:
            if "ATTEMPT_ANALYSIS_IN_PIPELINE_QUERY_FUNCTION" in str(error):
                raise ConfigurationError(
                    "shaped() cannot be called in the function of a flow, where Spark does not "
                    f"analyse data frames: call it at the top of the file. Spark reports: {error}"
                ) from error
            faulty = [sink for sink in sinks if not _is_analysable(df, sink)]
            raise _not_in_one_pass(faulty or sinks, f"Spark reports: {error}") from error
        # The session's time zone and functions change the types.
        asked = (schema_json(df), schema_json(rows), *structs)
        misnamed = self._misnamed.get(asked)
        if misnamed is None:
            alone = [df if s.select is None else df.selectExpr(*s.select) for s in sinks]
            _check_same_meaning(df, rows, sinks, alone)
            if len(self._misnamed) >= _MOST_REMEMBERED:
                self._misnamed.clear()
            misnamed = self._misnamed[asked] = dict(_find_misnamed(rows, alone))
        if not misnamed:
            return rows
        names = [f"shape{n}" for n in range(len(sinks))]
        return rows.select(
            *(col(n).cast(misnamed[n]).alias(n) if n in misnamed else n for n in names)
        )


def distinct_shapes(sinks: Sequence[AnySink]) -> dict[Shape, AnySink]:
    """The shapes in their order, each with the first sink that has it."""
    shapes: dict[Shape, AnySink] = {}
    for sink in sinks:
        shapes.setdefault((sink.select, sink.columns), sink)
    return shapes


def _check_same_meaning(
    df: DataFrame, rows: DataFrame, sinks: Sequence[AnySink], alone: Sequence[DataFrame]
) -> None:
    """Check that each `select` means in the plan of all sinks what it means `alone`.

    Raises:
        ConfigurationError: Spark takes an alias for something else of that name, such as a session
            variable; or one `select` changes the rows of all sinks: it makes one row of many (an
            aggregate), or several or none of each (a time window).
    """
    makes_rows = {}
    for sink, made in zip(sinks, alone, strict=True):
        steps = _steps(made, df)
        makes_rows[sink.name] = [step for step in steps if step not in _KEEP_ROWS]
        if sink.select and _steps(df.selectExpr(_struct(sink.select, "shape")), df) != steps:
            raise _not_in_one_pass([sink], "Spark would read an alias as something else there")
    together = [step for step in _steps(rows, df) if step not in _KEEP_ROWS]
    if any(steps != together for steps in makes_rows.values()):
        faulty = [sink for sink in sinks if makes_rows[sink.name]]
        raise _not_in_one_pass(faulty, "Spark would change the other sinks' rows, too")


def _steps(rows: DataFrame, df: DataFrame) -> list[str]:
    """The names of the plan's nodes that Spark adds to `df` to make `rows`, the last one first.

    Outside a struct, an entry that uses another entry's alias adds a node.
    """
    if not has_jvm(df):
        nodes = _explained(rows)
        return nodes[: len(nodes) - len(_explained(df))]
    node, first = (frame._jdf.queryExecution().analyzed() for frame in (rows, df))  # noqa: SLF001
    steps = []
    while not node.equals(first):
        steps.append(str(node.nodeName()))
        node = node.children().head()
    return steps


def _explained(df: DataFrame) -> list[str]:
    """The names of the nodes of the analyzed plan, the last one first, without a JVM."""
    with contextlib.redirect_stdout(io.StringIO()) as text:
        df.explain("extended")
    _, _, analyzed = text.getvalue().partition("== Analyzed Logical Plan ==\n")
    _, _, tree = analyzed.partition("== Optimized Logical Plan ==")[0].partition("\n")
    return _NODE.findall(tree)


def _analysed(df: DataFrame) -> DataFrame:
    """Analyse it now; over Spark Connect that happens only when somebody asks for the schema."""
    if not has_jvm(df):
        _ = df.schema
    return df


def schema_json(df: DataFrame) -> str:
    """The schema as JSON; `DataFrame.schema` would parse it."""
    return str(df._jdf.schema().json()) if has_jvm(df) else df.schema.json()  # noqa: SLF001


def has_jvm(df: DataFrame) -> bool:
    """Whether the DataFrame is of a classic session, not of Spark Connect."""
    return hasattr(df.sparkSession, "_jsparkSession")


def _not_in_one_pass(faulty: Sequence[AnySink], why: str) -> ConfigurationError:
    return ConfigurationError(
        f"{' and '.join(sink.name for sink in faulty)}: select= cannot be evaluated in one pass "
        "over the batch with the columns of all sinks: write each expression without the alias of "
        "another one, explode, an aggregate or a time window; or make the columns in transform=, "
        f"which gets a pass of its own. {why}"
    )


def _find_misnamed(rows: DataFrame, alone: Sequence[DataFrame]) -> Iterator[tuple[str, StructType]]:
    """The structs whose fields are named otherwise than `alone`, with the columns as named there.

    In a struct Spark names CAST(id AS string) col1 instead of id.
    """
    for field, made in zip(rows.schema, alone, strict=True):
        if cast("StructType", field.dataType).names != made.schema.names:
            yield field.name, made.schema


def _struct(select: Sequence[str] | None, name: str) -> str:
    expressions = "\n, ".join(select or ["*"])  # each may end with a comment
    return f"struct({expressions}\n) AS {name}"


def _is_analysable(df: DataFrame, sink: AnySink) -> bool:
    try:
        _analysed(df.selectExpr(_struct(sink.select, "shape")))
    except AnalysisException:
        return False
    return True


def _with_columns(field: pa.Field[pa.StructType], sink: AnySink) -> str:
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
        ConfigurationError: a column has a type that Spark passes to no Python worker, or that
            would crash it.
    """
    return arrow_schema_of(df.schema, df.sparkSession.conf.get("spark.sql.session.timeZone"))


def arrow_schema_of(schema: StructType, timezone: str | None) -> pa.Schema:
    """Like `arrow_schema`, for columns whose instants reach the executors in this time zone."""
    # Older versions of PySpark take no zone and use UTC.
    takes_zone = "timezone" in inspect.signature(to_arrow_schema).parameters
    try:
        arrow = to_arrow_schema(schema, **({"timezone": timezone} if takes_zone else {}))
    except (PySparkTypeError, ValueError) as error:
        field = next(field for field in schema if not _has_arrow_type(field))
        raise ConfigurationError(
            f"the column {field.name!r} is {field.dataType.simpleString()}, which Spark passes "
            f"to no Python worker: cast it in the query or in select=, such as to string ({error})"
        ) from error
    if NESTED_MAPS_CRASH:
        _refuse_nested_maps(arrow)
    return in_zone(arrow, timezone)


def _refuse_nested_maps(schema: pa.Schema) -> None:
    for field in schema:
        if _has_map(field.type, is_nested=False):
            raise ConfigurationError(
                f"the column {field.name!r} has a map inside an array or a map. Where such a map "
                f"is empty or NULL, Spark {pyspark.__version__} sends it to Python in a form that "
                "crashes the process: use Spark 4.2 or later, or write the column as text, with "
                f"to_json({field.name}) in the query or in select="
            )


def _has_map(kind: pa.DataType, *, is_nested: bool) -> bool:
    """Whether the type holds a map; with `is_nested`, one in an array or a map already counts."""
    is_map = pa.types.is_map(kind)
    if is_map and is_nested:
        return True
    is_nested = is_nested or is_map or pa.types.is_list(kind)
    children = (kind.field(n).type for n in range(kind.num_fields))
    return any(_has_map(child, is_nested=is_nested) for child in children)


def _has_arrow_type(field: StructField) -> bool:
    try:
        to_arrow_schema(StructType([field]))
    except (PySparkTypeError, ValueError):  # ValueError: an `array()` without a type
        return False
    return True
