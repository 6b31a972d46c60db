"""What a coordinator's state means for a branch: pure functions.

held by its own producer id and epoch, "Ongoing"    ──► open
the next epoch, "CompleteCommit" or "CompleteAbort" ──► ended by an EndTxn that fences
the next epoch, "Empty"                             ──► ended, then fenced by initialising its id
an earlier epoch, or its own, "Empty"               ──► a broker that has not seen the branch
"""

from __future__ import annotations

import time
from collections.abc import Collection
from typing import Final

from sparkonce.sinks.kafka.branch import KafkaBranch
from sparkonce.sinks.kafka.finishing.questions import Partitions
from sparkonce.sinks.kafka.finishing.transactions import TransactionState

COMMITTED: Final = frozenset({"PrepareCommit", "CompleteCommit"})
ABORTED: Final = frozenset({"PrepareAbort", "CompleteAbort"})
_ENDING: Final = "PrepareAbort"
_FENCED: Final = "PrepareEpochFence"

BEHIND: Final = (
    "the broker that responds as its coordinator has not seen it, as after the coordinator moved"
)


def is_open(branch: KafkaBranch, state: TransactionState) -> bool:
    held = (state.producer_id, state.producer_epoch)
    return state.state == "Ongoing" and held == (branch.producer_id, branch.producer_epoch)


def is_ending(state: TransactionState | None) -> bool:
    return state is not None and state.state == _ENDING


def is_complete(branch: KafkaBranch, state: TransactionState, *, commit: bool) -> bool:
    """Whether the branch ended and its producer is fenced.

    Then any open transaction of its producer in a partition is the branch itself. An EndTxn that
    fences leaves CompleteCommit or CompleteAbort. If it does not fence, `Outcome` leaves Empty
    after a commit.
    """
    if commit and is_fenced(branch, state):
        return True
    held = (state.producer_id, state.producer_epoch)
    ours = (branch.producer_id, branch.producer_epoch + 1)
    return held == ours and state.state == ("CompleteCommit" if commit else "CompleteAbort")


def has_ended(branch: KafkaBranch, state: TransactionState, ends: Collection[str]) -> bool:
    """Whether the branch reached one of `ends`, whether or not that fenced it."""
    is_ours = state.producer_id == branch.producer_id and state.producer_epoch in {
        branch.producer_epoch,
        branch.producer_epoch + 1,
    }
    return state.state in ends and is_ours


def is_behind(branch: KafkaBranch, state: TransactionState) -> bool:
    """Whether the state is older than the branch: its present coordinator would not report it.

    Epochs only grow, and the branch's own epoch is empty only until its first partition is written.
    """
    if state.producer_id != branch.producer_id:
        return False
    is_empty = state.state == "Empty" and state.producer_epoch == branch.producer_epoch
    return is_empty or state.producer_epoch < branch.producer_epoch


def is_fenced(branch: KafkaBranch, state: TransactionState) -> bool:
    """Whether a process initialised the id again after the branch."""
    is_later = state.producer_epoch > branch.producer_epoch
    return state.state == "Empty" and state.producer_id == branch.producer_id and is_later


def may_be_fenced_by_us(branch: KafkaBranch, state: TransactionState) -> bool:
    """Whether this can be the state that our own fencing leaves after a commit."""
    return is_fenced(branch, state) and state.producer_epoch == branch.producer_epoch + 1


def story(branch: KafkaBranch, state: TransactionState | None) -> str:
    """What the coordinator's state shows about the end of a branch, for people."""
    if state is None:
        return "the brokers no longer know its transactional id"
    now = (
        f"{state.state} with producer id {state.producer_id}, epoch {state.producer_epoch}; ours "
        f"were {branch.producer_id}, {branch.producer_epoch}"
    )
    if is_behind(branch, state):
        return f"the brokers report {now}"
    if state.producer_id != branch.producer_id or state.state in {"Empty", "Ongoing"}:
        return f"another producer has taken its transactional id ({now})"
    if state.state in ABORTED or state.state == _FENCED:
        return f"{_why_ended(branch)} ({now})"
    return f"the brokers report {now}"


def _why_ended(branch: KafkaBranch) -> str:
    age_s, timeout_s = time.time() - branch.began_at, branch.timeout_ms / 1000
    if age_s < 0:
        return (
            "it timed out, or another process aborted it; which one is not known, since it began "
            f"{-age_s:.0f} s in the future by the driver's clock"
        )
    if age_s > timeout_s:
        return (
            f"it timed out: the broker aborts it after {timeout_s:g} s, and it began {age_s:.0f} s "
            "ago"
        )
    return "another process aborted it"


def torn_story(torn: Partitions) -> str:
    """Why a branch that is open in only some of its partitions was lost."""
    return (
        f"its rows in {dict(torn)} were gone before it was committed: aborted there manually "
        "(kafka-transactions.sh), or the topic was recreated, or it has lost its end"
    )
