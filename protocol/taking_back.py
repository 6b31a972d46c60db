"""Takes delivered batches out of the sinks again, each branch with a proof that only its rows go.

    records ─► each sink: what it has of their branches ─► as many rows as the log says ─► removed

`look` changes nothing. `take_back` may be repeated: what is gone stays gone.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from sparkonce.errors import SinkError, TakeBackRefusedError
from sparkonce.sinks import verbs
from sparkonce.sinks.base import AnySink
from sparkonce.sinks.capabilities import Delivered
from sparkonce.sinks.committables import check_all_there
from sparkonce.txn_log.record import Head, TransactionRecord
from sparkonce.words import counted

logger = logging.getLogger("sparkonce")


@dataclass(frozen=True)
class Removal:
    """What one sink has of the batches.

    Attributes:
        name: of the sink.
        target: where it wrote them.
        batches: those with rows for this sink, lowest first.
        branches: theirs, newest first.
        rows: how many of them the target has now; of a kept sink, what the log says.
        names: files or objects that hold them.
        is_kept: whether they stay, as the operator wants.
        refusal: why they cannot be removed; None if they can.
        sink: None if the pipeline has none of this name.
    """

    name: str
    target: str
    batches: tuple[int, ...]
    branches: tuple[Delivered, ...]
    rows: int
    names: tuple[str, ...] = ()
    is_kept: bool = False
    refusal: str | None = None
    sink: AnySink | None = None


def look(
    head: Head,
    records: Sequence[TransactionRecord],
    sinks: Mapping[str, AnySink],
    kept: Collection[str],
) -> list[Removal]:
    """What each sink has of the batches, and whether it can take that back.

    Args:
        head: of the pipeline; of what an earlier rewind has taken back, parts may be gone.
        records: of the batches, newest first.
        sinks: the pipeline's, by name.
        kept: names of sinks whose rows stay.
    """
    names = dict.fromkeys(
        name for record in records for name, share in record.shares.items() if share.committables
    )
    return [_look(head, records, name, sinks.get(name), is_kept=name in kept) for name in names]


def take_back(removals: Iterable[Removal]) -> None:
    """Remove the branches of all sinks but the kept ones.

    Raises:
        SinkError: some are left; call it again.
    """
    for removal in removals:
        if removal.sink is not None and not removal.is_kept:
            logger.info("%r: taking %s back", removal.sink, counted(len(removal.batches), "batch"))
            verbs.take_back(removal.sink, removal.branches)


def _look(
    head: Head,
    records: Sequence[TransactionRecord],
    name: str,
    sink: AnySink | None,
    *,
    is_kept: bool,
) -> Removal:
    mine = [r for r in records if name in r.shares and r.shares[name].committables]
    branches = tuple(
        Delivered(committable, record.shares[name].rows_of(committable))
        for record in mine
        for committable in record.shares[name].committables
    )
    removal = Removal(
        name,
        mine[0].shares[name].target,
        tuple(sorted({record.id.batch_id for record in mine})),
        branches,
        sum(branch.rows for branch in branches),
        is_kept=is_kept,
        sink=sink,
    )
    if sink is None or is_kept:
        why = None if is_kept else "the pipeline has no such sink any more: pass it in removed="
        return replace(removal, refusal=why)
    try:
        _check_may(sink, mine)
        found = verbs.find_delivered(sink, branches)
        before = [record for record in mine if head.is_rewound(record.id)]
        may_be_gone = {str(c.branch_id) for record in before for c in record.committables()}
        for branch, visible in zip(branches, found, strict=True):
            branch_id = branch.committable.branch_id
            if str(branch_id) not in may_be_gone:
                check_all_there(sink.where, branch_id, visible.rows, branch.rows)
    except SinkError as error:
        return replace(removal, refusal=str(error))
    rows = sum(visible.rows for visible in found)
    return replace(removal, rows=rows, names=tuple(n for v in found for n in v.names))


def _check_may(sink: AnySink, records: Iterable[TransactionRecord]) -> None:
    """Refuse where the log itself does not know what the target has."""
    for record in records:
        share = record.shares[sink.name]
        if share.target != sink.target:
            raise TakeBackRefusedError(
                f"{record.id} went to {share.target}, and the sink writes to {sink.target} now"
            )
        for committable in share.committables:
            if record.is_ruled_out(committable):
                raise TakeBackRefusedError(
                    f"{record.id} is settled: an operator has ruled what became of "
                    f"{committable.branch_id}, and there is no proof"
                )
