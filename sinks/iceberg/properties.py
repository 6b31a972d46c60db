"""The properties of a table that prove how batches ended. Snapshots expire, and properties stay.

sparkonce.LOG.QUERY.SINK.committed  = {"t3.p0": "0-41", "t4.p0": "42-97"}
sparkonce.LOG.QUERY.SINK.aborted    = {"t3.p0": "42"}
sparkonce.LOG.QUERY.SINK.taken_back = 40
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
    is_after,
    taken_back_from,
    with_batch,
)

if TYPE_CHECKING:
    from pyiceberg.table import Table


def end_of(table: Table, branch_id: BranchId) -> End | Literal["unknown"] | None:
    """How the batch ended; None if it has not; "unknown" if that is no longer kept."""
    return end_in({end: _kept(table, branch_id, end) for end in ENDS}, branch_id)


def proof(table: Table, branch_id: BranchId, end: End) -> dict[str, str]:
    """The property that proves the batch's end, along with those of all earlier ones."""
    kept = with_batch(_kept(table, branch_id, end), branch_id)
    return {_name(branch_id, end): json.dumps(kept, separators=(",", ":"))}


def is_taken_back(table: Table, branch_id: BranchId) -> bool:
    """Whether a rewind has removed the batch's files."""
    return is_after(_first(table, branch_id), branch_id)


def proof_of_removal(table: Table, branch_ids: Iterable[BranchId]) -> dict[str, str]:
    """The properties that prove that these batches are taken back."""
    found = taken_back_from(branch_ids, lambda branch_id: _first(table, branch_id))
    return {_name(branch_id, TAKEN_BACK): str(first) for branch_id, first in found}


def _first(table: Table, branch_id: BranchId) -> int | None:
    """From which batch on all of the query are taken back."""
    kept = table.properties.get(_name(branch_id, TAKEN_BACK))
    return None if kept is None else int(kept)


def _kept(table: Table, branch_id: BranchId, end: End) -> Kept:
    found: Kept = json.loads(table.properties.get(_name(branch_id, end), "{}"))
    return found


def _name(branch_id: BranchId, what: str) -> str:
    return f"{branch_id.owner.prefix}{branch_id.sink}.{what}"
