"""One pipeline that is killed again and again, and looked at from outside after each kill."""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from sparkonce.testing.crash import Arm, DriverProcess, Failpoints
from sparkonce.txn_log import open_log

ROOT = Path(__file__).parent.parent.parent
ROWS_PER_FILE = 50
FILES_PER_BATCH = 2
DAYS = ("2026-01-01", "2026-01-02")


@dataclass(frozen=True)
class Target:
    """A sink of the pipeline, and how an outsider looks at it.

    Attributes:
        kind: class name in `sparkonce.sinks`.
        target: positional arguments.
        settings: keyword arguments.
        visible: reads the ids that readers see.
        leaks: names what is left over.
    """

    kind: str
    target: list[Any]
    settings: dict[str, Any]
    visible: Callable[[], Counter[int]]
    leaks: Callable[[], list[str]]

    @property
    def name(self) -> str:
        return str(self.settings["name"])


@dataclass
class Scenario:
    """A source with as many batches as are asked for, a driver, and the outside view."""

    folder: Path
    targets: list[Target]
    batches: int
    table: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        source = self.folder / "in"
        source.mkdir()
        for number in range(self.batches * FILES_PER_BATCH):
            ids = range(number * ROWS_PER_FILE, (number + 1) * ROWS_PER_FILE)
            path = source / f"{number:05d}.json"
            path.write_text("\n".join(json.dumps(self._row(n)) for n in ids))
            os.utime(path, (number, number))  # Spark takes the oldest first
        self.log = f"sqlite:///{self.folder}/txn.db"
        config = {
            "source": str(source),
            "checkpoint": str(self.folder / "ckpt"),
            "log": self.log,
            "sinks": [
                {"kind": t.kind, "target": t.target, "settings": t.settings} for t in self.targets
            ],
        }
        path = self.folder / "config.json"
        path.write_text(json.dumps(config))
        self.failpoints = Failpoints(self.folder / "failpoints")
        self.driver = DriverProcess(
            [sys.executable, "-m", "integration_tests.crash.job", str(path)],
            self.failpoints,
            log=self.folder / "driver.log",
            env={"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'src'}"},
        )

    @staticmethod
    def _row(number: int) -> Mapping[str, Any]:
        return {
            "id": number,
            "day": DAYS[number % len(DAYS)],
            "name": None if number % 7 == 0 else f"名前 {number}",
            "amount": f"{number}.25",
        }

    def ids_of(self, batch: int) -> Counter[int]:
        size = FILES_PER_BATCH * ROWS_PER_FILE
        return Counter(range(batch * size, (batch + 1) * size))

    def ids_up_to(self, batch: int) -> Counter[int]:
        """Every id of all batches before `batch`."""
        return sum((self.ids_of(n) for n in range(batch)), Counter())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.driver.close()

    def start(self, *arms: Arm) -> None:
        """Start a driver and wait until it stands at every one of `arms`."""
        self.driver.start()
        self.driver.wait_for(*arms)

    def kill(self) -> None:
        """SIGKILL the driver as a whole, and let its successor pass."""
        self.driver.kill()
        self.failpoints.disarm()

    def visible_of(self, batch: int) -> dict[str, str]:
        """By sink: none, all or some of the batch is visible; asserts that all before are."""
        seen = {}
        for target in self.targets:
            visible = target.visible()
            before = Counter({n: c for n, c in visible.items() if n in self.ids_up_to(batch)})
            assert before == self.ids_up_to(batch), f"{target.name}: earlier batches differ"
            rest = visible - before
            seen[target.name] = (
                "none" if not rest else "all" if rest == self.ids_of(batch) else "some"
            )
        return seen

    def finish(self) -> None:
        """Run to the end and compare every sink with the source, and look for leaks."""
        self.failpoints.disarm()
        self.driver.start()
        assert self.driver.wait() == 0, self.driver.log.read_text()[-3000:]
        for target in self.targets:
            assert target.visible() == self.ids_up_to(self.batches), target.name
            assert target.leaks() == [], target.name
        log = open_log(self.log)
        assert log.unfinished("crash") == []
        assert log.history("crash")[0].id.batch_id == self.batches - 1
        log.close()
