"""Runs a sink's verbs in other processes, for `SinkContract`.

in_other_process      runs a verb, and kills the process at the end of the verb if asked to
task_around_another   pauses a task between its rows and preCommit while another task runs
lines_of_commit       lists the lines that a commit runs, each a place to kill or pause it
lines_of_precommit    the same for the preCommit of a task
precommit_around      pauses a task before a line of preCommit while another task runs
commit_after_another  pauses a commit before a line while another commit runs
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import signal
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self, TypeAlias

import psutil

from sparkonce.model import BranchId, Committable
from sparkonce.sinks import verbs
from sparkonce.sinks.base import AnySink
from sparkonce.testing.commit_lines import LineTrace
from sparkonce.testing.forking import start_process
from sparkonce.testing.sink_world import SinkWorld, Stage

if TYPE_CHECKING:
    import pyarrow as pa

PATIENCE_S = 120.0
"""How long the other process may take to reach its line, or its end."""

_POLL_S = 0.01

Verb: TypeAlias = Literal["write", "task", "commit", "abort", "names"]

_Order: TypeAlias = "tuple[AnySink, Verb, tuple[Any, ...], int | None, int | None]"
"""The sink, the verb and its arguments; the signal, if any, that the process sends itself; and the
number of the line of the sink's code before which it does so (None: at the end)."""


def in_other_process(
    sink: AnySink,
    verb: Verb,
    *args: Any,
    is_killed: bool = False,
    selected: Callable[[pa.RecordBatch], pa.RecordBatch] = lambda batch: batch,
) -> list[Committable]:
    """Run a verb in another process, which gets the pickled sink as an executor does.

    Args:
        sink: runs the verb.
        verb: "write" and "task" take a branch id and record batches, "commit" and "abort"
            committables.
        args: of the verb.
        is_killed: SIGKILL the process at the end, before it can free anything.
        selected: see `SinkWorld`.

    Returns:
        The committables that "task" prepared.

    Raises:
        AssertionError: the verb failed or did not end; the message has its last output.
    """
    if verb in {"write", "task"}:
        args = (args[0], *map(selected, args[1:]))
    with _Other((sink, verb, args, signal.SIGKILL if is_killed else None, None)) as other:
        report = other.report_at_end(-signal.SIGKILL if is_killed else 0)
    return [Committable.from_json(value) for value in report.get("prepared", ())]


def names_in_other_process(sink: AnySink) -> tuple[str, str]:
    """The sink's name and target, as another process sees them."""
    with _Other((sink, "names", (), None, None)) as other:
        name, target = other.report_at_end(0)["names"]
    return name, target


def lines_of_commit(
    sink: AnySink, committables: Sequence[Committable], *, killed_at: int | None = None
) -> list[int]:
    """List the lines of the sink's own code that a commit runs in a new process.

    Args:
        sink: commits there; the process gets it pickled and opens new connections.
        committables: the branches to commit.
        killed_at: SIGKILL the process before its nth line.

    Returns:
        For each line, in order, the number of its place (see `LineTrace`); an empty list if the
        process was killed.

    Raises:
        AssertionError: no line was seen, so no commit could be killed.
    """
    is_killed = None if killed_at is None else signal.SIGKILL
    with _Other((sink, "commit", tuple(committables), is_killed, killed_at)) as other:
        report = other.report_at_end(0, *([-signal.SIGKILL] if killed_at else ()))
    if not report:
        return []
    return _seen(sink, "commit", report["places"])


def lines_of_precommit(sink: AnySink, branch_id: BranchId, rows: pa.RecordBatch) -> list[int]:
    """List the lines of the sink's own code that preCommit runs; see `lines_of_commit`.

    It runs one task in another process, which leaves its branch prepared.
    """
    with _Other((sink, "task", (branch_id, rows), None, None)) as other:
        return _seen(sink, "preCommit", other.report_at_end(0)["places"])


def _seen(sink: AnySink, verb: str, places: list[int]) -> list[int]:
    """Return the places; without any, nothing would be proven."""
    kind = type(sink)
    assert places, (
        f"no line of {verb} of {kind.__name__} was seen, so it cannot be interrupted and nothing "
        f"is proven: write it in Python, in files of the package of {kind.__module__} (or next to "
        f"that module), and run it in the process, in any thread, that calls {verb}"
    )
    return places


def commit_after_another(
    sink: AnySink,
    committables: Sequence[Committable],
    line: int,
    other_commit: Callable[[], None],
    *,
    longest_pause_s: float,
) -> tuple[list[int], bool]:
    """Pause a commit before its nth line until another commit has run; then let it continue.

    The paused commit may succeed or fail.

    Args:
        sink: commits in another process, which gets it pickled.
        committables: the branches to commit.
        line: the number of the line before which the commit pauses.
        other_commit: runs during the pause, in a thread.
        longest_pause_s: the longest pause: the other commit may wait for what this one holds.

    Returns:
        The lines, as `lines_of_commit` lists them, if the commit ended before it reached the line;
        else an empty list. And whether the other commit ended during the pause.
    """
    order: _Order = (sink, "commit", tuple(committables), signal.SIGSTOP, line)
    with ThreadPoolExecutor(1) as pool, _Other(order) as first:
        if not first.pauses():
            return first.report_at_end(0)["places"], False
        other = pool.submit(other_commit)
        has_ended = bool(wait([other], longest_pause_s).done)
        first.resume()
        first.wait()
        other.result()
    return [], has_ended


def task_around_another(
    sink: AnySink, branch_id: BranchId, rows: pa.RecordBatch, other_task: Callable[[], None]
) -> Committable:
    """Write rows in another process, run another task, and prepare what was written."""
    with _Other((sink, "task", (branch_id, rows), signal.SIGSTOP, None)) as first:
        assert first.pauses(), f"task in another process ended: {first.report_at_end(0)}"
        other_task()
        first.resume()
        return Committable.from_json(first.report_at_end(0)["prepared"][0])


def precommit_around(
    sink: AnySink,
    branch_id: BranchId,
    rows: pa.RecordBatch,
    line: int,
    other_task: Callable[[], None],
    *,
    longest_pause_s: float,
) -> tuple[Committable, bool]:
    """Pause a task before the nth line of its preCommit until another task has run.

    Args:
        sink: runs the task in another process, which gets it pickled.
        branch_id: of the task.
        rows: of the task.
        line: the number of the line.
        other_task: runs during the pause, in a thread of this process.
        longest_pause_s: the longest pause: the other task may wait for what this one holds.

    Returns:
        What the task prepared, and whether it reached the line.
    """
    order: _Order = (sink, "task", (branch_id, rows), signal.SIGSTOP, line)
    with ThreadPoolExecutor(1) as pool, _Other(order) as first:
        has_paused = first.pauses()
        other = pool.submit(other_task)
        if has_paused:
            wait([other], longest_pause_s)
            first.resume()
        prepared = first.report_at_end(0)["prepared"]
        other.result()
    return Committable.from_json(prepared[0]), has_paused


class OtherProcess:
    """A process that gets its order, and reports, through files; so it never waits for a reader.

    Args:
        main: the function that it runs, with the folder of its files, and with what else is given.
        order: the sink, the verb, and what else `main` needs; pickled as for an executor.
        more: more arguments of `main`.
    """

    def __init__(
        self, main: Callable[..., None], order: tuple[AnySink, str, *tuple[Any, ...]], *more: object
    ) -> None:
        from pyspark import cloudpickle  # noqa: PLC0415 - Spark's own copy

        self._verb = order[1]
        self._files = tempfile.TemporaryDirectory(prefix="sparkonce-")
        folder = Path(self._files.name)
        self._report, self._log = folder / "report", folder / "log"
        (folder / "order").write_bytes(cloudpickle.dumps(order))
        self._process = start_process(_begin, main, folder, *more)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.join()
        self._files.cleanup()

    def wait(self) -> int:
        """Wait for its end, at most `PATIENCE_S`; return its exit code."""
        self._process.join(PATIENCE_S)
        status = self._process.exitcode
        if status is None:
            raise AssertionError(self.failure(f"does not end in {PATIENCE_S:.0f} s"))
        return status

    def report_at_end(self, *expected: int) -> Any:
        """Wait for one of the expected exit codes; return the report, an empty one if killed."""
        status = self.wait()
        assert status in expected, self.failure(
            f"failed (exit code {status}): a sink may need only what it is pickled with"
        )
        return json.loads(self._report.read_text()) if self._report.exists() else {}

    def failure(self, what: str) -> str:
        output = self._log.read_text(errors="replace")[-2000:] if self._log.exists() else ""
        return f"{self._verb} in another process {what}. Its output:\n{output}"


def _begin(main: Callable[..., None], folder: Path, *more: object) -> None:
    """Run `main`, whose output goes to a file of the folder."""
    with (folder / "log").open("wb") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    main(folder, *more)


class _Other(OtherProcess):
    """A process that runs one verb, and may be paused in it."""

    def __init__(self, order: _Order) -> None:
        super().__init__(main, order)

    def pauses(self) -> bool:
        """Wait until it pauses; return False if it ended first."""
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            if self._process.exitcode is not None:
                return False
            with contextlib.suppress(psutil.NoSuchProcess):
                if psutil.Process(self._process.pid).status() == psutil.STATUS_STOPPED:
                    return True
            time.sleep(_POLL_S)
        raise AssertionError(self.failure(f"does not reach its line in {PATIENCE_S:.0f} s"))

    def resume(self) -> None:
        assert self._process.pid is not None
        os.kill(self._process.pid, signal.SIGCONT)


def _run_task(
    sink: AnySink, verb: Verb, args: Sequence[Any], trace: LineTrace, *, is_paused: bool
) -> tuple[list[Committable], object]:
    """Write, and perhaps prepare; what was prepared, and the handle."""
    handle = sink.beginTransaction(args[0])
    for batch in args[1:]:
        sink.write(handle, batch)
    if verb == "write":
        return [], handle
    if is_paused:
        os.kill(os.getpid(), signal.SIGSTOP)
    trace.begin(sink)
    committable = sink.preCommit(handle)
    trace.end()
    return [committable], handle


def main(folder: Path) -> None:
    """Run the verb of the order in this process, and write the report."""
    fate: int | None = None
    fatal_line: int | None = None

    def reached(line: int) -> None:
        if fate is not None and line == fatal_line:
            os.kill(os.getpid(), fate)

    trace = LineTrace(reached)
    order = pickle.loads((folder / "order").read_bytes())  # noqa: S301 - ours
    sink, verb, args, fate, fatal_line = order
    prepared: list[Committable] = []
    if verb in {"write", "task"}:
        is_paused = fate == signal.SIGSTOP and fatal_line is None
        # The handle is not freed before the end.
        prepared, _handle = _run_task(sink, verb, args, trace, is_paused=is_paused)
    elif verb == "commit":
        trace.begin(sink)
        if fate == signal.SIGSTOP:  # once: a retry would start from the beginning
            verbs.commit_many(sink, args)
        else:
            Stage(SinkWorld(lambda: sink, list, list)).commit_all(sink, args)
        trace.end()
    else:
        for committable in args:
            sink.abort(committable)
    report = {
        "prepared": [each.to_json() for each in prepared],
        "places": trace.places,
        "names": [sink.name, sink.target],
    }
    (folder / "report").write_text(json.dumps(report))
    if fate == signal.SIGKILL and fatal_line is None:
        os.kill(os.getpid(), fate)
