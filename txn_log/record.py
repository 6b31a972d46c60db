"""What the transaction log stores: heads of pipelines, and records of batches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from enum import StrEnum
from typing import Any, Final, Self

from sparkonce.errors import LogCorruptError
from sparkonce.model import Committable, JsonValue, Owner, TransactionId
from sparkonce.txn_log.sealing import seal, unseal
from sparkonce.txn_log.settlement import Ruling, Settlement


class State(StrEnum):
    """The progress of a transaction."""

    PREPARED = "prepared"
    """Every branch is prepared; Spark's checkpoint will show whether the batch commits."""
    ABANDONED = "abandoned"
    """Spark's checkpoint has not reached the prepared batch. The branches are aborted, and Spark
    may run the batch again."""
    DECIDED = "decided"
    """Every branch is prepared, and will be committed whatever happens."""
    COMPLETE = "complete"
    """Every branch is known to be committed."""
    SETTLED = "settled"
    """Finished, and for at least one branch an operator's ruling replaces the proof. Such a record
    is never forgotten."""

    @property
    def is_unfinished(self) -> bool:
        """Whether some branches of the record may still have to be committed."""
        return self in {State.PREPARED, State.DECIDED}

    @property
    def is_finished(self) -> bool:
        """Whether every branch is committed, or ruled on by an operator."""
        return self in {State.COMPLETE, State.SETTLED}


COUNT_ONLY: Final = "rows"  # the algorithm of a fingerprint without hashes


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """The content of a set of rows, in any order; duplicate rows count each time they occur.

    Attributes:
        algorithm: how `value` was computed; only fingerprints of one algorithm are comparable.
        rows: number of rows.
        value: sum of the rows' hashes modulo 2^64.
    """

    algorithm: str
    rows: int
    value: int

    @classmethod
    def counted(cls, rows: int) -> Self:
        """Of rows that have no hashes: it shows how many there are, and proves nothing else."""
        return cls(COUNT_ONLY, rows, 0)

    def __add__(self, other: Fingerprint) -> Fingerprint:
        """The fingerprint of both sets of rows together.

        Raises:
            ValueError: the algorithms differ.
        """
        if self.algorithm != other.algorithm:
            raise ValueError(f"{self.algorithm} and {other.algorithm} fingerprints do not add up")
        return Fingerprint(
            self.algorithm, self.rows + other.rows, (self.value + other.value) % 2**64
        )

    def to_json(self) -> dict[str, JsonValue]:
        # Hexadecimal, because most JSON parsers round integers above 2^53.
        return {"algorithm": self.algorithm, "rows": self.rows, "value": f"{self.value:016x}"}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        return cls(value["algorithm"], value["rows"], int(value["value"], 16))


@dataclass(frozen=True, slots=True)
class Part:
    """What one Spark task wrote into one sink.

    Attributes:
        partition: Spark's partition id.
        branch: name of the task's branch.
        bytes: size of the rows in Arrow memory, in bytes.
        content: fingerprint of the rows that this sink received.
    """

    partition: int
    branch: str
    bytes: int
    content: Fingerprint

    def to_json(self) -> dict[str, JsonValue]:
        return {
            "partition": self.partition,
            "branch": self.branch,
            "bytes": self.bytes,
            "content": self.content.to_json(),
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        content = Fingerprint.from_json(value["content"])
        return cls(value["partition"], value["branch"], value["bytes"], content)


@dataclass(frozen=True, slots=True)
class Share:
    """One sink's share of a transaction.

    Attributes:
        target: where the rows go, as the sink describes it.
        parts: what each task wrote; a task without rows has none.
        committables: the prepared branches.
    """

    target: str
    parts: tuple[Part, ...] = ()
    committables: tuple[Committable, ...] = ()

    @property
    def rows(self) -> int:
        """Number of rows written."""
        return sum(part.content.rows for part in self.parts)

    def rows_of(self, committable: Committable) -> int:
        """Rows of the branch; the driver's own branch has those of all tasks."""
        by_task = {part.branch: part.content.rows for part in self.parts}
        return by_task.get(committable.branch_id.name, self.rows)

    @property
    def bytes(self) -> int:
        """Size of those rows in Arrow memory, in bytes."""
        return sum(part.bytes for part in self.parts)

    def to_json(self) -> dict[str, JsonValue]:
        return {
            "target": self.target,
            "parts": [part.to_json() for part in self.parts],
            "committables": [c.to_json() for c in self.committables],
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        return cls(
            value["target"],
            tuple(Part.from_json(part) for part in value["parts"]),
            tuple(Committable.from_json(c) for c in value["committables"]),
        )


@dataclass(frozen=True, slots=True)
class TransactionRecord:
    """The decision on one micro-batch, and its progress.

    Attributes:
        id: of the batch.
        token: of the incarnation that prepared it.
        state: see `State`.
        offsets: source offsets of the batch, as Spark's checkpoint shows them, one per source.
        shares: by sink name.
        times: Unix time in seconds at which each state was reached.
        revision: number of amendments of the decision.
        lost: branches that were lost after the decision, and rewritten.
        settled: operators' rulings on branches, oldest first.
    """

    id: TransactionId
    token: int
    state: State
    offsets: tuple[str, ...]
    shares: Mapping[str, Share]
    times: Mapping[State, float] = field(default_factory=dict)
    revision: int = 0
    lost: tuple[Committable, ...] = ()
    settled: tuple[Settlement, ...] = ()

    def committables(self) -> Iterator[Committable]:
        """Every branch of every sink."""
        for share in self.shares.values():
            yield from share.committables

    def branch_names(self) -> Iterator[str]:
        """Names of all branches that the record needs: those to commit, and the tasks' branches."""
        for share in self.shares.values():
            yield from (committable.branch_id.name for committable in share.committables)
            yield from (part.branch for part in share.parts)

    def ruling(self, committable: Committable) -> Ruling | None:
        """The last ruling on the branch; None if there is none."""
        full = str(committable.branch_id)
        return next((s.ruling for s in reversed(self.settled) if s.branch == full), None)

    def is_ruled_out(self, committable: Committable) -> bool:
        """Whether the last ruling says that no driver commits the branch again."""
        return self.ruling(committable) in {Ruling.COMMITTED, Ruling.ABORTED}

    def moved(self, state: State, at: float) -> TransactionRecord:
        """This record in another state, reached at `at`."""
        return replace(self, state=state, times={**self.times, state: at})

    def amended(
        self, shares: Mapping[str, Share], lost: Iterable[Committable]
    ) -> TransactionRecord:
        """This record with new shares in place of those that held the branches in `lost`."""
        return replace(
            self,
            shares={**self.shares, **shares},
            revision=self.revision + 1,
            lost=(*self.lost, *lost),
        )

    def encode(self) -> str:
        return seal(self.to_json())

    def to_json(self) -> dict[str, JsonValue]:
        return {
            "id": asdict(self.id),
            "token": self.token,
            "state": self.state.value,
            "offsets": list(self.offsets),
            "shares": {name: share.to_json() for name, share in self.shares.items()},
            "times": {state.value: at for state, at in self.times.items()},
            "revision": self.revision,
            "lost": [c.to_json() for c in self.lost],
            "settled": [settlement.to_json() for settlement in self.settled],
        }

    @classmethod
    def decode(cls, text: str, where: str) -> Self:
        return cls.from_json(unseal(text, where))

    @classmethod
    def of_row(cls, tid: TransactionId, state: str, text: str, address: str) -> Self:
        """Decode a database row, whose columns must agree with the record."""
        record = cls.decode(text, f"the record of {tid} in {address}")
        if (record.id, record.state.value) != (tid, state):
            raise LogCorruptError(
                f"the row of {tid}, {state}, in {address} holds the record of {record.id}, "
                f"{record.state.value}; restore the transaction log from a copy"
            )
        return record

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> Self:
        return cls(
            id=TransactionId(**body["id"]),
            token=body["token"],
            state=State(body["state"]),
            offsets=tuple(body["offsets"]),
            shares={name: Share.from_json(share) for name, share in body["shares"].items()},
            times={State(state): at for state, at in body["times"].items()},
            revision=body["revision"],
            lost=tuple(Committable.from_json(c) for c in body["lost"]),
            settled=tuple(map(Settlement.from_json, body.get("settled", ()))),
        )


OPERATOR: Final = "operator "
"""What the run id of an operator's command begins with; that of Spark is a UUID."""


@dataclass(frozen=True, slots=True)
class Head:
    """What the log knows about a pipeline as a whole.

    Attributes:
        pipeline: the pipeline's permanent name.
        query_id: the Spark checkpoint that the name is bound to.
        token: the highest fencing token; every write is conditional on it.
        run_id: Spark's id of the run that holds the token.
        driver: host and process of that run, for messages.
        started_at: Unix time in seconds when the token was taken.
        first_batch: the first batch that this log must know; 0 unless a checkpoint was adopted.
        sinks: targets of all sinks that the pipeline ever had, by name.
        retired: ids of the queries that had the pipeline before (``replaces=``).
        log_id: id of the log in which the pipeline began, if the pipeline was moved here; its
            branches carry that id in their names.
        moved_to: address of the log that the pipeline was moved to; this log takes no more writes.
        checkpoint: location of the query's checkpoint at the last run; empty if it is not known.
            A log inside the checkpoint refuses a start from any other location.
        rewound: by the id of a retired query, its last batch that still counts: there are no later
            ones (`savepoint restore`), or they were taken out of the sinks (`savepoint rewind`), or
            are being so.
        rewinding_to: name of the savepoint that a rewind goes back to, until every sink has given
            the later rows back; empty otherwise.
        starts: how often a driver or a command has taken a token since one of them completed a
            batch; at least 1, for this one.
    """

    pipeline: str
    query_id: str
    token: int
    run_id: str
    driver: str
    started_at: float
    first_batch: int = 0
    sinks: Mapping[str, str] = field(default_factory=dict)
    retired: tuple[str, ...] = ()
    log_id: str | None = None
    moved_to: str | None = None
    checkpoint: str = ""
    rewound: Mapping[str, int] = field(default_factory=dict)
    rewinding_to: str = ""
    starts: int = 1

    def is_rewound(self, batch: TransactionId) -> bool:
        """Whether a rewind has taken the batch out of the sinks, or is doing so."""
        return batch.batch_id > self.rewound.get(batch.query_id, batch.batch_id)

    def counts(self, batch: TransactionId) -> bool:
        """Whether the present query goes on from this batch, of its own or from a savepoint."""
        is_before = batch.query_id in self.rewound and not self.is_rewound(batch)
        return batch.query_id == self.query_id or is_before

    def state_of(self, record: TransactionRecord) -> str:
        """The record's state, for people: "rewound" where a rewind has taken the batch out."""
        return "rewound" if self.is_rewound(record.id) else record.state.value

    @property
    def is_of_operator(self) -> bool:
        """Whether a command of an operator's took the token; the driver before it is fenced."""
        return self.run_id.startswith(OPERATOR)

    def encode(self) -> str:
        return seal(self.to_json())

    def to_json(self) -> dict[str, JsonValue]:
        body = {**asdict(self), "retired": list(self.retired)}
        # Older versions can read a head without these.
        for name, usual in (("rewound", {}), ("rewinding_to", ""), ("starts", 1)):
            if body[name] == usual:
                del body[name]
        return body

    @classmethod
    def decode(cls, text: str, where: str) -> Self:
        return cls.from_json(unseal(text, where))

    @classmethod
    def of_row(cls, pipeline: str, token: int, text: str, address: str) -> Self:
        """Decode a database row, whose columns must agree with the head."""
        where = f"the head of pipeline {pipeline!r} in {address}"
        head = cls.decode(text, where)
        if (head.pipeline, head.token) != (pipeline, token):
            raise LogCorruptError(
                f"{where} has token {token} in its row, but token {head.token} of "
                f"{head.pipeline!r} in its body; restore the transaction log from a copy"
            )
        return head

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> Self:
        """Decode the body of a head.

        Raises:
            LogCorruptError: a newer version has written it.
        """
        if unknown := body.keys() - {each.name for each in fields(cls)}:
            raise LogCorruptError(
                f"the head of pipeline {body['pipeline']!r} has fields that this sparkonce does "
                f"not know ({', '.join(sorted(unknown))}): use a newer one"
            )
        return cls(**{**body, "retired": tuple(body["retired"])})


@dataclass(frozen=True, slots=True)
class Incarnation:
    """What one `begin` gives a driver: the token that lets it write, and the names that it uses.

    Attributes:
        pipeline: its name.
        owner: log id and query id, with which the names of its branches begin.
        token: the fencing token.
        retired: owners of the queries that had the pipeline before.
        fenced_run: the run whose token this one replaced; None for a new pipeline.
    """

    pipeline: str
    owner: Owner
    token: int
    retired: tuple[Owner, ...] = ()
    fenced_run: str | None = None

    def transaction_id(self, batch_id: int) -> TransactionId:
        return TransactionId(self.pipeline, self.owner.query_id, batch_id)
