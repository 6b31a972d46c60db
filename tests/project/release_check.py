"""Build a release, and run the README's job from its wheel in an empty environment.

    build ─► twine check ─► venv with the wheel ─► README's first Python block, as a program
                                                        │ rows visible in every sink
                                                        ▼
                            SIGKILL ─► started again ─► SIGKILL ─► sparkonce recover ─► compared

`make release-check` runs it; with ``DIST=dist`` the checked files stay there. The job must use
FileSink and SqliteSink, and rows with a column `id` that counts from 0, as those of Spark's rate
source do.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pyarrow.parquet as pq

ROOT = Path(__file__).parents[2]
ROWS_BEFORE_A_KILL: Final = 5
PATIENCE_S: Final = 300.0
POLL_S: Final = 0.5


@dataclass(frozen=True)
class Job:
    """The README's job, as its text shows it.

    Attributes:
        source: the program.
        module: its name, from the comment in its first line.
        files: the folder of FileSink.
        database: the file of SqliteSink.
        table: its table.
    """

    source: str
    module: str
    files: str
    database: str
    table: str

    @classmethod
    def of(cls, readme: str) -> Job:
        """Find the job in the text.

        Raises:
            ValueError: naming what the text lacks.
        """
        source = _only(r"^```python\n(.*?)^```$", readme, "Python block")
        sqlite = r"SqliteSink\(\s*\"([^\"]+)\",\s*table=\"([^\"]+)\""
        return cls(
            source,
            _only(r"\A# (?:.*/)?(\w+)\.py\n", source, "first line with the file's name"),
            _only(r"FileSink\(\s*\"([^\"]+)\"", source, "FileSink"),
            _only(sqlite, source, "SqliteSink"),
            _only(sqlite, source, "SqliteSink with table=", group=2),
        )


def _only(pattern: str, text: str, what: str, group: int = 1) -> str:
    found = re.search(pattern, text, re.MULTILINE | re.DOTALL)
    if found is None:
        raise ValueError(f"the README's first job has no {what}")
    return found[group]


# -- build and install -----------------------------------------------------------------------------


def run(*command: str | Path, cwd: Path = ROOT) -> None:
    print("$", *command, flush=True)
    subprocess.run(command, check=True, cwd=cwd, env=clean_environment())


def clean_environment() -> dict[str, str]:
    """Without what would let the repository's own sources be imported."""
    left_out = {"PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV"}
    return {key: value for key, value in os.environ.items() if key not in left_out}


def build(dist: Path) -> Path:
    """The wheel, built from the sdist."""
    run(sys.executable, "-m", "build", "--outdir", dist)
    run(sys.executable, "-m", "twine", "check", "--strict", *sorted(dist.iterdir()))
    (wheel,) = dist.glob("*.whl")
    return wheel


def install(wheel: Path, folder: Path) -> Path:
    """An environment with the wheel and no extra, in the locked versions; its `bin`."""
    locked = re.findall(r"(?m)^[\w.-]+==.*?(?= \\$)", (ROOT / "requirements.lock").read_text())
    constraints = folder / "constraints.txt"
    constraints.write_text("\n".join(locked) + "\n")
    run(sys.executable, "-m", "venv", folder / "venv")
    python = folder / "venv" / "bin" / "python"
    run(python, "-m", "pip", "install", "--quiet", "--constraint", constraints, wheel, cwd=folder)
    return python.parent


# -- run and compare -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Place:
    """The job's folder, seen from outside."""

    job: Job
    folder: Path
    binaries: Path

    def prepare(self) -> None:
        (self.folder / self.job.files).mkdir(parents=True)
        (self.folder / f"{self.job.module}.py").write_text(self.job.source)

    def run_until(self, rows: int, what: str) -> None:
        """Run the job until each sink shows so many rows; then it and its JVM get SIGKILL."""
        python = self.binaries / "python"
        with (self.folder / "driver.log").open("ab") as log:
            driver = subprocess.Popen(
                [python, f"{self.job.module}.py"],
                cwd=self.folder,
                env={**clean_environment(), "PYSPARK_PYTHON": str(python)},
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        try:
            deadline = time.monotonic() + PATIENCE_S
            while fewest(self.ids()) < rows:
                if driver.poll() is not None or time.monotonic() > deadline:
                    tail = (self.folder / "driver.log").read_text(errors="replace")[-5000:]
                    sys.exit(
                        f"{what}: no {rows} rows; the driver's exit code: {driver.poll()}\n{tail}"
                    )
                time.sleep(POLL_S)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(driver.pid, signal.SIGKILL)
            driver.wait()

    def ids(self) -> dict[str, Counter[int]]:
        """How often each sink shows each row."""
        paths = (self.folder / self.job.files).glob("*.parquet")
        in_files = (value for path in paths for value in pq.read_table(path)["id"].to_pylist())
        return {"FileSink": Counter(in_files), "SqliteSink": Counter(self._in_sqlite())}

    def _in_sqlite(self) -> list[int]:
        path = self.folder / self.job.database
        if not path.exists():
            return []
        with contextlib.closing(sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True)) as database:
            tables = database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
            if (self.job.table,) not in tables.fetchall():
                return []
            return [row[0] for row in database.execute(f'SELECT id FROM "{self.job.table}"')]


def fewest(found: dict[str, Counter[int]]) -> int:
    return min(rows.total() for rows in found.values())


def wrong(found: dict[str, Counter[int]]) -> list[str]:
    """What is doubled or missing in each sink; nothing if both show the same rows once."""
    newest = max((max(rows, default=-1) for rows in found.values()), default=-1)
    every = Counter(range(newest + 1))
    return [
        f"{sink}: doubled {sorted(rows - every)[:10]}, missing {sorted(every - rows)[:10]}"
        for sink, rows in found.items()
        if rows != every
    ]


def prove(place: Place) -> int:
    """Run the job, kill it twice and recover it; return how many rows each sink shows."""
    place.prepare()
    place.run_until(ROWS_BEFORE_A_KILL, "the first start")
    place.run_until(fewest(place.ids()) + ROWS_BEFORE_A_KILL, "the start after a kill")
    recover = [place.binaries / "sparkonce", "recover", f"{place.job.module}:pipeline"]
    run(*recover, cwd=place.folder)
    found = place.ids()
    if problems := wrong(found):
        sys.exit("\n".join(problems))
    return fewest(found)


def main(keep: Path | None = None) -> None:
    """Check a release; the files that were checked are kept in the folder `keep`."""
    job = Job.of((ROOT / "README.md").read_text(encoding="utf-8"))
    with tempfile.TemporaryDirectory(prefix="sparkonce-release-") as name:
        folder = Path(name)
        wheel = build(folder / "dist")
        rows = prove(Place(job, folder / "work", install(wheel, folder)))
        print(f"{wheel.name}: {rows} rows, each once in both sinks, after two kills")
        if keep is not None:
            shutil.copytree(wheel.parent, keep)  # refuses an existing folder with older files


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:2]))
