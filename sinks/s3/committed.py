"""Reading exactly the committed batches of a place that `S3Sink` writes.

    list the manifests twice ─► read those that are needed ─► the objects that they name ─► rows

Objects are visible one by one, and manifests move when they are merged; a reader that follows this
page sees a batch whole or not at all. Nothing here writes, and nothing asks the transaction log.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar, cast
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pa_csv
import pyarrow.dataset as ds
import pyarrow.fs as pa_fs
import pyarrow.types as pat

from sparkonce.errors import ConfigurationError, SparkOnceError
from sparkonce.sinks.base import quoted
from sparkonce.sinks.s3.formats import check_arrow_reads_json, spark_read_options
from sparkonce.sinks.s3.layout import NULL_FOLDER
from sparkonce.sinks.s3.manifest import FOLDER, Layout, Manifest, Span, decode_file, newest

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_PARALLEL_READS: Final = 16
_TRIES: Final = 20

ResultT = TypeVar("ResultT")


class Files(Protocol):
    """Where the manifests are read."""

    def names(self, folder: str) -> list[str]:
        """All files below a folder of the place, named from the place on; none if it is absent."""

    def read(self, name: str) -> bytes:
        """The whole file.

        Raises:
            FileNotFoundError: there is none.
        """


@dataclass(frozen=True, slots=True)
class Committed:
    """What a reader may see: whole batches of one pipeline, or of all that write the place.

    Attributes:
        layout: of the files; its schema has the columns of all batches.
        schema: the same schema, decoded.
        keys: of the objects, below the place.
    """

    layout: Layout
    schema: pa.Schema
    keys: tuple[str, ...]


def find_committed(
    files: Files,
    url: str,
    *,
    batch: int | None = None,
    after: int | None = None,
    source: str | None = None,
) -> Committed:
    """The objects of the committed batches; see `committed_dataset` for the arguments."""

    # A manifest that is merged between the listing and its reading is gone: begin again.
    def read(begin: int | None) -> list[Manifest]:
        return _until(
            lambda: _read_once(files, url, batch=batch, after=begin, source=source),
            f"{url}: its manifests went on changing while they were read; read it again",
        )

    manifests = read(after)
    layouts = _layouts(manifests)
    if not layouts and after is not None:  # no rows since then: the columns are those from before
        layouts = _layouts(read(-1))[-1:]
    if not layouts:
        raise ConfigurationError(
            f"{url}: no committed batch has rows yet, so that their columns are not known"
        )
    keys = tuple(file.key for manifest in manifests for file in manifest.files)
    return Committed(*_common(layouts, url), keys)


def _layouts(manifests: Iterable[Manifest]) -> list[Layout]:
    return list({m.layout: None for m in manifests if m.layout is not None})


def _read_once(
    files: Files, url: str, *, batch: int | None, after: int | None, source: str | None
) -> list[Manifest] | None:
    listed = _listed(files, FOLDER if source is None else f"{FOLDER}{source}/")
    by_source: dict[str, list[Span]] = {}
    for folder, span in listed:
        by_source.setdefault(folder, []).append(span)
    if not by_source:
        raise ConfigurationError(
            f"{url}: there is no manifest"
            f"{f' of source={source!r}' if source else ''}: nothing is committed yet, or it is "
            "not what an S3Sink writes to"
        )
    if len(by_source) > 1 and not (batch is None and after is None):
        names = ", ".join(repr(f.removeprefix(FOLDER).strip("/")) for f in sorted(by_source))
        raise ConfigurationError(
            f"{url}: {names} write here, each with batches of its own: say which with source="
        )
    first = 0 if after is None else after + 1
    wanted = [
        f"{folder}{span.name}"
        for folder, spans in by_source.items()
        for span in spans
        if span.last >= first and (batch is None or span.first <= batch)
    ]
    try:
        with ThreadPoolExecutor(_PARALLEL_READS) as pool:
            bodies = list(pool.map(files.read, wanted))
    except FileNotFoundError:
        return None
    found: dict[str, list[Manifest]] = {}
    for name, body in zip(wanted, bodies, strict=True):
        found.setdefault(name.rpartition("/")[0], []).extend(decode_file(body, f"{url}/{name}"))
    manifests = [manifest for some in found.values() for manifest in newest(some)]
    if batch is not None and all(manifest.batch_id != batch for manifest in manifests):
        newest_one = max(span.last for _, span in listed)
        raise ConfigurationError(
            f"{url}: batch {batch} is not committed here; the newest that is: {newest_one}"
        )
    return [m for m in manifests if m.batch_id >= first and (batch is None or m.batch_id <= batch)]


def _listed(files: Files, folder: str) -> list[tuple[str, Span]]:
    """The manifests, as they stood at one moment.

    A listing that runs while manifests are merged can miss both what is deleted and what takes its
    place. So one counts only when the next has the same, but for what was written behind its end.
    """

    def once() -> set[tuple[str, Span]]:
        found = set()
        for name in files.names(folder):
            parent, _, last = name.rpartition("/")
            if (span := Span.from_name(last)) is not None:
                found.add((f"{parent}/", span))
        return found

    before = once()

    def confirmed() -> list[tuple[str, Span]] | None:
        nonlocal before
        now, seen = once(), before
        ends = {f: max(span.last for other, span in seen if other == f) for f, _ in seen}
        same = {(f, span) for f, span in now if span.first <= ends.get(f, -1)} == seen
        before = now
        return sorted(seen) if same else None

    return _until(confirmed, "the manifests went on changing while they were listed; read again")


def _until(attempt: Callable[[], ResultT | None], otherwise: str) -> ResultT:
    for _ in range(_TRIES):
        if (result := attempt()) is not None:
            return result
    raise SparkOnceError(otherwise)


def _common(layouts: Sequence[Layout], url: str) -> tuple[Layout, pa.Schema]:
    """One layout for all; columns that were added later are null in what is older."""
    kinds = {(layout.format, layout.partition_by) for layout in layouts}
    if len(kinds) > 1:
        told = " and ".join(f"format={f!r}, partition_by={list(p)}" for f, p in sorted(kinds))
        raise ConfigurationError(
            f"{url}: its batches were written with {told}: read them apart, with after= and "
            "batch=, or source="
        )
    try:
        schema = pa.unify_schemas([layout.arrow_schema() for layout in layouts])
    except pa.ArrowException as error:
        raise ConfigurationError(
            f"{url}: a column changed its type between the batches ({error}): read them apart, "
            "with after= and batch=, or source="
        ) from error
    return layouts[0], schema


# -- pyarrow ---------------------------------------------------------------------------------------


class _ArrowFiles:
    def __init__(self, filesystem: pa_fs.FileSystem, root: str) -> None:
        self._filesystem = filesystem
        self._root = root

    def names(self, folder: str) -> list[str]:
        selector = pa_fs.FileSelector(
            self._root + folder.rstrip("/"), recursive=True, allow_not_found=True
        )
        found = self._filesystem.get_file_info(selector)
        return [info.path.removeprefix(self._root) for info in found if info.is_file]

    def read(self, name: str) -> bytes:
        with self._filesystem.open_input_file(self._root + name) as file:
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

    It stays what it was when it was made; batches that come later are not in it. Timestamps have
    the zone of the Spark session that wrote them.

    Args:
        url: the sink's; ``s3://BUCKET/PREFIX``, or with `filesystem` a path in that.
        filesystem: default: pyarrow's own for the url, which takes
            ``?endpoint_override=…&scheme=http&region=…`` and AWS' credential chain.
        batch: nothing of later batches.
        after: nothing of this batch and earlier ones; with ``batch=after + 1`` one batch is read.
        source: the pipeline's name, where several write here, or one of its queries and sinks, as
            the folders below ``_sparkonce/`` are named: ``orders/0a1b2c3d4e5f.s3``.

    Raises:
        ConfigurationError: there is no committed batch, or not this one; several sources count
            their batches apart; or the batches do not fit into one table.
    """
    if filesystem is None:
        filesystem, path = pa_fs.FileSystem.from_uri(url.replace("s3a://", "s3://", 1))
    else:
        path = url.removeprefix("s3://").removeprefix("s3a://")
    root = path.strip("/") + "/" if not path.startswith("/") else path.rstrip("/") + "/"
    committed = find_committed(
        _ArrowFiles(filesystem, root), url, batch=batch, after=after, source=source
    )
    if any(key.endswith(".zst") for key in committed.keys):
        raise ConfigurationError(
            f"{url}: pyarrow's datasets read no zstd text: use read_committed, which asks Spark, "
            "or write with compression='gzip'"
        )
    schema, layout = committed.schema, committed.layout
    data = pa.schema([column for column in schema if column.name not in layout.partition_by])
    file_format = _arrow_format(layout.format, data)
    folders = _Folders(schema, layout.partition_by)
    fragments = [
        file_format.make_fragment(root + key, filesystem, folders.expression(key))
        for key in committed.keys
    ]
    return ds.FileSystemDataset(fragments, schema, file_format, filesystem)


class _Folders:
    """What the folders say of the rows in them.

    Arrow's own reading of Hive's folders knows no decimals, and takes a zone's times for UTC.
    """

    def __init__(self, schema: pa.Schema, columns: Sequence[str]) -> None:
        self._schema = schema
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
            local = value.cast(pa.timestamp(kind.unit))
            # An hour that comes twice has one folder: which of the two it was is not kept.
            value = pc.assume_timezone(local, kind.tz, ambiguous="earliest")
        return cast("pa.Scalar[Any]", value.cast(kind))


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
        check_arrow_reads_json(schema)
        return ds.JsonFileFormat()
    return ds.ParquetFileFormat()


# -- Spark -----------------------------------------------------------------------------------------


class _HadoopFiles:
    """Hadoop's own file systems, with the credentials that Spark has."""

    def __init__(self, spark: SparkSession, root: str) -> None:
        jvm: Any = spark.sparkContext._jvm  # noqa: SLF001 - py4j is the only way
        self._path = jvm.org.apache.hadoop.fs.Path
        self._io_utils = jvm.org.apache.commons.io.IOUtils
        base = self._path(root)
        jsession: Any = spark._jsparkSession  # noqa: SLF001
        self._fs = base.getFileSystem(jsession.sessionState().newHadoopConf())
        # As the file system itself writes it, so that what it lists begins with it.
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

    It stays what it was when it was made; batches that come later are not in it. The columns have
    the types that they had when they were written, in the same order.

    Args:
        spark: a classic session that can read the place with S3A.
        url: the sink's, ``s3://BUCKET/PREFIX``, or where a copy of it is, in any file system.
        batch: see `committed_dataset`.
        after: see `committed_dataset`.
        source: see `committed_dataset`.

    Raises:
        ConfigurationError: see `committed_dataset`.
    """
    from pyspark.sql.pandas.types import from_arrow_schema  # noqa: PLC0415 - on the driver only

    root = "s3a://" + url.removeprefix("s3://") if url.startswith("s3://") else url
    root = root.rstrip("/")
    committed = find_committed(
        _HadoopFiles(spark, root), url, batch=batch, after=after, source=source
    )
    schema = from_arrow_schema(committed.schema, prefer_timestamp_ntz=True)
    if not committed.keys:
        return spark.createDataFrame([], schema)
    reader = spark.read.format(committed.layout.format).schema(schema).option("basePath", root)
    for key, value in spark_read_options(committed.layout.format).items():
        reader = reader.option(key, value)
    rows = reader.load([f"{root}/{key}" for key in committed.keys])
    return rows.select([quoted(name) for name in committed.schema.names])
