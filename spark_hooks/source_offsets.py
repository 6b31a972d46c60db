"""The source offsets of a batch, as Spark's checkpoint shows them.

    offsets/7      v1 ⏎ {"batchWatermarkMs": …} ⏎ {"logOffset":3} ⏎ {"orders":{"0":120}}
                   format, watermark and settings, then one line for each use of a source
    sources/0/3    the files of counter 3 of the file source; 9.compact has those of 0 to 9

The first two lines may change in a replay and are left out. A file source's offset is only its own
counter, which a rolled-back checkpoint may give to other files. So a digest of the batch's files is
added to it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from sparkonce.storage import FileSystemFolder

FoldersOf: TypeAlias = "Callable[[Sequence[str]], Mapping[str, str] | None]"
"""Takes all uses of sources (the number of a line, or a name); gives the name of the source's
folder for each use whose folder is known. None while Spark has not created its sources."""

PARTITIONS = "spark.sql.shuffle.partitions"
"""The setting that a checkpoint pins: how many partitions the state has."""

_TAIL_BYTES = 1 << 18
_GROWTH = 4
"""How much more of a compacted log is read when its tail was too short."""


def shown_offsets(
    checkpoint: FileSystemFolder, batch_id: int, folders_of: FoldersOf
) -> tuple[str, ...] | None:
    """The offsets of a batch, as JSON, for each use of a source.

    A file source's counter has no digest where its folder is not known.

    None when Spark has purged them, when the file is torn (Spark itself fails on it and names it),
    or while Spark has not created its sources.
    """
    text = checkpoint.read(f"offsets/{batch_id}")
    if text is None:
        return None
    try:
        uses = uses_in(text)
        counters = file_counters(uses)
        folders = folders_of([use for use, _ in uses]) if counters else {}
        if folders is None:
            return None
        shown = [
            (use, _with_files(checkpoint, counters[use], f"sources/{folders[use]}", offset))
            if use in counters and use in folders
            else (use, offset)
            for use, offset in uses
        ]
    except ValueError:
        return None  # torn
    known = [(use, offset) for use, offset in shown if offset is not None]
    if len(known) < len(shown):
        return None
    is_named = not text.startswith("v1\n")
    return tuple(f"{use}:{offset}" if is_named else offset for use, offset in known)


def uses_in(offsets: str) -> list[tuple[str, str]]:
    """Each use of a source in the text of offsets/N: its number or its name, and its offset.

    Raises:
        ValueError: the text is torn.
    """
    version, _, *lines = offsets.splitlines()
    if version == "v1":
        return [(str(number), line) for number, line in enumerate(lines)]
    named = (line.partition(":") for line in sorted(lines))
    return [(name, offset) for name, _, offset in named]


def is_repartition(before: str, after: str) -> bool:
    """Whether Spark has only repartitioned its state from one text of offsets/N to the next.

    Such a batch reads nothing, and has no call of foreachBatch. Its time and its watermark are
    those of the batch before, and of the settings that a checkpoint pins, only the number of
    partitions differs. Nothing else changes that one.
    """
    (version, pinned, *lines), (version_after, pinned_after, *lines_after) = (
        text.splitlines() for text in (before, after)
    )
    metadata, metadata_after = json.loads(pinned), json.loads(pinned_after)
    number = metadata.get("conf", {}).pop(PARTITIONS, None)
    number_after = metadata_after.get("conf", {}).pop(PARTITIONS, None)
    is_other = None not in {number, number_after} and number != number_after
    rest = (version, metadata, lines), (version_after, metadata_after, lines_after)
    return is_other and rest[0] == rest[1]


def file_counters(uses: Sequence[tuple[str, str]]) -> dict[str, int]:
    """By use, the counter that is the offset of a file source; other sources have none.

    Raises:
        ValueError: an offset is torn.
    """
    found = {use: _file_counter(offset) for use, offset in uses}
    return {use: counter for use, counter in found.items() if counter is not None}


def _file_counter(offset: str) -> int | None:
    """None for another source."""
    value = json.loads(offset) if offset.startswith("{") else None
    if not isinstance(value, dict) or value.keys() != {"logOffset"}:
        return None
    return int(value["logOffset"])


def _with_files(checkpoint: FileSystemFolder, counter: int, folder: str, offset: str) -> str | None:
    """A file source's offset with a digest of its files; None if they are gone."""
    entries = _entries(checkpoint.read(f"{folder}/{counter}"))
    if entries is None:
        entries = _end_of_compacted(checkpoint, f"{folder}/{counter}.compact", counter)
    if entries is None:
        return None if checkpoint.exists(folder) else offset
    files = sorted((e["path"], e["timestamp"]) for e in entries if e["batchId"] == counter)
    digest = hashlib.sha256(json.dumps(files).encode()).hexdigest()[:16]
    return json.dumps({"logOffset": counter, "files": digest})


def _end_of_compacted(
    checkpoint: FileSystemFolder, name: str, counter: int
) -> list[dict[str, Any]] | None:
    """The end of the log, with all of the counter's entries; None when there is no such log.

    The log may be long and ends with the newest files, so it is read from its end.
    """
    window = _TAIL_BYTES
    while (text := checkpoint.read_end(name, window)) is not None:
        entries = _entries(text) or []
        is_whole = len(text) < window // 4  # a character takes up to four bytes
        if is_whole or any(entry["batchId"] < counter for entry in entries):
            return entries
        window *= _GROWTH
    return None


def _entries(text: str | None) -> list[dict[str, Any]] | None:
    """All lines but the first, which is the format or the rest of a cut line."""
    return None if text is None else [json.loads(line) for line in text.splitlines()[1:]]
