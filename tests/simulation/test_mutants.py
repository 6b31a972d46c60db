"""The simulation or a unit test finds every known bug that is seeded into a copy of the code."""

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
    """Its file contains the text that it replaces exactly once, and something must catch it."""
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
    """Every catcher of the mutant fails (`make mutants` prints the table)."""
    assert try_mutant(mutant).survived == ()
