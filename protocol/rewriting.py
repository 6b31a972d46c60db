"""Lost branches are rewritten: what to write, and whether the replay holds the same rows.

    decided: p0 ✔ committed   p1 ✘ lost   p2 ✔        rewrite: the sink, partitions {1}, pass 1
    decided: p0 ✘ lost        p1 ✘ lost   p2 ✘        rewrite: the sink, every partition

Spark replays a batch with the same rows, but it may cut them into other partitions. Where some
branches of a sink are lost, each partition must hold what it held before. Where all are lost, the
sums over the partitions are compared, so a replay that is cut differently passes. A branch that the
driver made of all tasks' work counts as all of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, Self, TypeAlias

from sparkonce.errors import PreparedBranchLostError, settle_command
from sparkonce.model import Committable
from sparkonce.txn_log.record import COUNT_ONLY, Fingerprint, Part, Share, TransactionRecord
from sparkonce.words import counted

_CUT_OTHERWISE: Final = (
    " (were writers=, mode=, key=, select=, the cluster's cores or the session's time zone changed "
    "since? Then start once as before)"
)

_NOT_HASHED: Final = (
    "its rows were only counted, which does not prove that they are the same; sparkonce.shaped "
    "adds hashes"
)

Lost: TypeAlias = "Sequence[tuple[Committable, PreparedBranchLostError]]"
"""Branches, each with its sink's proof that it is gone."""


@dataclass(frozen=True, slots=True)
class Rewrite:
    """Which part of a decided batch is rewritten.

    Attributes:
        write_pass: of the new branches; 1 for the first rewrite of the batch.
        partitions: by sink name, the lost partitions; None where all are.
    """

    write_pass: int
    partitions: Mapping[str, frozenset[int] | None]

    @classmethod
    def of(cls, record: TransactionRecord, lost: Sequence[Committable]) -> Self | None:
        """The rewrite that replaces `lost`; None if it would repeat rows that are visible."""
        partitions: dict[str, frozenset[int] | None] = {}
        for name, share in record.shares.items():
            gone = {c.branch_id.name for c in lost if c.branch_id.sink == name}
            if not gone:
                continue
            if gone == {c.branch_id.name for c in share.committables}:
                partitions[name] = None
                continue
            by_task = {part.branch: part.partition for part in share.parts}
            if not gone <= by_task.keys():  # the driver's branch, while others are committed
                return None
            partitions[name] = frozenset(by_task[branch] for branch in gone)
        return cls(record.revision + 1, partitions)

    def wants(self, sink: str, partition: int) -> bool:
        """Whether this partition must be written into this sink."""
        wanted = self.partitions.get(sink, frozenset())
        return wanted is None or partition in wanted

    def difference(self, record: TransactionRecord, written: Mapping[str, Share]) -> str | None:
        """How the replay differs from what was lost; None when it holds the same rows."""
        for name, wanted in self.partitions.items():
            before, now = record.shares[name].parts, written[name].parts
            if wanted is None:
                found = _difference(before, now)
            else:
                found = next(
                    (
                        f"partition {n}: {difference}{_CUT_OTHERWISE}"
                        for n in sorted(wanted)
                        if (difference := _difference(_of(before, n), _of(now, n))) is not None
                    ),
                    None,
                )
            if found is not None:
                return f"sink {name!r}, {found}"
        return None

    def amend(
        self,
        record: TransactionRecord,
        written: Mapping[str, Share],
        lost: Sequence[Committable],
    ) -> TransactionRecord:
        """The record with the new branches in the place of the lost ones."""
        gone = {c.branch_id.name for c in lost}
        shares = {}
        for name, wanted in self.partitions.items():
            old, new = record.shares[name], written[name]
            kept = () if wanted is None else (p for p in old.parts if p.partition not in wanted)
            shares[name] = replace(
                old,
                parts=(*kept, *new.parts),
                committables=(
                    *(c for c in old.committables if c.branch_id.name not in gone),
                    *new.committables,
                ),
            )
        return record.amended(shares, lost)

    def __str__(self) -> str:
        parts = (
            f"{name!r} {'whole' if wanted is None else f'partitions {sorted(wanted)}'}"
            for name, wanted in self.partitions.items()
        )
        return f"pass {self.write_pass} into {', '.join(parts)}"


def _of(parts: Sequence[Part], partition: int) -> list[Part]:
    return [part for part in parts if part.partition == partition]


def replay_difference(record: TransactionRecord, sink: str, content: Fingerprint) -> str | None:
    """How a replay of a finished batch differs from what the sink got.

    Returns:
        None when it holds the same rows, or where that cannot be known: the sink was added since,
        or an older version has summed the content differently.
    """
    share = record.shares.get(sink)
    had = None if share is None else _sum(share.parts)
    if share is None or (had is not None and had.algorithm != content.algorithm):
        return None
    return _compare(had, content if content.rows else None)


def _difference(before: Sequence[Part], now: Sequence[Part]) -> str | None:
    return _compare(_sum(before), _sum(now))


def _compare(had: Fingerprint | None, has: Fingerprint | None) -> str | None:
    if had is None or has is None:
        return None if had == has else "one of the two has no rows"
    if had.algorithm != has.algorithm:
        return f"its content was summed with {had.algorithm}, which this version does not know"
    if has.algorithm == COUNT_ONLY:
        return f"{_NOT_HASHED} (it had {had.rows}, and the replay has {has.rows})"
    if had.rows != has.rows:
        return f"it had {counted(had.rows, 'row')}, and the replay has {has.rows}"
    return None if had == has else f"the replay has other values in its {counted(had.rows, 'row')}"


def _sum(parts: Sequence[Part]) -> Fingerprint | None:
    total: Fingerprint | None = None
    for part in parts:
        total = part.content if total is None else total + part.content
    return total


def cannot_redo(record: TransactionRecord, lost: Lost, why: str) -> PreparedBranchLostError:
    """The error for decided branches that cannot be rewritten, with what an operator must know."""
    committable, error = lost[0]
    rows = {
        part.branch: part.content.rows for share in record.shares.values() for part in share.parts
    }
    branches = ", ".join(
        f"{c.branch_id} ({rows.get(c.branch_id.name, record.shares[c.branch_id.sink].rows)} rows)"
        for c, _ in lost
    )
    cannot = PreparedBranchLostError(
        f"{record.id} is decided and {len(lost)} of its branches are lost: {branches}. They cannot "
        f"be rewritten: {why}. The first one is lost because: {error}. No later batch is written "
        "before this is resolved: restore the branch; or rule that its rows are entered manually "
        f"or abandoned, with {settle_command(committable.branch_id, 'committed|aborted')} "
        "(docs/howto/in-doubt.md, "
        "Settle a branch), and enter them after that.",
        committable.branch_id,
    )
    cannot.__cause__ = error
    return cannot
