"""Where a test can stop, kill or fail the process.

A step of the protocol (`sparkonce.steps.POINTS`) and a round trip of a log (`LOG_POINTS`) call
`reach("decide.before", batch=7)`; without a handler that is one check of a module variable. A test
arms points in a folder and sets ``SPARKONCE_FAILPOINTS`` to it, which executors inherit:

    FOLDER/armed/*.json   {"point": "commit.before", "where": {"sink": "kafka"}, "action": "stop",
                           "skip": 2}
    FOLDER/hits/*.json    written, whole, each time an armed point was reached, before the action

The action ``stop`` waits until the process is killed or the armed file is removed: the hit file
shows the test that the state is reached, and the test sends the signal. ``error`` raises
`InjectedError`; ``note`` continues.
"""

from __future__ import annotations

import json
import os
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

ENVIRONMENT_VARIABLE: Final = "SPARKONCE_FAILPOINTS"

LOG_POINTS: Final[Mapping[str, str]] = {
    "log.before": "driver: the log is about to make a round trip (per request)",
    "log.after": "driver: its answer has come",
}
"""The round trips of a transaction log; `sparkonce.steps.POINTS` has the protocol's own."""


class InjectedError(Exception):
    """Raised at a point that a test armed with the action ``error``."""


Handler = Callable[[str, Mapping[str, object]], None]


def _from_folder(folder: Path) -> Handler:
    seen: dict[str, int] = {}

    def handle(point: str, where: Mapping[str, object]) -> None:
        for armed in sorted((folder / "armed").glob("*.json")):
            try:
                order = json.loads(armed.read_text())
            except FileNotFoundError:  # disarmed between the listing and the reading
                continue
            wanted = order.get("where", {})
            if order["point"] != point or any(where.get(k) != v for k, v in wanted.items()):
                continue
            seen[armed.name] = seen.get(armed.name, 0) + 1
            if seen[armed.name] <= order.get("skip", 0):
                continue
            _write_hit(folder, armed.stem, point, where)
            if order["action"] == "error":
                raise InjectedError(f"armed at {point} ({dict(where)})")
            while order["action"] == "stop" and armed.exists():
                time.sleep(0.01)

    return handle


def _write_hit(folder: Path, arm: str, point: str, where: Mapping[str, object]) -> None:
    hit = {"arm": arm, "point": point, "where": dict(where), "pid": os.getpid()}
    path = folder / "hits" / f"{arm}-{uuid.uuid4().hex}.json"
    hidden = path.with_suffix(".tmp")
    hidden.write_text(json.dumps(hit))
    hidden.rename(path)


handler: Handler | None = (
    _from_folder(Path(os.environ[ENVIRONMENT_VARIABLE]))
    if ENVIRONMENT_VARIABLE in os.environ
    else None
)
"""What `reach` calls; a simulation in one process sets its own."""


def reach(point: str, **where: object) -> None:
    """Stop, fail or note here if a test has armed `point`; `where` names the batch and the sink."""
    if handler is not None:
        handler(point, where)
