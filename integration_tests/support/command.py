"""The command `sparkonce`, as an operator calls it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from integration_tests.crash.scenario import ROOT, Scenario

COMMAND = Path(sys.executable).parent / "sparkonce"
JOB = "jobs:pipeline"
MODULE = """
import json
from pathlib import Path
from integration_tests.crash.job import make_pipeline

print("a module may print")

def pipeline():
    return make_pipeline(json.loads(Path("config.json").read_text()))
"""
FINE, ERROR, USAGE, FOUND = range(4)
NAMED = re.compile(r"  \S+ -> |      \S|  \w[\w ]*  \S+$| +\S+$")
"""Lines that name a place, a target or what stands for a branch: no word is ever broken."""


@dataclass(frozen=True)
class Said:
    code: int
    out: str
    err: str

    @property
    def value(self) -> Any:
        return json.loads(self.out)


@dataclass
class Operator:
    """Somebody in the folder of the job, without a terminal."""

    scenario: Scenario

    def __post_init__(self) -> None:
        (self.scenario.folder / "jobs.py").write_text(MODULE)

    def start(
        self, *arguments: str, columns: int = 80, stderr: int = subprocess.PIPE
    ) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [COMMAND, *arguments],
            cwd=self.scenario.folder,
            env={**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": str(columns)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
        )

    def printed(self, *arguments: str) -> str:
        """Both streams in one, as a terminal of 100 columns shows them."""
        with self.start(*arguments, columns=100, stderr=subprocess.STDOUT) as process:
            return process.communicate(timeout=300)[0]

    def __call__(self, *arguments: str) -> Said:
        with self.start(*arguments) as process:
            out, err = process.communicate(timeout=300)
        shown_out = "(JSON)" if "--json" in arguments else out
        print(f"$ sparkonce {' '.join(arguments)}  -> {process.returncode}\n{shown_out}{err}")
        assert "Traceback" not in err
        assert "secret" not in out + err
        if "--json" not in arguments:
            wide = [line for line in out.splitlines() if len(line) > 80]
            assert all(NAMED.match(line) for line in wide), f"wider than 80 columns: {wide}"
        assert "\x1b" not in out, "colours without a terminal"
        return Said(process.returncode, out, err)
