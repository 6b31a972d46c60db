"""The merge of one batch, as a value that survives its process: the committable's payload."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final, Self

from sparkonce.errors import ProtocolError
from sparkonce.model import BranchId, Committable, JsonValue
from sparkonce.sinks.committables import check_version
from sparkonce.sinks.postgres.target.shape import Shape
from sparkonce.sinks.postgres.target.table import Target
from sparkonce.sinks.postgres.target.writing import Write, Writing

PAYLOAD_VERSION = 5
"""Version 4 was used once and never released. Versions before it have no shape."""

_GONE: Final = ("attached", "leading")
"""Fields of older versions. If such a batch is merged again, rows that were attached as partitions
are inserted."""

_SHOWN: Final = 3


@dataclass(frozen=True, slots=True)
class Merge:
    """All that any process needs to merge one batch, or to commit its merge.

    Attributes:
        schema: of the target, of the staging tables and of the marker table.
        table: the target.
        columns: the columns that the batch fills.
        key: columns that identify a row; None to append.
        staging: names of the staging tables.
        rows: number of rows in all of them.
        system: the server's identifier; empty if the role may not read it.
        database: the database's name.
        prepared: whether the merge waits in a prepared transaction, whose gid is the full branch
            id; else in an open transaction of the process that merged.
        mode: what happens to a row whose key is in the table.
        update: columns that an update sets.
        order_by: the row with the greatest value is the last row of its key.
        delete: SQL that says whether a row is a deletion.
        helpers: columns of the staging tables that only `order_by` and `delete` use.
        dead_letter: schema and name of the table for rows that the target refuses.
        shape: of the target's columns, for which the staged rows were encoded.
    """

    schema: str
    table: str
    columns: tuple[str, ...]
    key: tuple[str, ...] | None
    staging: tuple[str, ...]
    rows: int
    system: str
    database: str
    prepared: bool
    mode: Write
    update: tuple[str, ...] = ()
    order_by: tuple[str, ...] = ()
    delete: str | None = None
    helpers: tuple[str, ...] = ()
    dead_letter: tuple[str, str] | None = None
    shape: Shape = field(default=Shape(()))

    @classmethod
    def of(cls, target: Target, writing: Writing, staging: Iterable[str], rows: int) -> Self:
        """The merge of these staging tables."""
        return cls(
            target.schema,
            target.table,
            target.filled,
            writing.key,
            tuple(sorted(staging)),
            rows,
            target.system,
            target.database,
            target.can_prepare,
            writing.mode,
            target.updated,
            writing.order_by,
            target.delete,
            target.helpers,
            target.dead_letter,
            shape=target.shape,
        )

    @classmethod
    def read(cls, committable: Committable) -> Self:
        """Read a committable of this version or an older one.

        Raises:
            ConfigurationError: a newer sparkonce wrote it.
            ProtocolError: it is not a merge.
        """
        check_version(committable, PAYLOAD_VERSION)
        payload: dict[str, Any] = {
            name: value for name, value in committable.payload.items() if name not in _GONE
        }
        if "columns" not in payload:
            raise ProtocolError(f"{committable.branch_id}: not a merge of a Postgres sink")
        if committable.version == 1:
            key = payload["key"]
            payload["mode"] = "append" if key is None else "upsert"
            payload["update"] = [name for name in payload["columns"] if name not in (key or ())]
        fields: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in payload.items()
        }
        fields["shape"] = Shape(tuple(map(tuple, payload.get("shape", ()))))
        return cls(**fields)

    def committable(self, branch_id: BranchId) -> Committable:
        fields = {**asdict(self), "shape": [list(column) for column in self.shape.columns]}
        payload: dict[str, JsonValue] = {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in fields.items()
        }
        held = f"prepared transaction {branch_id}" if self.prepared else "an open transaction"
        text = f"table {self.schema}.{self.table}, {held}, {shown_staging(self.staging)}"
        return Committable(branch_id, payload, PAYLOAD_VERSION, text=text)

    @property
    def shown(self) -> str:
        return f"{self.database}.{self.schema}.{self.table}"

    @property
    def is_checked_for_duplicates(self) -> bool:
        """Whether the merge must look for a key that occurs twice.

        DO UPDATE finds it, but only within one statement, which a dead letter table may split.
        """
        if self.key is None:
            return False
        return self.mode != "upsert" or not self.update or self.dead_letter is not None


def shown_staging(names: Sequence[str]) -> str:
    """The first few staging tables, for messages; a batch may have hundreds."""
    shown, rest = ", ".join(names[:_SHOWN]), len(names) - _SHOWN
    more = f" and {rest} more" if rest > 0 else ""
    return f"staging table{'s' if len(names) > 1 else ''} {shown}{more}"
