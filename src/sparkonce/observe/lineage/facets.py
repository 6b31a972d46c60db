"""The facets: those of the specification that we send, and two of our own.

Our own have their JSON schemas in docs/assets/openlineage/.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import attr
import pyarrow as pa
import pyspark
from openlineage.client.event_v2 import InputDataset, OutputDataset
from openlineage.client.facet_v2 import (
    DatasetFacet,
    InputDatasetFacet,
    JobFacet,
    OutputDatasetFacet,
    RunFacet,
    error_message_run,
    job_type_job,
    output_statistics_output_dataset,
    processing_engine_run,
    schema_dataset,
    symlinks_dataset,
)
from pyspark.sql.pandas.types import from_arrow_type

from sparkonce import __version__
from sparkonce.datasets import Dataset, without_secrets
from sparkonce.errors import SparkOnceError
from sparkonce.observe.lineage.attempts import Change
from sparkonce.observe.lineage.inputs import Read
from sparkonce.txn_log.record import Share

PRODUCER: Final = f"urn:sparkonce:{__version__}"
"""Identifies this program in every event and facet."""

_SCHEMAS: Final = "urn:sparkonce:openlineage:1-0-0"


@attr.define
class TransactionRunFacet(RunFacet):
    pipeline: str
    logId: str  # noqa: N815 - names of JSON
    queryId: str  # noqa: N815
    batchId: int  # noqa: N815
    token: int
    state: str
    sparkRunId: str | None = None  # noqa: N815

    @staticmethod
    def _get_schema() -> str:
        return f"{_SCHEMAS}:TransactionRunFacet#/$defs/TransactionRunFacet"


@attr.define
class OffsetsInputDatasetFacet(InputDatasetFacet):
    end: str
    start: str | None = None

    @staticmethod
    def _get_schema() -> str:
        return f"{_SCHEMAS}:OffsetsInputDatasetFacet#/$defs/OffsetsInputDatasetFacet"


def run_facets(change: Change, spark_run: str | None) -> dict[str, RunFacet]:
    """What an event says about its attempt."""
    attempt = change.attempt
    facets: dict[str, RunFacet] = {
        "processing_engine": processing_engine_run.ProcessingEngineRunFacet(
            version=pyspark.__version__,
            name="spark",
            openlineageAdapterVersion=__version__,
            producer=PRODUCER,
        ),
        "sparkonce_transaction": TransactionRunFacet(
            attempt.pipeline,
            attempt.owner.log_id,
            attempt.owner.query_id,
            attempt.batch_id,
            attempt.token,
            change.state,
            spark_run,
            producer=PRODUCER,
        ),
    }
    if change.error is not None:
        facets["errorMessage"] = error_message_run.ErrorMessageRunFacet(
            message=message_of(change.error), programmingLanguage="PYTHON", producer=PRODUCER
        )
    return facets


def message_of(error: BaseException) -> str:
    """The text of an error of ours; that of another one may hold a secret or a row."""
    if not isinstance(error, SparkOnceError):
        return type(error).__name__
    return without_secrets(str(error))


def job_facets() -> dict[str, JobFacet]:
    """What an event says about its pipeline."""
    return {
        "jobType": job_type_job.JobTypeJobFacet(
            processingType="STREAMING",
            integration="SPARKONCE",
            jobType="MICRO_BATCH",
            producer=PRODUCER,
        )
    }


def input_of(read: Read) -> InputDataset:
    """A dataset that the batch reads, with its offsets."""
    offsets = OffsetsInputDatasetFacet(read.end, read.start, producer=PRODUCER)
    return InputDataset(
        read.dataset.namespace,
        read.dataset.name,
        facets=_symlinks(read.dataset),
        inputFacets={"sparkonce_offsets": offsets},
    )


def output_of(dataset: Dataset, schema: pa.Schema | None, share: Share | None) -> OutputDataset:
    """A sink's dataset, with what the batch has written into it."""
    facets = _symlinks(dataset)
    if schema is not None:
        fields = [_field(field, place) for place, field in enumerate(schema, start=1)]
        facets["schema"] = schema_dataset.SchemaDatasetFacet(fields=fields, producer=PRODUCER)
    statistics: dict[str, OutputDatasetFacet] = {}
    if share is not None:
        statistics["outputStatistics"] = (
            output_statistics_output_dataset.OutputStatisticsOutputDatasetFacet(
                rowCount=share.rows, size=share.bytes, producer=PRODUCER
            )
        )
    return OutputDataset(dataset.namespace, dataset.name, facets=facets, outputFacets=statistics)


def _symlinks(dataset: Dataset) -> dict[str, DatasetFacet]:
    if not dataset.symlinks:
        return {}
    identifiers = [
        symlinks_dataset.Identifier(other.namespace, other.name, "TABLE")
        for other in dataset.symlinks
    ]
    facet = symlinks_dataset.SymlinksDatasetFacet(identifiers=identifiers, producer=PRODUCER)
    return {"symlinks": facet}


def _field(
    field: pa.Field[pa.DataType], place: int | None = None
) -> schema_dataset.SchemaDatasetFacetFields:
    """A column, with Spark's name of its type, as OpenLineage's own integration of Spark has it."""
    kind = field.type
    parts: Iterable[pa.Field[pa.DataType]] = ()
    if pa.types.is_struct(kind):
        parts = [kind.field(n) for n in range(kind.num_fields)]
    elif pa.types.is_map(kind):
        parts = [pa.field("key", kind.key_type), pa.field("value", kind.item_type)]
    elif pa.types.is_list(kind) or pa.types.is_large_list(kind):
        parts = [pa.field("_element", kind.value_type)]
    return schema_dataset.SchemaDatasetFacetFields(
        field.name,
        _type_name(kind),
        ordinal_position=place,
        fields=[_field(part) for part in parts],
    )


def _type_name(kind: pa.DataType) -> str:
    try:
        spark = from_arrow_type(kind)
    except Exception:  # noqa: BLE001 - a type that Spark has no name for
        return str(kind)
    return str(spark.simpleString() if pa.types.is_decimal(kind) else spark.typeName())
