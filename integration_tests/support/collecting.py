"""Tests that several modules run: each takes them from a module that is not collected itself."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType


def cases_of(module: ModuleType, prefix: str = "") -> dict[str, Callable[..., None]]:
    """The module's tests by name, for the globals of a test module; `prefix` tells them apart."""
    return {
        f"test_{prefix}{name.removeprefix('test_')}": value
        for name, value in vars(module).items()
        if name.startswith("test_")
    }
