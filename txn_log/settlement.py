"""An operator's ruling on a branch whose outcome nobody can prove. A later proof overrides it.

    DECIDED ──settle──► DECIDED, with a settlement ──the next start──► SETTLED

The record keeps a settlement forever. A batch that has one ends as SETTLED instead of COMPLETE, so
no listing shows an operator's ruling as a proof.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any, Self

from sparkonce.model import JsonValue


class Ruling(StrEnum):
    """What holds for a branch from now on."""

    COMMITTED = "committed"
    """Its rows are in the target; no driver commits the branch again."""
    ABORTED = "aborted"
    """Its rows are abandoned in this sink: never committed, and ended if the branch exists."""
    REDO = "redo"
    """Its rows are not in the target. Unless its commit is proven after all, the branch is ended,
    and Spark's replay of the batch rewrites it."""


@dataclass(frozen=True, slots=True)
class Settlement:
    """One ruling.

    Attributes:
        branch: the full branch id.
        ruling: what holds from now on.
        who: the operator's user and host.
        why: the operator's reason.
        at: Unix time in seconds.
        token: the fencing token that the command took for this ruling.
    """

    branch: str
    ruling: Ruling
    who: str
    why: str
    at: float
    token: int

    def to_json(self) -> dict[str, JsonValue]:
        return asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        return cls(**{**value, "ruling": Ruling(value["ruling"])})
