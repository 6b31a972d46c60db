"""Replays what the drivers of a seed did through the spec: `specs.traces`.

The model has one way to write a batch, foreachBatch, and no savepoints. So seeds with others are
not replayed, and a seed only up to the first thing that the model does not have.
"""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass, field

from specs.traces import Event, Impossible, replay

from tests.simulation.simulation import Simulation, run

_NOT_MODELLED = (
    "a merge waits for the locks of another",
    "a whole sink is rewritten from other partitions",
)


@dataclass
class Replayed:
    """What came of the replay of some seeds.

    Attributes:
        seeds: how many were replayed.
        failures: what the model does not allow.
        kinds: how often each event happened.
        left_out: how many seeds the model cannot replay.
    """

    seeds: int = 0
    left_out: int = 0
    failures: list[str] = field(default_factory=list)
    kinds: Counter[str] = field(default_factory=Counter)


def replay_seeds(first: int, count: int) -> Replayed:
    """Run the seeds, and replay each through the spec."""
    logging.disable(logging.CRITICAL)
    found = Replayed()
    try:
        for seed in range(first, first + count):
            simulation = Simulation(seed, trace=False)
            run(simulation)
            replay_run(simulation, found)
    finally:
        logging.disable(logging.NOTSET)
    return found


def replay_run(simulation: Simulation, found: Replayed) -> None:
    """Replay a schedule that has run."""
    world, spark = simulation.world, simulation.world.pipelines["orders"].checkpoints[0]
    is_other = simulation.is_of_format or simulation.user.is_on
    if is_other or spark.repartitioned or any(s in world.states for s in _NOT_MODELLED):
        found.left_out += 1
        return
    events = _modelled(world.events)
    try:
        replay(events, first_batch=spark.first, batches=spark.end - spark.first)
    except Impossible as impossible:
        found.failures.append(f"seed {world.seed}: {impossible}")
    found.seeds += 1
    found.kinds.update(
        event.what if event.what != "record" else str(event.details["state"]) for event in events
    )


def _modelled(events: list[Event]) -> list[Event]:
    """The events up to the first act of an operator: it plans no batch."""
    known: list[Event] = []
    planned: set[int] = set()
    for event in events:
        if event.what == "plan":
            planned.add(event.driver)
        elif event.driver not in planned:
            break
        known.append(event)
    return known
