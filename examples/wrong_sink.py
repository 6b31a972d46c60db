"""A sink that looks right and is wrong. The contract tests catch it; do not copy it.

It writes rows into a hidden file, and its commit appends that file to the file of the readers.
Without faults every row appears once. Its mistakes are marked 1 to 3;
docs/howto/proving-a-sink.md shows how the tests report each.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from sparkonce.model import BranchId, Committable
from sparkonce.sinks import RowSink


@dataclass
class Lines:
    branch_id: BranchId
    lines: list[str] = field(default_factory=list)


class AppendingSink(RowSink[Lines]):
    kind: ClassVar[str] = "appending"

    def __init__(self, folder: str | Path) -> None:
        super().__init__()
        self._folder = Path(folder)

    def _hidden(self, branch_id: BranchId) -> Path:
        # Mistake 1: its own name instead of str(branch_id). Without the token, the pass and the
        # owner, an older driver has the same names as a younger one.
        return self._folder / f".{branch_id.batch_id}-{branch_id.attempt}"

    def beginTransaction(self, branch_id: BranchId) -> Lines:
        return Lines(branch_id)

    def write_rows(self, handle: Lines, rows: Sequence[Mapping[str, Any]]) -> None:
        handle.lines += [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]

    def preCommit(self, handle: Lines) -> Committable:
        self._hidden(handle.branch_id).write_text("".join(handle.lines))
        return Committable(handle.branch_id)

    def commit(self, committable: Committable) -> None:
        hidden = self._hidden(committable.branch_id)
        if not hidden.exists():
            return  # Mistake 2: "committed before", or lost? Nothing here proves either.
        with (self._folder / "rows.jsonl").open("a") as visible:
            visible.write(hidden.read_text())
        # Mistake 3: two steps. Killed here, the next commit appends the rows again.
        hidden.unlink()

    def abort(self, branch: BranchId | Committable) -> None:
        branch_id = branch.branch_id if isinstance(branch, Committable) else branch
        self._hidden(branch_id).unlink(missing_ok=True)
