"""How the batches of a query's sink ended, as numbers that a table can hold.

    committed   {"t3.p0": "0-41", "t4.p0": "42-97"}
    aborted     {"t3.p0": "42"}
    taken_back  40

Driver 3 has committed the batches 0 to 41 in their first write pass, and batch 42 was ruled out. A
rewind has removed the files of batch 40 and of all later ones, whose query never runs again. They
stay committed: a late commit must not add them.
The table changes these in the commit that adds a batch's files, or none. That succeeds only if the
table is as it was read. So one of two drivers wins, and the other one sees that before it tries
again.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Final, Literal, TypeAlias

from sparkonce.model import BranchId, Owner
from sparkonce.sinks.lakehouse.ranges import in_ranges, is_forgotten, with_number

KEPT: Final = 500
"""How many pairs of driver and write pass are kept of each end, 10 to 20 bytes each in every
commit."""

_FORGOTTEN: Final = "forgotten"
"""Nothing is known any more of the drivers up to this one."""

End: TypeAlias = Literal["committed", "aborted"]
ENDS: Final[tuple[End, ...]] = ("committed", "aborted")
TAKEN_BACK: Final = "taken_back"
"""The name of the number from which on all batches of a query's sink are taken back."""
Kept: TypeAlias = Mapping[str, str | int]


def end_in(kept: Mapping[End, Kept], branch_id: BranchId) -> End | Literal["unknown"] | None:
    """How the batch ended; None if it has not; "unknown" if that is no longer kept."""
    if (batch_id := branch_id.batch_id) is None:
        return None
    is_unknown = False
    for end in ENDS:
        of_end = kept.get(end, {})
        batches = str(of_end.get(key_of(branch_id), ""))
        if in_ranges(batches, batch_id):
            return end
        is_old = branch_id.token <= int(of_end.get(_FORGOTTEN, -1))
        is_unknown = is_unknown or is_old or is_forgotten(batches, batch_id)
    return "unknown" if is_unknown else None


def with_batch(kept: Kept, branch_id: BranchId) -> Kept:
    """What is kept of an end, and one more batch; the oldest drivers may be forgotten."""
    more = dict(kept)
    key = key_of(branch_id)
    more[key] = with_number(str(more.pop(key, "")), branch_id.batch_id or 0)  # the newest goes last
    while len(more) > KEPT:
        oldest = next(each for each in more if each != _FORGOTTEN)
        del more[oldest]
        token = int(re.findall(r"\d+", oldest)[0])
        more[_FORGOTTEN] = max(int(more.get(_FORGOTTEN, -1)), token)
    return more


def is_after(first: int | None, branch_id: BranchId) -> bool:
    """Whether a rewind that went back to before the batch `first` has taken this one back."""
    return first is not None and branch_id.batch_id is not None and branch_id.batch_id >= first


def taken_back_from(
    branch_ids: Iterable[BranchId], known: Callable[[BranchId], int | None]
) -> Iterable[tuple[BranchId, int]]:
    """One branch of each query, and from which of its batches on all are taken back.

    Args:
        branch_ids: all that a rewind removes of one sink.
        known: what an earlier rewind has noted for the query of a branch.
    """
    found: dict[Owner, tuple[BranchId, int]] = {}
    for each in branch_ids:
        _, first = found.get(each.owner, (each, known(each)))
        number = each.batch_id or 0
        found[each.owner] = each, number if first is None else min(first, number)
    return found.values()


def key_of(branch_id: BranchId) -> str:
    """The driver and the write pass."""
    return f"t{branch_id.token}.p{branch_id.write_pass}"
