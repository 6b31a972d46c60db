"""The properties of a table that prove how batches ended. Snapshots expire, and properties stay.

sparkonce.LOG.QUERY.SINK.committed = {"t3.p0": "0-41", "t4.p0": "42-97"}
sparkonce.LOG.QUERY.SINK.aborted   = {"t3.p0": "42"}
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Literal

from sparkonce.model import BranchId
from sparkonce.sinks.lakehouse.proofs import ENDS, End, Kept, end_in, with_batch

if TYPE_CHECKING:
    from pyiceberg.table import Table


def end_of(table: Table, branch_id: BranchId) -> End | Literal["unknown"] | None:
    """How the batch ended; None if it has not; "unknown" if that is no longer kept."""
    return end_in({end: _kept(table, branch_id, end) for end in ENDS}, branch_id)


def proof(table: Table, branch_id: BranchId, end: End) -> dict[str, str]:
    """The property that proves the batch's end, along with those of all earlier ones."""
    kept = with_batch(_kept(table, branch_id, end), branch_id)
    return {_name(branch_id, end): json.dumps(kept, separators=(",", ":"))}


def _kept(table: Table, branch_id: BranchId, end: End) -> Kept:
    found: Kept = json.loads(table.properties.get(_name(branch_id, end), "{}"))
    return found


def _name(branch_id: BranchId, end: End) -> str:
    return f"{branch_id.owner.prefix}{branch_id.sink}.{end}"
