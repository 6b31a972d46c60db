"""How a sink's batches ended, as two properties of the table say it.

    sparkonce.LOG.QUERY.SINK.committed = {"t3.p0": "0-41", "t4.p0": "42-97"}
    sparkonce.LOG.QUERY.SINK.aborted   = {"t3.p0": "42"}

Driver 3 has committed the batches 0 to 41 in their first write pass. `committed` changes in the
commit that adds a batch's files, and `aborted` in one that adds no files. Both add a snapshot to
the main branch, and fail if another one came in between. So one of two drivers wins, and the other
one sees that before it tries again.

Snapshots expire, and properties stay.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Final, Literal, TypeAlias

from sparkonce.model import BranchId
from sparkonce.sinks.iceberg.ranges import highest, in_ranges, with_number

if TYPE_CHECKING:
    from pyiceberg.table import Table

KEPT: Final = 500
"""Drivers and write passes whose batches are kept, 10 to 20 bytes each in every metadata file."""

_BELOW: Final = "below"
"""Nothing is known any more of batches below this one."""

End: TypeAlias = Literal["committed", "aborted"]


def end_of(table: Table, branch_id: BranchId) -> End | Literal["unknown"] | None:
    """How the batch ended; None if it has not; "unknown" if that is no longer kept."""
    if (batch_id := branch_id.batch_id) is None:
        return None
    is_forgotten = False
    for end in ("committed", "aborted"):
        kept = _kept(table, branch_id, end)
        if in_ranges(str(kept.get(_key(branch_id), "")), batch_id):
            return end
        is_forgotten = is_forgotten or batch_id < int(kept.get(_BELOW, 0))
    return "unknown" if is_forgotten else None


def proof(table: Table, branch_id: BranchId, end: End) -> dict[str, str]:
    """The property that proves the batch's end, beside those of all earlier ones."""
    kept = _kept(table, branch_id, end)
    key = _key(branch_id)
    kept[key] = with_number(str(kept.pop(key, "")), branch_id.batch_id or 0)  # the newest goes last
    while len(kept) > KEPT:
        oldest = next(each for each in kept if each != _BELOW)
        below = highest(str(kept.pop(oldest))) + 1
        kept[_BELOW] = max(int(kept.get(_BELOW, 0)), below)
    return {_name(branch_id, end): json.dumps(kept, separators=(",", ":"))}


def _kept(table: Table, branch_id: BranchId, end: End) -> dict[str, str | int]:
    found: dict[str, str | int] = json.loads(table.properties.get(_name(branch_id, end), "{}"))
    return found


def _name(branch_id: BranchId, end: End) -> str:
    return f"{branch_id.owner.prefix}{branch_id.sink}.{end}"


def _key(branch_id: BranchId) -> str:
    return f"t{branch_id.token}.p{branch_id.write_pass}"
