"""`SparkOnce`, the data source that Spark knows as ``format("sparkonce")``."""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final, NoReturn, cast

from pyspark.sql import datasource
from pyspark.sql.datasource import (
    DataSource,
    DataSourceStreamWriter,
    DataSourceWriter,
    WriterCommitMessage,
)

from sparkonce.errors import ConfigurationError, SparkOnceError

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.types import StructType

    from sparkonce.spark_hooks.data_source.tasks import Prepared, TaskWriter

_StreamWriter = getattr(datasource, "DataSourceStreamArrowWriter", DataSourceStreamWriter)
_BatchWriter = getattr(datasource, "DataSourceArrowWriter", DataSourceWriter)


class SparkOnce(DataSource):  # type: ignore[misc]
    """Writes each micro-batch into all sinks of a pipeline once, or into none.

    ::

        query = (
            df.writeStream.format("sparkonce")
            .option("pipeline", "jobs.orders:pipeline")
            .option("checkpointLocation", "/var/lib/orders/checkpoint")
            .start()
        )

    Spark finds it by itself where the Python of its driver has sparkonce installed. Where it does
    not, ``spark.dataSource.register(SparkOnce)`` makes it known to a session.

    It works where foreachBatch has no JVM: over Spark Connect, and in Declarative Pipelines. The
    guarantee, log, recovery and command line are those of `sparkonce.ExactlyOnce`.

    An ordinary batch job writes all or nothing into the sinks, and once for each key::

        writer = df.write.format("sparkonce").mode("append").option("key", "2026-11-26")
        writer.option("pipeline", "jobs.nightly:pipeline").save()

    Options:
        pipeline: ``module:attribute`` of an `ExactlyOnce`, or of a function that returns one; or
            the path of a file ``….json``. The Python processes of Spark's driver read it, not the
            client.
        name: of the pipeline, in place of `pipeline`, with the other parameters of `ExactlyOnce`.
        sinks: JSON: a list of objects, each with the sink's ``type`` and the parameters of its
            class. A secret is ``{"env": "NAME"}`` or ``{"file": "/PATH"}``.
        sink.type, sink.…: in place of `sinks`: the type and the parameters of one sink.
        checkpointLocation: of a streaming query: in a folder that these processes see.
        key: of a batch job: what it is about, such as its date. A job whose key is among the
            pipeline's last batches (`retain=`) and complete writes nothing.

    Raises:
        ConfigurationError: an option is missing, or Spark is older than 4.1.
    """

    @classmethod
    def name(cls) -> str:
        return "sparkonce"

    def streamWriter(self, schema: StructType, overwrite: bool) -> StreamWriter:  # noqa: N802 - Spark's name
        _check_gives_arrow()
        if overwrite:
            raise ConfigurationError(
                'outputMode("complete") replaces all that was written before, which a sink cannot '
                'do: use "append"'
            )
        pipeline = _job_of(self.options)
        return StreamWriter(pipeline, _option(self.options, "checkpointLocation"), schema)

    def writer(self, schema: StructType, overwrite: bool) -> BatchWriter:
        _check_gives_arrow()
        if overwrite:
            raise ConfigurationError(
                'mode("overwrite") replaces all that was written before, which a sink cannot do: '
                'use mode("append")'
            )
        pipeline = _job_of(self.options)
        return BatchWriter(pipeline, _option(self.options, "key"), schema)

    def reader(self, schema: StructType) -> NoReturn:
        del schema
        raise ConfigurationError('format("sparkonce") only writes: read each target with its own')


_NEEDED: Final = {
    "checkpointLocation": (
        'format("sparkonce") needs .option("checkpointLocation", …) on the query itself: Spark '
        "does not tell it a location from the session's settings"
    ),
    "key": (
        'df.write.format("sparkonce") needs .option("key", …), which names the job, such as its '
        "date: the rows of one key are written once, however often the job runs"
    ),
}
"""Options, and what to say where one is missing."""


def _option(options: Mapping[str, str], name: str) -> str:
    found = {known.lower(): value for known, value in options.items()}.get(name.lower())
    if not found:
        raise ConfigurationError(_NEEDED[name])
    return found


def _job_of(options: Mapping[str, str]) -> str:
    from sparkonce.spark_hooks.data_source.options import job_of  # noqa: PLC0415 - the driver's

    return job_of(options)


def _check_gives_arrow() -> None:
    if not hasattr(datasource, "DataSourceStreamArrowWriter"):
        raise ConfigurationError(
            'format("sparkonce") needs Spark 4.1 or later, which gives the rows as Arrow: with '
            "Spark 4.0 write with foreachBatch"
        )


@contextlib.contextmanager
def _readable() -> Iterator[None]:
    """Let errors pass PySpark's pickling: it hides the class of all but a `pickle.PickleError`."""
    try:
        yield
    except SparkOnceError as error:
        kind = type(error)
        names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
        error.__class__ = type(kind.__name__, (kind, pickle.PickleError), names)
        raise


class StreamWriter(_StreamWriter):  # type: ignore[misc,valid-type]
    """Spark's view of one batch; see `sparkonce.spark_hooks.data_source`.

    Spark makes one in each of its processes, always by the same call. Only the process that plans a
    batch pickles its writer, to send it to the tasks, so the plan is made when that happens.
    """

    def __init__(self, pipeline: str, checkpoint: str, schema: StructType) -> None:
        self._place = (pipeline, checkpoint)
        self._schema = schema

    @cached_property
    def _planned(self) -> TaskWriter:
        from sparkonce.spark_hooks.data_source.planning import plan  # noqa: PLC0415 - the driver's

        return plan(*self._place, self._schema)

    def __getstate__(self) -> dict[str, Any]:
        with _readable():
            return {"_planned": self._planned}  # PySpark pickles it twice, and it must be one plan

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Prepared:
        return self._planned.write(iterator)

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        from sparkonce.spark_hooks.data_source.committing import commit  # noqa: PLC0415

        prepared = cast("list[Prepared | None]", messages)
        commit(*self._place, self._schema, prepared, batchId)

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        from sparkonce.spark_hooks.data_source.committing import abort  # noqa: PLC0415

        abort(*self._place, cast("list[Prepared | None]", messages), batchId)


class BatchWriter(_BatchWriter):  # type: ignore[misc,valid-type]
    """Spark's view of a batch job; see `sparkonce.spark_hooks.data_source.keyed`.

    It is pickled once it is planned, for the tasks and for its own commit.
    """

    def __init__(self, pipeline: str, key: str, schema: StructType) -> None:
        self._job = (pipeline, key)
        self._schema = schema

    @cached_property
    def _planned(self) -> TaskWriter | None:
        from sparkonce.spark_hooks.data_source.keyed import plan_keyed  # noqa: PLC0415

        return plan_keyed(*self._job, self._schema)

    def __getstate__(self) -> dict[str, Any]:
        with _readable():
            _ = self._planned
        return self.__dict__

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        if self._planned is not None:
            return self._planned.write(iterator)
        for _ in iterator:
            pass
        return WriterCommitMessage()

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        from sparkonce.spark_hooks.data_source.keyed import commit_keyed  # noqa: PLC0415

        if self._planned is not None:
            prepared = cast("list[Prepared | None]", messages)
            commit_keyed(*self._job, self._schema, self._planned, prepared)

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        from sparkonce.spark_hooks.data_source.keyed import abort_keyed  # noqa: PLC0415

        del messages
        if self._planned is not None:
            abort_keyed(*self._job, self._planned)
