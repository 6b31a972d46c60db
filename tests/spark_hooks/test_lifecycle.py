"""The end of an interpreter: whose last batch is settled there, and whose is not."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from sparkonce import ExactlyOnce
from sparkonce.sinks import FileSink

CHILD_OF_A_BUSY_DRIVER = """
import multiprocessing, os, sys, threading
from sparkonce import ExactlyOnce
from sparkonce.sinks import FileSink

folder = sys.argv[1]
log = f"sqlite:///{folder}/log.db"
pipeline = ExactlyOnce("orders", sinks=[FileSink(folder)], log=log, commit="after_checkpoint")
held = threading.Event()

def run_a_batch():
    with pipeline._serving.lock:
        held.set()
        threading.Event().wait()

threading.Thread(target=run_a_batch, daemon=True).start()
held.wait()
child = multiprocessing.get_context("fork").Process(target=print, args=("worked",), daemon=True)
child.start()
child.join(20)
print("hangs" if child.is_alive() else "ended", flush=True)
child.kill()
os._exit(0)
"""


def test_sink_that_cannot_be_closed_keeps_nothing_open(tmp_path: Path) -> None:
    """Its error is raised when the other sinks and the log are closed, while no batch runs."""
    closed: list[tuple[str, bool]] = []

    class Closing(FileSink):
        def close(self) -> None:
            with ThreadPoolExecutor(1) as other:
                is_held = not other.submit(pipeline._serving.lock.acquire, blocking=False).result()
            closed.append((self.name, is_held))
            if self.name == "left":
                raise OSError("no space left")

    sinks = [Closing(tmp_path, name=name) for name in ("left", "right")]
    pipeline = ExactlyOnce("orders", sinks=sinks, log=f"sqlite:///{tmp_path}/txn.db")
    with pytest.raises(OSError, match="no space left"):
        pipeline.close()
    assert sorted(closed) == [("left", True), ("right", True)]


def test_forked_child_settles_nothing(tmp_path: Path) -> None:
    """Its copy of the lock is held for ever by a thread that only its parent has."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", CHILD_OF_A_BUSY_DRIVER, tmp_path],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == ["worked", "ended"], done.stderr
