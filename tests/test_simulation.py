"""A slice of the simulation: seeds that every test run goes through (I1 to I8)."""

from __future__ import annotations

from tests.simulation.__main__ import run
from tests.simulation.coverage import PAIRS, STATES
from tests.simulation.simulation import simulate

SEEDS = 4000


def test_invariants_hold_on_a_slice_of_seeds() -> None:
    """Every seed ends exactly once or loudly, and the slice meets every fault and state."""
    coverage = run(0, SEEDS)
    print(f"seeds 0 to {SEEDS - 1}: {coverage.steps} steps, {len(coverage.fired)} pairs")
    assert coverage.failures == []
    assert coverage.missing(STATES) == []
    assert coverage.fired.keys() <= PAIRS


def test_one_seed_replays_exactly() -> None:
    """Two runs of a seed take the same steps, at the same simulated times."""
    for seed in range(20):
        first, second = simulate(seed, trace=True), simulate(seed, trace=True)
        assert first == second
        assert len(first.trace) > 10
