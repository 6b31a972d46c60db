"""Reads the rows of exactly the committed batches, with pyarrow or with Spark.

Both use their own file systems and credentials.
"""

from __future__ import annotations

import datetime as dt
import functools
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Self, cast
from urllib.parse import quote, unquote

import pyarrow as pa
import pyarrow.csv as pa_csv
import pyarrow.dataset as ds
import pyarrow.fs as pa_fs
import pyarrow.types as pat

from sparkonce.errors import ConfigurationError
from sparkonce.sinks.arrow_types import zone_of
from sparkonce.sinks.s3.manifests.committed import Committed, Files, find_committed, find_newest
from sparkonce.sinks.s3.writing.columns import kinds
from sparkonce.sinks.s3.writing.formats import spark_read_options
from sparkonce.sinks.s3.writing.keys import NULL_FOLDER
from sparkonce.sinks.spark_sql import quoted

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

# A ? may also be part of a sink's prefix.
_SETTINGS = re.compile(r"\?(?=\w+=)")

# -- pyarrow ---------------------------------------------------------------------------------------


class _ArrowFiles:
    def __init__(self, filesystem: pa_fs.FileSystem, root: str) -> None:
        self.filesystem = filesystem
        self.root = root

    @classmethod
    def at(cls, url: str, filesystem: pa_fs.FileSystem | None) -> Self:
        """The files of a sink's url, which may contain pyarrow's settings."""
        if filesystem is None:
            try:
                filesystem, path = pa_fs.FileSystem.from_uri(_as_uri(url))
            except pa.ArrowInvalid as error:  # its text repeats the url, with the keys
                raise ConfigurationError(
                    f"the url cannot be read ({str(error).partition(':')[0]}): give "
                    "s3://BUCKET/PREFIX?endpoint_override=…&scheme=http&region=…, with / ? # and @ "
                    "in keys written as %2F %3F %23 and %40, or filesystem="
                ) from None
        else:
            path = url.removeprefix("s3://").removeprefix("s3a://")
        root = path.strip("/") + "/" if not path.startswith("/") else path.rstrip("/") + "/"
        return cls(filesystem, root)

    def names(self, folder: str) -> list[str]:
        selector = pa_fs.FileSelector(
            self.root + folder.rstrip("/"), recursive=True, allow_not_found=True
        )
        found = self.filesystem.get_file_info(selector)
        return [info.path.removeprefix(self.root) for info in found if info.is_file]

    def read(self, name: str) -> bytes:
        with self.filesystem.open_input_file(self.root + name) as file:
            return file.read()


def committed_dataset(
    url: str,
    *,
    filesystem: pa_fs.FileSystem | None = None,
    batch: int | None = None,
    after: int | None = None,
    source: str | None = None,
) -> ds.Dataset:
    """The rows of the committed batches, as a pyarrow dataset over their objects.

    The list of objects is fixed when the dataset is made; later batches are not in it. Timestamps
    have the zone of the Spark session that wrote them, the newest if there were several.

    Args:
        url: the sink's, ``s3://BUCKET/PREFIX``; with `filesystem`, a path in that file system.
        filesystem: default: pyarrow's own for the url, which accepts
            ``?endpoint_override=…&scheme=http&region=…`` and AWS' credential chain.
        batch: the id of the last batch to read; default: the newest.
        after: reads only batches after this id; ``batch=after + 1`` reads one batch.
        source: the pipeline's name if several write here, or one of its queries and sinks, named
            as the folders below ``_sparkonce/``: ``orders/0a1b2c3d4e5f.s3``.

    Raises:
        ConfigurationError: there is no committed batch, or not this one; several sources count
            their batches separately; the batches do not fit into one table; or pyarrow cannot read
            their files.
        SparkOnceError: the manifests kept changing while they were read; read them again.
    """
    files = _ArrowFiles.at(url, filesystem)
    url = _shown(url)
    committed = find_committed(files, url, batch=batch, after=after, source=source)
    if any(key.endswith(".zst") for key in committed.keys):
        raise ConfigurationError(
            f"{url}: pyarrow's datasets cannot read zstd text: use read_committed, which asks "
            "Spark, or write with compression='gzip'"
        )
    return _dataset(files, committed)


def _dataset(files: _ArrowFiles, committed: Committed) -> ds.Dataset:
    schema, partition_by = committed.schema, committed.partition_by
    data = pa.schema([column for column in schema if column.name not in partition_by])
    file_format = _arrow_format(committed.format, data)
    fragments = [
        file_format.make_fragment(files.root + key, files.filesystem, folders.expression(key))
        for layout, keys in committed.keys_by_layout.items()
        for folders in [_Folders(schema, partition_by, layout.zone())]
        for key in keys
    ]
    return ds.FileSystemDataset(fragments, schema, file_format, files.filesystem)


def _as_uri(url: str) -> str:
    """A sink's url, in which no character is quoted, in the form that pyarrow reads."""
    scheme, _, rest = url.partition("://")
    if scheme not in {"s3", "s3a"}:
        return url
    place, *settings = _SETTINGS.split(rest, maxsplit=1)
    authority, slash, prefix = place.partition("/")
    return "?".join([f"s3://{authority}{slash}{quote(prefix)}", *settings])


def _shown(url: str) -> str:
    """The url for messages, without keys and settings."""
    scheme, separator, rest = _SETTINGS.split(url, maxsplit=1)[0].rpartition("://")
    authority, slash, path = rest.partition("/")
    return f"{scheme}{separator}{authority.rpartition('@')[2]}{slash}{path}"


class _Folders:
    """The values that the folders' names give to the rows in them.

    Arrow's own reader of Hive folders knows no decimals, and reads times of a zone as UTC.
    """

    def __init__(self, schema: pa.Schema, columns: Sequence[str], zone: str | None) -> None:
        self._schema = schema
        self._zone = zone
        self._columns = columns
        self._known: dict[str, ds.Expression] = {}

    def expression(self, key: str) -> ds.Expression:
        """True for every row of the object."""
        folder = key.rpartition("/")[0]
        if folder not in self._known:
            every = ds.scalar(True)
            for name, segment in zip(self._columns, folder.split("/"), strict=False):
                value = self._value(name, segment.partition("=")[2])
                is_it = ds.field(name) == value if value.is_valid else ds.field(name).is_null()
                every = every & is_it
            self._known[folder] = every
        return self._known[folder]

    def _value(self, name: str, text: str) -> pa.Scalar[Any]:
        kind: Any = self._schema.field(name).type
        if text == NULL_FOLDER:
            return cast("pa.Scalar[Any]", pa.scalar(None, kind))
        value: Any = pa.scalar(unquote(text))
        if pat.is_timestamp(kind) and kind.tz is not None:
            value = pa.scalar(_instant(value.as_py(), self._zone or kind.tz))
        return cast("pa.Scalar[Any]", value.cast(kind))


def _instant(text: str, zone: str) -> dt.datetime:
    """The earlier instant if an hour occurs twice: the folder does not show which one it was."""
    return dt.datetime.fromisoformat(text).replace(tzinfo=zone_of(zone))


def _arrow_format(name: str, schema: pa.Schema) -> ds.FileFormat:
    if name == "csv":
        return ds.CsvFileFormat(
            parse_options=pa_csv.ParseOptions(newlines_in_values=True),
            convert_options=pa_csv.ConvertOptions(
                column_types=schema,
                null_values=[""],
                strings_can_be_null=True,
                quoted_strings_can_be_null=False,
            ),
        )
    if name == "json":
        _check_arrow_reads_json(schema)
        return ds.JsonFileFormat()
    return ds.ParquetFileFormat()


def _check_arrow_reads_json(schema: pa.Schema) -> None:
    """Refuse columns that Arrow's reader of JSON cannot read, or reads as something else.

    Raises:
        ConfigurationError: naming the column.
    """
    for column in schema:
        for kind in kinds(column.type):
            if pat.is_binary(kind) or pat.is_map(kind) or pat.is_date(kind):
                raise ConfigurationError(
                    f"column {column.name!r} is {column.type}, and Arrow cannot read {kind} from "
                    "JSON as it was written: use read_committed, which asks Spark"
                )


# -- Spark -----------------------------------------------------------------------------------------


class _HadoopFiles:
    """Hadoop's own file systems, with Spark's credentials."""

    def __init__(self, spark: SparkSession, root: str) -> None:
        jvm: Any = spark.sparkContext._jvm  # noqa: SLF001 - py4j is the only way
        self._path = jvm.org.apache.hadoop.fs.Path
        self._io_utils = jvm.org.apache.commons.io.IOUtils
        base = self._path(root)
        jsession: Any = spark._jsparkSession  # noqa: SLF001
        self._fs = base.getFileSystem(jsession.sessionState().newHadoopConf())
        # In the file system's own spelling, so that the paths that it lists begin with it.
        self._root = str(base.makeQualified(self._fs.getUri(), self._fs.getWorkingDirectory()))
        self._root = self._root.rstrip("/") + "/"

    def names(self, folder: str) -> list[str]:
        try:
            found = self._fs.listFiles(self._path(self._root + folder), True)
            names = []
            while found.hasNext():
                names.append(str(found.next().getPath()).removeprefix(self._root))
        except Exception as error:
            if _is_not_found(error):
                return []
            raise
        return names

    def read(self, name: str) -> bytes:
        try:
            stream = self._fs.open(self._path(self._root + name))
            try:
                return bytes(self._io_utils.toByteArray(stream))
            finally:
                stream.close()
        except Exception as error:
            if _is_not_found(error):
                raise FileNotFoundError(name) from error
            raise


def _hadoop_root(url: str) -> str:
    root = "s3a://" + url.removeprefix("s3://") if url.startswith("s3://") else url
    return root.rstrip("/")


def _is_not_found(error: Exception) -> bool:
    thrown = getattr(error, "java_exception", None)
    return thrown is not None and thrown.getClass().getSimpleName() in {
        "FileNotFoundException",
        "NoSuchFileException",
    }


def read_committed(
    spark: SparkSession,
    url: str,
    *,
    batch: int | None = None,
    after: int | None = None,
    source: str | None = None,
) -> DataFrame:
    """The rows of the committed batches, read by Spark (through S3A).

    The list of objects is fixed when the frame is made; later batches are not in it. The columns
    have the types with which they were written, in the same order.

    Args:
        spark: a classic session that can read the place with S3A.
        url: the sink's, ``s3://BUCKET/PREFIX``, or the place of a copy, in any file system.
        batch: see `committed_dataset`.
        after: see `committed_dataset`.
        source: see `committed_dataset`.

    Raises:
        ConfigurationError: see `committed_dataset`.
    """
    root = _hadoop_root(url)
    committed = find_committed(
        _HadoopFiles(spark, root), _shown(url), batch=batch, after=after, source=source
    )
    return _frame(spark, root, committed)


def _frame(spark: SparkSession, root: str, committed: Committed) -> DataFrame:
    from pyspark.sql.pandas.types import from_arrow_schema  # noqa: PLC0415 - on the driver only

    schema = from_arrow_schema(committed.schema, prefer_timestamp_ntz=True)
    if not committed.keys:
        return spark.createDataFrame([], schema)
    options = {**spark_read_options(committed.format), "basePath": root}
    options["__globPaths__"] = "false"  # a [ or { in the prefix is not a pattern
    frames = []
    for layout, keys in committed.keys_by_layout.items():
        # CSV has its own order of columns, and folders of instants have their writer's zone.
        columns = layout.arrow_schema().names
        zone = {"timeZone": zone} if (zone := layout.zone()) else {}
        reader = spark.read.format(committed.format).options(**options, **zone)
        reader = reader.schema(type(schema)([schema[name] for name in columns]))
        frames.append(reader.load([f"{root}/{key}" for key in keys]))
    rows = functools.reduce(lambda a, b: a.unionByName(b, allowMissingColumns=True), frames)
    return rows.select([quoted(name) for name in committed.schema.names])


# -- both ------------------------------------------------------------------------------------------


def newest_committed(
    url: str,
    *,
    spark: SparkSession | None = None,
    filesystem: pa_fs.FileSystem | None = None,
    source: str | None = None,
) -> int:
    """The id of the newest committed batch, for readers that continue where they stopped.

    Batches are committed in order and permanently. A reader reads every row once if it passes the
    last batch that it has read as ``after=``, and this one as ``batch=``. This function lists the
    manifests, but does not read them.

    Args:
        url: see `read_committed` with `spark`, otherwise `committed_dataset`.
        spark: the session that lists the files; default: pyarrow lists them.
        filesystem: see `committed_dataset`.
        source: see `committed_dataset`.

    Raises:
        ConfigurationError: there is no committed batch, or several sources count theirs separately.
    """
    files: Files
    if spark is None:
        files = _ArrowFiles.at(url, filesystem)
    else:
        files = _HadoopFiles(spark, _hadoop_root(url))
    return find_newest(files, _shown(url), source=source)
