"""What an operator says of a branch that nobody can prove anything of: the one thing above proof.

    DECIDED ──settle──► DECIDED, with a settlement ──the next start──► SETTLED

A settlement stays in its record for ever, and a batch that has one ends as SETTLED, not as
COMPLETE, so that no listing shows an operator's word as a proof.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any, Self

from sparkonce.model import JsonValue


class Ruling(StrEnum):
    """What is to be taken for true of a branch."""

    COMMITTED = "committed"
    """Its rows are in the target; nobody commits it any more."""
    ABORTED = "aborted"
    """Its rows are given up in this sink: it is never committed, and what stands is ended."""
    REDO = "redo"
    """Its rows are not in the target: unless its commit is proven after all, it is ended, and
    Spark's replay of the batch writes it again."""


@dataclass(frozen=True, slots=True)
class Settlement:
    """One ruling.

    Attributes:
        branch: the full branch id.
        ruling: what holds from now on.
        who: user and host.
        why: the operator's reason.
        at: Unix time in seconds.
        token: the fencing token that was taken for it.
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
