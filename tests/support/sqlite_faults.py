"""SQLite connections that fail."""

from __future__ import annotations

import sqlite3
from typing import Any


class FailingCommit:
    """A connection whose first COMMIT lands and is answered with an error."""

    def __init__(self, real: sqlite3.Connection) -> None:
        self._real = real

    def execute(self, statement: str, *values: Any) -> sqlite3.Cursor:
        done = self._real.execute(statement, *values)
        if statement == "COMMIT":
            raise sqlite3.OperationalError("disk I/O error")
        return done

    def close(self) -> None:
        self._real.close()
