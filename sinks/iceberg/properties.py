"""The properties of a table that prove how batches ended. Snapshots expire, and properties stay.

sparkonce.LOG.QUERY.SINK.committed  = {"t3.p0": "0-41", "t4.p0": "42-97"}
sparkonce.LOG.QUERY.SINK.aborted    = {"t3.p0": "42"}
sparkonce.LOG.QUERY.SINK.taken_back = {"t3.p0": "40-41"}
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import TYPE_CHECKING, Literal

from sparkonce.model import BranchId
from sparkonce.sinks.lakehouse.proofs import (
    ENDS,
    TAKEN_BACK,
    End,
    Kept,
    end_in,
    has_batch,
    with_batch,
    with_batches,
)

if TYPE_CHECKING:
    from pyiceberg.table import Table


def end_of(table: Table, branch_id: BranchId) -> End | Literal["unknown"] | None:
    """How the batch ended; None if it has not; "unknown" if that is no longer kept."""
    return end_in({end: _kept(table, branch_id, end) for end in ENDS}, branch_id)


def proof(table: Table, branch_id: BranchId, end: End) -> dict[str, str]:
    """The property that proves the batch's end, along with those of all earlier ones."""
    return {_name(branch_id, end): _text(with_batch(_kept(table, branch_id, end), branch_id))}


def is_taken_back(table: Table, branch_id: BranchId) -> bool:
    """Whether a rewind has removed the batch's files."""
    return has_batch(_kept(table, branch_id, TAKEN_BACK), branch_id)


def proof_of_removal(table: Table, branch_ids: Iterable[BranchId]) -> dict[str, str]:
    """The properties that prove that these batches, and all earlier ones, are taken back."""
    by_name: dict[str, list[BranchId]] = {}
    for branch_id in branch_ids:
        by_name.setdefault(_name(branch_id, TAKEN_BACK), []).append(branch_id)
    return {
        name: _text(with_batches(_kept(table, some[0], TAKEN_BACK), some))
        for name, some in by_name.items()
    }


def _text(kept: Kept) -> str:
    return json.dumps(kept, separators=(",", ":"))


def _kept(table: Table, branch_id: BranchId, end: str) -> Kept:
    found: Kept = json.loads(table.properties.get(_name(branch_id, end), "{}"))
    return found


def _name(branch_id: BranchId, end: str) -> str:
    return f"{branch_id.owner.prefix}{branch_id.sink}.{end}"
