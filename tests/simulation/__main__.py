"""Run many seeds, or replay one.

python -m tests.simulation                       100,000 seeds from 0
python -m tests.simulation --seeds 500 --first 7000
python -m tests.simulation --seed 4711           replays one, with its trace
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial

from tests.simulation.coverage import PAIRS, RARE_STATES, STATES, Coverage
from tests.simulation.replaying import Replayed, replay_run
from tests.simulation.simulation import Simulation, result_of, simulate
from tests.simulation.simulation import run as run_schedule

_CHUNK = 500
_REPLAY_EVERY = 20
"""A replay takes longer than its seed."""


def run(
    first: int, count: int, *, until_red: bool = False, replay_every: int | None = None
) -> Coverage:
    """Run the seeds from `first` on, in this process; with `until_red` up to the first failure.

    Every so many seeds, one is also replayed through the model of the protocol.
    """
    logging.disable(logging.CRITICAL)
    coverage = Coverage()
    try:
        for seed in range(first, first + count):
            simulation = Simulation(seed, trace=False)
            run_schedule(simulation)
            coverage.add(result_of(simulation))
            if replay_every is not None and seed % replay_every == 0:
                replayed = Replayed()
                replay_run(simulation, replayed)
                coverage.replayed += replayed.seeds
                coverage.failures += [(seed, failure) for failure in replayed.failures]
            if until_red and coverage.failures:
                break
    finally:
        logging.disable(logging.NOTSET)
    return coverage


def run_all(first: int, count: int, jobs: int, *, until_red: bool) -> Iterator[Coverage]:
    """Run the seeds in `jobs` processes; yield the coverage of each portion."""
    portion = partial(run, until_red=until_red, replay_every=_REPLAY_EVERY)
    starts = range(first, first + count, _CHUNK)
    sizes = [min(_CHUNK, first + count - start) for start in starts]
    if jobs == 1:
        yield from map(portion, starts, sizes)
        return
    with ProcessPoolExecutor(jobs) as pool:
        yield from pool.map(portion, starts, sizes)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seed", type=int, help="replay this seed and print its steps")
    parser.add_argument("--seeds", type=int, default=100_000, help="the number of seeds")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--until-red", action="store_true", help="end at the first failure")
    given = parser.parse_args()
    if given.seed is not None:
        return _replay(given.seed)
    return _run(given.first, given.seeds, given.jobs, until_red=given.until_red)


def _replay(seed: int) -> int:
    logging.disable(logging.CRITICAL)
    result = simulate(seed, trace=True)
    print("\n".join(result.trace))
    print(f"seed {seed}: {result.failure or 'all invariants hold'}")
    return 0 if result.failure is None else 1


def _run(first: int, count: int, jobs: int, *, until_red: bool) -> int:
    started, coverage = time.monotonic(), Coverage()
    print(f"seeds {first} to {first + count - 1} in {jobs} processes", flush=True)
    for portion in run_all(first, count, jobs, until_red=until_red):
        coverage.join(portion)
        if until_red and coverage.failures:
            break
    took = time.monotonic() - started
    for seed, failure in coverage.failures[:20]:
        print(f"FAILED {failure}\n       replay: make simulate SEED={seed}")
    for state, seen in sorted(coverage.states.items()):
        print(f"  {seen:7d}  {state}")
    missing = [] if until_red else coverage.missing((*STATES, *RARE_STATES))
    for what in missing:
        print(f"NEVER HAPPENED: {what}")
    print(
        f"{coverage.seeds} schedules, {coverage.steps} steps in {took:.0f} s; "
        f"{len(coverage.fired)} of {len(PAIRS)} (step, fault) pairs fired; "
        f"{coverage.replayed} replayed through the model; {len(coverage.failures)} failed"
    )
    return 1 if coverage.failures or missing else 0


if __name__ == "__main__":
    sys.exit(main())
