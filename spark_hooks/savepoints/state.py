"""Which files of `state/` hold the state after a batch.

    state/0/_metadata/…          of the operator: schemas, partitions
    state/0/1/12.delta           partition 1: what batch 11 changed        (HDFS-backed store)
             /12.changelog       the same                                  (RocksDB)
             /10.snapshot        the whole state after batch 9             (HDFS-backed store)
             /10.zip             the same; its large files are in SSTs/    (RocksDB)
             /12_ab…-9f.zip      the same, named in commits/11             (format version 2)
             /left-keyTo…/12.…   a store with a name: a join has several

Batch N leaves version N + 1 of each store: the newest whole state up to it, and every change since.
Later versions must not come along: Spark would read them without an error.
"""

from __future__ import annotations

import io
import json
import re
import zipfile
from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple

from sparkonce.errors import SavepointError
from sparkonce.spark_hooks.savepoints.gone import FileGoneError

ReadBytes = Callable[[str], bytes]
CommittedIds = Callable[[int], "frozenset[str] | None"]
"""The unique ids of the stores' files after a batch; None if they are not known any more. Empty
where the checkpoint has none."""

_VERSIONED: Final = re.compile(
    r"(?P<version>[0-9]+)(?:_(?P<id>[0-9a-f-]{36}))?\.(?P<kind>delta|snapshot|changelog|zip)"
)
_CHECKSUM: Final = ".crc"
_WHOLE: Final = frozenset({"snapshot", "zip"})
_SHARED: Final = {"SSTs": ("sstFiles", "dfsSstFileName"), "logs": ("logFiles", "dfsLogFileName")}
"""Folders of files that several versions share, and how a .zip names them."""
_OF_BATCH: Final = re.compile(r"([0-9]+)(?:_[0-9a-f-]{36})?")
"""A schema that some batch wrote: state/0/_metadata/v2/7, state/0/_stateSchema/default/7_…"""


class _File(NamedTuple):
    name: str
    id: str | None
    is_whole: bool
    checksum: Sequence[str]


def files_of_state(
    names: Sequence[str], batch: int, committed_ids: CommittedIds, read: ReadBytes
) -> list[str]:
    """The files to copy.

    Args:
        names: all files below `state`.
        batch: whose state.
        committed_ids: see `CommittedIds`.
        read: returns a file.

    Raises:
        FileGoneError: Spark has purged a part of the state.
        SavepointError: there are files that this version does not know.
    """
    taken = [name for name in names if _is_schema(name) and not _is_later(name, batch)]
    for folder, versions in _stores(names).items():
        for file in _chain(folder, versions, batch + 1, committed_ids):
            taken += [file.name, *file.checksum]
            if file.name.endswith(".zip"):
                taken += _shared(folder, read(file.name))
    there = frozenset(names)
    if missing := [name for name in taken if name not in there]:
        raise FileGoneError(missing[0])
    return list(dict.fromkeys(taken))


def _is_schema(name: str) -> bool:
    """Whether the file is of an operator or a store as a whole, not of a version."""
    _, _, *inside = name.split("/")[:-1]  # without state/0
    return not inside or not inside[0].isdigit() or inside[-1].startswith("_")


def _is_later(name: str, batch: int) -> bool:
    written = _OF_BATCH.fullmatch(name.rpartition("/")[2])
    return written is not None and int(written[1]) > batch


def _stores(names: Sequence[str]) -> dict[str, dict[int, list[_File]]]:
    """The versions that each store has, by its folder."""
    there = frozenset(names)
    stores: dict[str, dict[int, list[_File]]] = {}
    for name in names:
        folder, _, last = name.rpartition("/")
        if _is_schema(name) or folder.rpartition("/")[2] in _SHARED:
            continue
        match = _VERSIONED.fullmatch(last.removesuffix(_CHECKSUM))
        if match is None:
            raise _unknown(name)
        if not last.endswith(_CHECKSUM):
            checksum = [name + _CHECKSUM] if name + _CHECKSUM in there else []
            file = _File(name, match["id"], match["kind"] in _WHOLE, checksum)
            stores.setdefault(folder, {}).setdefault(int(match["version"]), []).append(file)
    return stores


def _chain(
    folder: str, versions: Mapping[int, Sequence[_File]], version: int, committed_ids: CommittedIds
) -> list[_File]:
    """The newest whole state up to the version, and all changes since."""
    chain: list[_File] = []
    while version > 0:
        ids = committed_ids(version - 1)
        files = [
            file
            for file in versions.get(version, ())
            if file.id is None or ids is None or file.id in ids
        ]
        if not files:
            raise FileGoneError(f"{folder}/{version}")
        whole = [file for file in files if file.is_whole]
        # Where the ids are not known any more, a whole state may be a loser's.
        if whole and ids is not None:
            return [*chain, *whole]
        chain += files
        version -= 1
        if ids is None and version not in versions:
            break
    return chain


def _shared(folder: str, archive: bytes) -> list[str]:
    """The files that a version of RocksDB shares with others."""
    with zipfile.ZipFile(io.BytesIO(archive)) as opened:
        if "metadata" not in opened.namelist():
            return []
        _, _, text = opened.read("metadata").decode().partition("\n")
    metadata = json.loads(text)
    return [
        f"{folder}/{inside}/{file[key]}"
        for inside, (kind, key) in _SHARED.items()
        for file in metadata.get(kind) or ()
    ]


def _unknown(name: str) -> SavepointError:
    return SavepointError(
        f"the checkpoint has {name}, a file of Spark's state that this sparkonce does not know, so "
        "no savepoint is made: stop the query and copy the whole checkpoint, or use a sparkonce "
        "that knows this Spark"
    )
