"""`DeltaSink`: each batch is one version of a Delta table.

A commit succeeds only if no other version came after the one that was read, and the proof is a
transaction identifier in the same version.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar, Literal

from sparkonce.datasets import Dataset
from sparkonce.errors import ConfigurationError
from sparkonce.sinks.capabilities import NamesDatasets
from sparkonce.sinks.delta.checking import add_columns, check_table, create, diagnose
from sparkonce.sinks.delta.places import Place
from sparkonce.sinks.delta.table import DeltaVersion
from sparkonce.sinks.lakehouse import missing
from sparkonce.sinks.lakehouse.sink import LakehouseSink

if TYPE_CHECKING:
    import pyarrow as pa

    from sparkonce.finding import Finding
    from sparkonce.sinks.base import Transform


class DeltaSink(LakehouseSink, NamesDatasets):
    """Appends each batch to a Delta Lake table, in one version.

    Readers of every engine get whole batches. Other writers, OPTIMIZE, VACUUM with its default
    retention, and added columns may run at the same time.

    Args:
        uri: the table's folder, or ``s3://BUCKET/PATH``.
        storage_options: deltalake's, such as ``{"AWS_ENDPOINT_URL": …}``. What is not given is read
            from the environment.
        create: "if_missing": create a table without partitions from the first batch's columns.
        new_columns: "add": a start adds the columns that the rows have and the table lacks; they
            may be null. By default they are refused, as fields within a column always are.
        max_open_files: how many partitions one task may write.
        name: see `TwoPhaseCommitSink`.
        select: see `TwoPhaseCommitSink`.
        transform: see `TwoPhaseCommitSink`.
        writers: see `TwoPhaseCommitSink`.

    Raises:
        ConfigurationError: a setting cannot work.
    """

    kind: ClassVar[str] = "delta"

    def __init__(
        self,
        uri: str,
        *,
        storage_options: Mapping[str, str] | None = None,
        create: Literal["if_missing"] | None = None,
        new_columns: Literal["add"] | None = None,
        max_open_files: int = 32,
        name: str | None = None,
        select: Sequence[str] | None = None,
        transform: Transform | None = None,
        writers: Literal[1] | None = None,
    ) -> None:
        super().__init__(
            create=create,
            new_columns=new_columns,
            max_open_files=max_open_files,
            name=name,
            select=select,
            transform=transform,
            writers=writers,
        )
        self._place = Place(uri, storage_options or {})

    @property
    def target(self) -> str:
        return f"Delta table {self._place.uri}"

    def dataset(self) -> Dataset:
        return Dataset.at(self._place.uri)

    def diagnose(self) -> Iterable[Finding]:
        return diagnose(self._place, self.target, creates=self._create is not None)

    def _load(self) -> DeltaVersion | None:
        table = self._place.load()
        return None if table is None else DeltaVersion(table, self._place.storage())

    def _prepare_table(self, schema: pa.Schema) -> DeltaVersion:
        if (version := self._load()) is None:
            if self._create is None:
                raise missing.refusal(self.target)
            create(self._place, schema, self.target)
            version = self._load()
        if version is None:
            raise ConfigurationError(f"{self.target} was deleted just now: start again")
        if self._new_columns is not None:
            add_columns(self._place, schema, self.target)
            version = self._load() or version
        check_table(version, self._place, schema, self.target)
        return version
