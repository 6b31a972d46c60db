"""What the demo passes to the program that it kills, in a file."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final, Self

PIPELINE: Final = "orders"


@dataclass(frozen=True, slots=True)
class Job:
    """Everything that the program needs to know."""

    writer: str
    lake: str
    rows: int
    rows_per_batch: int
    folder: str
    jars: tuple[str, ...]
    kafka: str
    source_topic: str
    topic: str
    postgres: str
    table: str
    s3_endpoint: str
    s3_access_key: str
    s3_secret_key: str
    s3_region: str
    bucket: str
    prefix: str

    @property
    def checkpoint(self) -> str:
        return f"{self.folder}/checkpoint"

    @property
    def log(self) -> str:
        return f"sqlite:///{self.folder}/transactions.db"

    @property
    def scratch(self) -> str:
        """For temporary files of Python, the JVM and Spark."""
        return f"{self.folder}/scratch"

    def save(self, path: Path) -> None:
        path.touch(mode=0o600)
        path.write_text(json.dumps(asdict(self)))

    @classmethod
    def load(cls, path: Path) -> Self:
        return cls(**json.loads(path.read_text()))
