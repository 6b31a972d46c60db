"""Known bugs, seeded into a copy of the code, are found: by the simulation or by a unit test."""

from __future__ import annotations

import pytest

from tests.simulation.mutants import MUTANTS, Mutant
from tests.simulation.mutate import ROOT, try_mutant

IN_EVERY_RUN = ("commit before decide", "token not checked", "no sweep at recovery")


def test_every_invariant_has_a_mutant() -> None:
    assert {mutant.invariant for mutant in MUTANTS} == {f"I{number}" for number in range(1, 9)}
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_mutant_still_fits_the_code(mutant: Mutant) -> None:
    """The text that it replaces is there exactly once, and it has somebody to catch it."""
    for edit in mutant.edits:
        assert (ROOT / edit.file).read_text().count(edit.old) == 1, edit
    assert mutant.tests or mutant.simulated


@pytest.mark.parametrize(
    "mutant", [m for m in MUTANTS if m.name in IN_EVERY_RUN], ids=lambda mutant: mutant.name
)
def test_some_mutants_are_caught(mutant: Mutant) -> None:
    """A few seeds are enough for these."""
    assert try_mutant(mutant, seeds=500).survived == ()


@pytest.mark.slow
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_mutant_is_caught(mutant: Mutant) -> None:
    """Everything that is meant to turn red does (make mutants prints the table)."""
    assert try_mutant(mutant).survived == ()
