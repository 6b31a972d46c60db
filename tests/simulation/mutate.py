"""Seed every bug of `tests.simulation.mutants`, and check that it is found.

python -m tests.simulation.mutate                 all mutants, with a table
python -m tests.simulation.mutate "names without" only mutants whose name contains this
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.simulation.mutants import MUTANTS, Mutant

ROOT: Final = Path(__file__).resolve().parents[2]

_COPIED: Final = (
    "src",
    "sinks",
    "protocol",
    "specs",
    "spark_hooks",
    "txn_log",
    "tests",
    "pyproject.toml",
)
_SEEDS: Final = 20_000
_PATIENCE_S: Final = 240.0
_IGNORED: Final = shutil.ignore_patterns("__pycache__", "*.egg-info")


@dataclass(frozen=True, slots=True)
class Verdict:
    """How each catcher found a mutant, and the catchers that did not find it."""

    mutant: Mutant
    caught_by: tuple[str, ...]
    survived: tuple[str, ...]


def try_mutant(mutant: Mutant, seeds: int = _SEEDS) -> Verdict:
    """Apply the mutant to a copy of the tree, and run its catchers."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        for name in _COPIED:
            source = ROOT / name
            if source.is_dir():
                shutil.copytree(source, copy / name, symlinks=True, ignore=_IGNORED)
            else:
                shutil.copy(source, copy / name)
        for edit in mutant.edits:
            path = copy / edit.file
            text = path.read_text()
            found = text.count(edit.old)
            if found != 1:
                raise ValueError(f"{mutant.name!r}: {edit.old!r} is {found} times in {edit.file}")
            path.write_text(text.replace(edit.old, edit.new))
        caught, survived = [], []
        for catcher in (*mutant.tests, *(("simulation",) if mutant.simulated else ())):
            failure = _simulated(copy, seeds) if catcher == "simulation" else _tested(copy, catcher)
            if failure is None:
                survived.append(catcher)
            else:
                caught.append(failure)
        return Verdict(mutant, tuple(caught), tuple(survived))


def _simulated(copy: Path, seeds: int) -> str | None:
    """The first failure of the simulation, as seed and invariant; None if there is none."""
    done = _run(copy, "-m", "tests.simulation", "--seeds", str(seeds), "--until-red", "--jobs", "1")
    if done.returncode == 0:
        return None
    found = re.search(r"FAILED seed (\d+)(?:, step \d+)?: (.*)", done.stdout)
    if found is None:
        raise RuntimeError(f"the simulation did not run:\n{done.stdout}\n{done.stderr}")
    return f"seed {found[1]}: {found[2]}"


def _tested(copy: Path, test: str) -> str | None:
    """The test's name if it fails; None if it passes."""
    done = _run(copy, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", test)
    if done.returncode == 0:
        return None
    if done.returncode != 1:
        raise RuntimeError(f"{test} did not run:\n{done.stdout}\n{done.stderr}")
    return test.removeprefix("tests/")


def _run(copy: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    paths = os.pathsep.join([str(copy / "src"), str(copy)])
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=copy,
        env={**os.environ, "PYTHONPATH": paths, "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        timeout=_PATIENCE_S,
        check=False,
    )


def main() -> int:
    wanted = sys.argv[1] if len(sys.argv) > 1 else ""
    mutants = [mutant for mutant in MUTANTS if wanted in mutant.name]
    started, survivors = time.monotonic(), 0
    width = max(len(mutant.name) for mutant in mutants)
    print(f"{'mutant':{width}}  breaks  caught by")
    for mutant in mutants:
        verdict = try_mutant(mutant)
        survivors += bool(verdict.survived)
        found = [*verdict.caught_by, *(f"SURVIVES {catcher}" for catcher in verdict.survived)]
        for number, line in enumerate(found):
            name, invariant = (mutant.name, mutant.invariant) if number == 0 else ("", "")
            print(f"{name:{width}}  {invariant:6}  {_short(line)}", flush=True)
    print(f"{len(mutants)} mutants, {survivors} survive; {time.monotonic() - started:.0f} s")
    return 1 if survivors else 0


def _short(line: str) -> str:
    return re.sub(r"sparkonce\.0{16}\.[0-9-]{36}\.", "", line)[:110]


if __name__ == "__main__":
    sys.exit(main())
