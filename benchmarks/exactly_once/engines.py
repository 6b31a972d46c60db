"""The engines that take part: each is a program that copies the values of one Kafka topic.

    PROGRAM --servers HOST:PORT --input TOPIC --output OUTPUT --state DIR --guarantee GUARANTEE

It copies every record's value from the input, from its beginning, until it is killed, and keeps
what it must remember in DIR. OUTPUT is a topic, or the URI of an empty folder (file:///…). Started
again with the same arguments, it continues. It and all its children are killed by SIGKILL. So an
engine joins with one such program and one entry here.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from sparkonce.testing.services.java import jar_dir
from sparkonce.testing.services.process import import_path

ADAPTERS: Final = Path(__file__).parent / "adapters"
PYFLINK: Final = "PYFLINK"
"""The environment variable that names the Python of a venv with apache-flink."""


@dataclass(frozen=True)
class Engine:
    """One contender.

    Attributes:
        name: as the report shows it.
        program: its adapter.
        guarantee: what it is asked for: "exactly-once", "after-checkpoint" or "at-least-once".
        python: runs the adapter.
        env: gives more environment variables.
        writes_files: whether its output is a folder, not a topic.
    """

    name: str
    program: Path
    guarantee: str
    python: str = sys.executable
    env: Callable[[], Mapping[str, str]] = dict
    writes_files: bool = False

    @property
    def promises_once(self) -> bool:
        """Whether no record may be lost or doubled."""
        return self.guarantee != "at-least-once"

    def argv(self, servers: str, source: str, target: str, state: Path) -> list[str]:
        """The command that runs it."""
        return [
            *(self.python, str(self.program), "--servers", servers, "--input", source),
            *("--output", target, "--state", str(state), "--guarantee", self.guarantee),
        ]


def engines() -> dict[str, Engine]:
    """All engines that can run here, by their short names."""
    spark = partial(Engine, program=ADAPTERS / "spark.py", env=import_path)
    ours = partial(Engine, program=ADAPTERS / "with_sparkonce.py", env=import_path)
    after = 'sparkonce, commit="after_checkpoint"'
    found = {
        "sparkonce": ours("sparkonce", guarantee="exactly-once"),
        "sparkonce-after": ours(after, guarantee="after-checkpoint"),
        "spark": spark("Spark's Kafka sink", guarantee="at-least-once"),
        "sparkonce-files": ours("sparkonce, files", guarantee="exactly-once", writes_files=True),
        "spark-files": spark("Spark's file sink", guarantee="exactly-once", writes_files=True),
    }
    if named := os.environ.get(PYFLINK):
        flink = partial(
            Engine,
            program=ADAPTERS / "flink.py",
            python=os.path.abspath(named),  # noqa: PTH100 - a resolved link leaves its venv
            env=lambda: {"FLINK_JARS": str(jar_dir("flink"))},
        )
        found["flink"] = flink("PyFlink, exactly once", guarantee="exactly-once")
        found["flink-once"] = flink("PyFlink, at least once", guarantee="at-least-once")
        found["flink-files"] = flink("PyFlink, files", guarantee="exactly-once", writes_files=True)
    return found
