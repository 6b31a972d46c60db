"""Which lines a sink's commit runs, and at which of them `SinkContract` kills it.

LineTrace   sees the lines in the process that commits, in all of its threads
chosen      picks the lines at which to kill
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from types import FrameType
from typing import Any, TypeAlias

from sparkonce.sinks.base import AnySink, TwoPhaseCommitSink
from sparkonce.sinks.capabilities import Votes
from sparkonce.sinks.rows import RowSink

_CONTRACT = {kind.__module__ for kind in (TwoPhaseCommitSink, RowSink, Votes)}
"""Modules that every sink inherits from."""

TraceFunction: TypeAlias = "Callable[[FrameType, str, Any], TraceFunction | None]"
_INSTALLED = {"site-packages", "dist-packages"}
"""Folders of other people's code; a virtual environment next to the sink has them too."""


class LineTrace:
    """Calls `reached(n)` before this process runs the nth line of a sink's own code.

    A sink's own code is the top-level packages of its class and of the classes it inherits from.
    If such a module is in no package (a test file), its folder counts instead. The lines in which
    `shutil` and `pathlib` write files count too. Make the trace before the sink is unpickled: it
    sees no line of threads that were started earlier.

    Attributes:
        places: for each line so far, the number of its place in the code.
    """

    def __init__(self, reached: Callable[[int], None]) -> None:
        self.places: list[int] = []
        self._reached = reached
        self._numbers: dict[tuple[str, int], int] = {}
        self._one_at_a_time = threading.Lock()
        self._is_own: Callable[[str], bool] | None = None
        threading.settrace(self._call)

    def begin(self, sink: AnySink) -> None:
        self._is_own = _own_code(sink)
        sys.settrace(self._call)

    def end(self) -> None:
        """Stop counting; threads may still run."""
        sys.settrace(None)
        with self._one_at_a_time:
            self._is_own = None

    def _call(self, frame: FrameType, _event: str, _arg: object) -> TraceFunction | None:
        is_own = self._is_own
        if is_own and (is_own(frame.f_code.co_filename) or _writes_a_file(frame)):
            return self._line
        return None

    def _line(self, frame: FrameType, event: str, _arg: object) -> TraceFunction:
        if event == "line":
            place = frame.f_code.co_filename, frame.f_lineno
            with self._one_at_a_time:
                if self._is_own:
                    self.places.append(self._numbers.setdefault(place, len(self._numbers)))
                    self._reached(len(self.places))
        return self._line


def _writes_a_file(frame: FrameType) -> bool:
    module = str(frame.f_globals.get("__name__")).partition(".")[0]
    name = frame.f_code.co_name.lstrip("_")
    return module == "shutil" or (module == "pathlib" and name.startswith(("write", "copy")))


def _own_code(sink: AnySink) -> Callable[[str], bool]:
    """A function that reports whether a file holds code of the sink."""
    names = {kind.__module__ for kind in type(sink).__mro__} - _CONTRACT
    files: set[Path] = set()
    folders: set[Path] = set()
    for name in names:
        parts = name.split(".")
        if parts[0] in {"__main__", *sys.stdlib_module_names}:
            continue
        is_ours = parts[0] == "sparkonce"  # which also has the base classes of every sink
        spec = find_spec(".".join(parts[: 3 if is_ours else 1]))
        if spec is not None and spec.submodule_search_locations is not None:
            folders.update(map(Path, spec.submodule_search_locations))
        elif spec is not None and spec.origin is not None:
            module = Path(spec.origin)
            if is_ours or module.parent.name in _INSTALLED:
                files.add(module)
            else:
                folders.add(module.parent)

    @functools.cache
    def is_own(file: str) -> bool:
        path = Path(file)
        return path in files or any(
            folder in path.parents and _INSTALLED.isdisjoint(path.relative_to(folder).parts)
            for folder in folders
        )

    return is_own


def chosen(places: Sequence[int], most: int) -> list[int]:
    """The numbers of the lines at which to kill: all, or a fixed choice of at most `most`.

    Half of the choice are the last lines, where rows become visible and their proof is written. The
    others are spread evenly over the earlier lines. A place that runs many times, as in a loop,
    counts only by its last time.
    """
    lines = list(range(1, len(places) + 1))
    if len(lines) > most:
        lines = sorted({place: line for line, place in enumerate(places, 1)}.values())
    last = max(len(lines) - most // 2, 0)
    step = max(-(-last // (most - most // 2)), 1)
    return lines[:last:step] + lines[last:]
