"""The files of a checkpoint that make one committed batch whole.

    metadata, offsets/N-1, offsets/N, commits/N      the query, and how far it has come
    sparkonce-aggregates.json                        which aggregates made the state
    sources/…                                        `sources`
    state/…                                          `state`

Spark changes none of them until it purges the batch. So a copy that has met no missing file is
whole, although the query runs on meanwhile. A plain copy of a live checkpoint is not: it may hold
later offsets than commits, or half of a state.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

from sparkonce.spark_hooks.aggregates import AGGREGATES
from sparkonce.spark_hooks.savepoints.gone import FileGoneError
from sparkonce.spark_hooks.savepoints.sources import files_of_sources
from sparkonce.spark_hooks.savepoints.state import files_of_state
from sparkonce.spark_hooks.source_offsets import PARTITIONS
from sparkonce.storage import FileSystemFolder

ResultT = TypeVar("ResultT")

_PARTITION: Final = re.compile("state/[0-9]+/([0-9]+)/")


@dataclass(frozen=True, slots=True)
class Closure:
    """What a batch needs of a checkpoint.

    Attributes:
        copied: names of the files that are taken as they are.
        rewritten: the texts of files that are taken with another content, by name.
        settings: Spark's settings that the checkpoint pins, from offsets/N.
    """

    copied: tuple[str, ...]
    rewritten: Mapping[str, str]
    settings: Mapping[str, str]


def closure_of(checkpoint: FileSystemFolder, batch: int) -> Closure:
    """What the batch needs; nothing is copied yet.

    Raises:
        FileGoneError: Spark has purged something of it, or has not committed it.
        SavepointError: the checkpoint has files that this version does not know.
        LogUnavailableError: it cannot be read now.
    """

    def text(name: str) -> str:
        return _there(checkpoint.read(name), name)

    def whole(name: str) -> bytes:
        return b"".join(_there(checkpoint.pieces(name), name))

    @functools.cache
    def committed_ids(of_batch: int) -> frozenset[str] | None:
        commit = checkpoint.read(f"commits/{of_batch}")
        return None if commit is None else _ids_in(commit)

    offsets = text(f"offsets/{batch}")
    names = ["metadata", f"commits/{batch}", f"offsets/{batch}"]
    if batch > 0:
        names.append(f"offsets/{batch - 1}")
    if missing := [name for name in names if not checkpoint.exists(name)]:
        raise FileGoneError(missing[0])
    if checkpoint.exists(AGGREGATES):
        names.append(AGGREGATES)
    copied, rewritten = files_of_sources(checkpoint.names("sources"), offsets, text)
    settings = _settings_in(offsets)
    there = _of_partitions(checkpoint.names("state"), settings.get(PARTITIONS))
    state = files_of_state(there, batch, committed_ids, whole)
    return Closure((*names, *copied, *state), rewritten, settings)


def _of_partitions(names: Sequence[str], number: str | None) -> list[str]:
    """Without the partitions that the state has no more, or not yet, where it was repartitioned."""
    found = [(name, _PARTITION.match(name)) for name in names]
    return [name for name, of in found if number is None or of is None or int(of[1]) < int(number)]


def _there(found: ResultT | None, name: str) -> ResultT:
    if found is None:
        raise FileGoneError(name)
    return found


def _ids_in(commit: str) -> frozenset[str]:
    """The unique ids in commits/N; none before format version 2 of the state."""
    _, _, text = commit.partition("\n")
    by_operator = json.loads(text).get("stateUniqueIds") or {}
    return frozenset(
        unique for partitions in by_operator.values() for stores in partitions for unique in stores
    )


def _settings_in(offsets: str) -> dict[str, str]:
    _, metadata, *_ = offsets.splitlines()
    return dict(json.loads(metadata).get("conf") or {})
