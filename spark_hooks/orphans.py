"""Which of the branches that stand in our name belong to nobody any more."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

from sparkonce.model import Committable, Owner
from sparkonce.sinks import verbs
from sparkonce.sinks.base import AnySink
from sparkonce.txn_log.record import TransactionRecord


def named_by(unfinished: Iterable[TransactionRecord]) -> set[str]:
    """Names that no sweep may touch, those of a task's part among them."""
    return {name for record in unfinished for name in record.branch_names()}


def find_orphans(
    sink: AnySink,
    owners: Iterable[Owner],
    *,
    token: int,
    named: Collection[str],
    others: Collection[str],
    failures: list[Exception],
) -> Iterator[Committable]:
    """Branches in the sink that no unfinished record names.

    What an incarnation with this very token is writing right now is among them: whoever aborts
    them has to hold the token, and to have no batch in the making.

    Args:
        sink: where to look.
        owners: this query, and those that had the pipeline's name before.
        token: branches of a higher one are left out.
        named: see `named_by`; read after the token was taken.
        others: names of the pipeline's sinks; a branch of another one of them is left to it.
        failures: gets what could not be listed; it keeps no other owner's branches back.
    """
    for owner in owners:
        for found in _found(sink, owner, failures):
            branch_id = found.branch_id
            of_other_sink = branch_id.sink != sink.name and branch_id.sink in others
            if of_other_sink or branch_id.token > token or branch_id.name in named:
                continue
            yield found


def _found(sink: AnySink, owner: Owner, failures: list[Exception]) -> Iterator[Committable]:
    try:
        yield from verbs.find_branches(sink, owner)
    except Exception as error:  # noqa: BLE001 - the caller says it
        failures.append(error)
