"""The log under test of `LogContract`, and the faults that a backend's tests define."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import ClassVar

import pytest

from sparkonce.testing.log_process import LogProcess
from sparkonce.txn_log import TransactionLog, open_log


class LogUnderTest:
    """The base of every part of `LogContract`; see there."""

    secrets: ClassVar[Sequence[str]] = ()
    long_history: ClassVar[int] = 10_000

    @staticmethod
    def open_log(address: str) -> TransactionLog:
        """Open the log. It must wait less than a second for others, such as for a lock."""
        return open_log(address)

    def damage(self, address: str, old: str, new: str) -> None:
        """Replace `old` by `new` in everything stored at `address`."""
        raise NotImplementedError

    def losing_the_answer(self, address: str) -> AbstractContextManager[TransactionLog]:
        """A log whose first write succeeds, but whose answer is lost."""
        raise NotImplementedError

    def out_of_reach(self, address: str) -> AbstractContextManager[None]:
        """A context in which the log at `address` is unreachable."""
        raise NotImplementedError

    def remove(self, address: str) -> None:
        """Delete everything stored at `address`, as an operator may do by mistake."""
        raise NotImplementedError

    def stored_bytes(self, address: str) -> int:
        """The number of bytes that the log takes at `address`."""
        raise NotImplementedError

    @pytest.fixture
    def log(self, address: str) -> Iterator[TransactionLog]:
        log = self.open_log(address)
        yield log
        log.close()

    @pytest.fixture
    def other(self, address: str) -> Iterator[TransactionLog]:
        """The same log, opened by another driver."""
        log = self.open_log(address)
        yield log
        log.close()

    def start(self, address: str, program: Callable[..., None], *arguments: object) -> LogProcess:
        """Start a program of `log_process` in another process."""
        return LogProcess(self.open_log, address, program, *arguments)
