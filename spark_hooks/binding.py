"""Which transaction log and pipeline a checkpoint belongs to, written into the checkpoint itself.

    CHECKPOINT/sparkonce.json         {"log_id": …, "pipeline": …}, from the first start on
              /sparkonce.1.json       the same, of the log that took the checkpoint over; and so on
              /sparkonce-drivers/…    a file for each driver that has begun; only the last are kept

The highest number counts. Each file is created atomically, and no file that counts is replaced. Two
drivers may be admitted by different logs, each unaware of the other. Only one of them can then
create the next number after what both have seen, whether that is nothing or a lost log.

A fencing token orders the drivers that use one log. If two drivers use copies of a log, each copy
has its own tokens, and the drivers share only the checkpoint. Each driver enters it after the last
entry that it has seen there, so a driver that was paused meanwhile cannot enter.
"""

from __future__ import annotations

import contextlib
import json
import secrets
from typing import Final, NamedTuple

from sparkonce.errors import ConfigurationError, DecisionUnknownError
from sparkonce.storage import Folder
from sparkonce.txn_log.folder import FolderPlace
from sparkonce.txn_log.place import Version

_FIRST: Final = "sparkonce.json"
_DRIVERS: Final = "sparkonce-drivers"
_MOST_TRIES: Final = 4


class Binding(NamedTuple):
    """What a checkpoint belongs to; `number` counts how often another log has taken it over."""

    log_id: str
    pipeline: str
    number: int = 0


def read_binding(checkpoint: Folder) -> Binding | None:
    """What the checkpoint belongs to; None while it belongs to nobody.

    Raises:
        ConfigurationError: the file is damaged.
        LogUnavailableError: it cannot be read now.
    """
    number, text = 0, None
    while (newer := checkpoint.read(_name(number + 1))) is not None:
        number, text = number + 1, newer
    text = checkpoint.read(_FIRST) if text is None else text
    if text is None:
        return None
    try:
        value = json.loads(text)
        return Binding(str(value["log_id"]), str(value["pipeline"]), number)
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigurationError(
            f"{_name(number)} in {checkpoint.address} is damaged: restore it from a copy of the "
            "checkpoint, or delete it if you are sure which transaction log belongs to it"
        ) from error


def bind(checkpoint: Folder, seen: Binding | None, log_id: str, pipeline: str) -> None:
    """Write what the checkpoint belongs to, in place of `seen`, which the identity guard was shown.

    Raises:
        ConfigurationError: another driver has bound it since then.
        LogUnavailableError: it cannot be written now.
        DecisionUnknownError: it may have been written.
    """
    if seen is not None and (seen.log_id, seen.pipeline) == (log_id, pipeline):
        return
    mine = Binding(log_id, pipeline, 0 if seen is None else seen.number + 1)
    text = json.dumps({"log_id": log_id, "pipeline": pipeline})
    checkpoint.create(_name(mine.number), text)
    # Another driver with the same log may have been faster: the log itself keeps those apart.
    now = read_binding(checkpoint)
    if now != mine:
        owner = "nobody" if now is None else f"the transaction log with id {now.log_id}"
        raise ConfigurationError(
            f"another driver was faster: {checkpoint.address} belongs to {owner} now, and log= has "
            f"id {log_id}. Start one query per checkpoint, with one log= on every host"
        )
    if mine.number > 0:
        # It does not count any more, but people who look into the checkpoint read it first.
        checkpoint.delete(_FIRST)
        checkpoint.create(_FIRST, text)


class Entry(NamedTuple):
    """A driver that has begun on a checkpoint.

    Attributes:
        version: of its file; the highest one is the last.
        run_id: of the driver's run of the query.
        text: the whole file.
    """

    version: Version
    run_id: str
    text: str


def last_entry(checkpoint: Folder) -> Entry | None:
    """The driver that has begun last; None before the first.

    Raises:
        ConfigurationError: the file is damaged.
        LogUnavailableError: it cannot be read now.
    """
    found = FolderPlace(checkpoint).load(_DRIVERS, None)
    if found is None:
        return None
    text = found.text or ""
    try:
        return Entry(found.version, _run_of(text), text)
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigurationError(
            f"the newest file of {_DRIVERS}/ in {checkpoint.address} is damaged: delete it"
        ) from error


def is_newest_entry(checkpoint: Folder, entry: Entry) -> bool:
    """Whether no driver has entered since; see `last_entry`."""
    found = FolderPlace(checkpoint).load(_DRIVERS, entry.version)
    return found is not None and found.version == entry.version


def enter(
    checkpoint: Folder, seen: Entry | None, driver: str, run_id: str, fenced_run: str | None = None
) -> Entry | None:
    """Write that this driver has begun on the checkpoint, unless another has since it looked.

    A run that has entered once does not enter after another run.

    Args:
        checkpoint: its folder.
        seen: the `last_entry` from before the driver took its token.
        driver: where it runs, for people who look into the file.
        run_id: of its run of the query.
        fenced_run: the run that held the token before. It may have entered since.

    Returns:
        The driver's entry; None where another driver has entered.

    Raises:
        LogUnavailableError: it cannot be written now.
        DecisionUnknownError: it may have been written.
    """
    if seen is not None and seen.run_id != run_id and _has_entered(checkpoint, run_id):
        return None
    place = FolderPlace(checkpoint)
    text = json.dumps({"driver": driver, "run_id": run_id, "entry": secrets.token_hex(8)})
    for _ in range(_MOST_TRIES):
        with contextlib.suppress(DecisionUnknownError):
            version = place.swap(_DRIVERS, None if seen is None else seen.version, text)
            if version is not None:
                return Entry(version, run_id, text)
        # Others were faster, or the answer was lost: the newest file shows which.
        found = last_entry(checkpoint)
        if found is not None and found.text == text:
            return found
        if found != seen:
            if found is None or found.run_id not in {run_id, fenced_run}:
                return None
            seen = found
    raise DecisionUnknownError(
        f"{checkpoint.address}: it is not known whether a file of {_DRIVERS}/ was written; "
        "start the query again"
    )


def _has_entered(checkpoint: Folder, run_id: str) -> bool:
    """Whether an entry of the run is among those that are kept."""
    for name in FolderPlace(checkpoint).names(_DRIVERS):
        with contextlib.suppress(
            ValueError, KeyError, TypeError
        ):  # a damaged file, but not the last
            if _run_of(checkpoint.read(name) or "") == run_id:
                return True
    return False


def _run_of(text: str) -> str:
    return str(json.loads(text)["run_id"])


def _name(number: int) -> str:
    return _FIRST if number == 0 else f"sparkonce.{number}.json"
