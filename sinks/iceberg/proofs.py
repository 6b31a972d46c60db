"""How a sink's batches ended, as two properties of the table say it.

    sparkonce.LOG.QUERY.SINK.committed = {"t3.p0": "0-41", "t4.p0": "42-97"}
    sparkonce.LOG.QUERY.SINK.aborted   = {"t3.p0": "42"}

Driver 3 has committed the batches 0 to 41 in their first write pass. `committed` changes in the
commit that adds a batch's files, and `aborted` in one that adds no files. Both add a snapshot, and
succeed only if the main branch still has the snapshot that was read. So one of two drivers wins,
and the other one sees that before it tries again.

Snapshots expire, and properties stay.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Final, Literal, TypeAlias

from sparkonce.model import BranchId
from sparkonce.sinks.iceberg.ranges import in_ranges, is_forgotten, with_number

if TYPE_CHECKING:
    from pyiceberg.table import Table

KEPT: Final = 500
"""How many pairs of driver and write pass each property remembers, 10 to 20 bytes each in every
metadata file."""

_FORGOTTEN: Final = "forgotten"
"""Nothing is known any more of the drivers up to this one."""

End: TypeAlias = Literal["committed", "aborted"]


def end_of(table: Table, branch_id: BranchId) -> End | Literal["unknown"] | None:
    """How the batch ended; None if it has not; "unknown" if that is no longer kept."""
    if (batch_id := branch_id.batch_id) is None:
        return None
    is_unknown = False
    for end in ("committed", "aborted"):
        kept = _kept(table, branch_id, end)
        batches = str(kept.get(_key(branch_id), ""))
        if in_ranges(batches, batch_id):
            return end
        is_old = branch_id.token <= int(kept.get(_FORGOTTEN, -1))
        is_unknown = is_unknown or is_old or is_forgotten(batches, batch_id)
    return "unknown" if is_unknown else None


def proof(table: Table, branch_id: BranchId, end: End) -> dict[str, str]:
    """The property that proves the batch's end, along with those of all earlier ones."""
    kept = _kept(table, branch_id, end)
    key = _key(branch_id)
    kept[key] = with_number(str(kept.pop(key, "")), branch_id.batch_id or 0)  # the newest goes last
    while len(kept) > KEPT:
        oldest = next(each for each in kept if each != _FORGOTTEN)
        del kept[oldest]
        token = int(re.findall(r"\d+", oldest)[0])
        kept[_FORGOTTEN] = max(int(kept.get(_FORGOTTEN, -1)), token)
    return {_name(branch_id, end): json.dumps(kept, separators=(",", ":"))}


def _kept(table: Table, branch_id: BranchId, end: End) -> dict[str, str | int]:
    found: dict[str, str | int] = json.loads(table.properties.get(_name(branch_id, end), "{}"))
    return found


def _name(branch_id: BranchId, end: End) -> str:
    return f"{branch_id.owner.prefix}{branch_id.sink}.{end}"


def _key(branch_id: BranchId) -> str:
    return f"t{branch_id.token}.p{branch_id.write_pass}"
