"""What a savepoint says of itself: ROOT/NAME.json, sealed like a record of the log."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, Self

from sparkonce.errors import LogCorruptError, SavepointError
from sparkonce.txn_log.record import Head, TransactionRecord
from sparkonce.txn_log.sealing import seal, unseal

FORMAT: Final = 1


class Stored(NamedTuple):
    """A file of a savepoint: its size in bytes, and the SHA-256 of its content."""

    size: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """One savepoint.

    Attributes:
        name: of the savepoint.
        made_at: Unix time in seconds.
        head: what the log knew of the pipeline: name, query id, token, sinks, checkpoint.
        record: of the batch, complete or settled.
        log_id: of the log in which the pipeline began.
        log: its address, without secrets.
        spark: the version of PySpark that was there.
        sparkonce: the version that made it.
        settings: Spark's settings that the checkpoint pins.
        files: of the checkpoint, by name.
    """

    name: str
    made_at: float
    head: Head
    record: TransactionRecord
    log_id: str
    log: str
    spark: str
    sparkonce: str
    settings: Mapping[str, str]
    files: Mapping[str, Stored]

    @property
    def batch(self) -> int:
        """The last batch that it holds."""
        return self.record.id.batch_id

    @property
    def bytes(self) -> int:
        """Of all files together."""
        return sum(file.size for file in self.files.values())

    def encode(self) -> str:
        body = {
            "name": self.name,
            "made_at": self.made_at,
            "head": self.head.to_json(),
            "record": self.record.to_json(),
            "log_id": self.log_id,
            "log": self.log,
            "spark": self.spark,
            "sparkonce": self.sparkonce,
            "settings": dict(self.settings),
            "files": {name: list(file) for name, file in sorted(self.files.items())},
        }
        return seal(body, FORMAT)

    @classmethod
    def decode(cls, text: str, where: str) -> Self:
        """Decode what `encode` wrote.

        Raises:
            SavepointError: it is damaged, or its format is newer.
        """
        try:
            body: dict[str, Any] = unseal(
                text, where, readable={FORMAT}, fix="take another savepoint"
            )
        except LogCorruptError as error:
            raise SavepointError(str(error)) from error
        return cls(
            name=body["name"],
            made_at=body["made_at"],
            head=Head.from_json(body["head"]),
            record=TransactionRecord.from_json(body["record"]),
            log_id=body["log_id"],
            log=body["log"],
            spark=body["spark"],
            sparkonce=body["sparkonce"],
            settings=body["settings"],
            files={name: Stored(*file) for name, file in body["files"].items()},
        )
