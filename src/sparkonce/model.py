"""The values that cross processes and survive crashes.

    BranchId ──► Committable ──► (in a decision of the transaction log) ──► visible data

Everything here is frozen and has a versioned JSON encoding. Nothing here does I/O.

Names in external systems are built from a `BranchId` and from nothing else, each part with a
terminator, so that the prefix of one owner, token or sink is never the prefix of another one
(invariants I6 and I8 depend on that).
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Self, TypeAlias

JsonValue: TypeAlias = "str | int | float | bool | list[JsonValue] | dict[str, JsonValue] | None"
"""What JSON can hold."""

ATTEMPT_BOUND = 1 << 16
"""Task attempt ids are taken modulo this, so that the names of one incarnation are bounded."""

DRIVER_ATTEMPT = ATTEMPT_BOUND
"""The attempt number of a branch that the driver makes itself (`vote`)."""

MAX_BRANCH_ID = 131
"""The most characters of `str(branch_id)`, all ASCII: for a store with short names. It holds for a
query id of Spark, tokens until 2056, 99 rewrites of a batch and 9,999,999,999 batches."""

_SMALL_BATCHES = 1 << 14
"""Attempt numbers of small batches repeat after this many batches."""


def attempt_of_small_batch(batch_id: int) -> int:
    """The attempt number for rows that the driver writes: neither a task nor the vote has it."""
    return DRIVER_ATTEMPT + 1 + batch_id % _SMALL_BATCHES


_NUMBER = "(?:0|[1-9][0-9]{0,18})"
_NAME = re.compile(
    r"sparkonce\.(?P<log_id>[0-9a-f]{16})\.(?P<query_id>[0-9a-f-]{1,40})"
    rf"\.t(?P<token>{_NUMBER})\.(?P<sink>[A-Za-z0-9_-]{{1,32}})"
    rf"\.p(?P<write_pass>{_NUMBER})\.a(?P<attempt>{_NUMBER})\.(?:b(?P<batch_id>{_NUMBER})\.)?"
)
_LABEL = re.compile(r"[A-Za-z0-9_-]{1,32}")


def is_label(text: str) -> bool:
    """Whether `text` may name a pipeline or a sink: 1 to 32 of A-Z a-z 0-9 _ and -."""
    return _LABEL.fullmatch(text) is not None


@dataclass(frozen=True, slots=True)
class Owner:
    """One query under one transaction log, which owns names in the external systems."""

    log_id: str
    query_id: str

    @property
    def prefix(self) -> str:
        """The start of every branch name of this owner, and of no other."""
        return f"sparkonce.{self.log_id}.{self.query_id}."

    @property
    def digest(self) -> str:
        """Twelve hex digits that identify the owner where names must be short (S3, Postgres)."""
        return hashlib.sha256(self.prefix.encode()).hexdigest()[:12]


@dataclass(frozen=True, slots=True)
class TransactionId:
    """One micro-batch of one query, over all of its sinks."""

    pipeline: str
    query_id: str
    batch_id: int

    def __str__(self) -> str:
        return f"batch {self.batch_id} of pipeline {self.pipeline!r} (query {self.query_id})"


@dataclass(frozen=True, slots=True)
class BranchId:
    """The share of one sink and one Spark task attempt in a transaction.

    Attributes:
        owner: log and query.
        batch_id: the micro-batch; None only in a branch that was found in an external system
            whose names do not carry it (Kafka).
        token: fencing token of the incarnation that made the branch.
        sink: name of the sink.
        write_pass: 0 for the batch's own write, higher for each rewrite of lost branches.
        attempt: Spark's task attempt id modulo `ATTEMPT_BOUND`, `DRIVER_ATTEMPT`, or that of
            `attempt_of_small_batch`.
    """

    owner: Owner
    batch_id: int | None
    token: int
    sink: str
    write_pass: int
    attempt: int

    @property
    def name(self) -> str:
        """The branch's name without the batch: a later batch of the incarnation may have it again.

        So it may name what ends with the branch, but is no proof of a commit.
        """
        return f"{self.owner.prefix}t{self.token}.{self.sink}.p{self.write_pass}.a{self.attempt}."

    def __str__(self) -> str:
        """The full branch id: `name` and the batch. Unique for ever."""
        return f"{self.name}b{self.batch_id}."

    @property
    def short(self) -> str:
        """The branch within its log and query, as operators read and type it."""
        return f"t{self.token}.{self.sink}.p{self.write_pass}.a{self.attempt}"

    @classmethod
    def from_name(cls, name: str) -> BranchId | None:
        """Read `name`, or the full id, back; None when it is not a name of ours."""
        match = _NAME.fullmatch(name)
        if match is None:
            return None
        batch_id = match["batch_id"]
        return cls(
            Owner(match["log_id"], match["query_id"]),
            None if batch_id is None else int(batch_id),
            int(match["token"]),
            match["sink"],
            int(match["write_pass"]),
            int(match["attempt"]),
        )

    def to_json(self) -> dict[str, JsonValue]:
        return asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        return cls(**{**value, "owner": Owner(**value["owner"])})


@dataclass(frozen=True, slots=True)
class Committable:
    """All that any process needs to commit, or to abort, one prepared branch.

    Attributes:
        branch_id: the branch.
        payload: what the sink put in; JSON values only, and never a secret: it is stored in the
            transaction log and shown to operators.
        version: of the payload, chosen by the sink, so that a newer library reads older ones.
        safe_until: Unix time in seconds until which the external system promises to keep the
            prepared branch, less the sink's own safety margin; None when it keeps the branch
            until that is committed or aborted. A batch's first record is refused after it.
        text: for people, one line: the objects, tables or transactions that make up the branch.
        rows: how many rows the target has of the branch, if the sink counts them: a task fails if
            it wrote another number. Not stored.
    """

    branch_id: BranchId
    payload: Mapping[str, JsonValue] = field(default_factory=dict)
    version: int = 1
    safe_until: float | None = None
    text: str = field(default="", compare=False)
    rows: int | None = field(default=None, compare=False)

    def to_json(self) -> dict[str, JsonValue]:
        text: dict[str, JsonValue] = {"text": self.text} if self.text else {}
        return {
            "branch_id": self.branch_id.to_json(),
            "payload": dict(self.payload),
            "version": self.version,
            "safe_until": self.safe_until,
            **text,
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        known = {f.name for f in fields(cls)}
        values = {key: item for key, item in value.items() if key in known}
        return cls(**{**values, "branch_id": BranchId.from_json(value["branch_id"])})


@dataclass(frozen=True, slots=True)
class CommittedBatch:
    """One sink's share of a transaction whose branches are all committed.

    Attributes:
        pipeline: the pipeline's permanent name.
        owner: log and query.
        batch_id: the micro-batch.
        revision: how often the decision was amended; the highest one holds.
        offsets: source offsets of the batch, as Spark's checkpoint shows them, one per use of a
            source.
        committables: the committed branches of this sink; none when the batch had no rows for it.
    """

    pipeline: str
    owner: Owner
    batch_id: int
    revision: int
    offsets: tuple[str, ...]
    committables: tuple[Committable, ...]
