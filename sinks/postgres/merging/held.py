"""Merges that this process holds in open transactions, until they are committed or aborted."""

from __future__ import annotations

import threading

from sparkonce.model import BranchId, Owner
from sparkonce.sinks.postgres.server.connections import PgConnection


class HeldMerges:
    """Open connections by full branch id. Pickles as empty: connections stay in their process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: dict[str, PgConnection] = {}

    def __reduce__(self) -> tuple[type[HeldMerges], tuple[()]]:
        return HeldMerges, ()

    def put(self, branch_id: BranchId, connection: PgConnection) -> None:
        with self._lock:
            self._held[str(branch_id)] = connection

    def take(self, branch_id: BranchId) -> PgConnection | None:
        with self._lock:
            return self._held.pop(str(branch_id), None)

    def branches(self, owner: Owner) -> list[BranchId]:
        with self._lock:
            found = [BranchId.from_name(name) for name in self._held]
        return [branch_id for branch_id in found if branch_id and branch_id.owner == owner]

    def close(self) -> None:
        """Close all connections, which rolls back; a decided merge is merged again."""
        with self._lock:
            held, self._held = self._held, {}
        for connection in held.values():
            connection.close()
