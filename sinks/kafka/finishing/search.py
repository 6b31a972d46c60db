"""Lists the open transactions of an owner; the coordinator decides which of them are orphans."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from kafka import errors

from sparkonce.errors import SinkError
from sparkonce.model import BranchId, Committable, Owner
from sparkonce.sinks.kafka.connecting.connection import Patience
from sparkonce.sinks.kafka.finishing.finisher import Finisher


def find_branches(
    finisher: Finisher, owner: Owner, where: str, patience_s: float
) -> Iterator[Committable]:
    """See `KafkaSink.find_branches`. All questions together are repeated for `patience_s`."""
    patience, failures = Patience(patience_s), list[errors.KafkaError]()
    names: set[str] = set()
    try:
        patience(lambda: _list_into(names, finisher, owner))
    except errors.KafkaError as error:
        failures.append(error)
    for name in sorted(names):
        try:
            found = patience(partial(_find, finisher, name, owner))
        except errors.KafkaError as error:
            failures.append(error)
            continue
        if found is not None:
            yield found
    if failures:
        finisher.close()
        raise SinkError(
            f"{where}: open transactions cannot be listed completely: {failures[0]}"
        ) from failures[0]


def _list_into(names: set[str], finisher: Finisher, owner: Owner) -> None:
    """Ask every broker for the open transactions that it coordinates, even if one fails.

    By the next attempt that one may have left the cluster, and others coordinate its transactions.
    """
    failure: errors.KafkaError | None = None
    for node in finisher.nodes():
        try:
            names.update(finisher.ongoing(owner.prefix, node))
        except errors.KafkaError as error:
            failure = error
    if failure is not None:
        raise failure


def _find(finisher: Finisher, transactional_id: str, owner: Owner) -> Committable | None:
    branch_id = BranchId.from_name(transactional_id)
    if branch_id is None or branch_id.owner != owner:
        return None
    state = finisher.describe([transactional_id]).get(transactional_id)
    if state is None or state.state != "Ongoing":
        return None
    return state.branch(transactional_id, finisher.cluster_id()).committable(branch_id)
