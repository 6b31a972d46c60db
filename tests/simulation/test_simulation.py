"""A slice of the simulation: seeds that every test run goes through (I1 to I8)."""

from __future__ import annotations

import os
import subprocess
import sys

from tests.simulation.__main__ import run
from tests.simulation.coverage import PAIRS, STATES
from tests.simulation.simulation import simulate

SEEDS = 4000
RARE_PAIRS = 6
"""A change of the protocol makes other schedules of the seeds: then some pair may fall out of the
slice, and is met by `make simulate`."""


def test_invariants_hold_on_a_slice_of_seeds() -> None:
    """Every seed ends exactly once or loudly, and the slice meets every fault and state."""
    coverage = run(0, SEEDS)
    print(f"seeds 0 to {SEEDS - 1}: {coverage.steps} steps, {len(coverage.fired)} pairs")
    assert coverage.failures == []
    assert coverage.fired.keys() <= PAIRS
    assert len(PAIRS - coverage.fired.keys()) <= RARE_PAIRS, coverage.missing(())
    assert [state for state in STATES if state not in coverage.states] == []


def test_one_seed_replays_exactly() -> None:
    """Two runs of a seed take the same steps, at the same simulated times."""
    for seed in range(20):
        first, second = simulate(seed, trace=True), simulate(seed, trace=True)
        assert first == second
        assert len(first.trace) > 10


def test_seed_replays_exactly_in_another_process() -> None:
    """The order of a set of strings differs between processes: no step may depend on it."""
    told = [
        subprocess.run(
            [sys.executable, "-m", "tests.simulation", "--seed", "5"],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "PYTHONHASHSEED": number},
            capture_output=True,
            check=True,
        ).stdout
        for number in ("1", "2")
    ]
    assert told[0] == told[1]
