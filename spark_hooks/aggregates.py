"""Notices a query whose aggregates are not those that made the state in its checkpoint.

    CHECKPOINT/sparkonce-aggregates.json    [["sum(bigint)", "count(int)"]]

Spark keeps bare values for an aggregate and compares only their types. A query that is restarted
with `max` instead of `sum` continues from the sums, without an error and with wrong results. So
the first batch of each run compares the functions and the types of their arguments, for each
aggregation of the query. Arguments may be renamed or computed differently.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Sequence
from typing import Any, Final

from sparkonce.errors import ConfigurationError
from sparkonce.spark_hooks.checkpoint import CheckpointFiles
from sparkonce.txn_log.refusals import CHANGED_STATE

logger = logging.getLogger("sparkonce")

AGGREGATES: Final = "sparkonce-aggregates.json"

_SAVES: Final = frozenset({"StateStoreSave", "SessionWindowStateStoreSave"})
"""The physical operators that write the state of an aggregation."""
_MERGES: Final = frozenset(
    {"HashAggregate", "ObjectHashAggregate", "SortAggregate", "MergingSessions"}
)
"""Those below them that merge a batch's rows into it. Spark may put a sort or generated code
between."""


def check_aggregates(checkpoint: CheckpointFiles, plan: Any, adopt: Sequence[str]) -> None:
    """Compare the query's aggregates with those of its checkpoint, and keep them there.

    Args:
        checkpoint: of the query.
        plan: Spark's physical plan of the first batch of this run, in the JVM.
        adopt: see `sparkonce.ExactlyOnce`.

    Raises:
        ConfigurationError: they differ, and the user has not adopted the change.
        LogUnavailableError: the checkpoint cannot be used now.
    """
    mine = json.dumps(aggregates_of(plan))
    folder = checkpoint.folder
    made_by = folder.read(AGGREGATES)
    if made_by == mine or (made_by is None and mine == "[]"):
        return
    if made_by is not None:
        # Until a batch is committed, Spark computes the state from the beginning.
        if checkpoint.committed() != -1:
            if CHANGED_STATE not in adopt:
                raise _changed(checkpoint.location, made_by, mine)
            logger.warning(
                "the state in %s was made by %s and is continued by %s, as adopt= says",
                checkpoint.location,
                _shown(made_by),
                _shown(mine),
            )
        folder.delete(AGGREGATES)
    folder.create(AGGREGATES, mine)


def aggregates_of(plan: Any) -> list[list[str]]:
    """The aggregate functions of a physical plan in the JVM, for each aggregation with a state."""
    if "StateStoreSave" not in str(plan.toString()):
        return []
    return [
        [_signature(expression) for expression in _each(_merge_below(node).aggregateExpressions())]
        for node in _nodes(plan)
        if node.nodeName() in _SAVES
    ]


def _merge_below(save: Any) -> Any:
    return next(node for node in _nodes(save) if node.nodeName() in _MERGES)


def _signature(expression: Any) -> str:
    function = expression.aggregateFunction()
    types = ", ".join(argument.dataType().simpleString() for argument in _each(function.children()))
    return f"{function.prettyName()}({types})"


def _nodes(plan: Any) -> Iterator[Any]:
    yield plan
    for child in _each(plan.children()):
        yield from _nodes(child)


def _each(found: Any) -> Iterator[Any]:
    """The elements of a sequence of Scala."""
    elements = found.iterator()
    while elements.hasNext():
        yield elements.next()


def _changed(checkpoint: str, made_by: str, mine: str) -> ConfigurationError:
    return ConfigurationError(
        f"the state in {checkpoint} was made by {_shown(made_by)}, and the query computes "
        f"{_shown(mine)} now: Spark would continue from the old values without an error. Start "
        "with a new checkpoint; or, if the old values are right for the new query, pass "
        f'adopt="{CHANGED_STATE}" once'
    )


def _shown(aggregates: str) -> str:
    return "; ".join(", ".join(functions) for functions in json.loads(aggregates)) or "no aggregate"
