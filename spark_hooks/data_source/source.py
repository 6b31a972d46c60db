"""`SparkOnce`, the data source that Spark knows as ``format("sparkonce")``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, cast

from pyspark.sql import datasource
from pyspark.sql.datasource import DataSource, DataSourceStreamWriter, WriterCommitMessage

from sparkonce.errors import ConfigurationError

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.types import StructType

    from sparkonce.spark_hooks.data_source.tasks import Prepared, TaskWriter

_ArrowWriter = getattr(datasource, "DataSourceStreamArrowWriter", DataSourceStreamWriter)


class SparkOnce(DataSource):  # type: ignore[misc]
    """Writes each micro-batch into all sinks of a pipeline once, or into none.

    ::

        spark.dataSource.register(SparkOnce)
        query = (
            df.writeStream.format("sparkonce")
            .option("pipeline", "jobs.orders:pipeline")
            .option("checkpointLocation", "/var/lib/orders/checkpoint")
            .start()
        )

    It works where foreachBatch has no JVM: over Spark Connect, and in Declarative Pipelines. The
    guarantee, log, recovery and command line are those of `sparkonce.ExactlyOnce`.

    Options:
        pipeline: ``module:attribute`` of an `ExactlyOnce`, or of a function that returns one. The
            Python processes of Spark's driver import the module, not the client.
        checkpointLocation: the query's checkpoint, in a folder that these processes see.

    Raises:
        ConfigurationError: an option is missing, or Spark is older than 4.1.
    """

    @classmethod
    def name(cls) -> str:
        return "sparkonce"

    def streamWriter(self, schema: StructType, overwrite: bool) -> StreamWriter:  # noqa: N802 - Spark's name
        if not issubclass(_ArrowWriter, DataSourceStreamWriter) or (
            _ArrowWriter is DataSourceStreamWriter
        ):
            raise ConfigurationError(
                'format("sparkonce") needs Spark 4.1 or later, which gives the rows as Arrow: '
                "with Spark 4.0 write with foreachBatch"
            )
        if overwrite:
            raise ConfigurationError(
                'outputMode("complete") replaces all that was written before, which a sink cannot '
                'do: use "append"'
            )
        return StreamWriter(Options.of(self.options), schema)

    def reader(self, schema: StructType) -> NoReturn:
        del schema
        raise ConfigurationError('format("sparkonce") only writes: read each target with its own')


class Options(NamedTuple):
    """What the query was given with ``option``."""

    pipeline: str
    checkpoint: str

    @classmethod
    def of(cls, options: Mapping[str, str]) -> Options:
        """Check that all are there.

        Raises:
            ConfigurationError: naming the one that is missing.
        """
        known = {name.lower(): value for name, value in options.items()}
        if "pipeline" not in known:
            raise ConfigurationError(
                'format("sparkonce") needs .option("pipeline", "module:attribute"), the pipeline '
                "to write with"
            )
        if "checkpointlocation" not in known:
            raise ConfigurationError(
                'format("sparkonce") needs .option("checkpointLocation", …) on the query itself: '
                "Spark does not tell it a location from the session's settings"
            )
        return cls(known["pipeline"], known["checkpointlocation"])


class StreamWriter(_ArrowWriter):  # type: ignore[misc,valid-type]
    """Spark's view of one batch; see `sparkonce.spark_hooks.data_source`.

    Spark makes one in each process and tells none of them what it is for. Only the one that plans
    a batch pickles its writer, for the tasks, so the plan is made when that happens.
    """

    def __init__(self, options: Options, schema: StructType) -> None:
        self._options = options
        self._schema = schema

    @cached_property
    def _planned(self) -> TaskWriter:
        from sparkonce.spark_hooks.data_source.planning import plan  # noqa: PLC0415 - the driver's

        return plan(self._options.pipeline, self._options.checkpoint, self._schema)

    def __getstate__(self) -> dict[str, Any]:
        return {"_planned": self._planned}  # PySpark pickles it twice, and it must be one plan

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Prepared:
        return self._planned.write(iterator)

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        from sparkonce.spark_hooks.data_source.committing import commit  # noqa: PLC0415

        prepared = cast("list[Prepared | None]", messages)
        commit(*self._options, self._schema, prepared, batchId)

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        from sparkonce.spark_hooks.data_source.committing import abort  # noqa: PLC0415

        abort(*self._options, cast("list[Prepared | None]", messages), batchId)
