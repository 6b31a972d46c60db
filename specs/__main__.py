"""Check every model, its probes and its reverts: python -m specs [NAME …]."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import replace

from specs.checker import Result, check
from specs.models import MODELS, PROBES, REVERTS

_MOST_WITHOUT = 300_000


def check_model(name: str) -> tuple[Result, list[str]]:
    """Check a model; also the states that it should reach and does not."""
    probes = PROBES.get(name, {})
    result = check(MODELS[name], probes)
    return result, [probe for probe in probes if probe not in result.reached]


def check_without(guard: str) -> Result:
    """Check without the guard, up to the property that must fail."""
    revert = REVERTS[guard]
    model = replace(revert.model, without=frozenset({guard}))
    return check(model, expect=revert.breaks, most=_MOST_WITHOUT)


def main(wanted: Iterable[str]) -> int:
    failures = 0
    for name in wanted or (*MODELS, *REVERTS):
        if name in MODELS:
            result, missing = check_model(name)
            is_bad = result.problem is not None or bool(missing)
            print(
                f"{name}: {result}", *(f"  NEVER REACHED: {probe}" for probe in missing), sep="\n"
            )
        else:
            result = check_without(name)
            is_bad = result.problem is None
            print(f"without {name!r}: {result}")
        if is_bad:
            print(*(f"  {step}" for step in result.path), sep="\n")
        failures += is_bad
        sys.stdout.flush()
    print(f"{failures} failed")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
