"""The engines that take part: each is a program that copies the values of one Kafka topic.

    PROGRAM --servers HOST:PORT --input TOPIC --output TOPIC --state DIR --guarantee GUARANTEE

It copies every record's value from the input, from its beginning, until it is killed, and keeps
what it must remember in DIR. Started again with the same arguments, it continues. It and all its
children are killed by SIGKILL. So an engine joins with one such program and one entry here.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
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
        promises: whether its makers say that no record is lost or doubled.
        python: runs the adapter.
        env: gives more environment variables.
    """

    name: str
    program: Path
    guarantee: str
    promises: bool
    python: str = sys.executable
    env: Callable[[], Mapping[str, str]] = dict

    def argv(self, servers: str, source: str, target: str, state: Path) -> list[str]:
        """The command that runs it."""
        return [
            *(self.python, str(self.program), "--servers", servers, "--input", source),
            *("--output", target, "--state", str(state), "--guarantee", self.guarantee),
        ]


def engines() -> dict[str, Engine]:
    """All engines that can run here, by their short names."""
    spark, flink = ADAPTERS / "spark.py", ADAPTERS / "flink.py"
    found = {
        "sparkonce": Engine("sparkonce", spark, "exactly-once", promises=True, env=import_path),
        "sparkonce-after": Engine(
            'sparkonce, commit="after_checkpoint"',
            spark,
            "after-checkpoint",
            promises=True,
            env=import_path,
        ),
        "spark": Engine(
            "Spark's Kafka sink", spark, "at-least-once", promises=False, env=import_path
        ),
    }
    if named := os.environ.get(PYFLINK):
        python = os.path.abspath(named)  # noqa: PTH100 - a link that is resolved leaves its venv
        for short, guarantee in (("flink", "exactly-once"), ("flink-once", "at-least-once")):
            name = f"PyFlink, {guarantee.replace('-', ' ')}"
            promises = guarantee == "exactly-once"
            found[short] = Engine(
                name,
                flink,
                guarantee,
                promises=promises,
                python=python,
                env=lambda: {"FLINK_JARS": str(jar_dir("flink"))},
            )
    return found
