"""Real second processes for `SinkContract`, in which a sink's verbs run.

in_other_process       runs a verb in another process, and kills that at its end if asked to
lines_of_commit        the lines that a commit runs, each a place to kill or pause it
commit_behind_another  pauses a commit before a line while another commit runs
"""

from __future__ import annotations

import json
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self, TypeAlias

from sparkonce.model import Committable
from sparkonce.sinks import verbs
from sparkonce.sinks.base import AnySink
from sparkonce.testing.commit_lines import LineTrace
from sparkonce.testing.sink_world import SinkWorld, Stage

if TYPE_CHECKING:
    import pyarrow as pa

PATIENCE_S = 120.0
"""How long a second process may take to reach its line, or its end."""

_POLL_S = 0.01

Verb: TypeAlias = Literal["write", "task", "commit", "abort"]

_Order: TypeAlias = "tuple[AnySink, Verb, tuple[Any, ...], int | None, int | None]"
"""Sink, verb, its arguments; the signal, if any, that the process sends itself; and before which
line of the sink's code it does so (None: at the end)."""


def in_other_process(
    sink: AnySink,
    verb: Verb,
    *args: Any,
    is_killed: bool = False,
    shaped: Callable[[pa.RecordBatch], pa.RecordBatch] = lambda batch: batch,
) -> list[Committable]:
    """Run a verb in a separate process, which gets the sink as an executor does.

    Args:
        sink: pickled, as Spark does.
        verb: "write" and "task" take a branch id and record batches, "commit" and "abort"
            committables.
        args: of the verb.
        is_killed: SIGKILL it at the end, before it can free anything.
        shaped: see `SinkWorld`.

    Returns:
        What "task" prepared.

    Raises:
        AssertionError: the verb failed or did not end; the message has its last output.
    """
    if verb in {"write", "task"}:
        args = (args[0], *map(shaped, args[1:]))
    with _Other((sink, verb, args, signal.SIGKILL if is_killed else None, None)) as other:
        said = other.said_at_the_end(-signal.SIGKILL if is_killed else 0)
    return [Committable.from_json(value) for value in said.get("prepared", ())]


def lines_of_commit(
    sink: AnySink, committables: Sequence[Committable], *, killed_at: int | None = None
) -> list[int]:
    """List the lines of the sink's own code that a commit runs in a new process.

    It opens its connections there, as the process that is killed does.

    Args:
        sink: pickled, as Spark does.
        committables: to be committed.
        killed_at: SIGKILL it before it runs its nth line.

    Returns:
        For each line, in order, the number of its place (see `LineTrace`); an empty list if the
        process was killed.

    Raises:
        AssertionError: no line was seen, so no commit could be killed.
    """
    is_killed = None if killed_at is None else signal.SIGKILL
    with _Other((sink, "commit", tuple(committables), is_killed, killed_at)) as other:
        said = other.said_at_the_end(0, *([-signal.SIGKILL] if killed_at else ()))
    if not said:
        return []
    places: list[int] = said["places"]
    kind = type(sink)
    assert places, (
        f"no line of commit of {kind.__name__} was seen, so no commit can be killed and nothing is "
        f"proven: write it in Python, in files of the package of {kind.__module__} (or next to "
        "that module), and run it in the process, in any thread, that calls commit"
    )
    return places


def commit_behind_another(
    sink: AnySink,
    committables: Sequence[Committable],
    line: int,
    other_commit: Callable[[], None],
    *,
    stands_s: float,
) -> tuple[list[int], bool]:
    """Pause a commit before its nth line until another commit has run; then let it continue.

    The paused commit may succeed or fail.

    Args:
        sink: pickled, as Spark does.
        committables: to be committed.
        line: before which it pauses.
        other_commit: runs meanwhile, in a thread.
        stands_s: the longest pause: the other commit may wait for something that this one holds.

    Returns:
        The lines, as `lines_of_commit` lists them, if it finished before it reached the line; else
        an empty list. And whether the other commit finished during the pause.
    """
    order: _Order = (sink, "commit", tuple(committables), signal.SIGSTOP, line)
    with ThreadPoolExecutor(1) as pool, _Other(order) as first:
        if not first.stands():
            return first.said_at_the_end(0)["places"], False
        other = pool.submit(other_commit)
        is_made = bool(wait([other], stands_s).done)
        first.go_on()
        first.wait()
        other.result()
    return [], is_made


class _Other:
    """A process that communicates through files, so that nothing in it waits for a reader."""

    def __init__(self, order: _Order) -> None:
        from pyspark import cloudpickle  # noqa: PLC0415 - as Spark pickles, without starting it

        self._verb = order[1]
        self._files = tempfile.TemporaryDirectory(prefix="sparkonce-")
        folder = Path(self._files.name)
        self._said, self._log = folder / "said", folder / "log"
        (folder / "order").write_bytes(cloudpickle.dumps(order))
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "sparkonce.testing.sink_process", str(folder)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, map(str, sys.path)))},
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        self._files.cleanup()

    def stands(self) -> bool:
        """Wait until it pauses; return False if it ended first."""
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            pid, status = os.waitpid(self._process.pid, os.WUNTRACED | os.WNOHANG)
            if pid and os.WIFSTOPPED(status):
                return True
            if pid:
                self._process.returncode = os.waitstatus_to_exitcode(status)
                return False
            time.sleep(_POLL_S)
        raise AssertionError(self._told(f"does not reach its line in {PATIENCE_S:.0f} s"))

    def go_on(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def wait(self) -> int:
        """Return its exit code.

        Raises:
            AssertionError: it does not end.
        """
        try:
            return self._process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            raise AssertionError(self._told(f"does not end in {PATIENCE_S:.0f} s")) from None

    def said_at_the_end(self, *ends: int) -> dict[str, Any]:
        """Return the report of `main`; an empty one if it was killed.

        Args:
            ends: the exit codes that are expected.
        """
        status = self.wait()
        assert status in ends, self._told(
            f"failed (exit code {status}): a sink must need nothing but what it is pickled with"
        )
        return json.loads(self._said.read_text()) if self._said.exists() else {}

    def _told(self, what: str) -> str:
        said = self._log.read_text(errors="replace")[-2000:]
        return f"{self._verb} in another process {what}. Its output:\n{said}"


def main(folder: Path) -> None:
    """The second process."""
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
        handle = sink.beginTransaction(args[0])
        for batch in args[1:]:
            sink.write(handle, batch)
        if verb == "task":
            prepared.append(sink.preCommit(handle))
    elif verb == "commit":
        trace.begin(sink)
        if fate == signal.SIGSTOP:  # once: a repetition would start from the beginning
            verbs.commit_many(sink, args)
        else:
            Stage(SinkWorld(lambda: sink, list, list)).commit_all(sink, args)
        trace.end()
    else:
        for committable in args:
            sink.abort(committable)
    said = {"prepared": [committable.to_json() for committable in prepared], "places": trace.places}
    (folder / "said").write_text(json.dumps(said))
    if fate == signal.SIGKILL and fatal_line is None:
        os.kill(os.getpid(), fate)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
