"""Failing twins of the contract's tests with late requests: each sink makes one mistake.

The sinks ask a server before they act, and a proxy can hold this request back.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.request import urlopen

import pytest
from examples.http_sink import HttpSink, serve

from sparkonce.model import BranchId, Committable, Owner
from sparkonce.sinks import FileSink
from sparkonce.sinks.file import FileHandle
from sparkonce.testing import Proxy, SinkContract, SinkWorld
from sparkonce.testing.sink_late import LATE, SinkLate
from sparkonce.testing.sink_world import Stage
from tests.support.sink_worlds import caught, file_world, http_world

if TYPE_CHECKING:
    import pyarrow as pa

TIMEOUT_S = 30


class Asks(FileSink):
    """Asks a server before it acts."""

    def __init__(self, folder: Path, address: str) -> None:
        super().__init__(folder)
        self._address = address

    def ask(self) -> None:
        with urlopen(f"http://{self._address}/rows", timeout=TIMEOUT_S):
            pass

    def beginTransaction(self, branch_id: BranchId) -> FileHandle:
        self.ask()
        return super().beginTransaction(branch_id)

    def abort(self, branch: BranchId | Committable) -> None:
        self.ask()
        super().abort(branch)


class AbortsByName(Asks):
    """Aborts what has the branch's name, whatever its batch."""

    def abort(self, branch: BranchId | Committable) -> None:
        branch_id = branch.branch_id if isinstance(branch, Committable) else branch
        self.ask()
        for path in self._hidden.glob(f"{branch_id.name}*"):
            path.unlink(missing_ok=True)


class SweepsOnce(Asks):
    """Takes one look after the start for enough."""

    def __init__(self, folder: Path, address: str) -> None:
        super().__init__(folder, address)
        self._has_looked = False

    def find_branches(self, owner: Owner) -> Iterable[Committable]:
        found = () if self._has_looked else super().find_branches(owner)
        self._has_looked = True
        return found


@contextmanager
def asking(folder: Path, sink: Callable[[Path, str], Asks]) -> Iterator[SinkWorld]:
    with serve() as api, Proxy(api.server_port) as proxy:
        yield replace(file_world(folder), sink=lambda: sink(folder, proxy.address), proxy=proxy)
        api.shutdown()


def test_late_abort_ends_a_branch_of_the_same_name(tmp_path: Path) -> None:
    def late(contract: SinkContract, stage: Stage) -> None:
        contract.test_request_of_abort_is_late(stage)

    with asking(tmp_path, AbortsByName) as world:
        caught(world, late, says="is gone")


def test_late_task_is_left(tmp_path: Path) -> None:
    def late(contract: SinkContract, stage: Stage) -> None:
        contract.test_request_of_a_task_is_late(stage)

    with asking(tmp_path, SweepsOnce) as world:
        caught(world, late, says="still open")


@pytest.mark.parametrize(
    "test", [SinkLate.test_request_of_abort_is_late, SinkLate.test_request_of_a_task_is_late]
)
def test_sink_that_asks_first_is_right(
    tmp_path: Path, test: Callable[[SinkLate, Stage], None]
) -> None:
    with asking(tmp_path, Asks) as world, closing(Stage(world)) as stage:
        test(SinkContract(), stage)


class AsksBeforeItPuts(HttpSink):
    """Asks for the key, and sends the rows without one: the answer may be old."""

    def put(self, branch_id: BranchId, rows: Iterator[pa.RecordBatch]) -> None:
        if not self.has(branch_id):
            super().put(f"{branch_id}{uuid.uuid4()}", rows)  # type: ignore[arg-type]
            super().put(branch_id, iter(()))


@pytest.mark.parametrize("kind", LATE)
def test_question_is_older_than_the_act(tmp_path: Path, kind: str) -> None:
    """Another driver commits between the answer and the rows, which come twice."""

    def late(contract: SinkContract, stage: Stage) -> None:
        contract.test_request_of_commit_is_late(stage, kind)  # type: ignore[arg-type]

    with http_world(tmp_path, AsksBeforeItPuts) as world:
        caught(world, late, says=f"during a {' '.join(kind.split()[::-1])}")
