"""The log that the tests of `LogContract` work on, and the faults that a backend can make."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import ClassVar

import pytest

from sparkonce.txn_log import TransactionLog, open_log


class LogUnderTest:
    """What `LogContract` inherits first; see there.

    Attributes:
        secrets: parts of the address that must be shown nowhere.
        long_history: batches of the long test.
    """

    secrets: ClassVar[Sequence[str]] = ()
    long_history: ClassVar[int] = 10_000

    @staticmethod
    def open_log(address: str) -> TransactionLog:
        """Open the log. One that waits for others, such as for a lock, gives up within a second."""
        return open_log(address)

    def damage(self, address: str, old: str, new: str) -> None:
        """Replace `old` by `new` in all that is stored."""
        raise NotImplementedError

    def losing_the_answer(self, address: str) -> AbstractContextManager[TransactionLog]:
        """A log that writes, and does not get the answer to its first write."""
        raise NotImplementedError

    def out_of_reach(self, address: str) -> AbstractContextManager[None]:
        """While it lasts, the log at `address` cannot be used."""
        raise NotImplementedError

    def stored_bytes(self, address: str) -> int:
        """How much the log takes at `address`."""
        raise NotImplementedError

    @pytest.fixture
    def log(self, address: str) -> Iterator[TransactionLog]:
        log = self.open_log(address)
        yield log
        log.close()

    @pytest.fixture
    def other(self, address: str) -> Iterator[TransactionLog]:
        """The same log as another driver has it open."""
        log = self.open_log(address)
        yield log
        log.close()

    def start(self, address: str, program: str, *arguments: object) -> subprocess.Popen[str]:
        """Run a program of `log_process` in a process of its own."""
        name = f"{type(self).__module__}:{type(self).__qualname__}"
        words = [name, address, program, *map(str, arguments)]
        return subprocess.Popen(
            [sys.executable, "-m", "sparkonce.testing.log_process", *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
