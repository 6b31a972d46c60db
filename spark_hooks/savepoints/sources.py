"""Which files of `sources/` a batch needs.

    sources/0/0              a source's first offsets: any small file is taken
    sources/0/3              the files of counter 3 of a file source
    sources/0/9.compact      those of 0 to 9; Spark deletes the single ones minutes later

The log of a file source is cut after the counter that the batch's offsets name. What came later is
found again by Spark when it lists the folder. Spark may have deleted the single files that the cut
needs, so a compacted log is cut too, and takes the counter as its name.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from sparkonce.spark_hooks.savepoints.gone import FileGoneError
from sparkonce.spark_hooks.source_offsets import file_counters, uses_in

ReadText = Callable[[str], str]

_COUNTER: Final = re.compile(r"([0-9]+)(\.compact)?")


def files_of_sources(
    names: Sequence[str], offsets: str, read: ReadText
) -> tuple[list[str], dict[str, str]]:
    """The files to copy, and those to write with another content.

    Args:
        names: all files below `sources`.
        offsets: the text of the batch's `offsets/N`.
        read: returns the text of a file.

    Raises:
        FileGoneError: a part of a log is not there any more.
    """
    counters = file_counters(uses_in(offsets))
    copied: list[str] = []
    rewritten: dict[str, str] = {}
    folders: dict[str, list[str]] = {}
    for name in names:
        folder, _, last = name.rpartition("/")
        folders.setdefault(folder, []).append(last)
    for folder, files in sorted(folders.items()):
        counter = counters.get(folder.removeprefix("sources/"))
        # A query that uses one source twice has fewer folders than uses, and the numbers differ.
        # The highest counter is never too low. It may be another source's, and too high.
        if counters and (counter is None or len(folders) != len(counters)):
            is_log = _is_log(folder, files, read)
            counter = min(max(counters.values()), _highest(files)) if is_log else None
        if counter is None:
            copied += [f"{folder}/{file}" for file in files]
        else:
            taken, cut = _cut_log(folder, files, counter, read)
            copied += taken
            rewritten |= cut
    return copied, rewritten


def _highest(files: Sequence[str]) -> int:
    """The highest counter of a log; 0 where there is none."""
    return max((int(m[1]) for m in map(_COUNTER.fullmatch, files) if m is not None), default=0)


def _is_log(folder: str, files: Sequence[str], read: ReadText) -> bool:
    """Whether the folder holds the log of a file source, by the first of its entries."""
    lines = read(f"{folder}/{min(files)}").splitlines()
    try:
        return len(lines) > 1 and "batchId" in json.loads(lines[1])
    except ValueError:
        return False


def _cut_log(
    folder: str, files: Sequence[str], counter: int, read: ReadText
) -> tuple[list[str], dict[str, str]]:
    single = {int(file) for file in files if file.isdigit()}
    compacts = {int(m[1]) for m in map(_COUNTER.fullmatch, files) if m is not None and m[2]}
    base = max((at for at in compacts if at <= counter), default=-1)
    needed = range(base + 1, counter + 1)
    if single.issuperset(needed):
        start = [f"{folder}/{base}.compact"] if base >= 0 else []
        return [*start, *(f"{folder}/{at}" for at in needed)], {}
    later = min((at for at in compacts if at > counter), default=None)
    if later is None:
        raise FileGoneError(f"{folder}/{min(set(needed) - single)}")
    version, *entries = read(f"{folder}/{later}.compact").splitlines()
    kept = [entry for entry in entries if _batch_of(json.loads(entry)) <= counter]
    return [], {f"{folder}/{counter}.compact": "\n".join([version, *kept])}


def _batch_of(entry: Mapping[str, Any]) -> int:
    return int(entry["batchId"])
