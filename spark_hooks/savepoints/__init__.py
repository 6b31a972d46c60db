"""Savepoints: copies of a query's checkpoint at a complete batch, which the user makes and owns.

    creating    a running query's checkpoint ─► a savepoint
    filling     a savepoint ─► a new checkpoint, by each of the next two
    restoring   the pipeline is new to the log: fork, or its log was lost
    rewinding   the pipeline goes on in its log: restore, rewind
    retention   whether Kafka still has the input that follows
    place       where savepoints are: read, verify, delete
    manifest    what one says of itself
    closure     which files of a checkpoint one batch needs: `sources`, `state`

A savepoint holds complete batches only, so nothing in doubt is ever inherited.
"""

from __future__ import annotations

from sparkonce.spark_hooks.savepoints.creating import Hold, create
from sparkonce.spark_hooks.savepoints.filling import Filling
from sparkonce.spark_hooks.savepoints.manifest import Manifest
from sparkonce.spark_hooks.savepoints.place import Savepoints
from sparkonce.spark_hooks.savepoints.restoring import fork, restore_lost
from sparkonce.spark_hooks.savepoints.rewinding import Rewind, restore, rewind

__all__ = [
    "Filling",
    "Hold",
    "Manifest",
    "Rewind",
    "Savepoints",
    "create",
    "fork",
    "restore",
    "restore_lost",
    "rewind",
]
