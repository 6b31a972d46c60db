"""When the driver is killed: each kill waits for a state, never for a time.

batch 2   while executors write
batch 4   everything is prepared, nothing is decided
batch 6   decided, nothing is committed
batch 8   one sink is committed, the others are not
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

SINKS: Final = ("kafka", "postgres", "s3")


@dataclass(frozen=True, slots=True)
class Kill:
    """One kill.

    Attributes:
        when: for the reader of the display.
        batch: the micro-batch that is under way.
        points: fail points that the driver must have reached, all of them, each with what it names.
        decided: whether the batch is decided by then.
        visible: the sinks that show the batch's rows by then.
    """

    when: str
    batch: int
    points: Sequence[tuple[str, Mapping[str, Any]]]
    decided: bool = False
    visible: Sequence[str] = ()


EXACTLY_ONCE: Final = (
    Kill("while executors write", 2, [("write.after", {})]),
    Kill("after prepare and before the decision", 4, [("decide.before", {})]),
    Kill(
        "after the decision and before any commit",
        6,
        [("commit.before", {"sink": sink}) for sink in SINKS],
        decided=True,
    ),
    Kill(
        "between the commits of two sinks",
        8,
        [
            ("commit.after", {"sink": "postgres"}),
            ("commit.before", {"sink": "kafka"}),
            ("commit.before", {"sink": "s3"}),
        ],
        decided=True,
        visible=["postgres"],
    ),
)
NAIVE: Final = (
    # Two tasks run at once: when the fourth begins, two have written their rows to Kafka.
    Kill("while executors write Kafka", 2, [("write.after", {"partition": 3})], visible=["kafka"]),
    Kill("between Kafka and Postgres", 4, [("commit.after", {"sink": "kafka"})], visible=["kafka"]),
    Kill(
        "between Postgres and S3",
        6,
        [("commit.after", {"sink": "postgres"})],
        visible=["kafka", "postgres"],
    ),
    Kill("after all three, before Spark notes it", 8, [("deliver.after", {})], visible=SINKS),
)
PLANS: Final[Mapping[str, Sequence[Kill]]] = {"exactly-once": EXACTLY_ONCE, "naive": NAIVE}
