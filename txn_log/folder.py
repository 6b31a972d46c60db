"""Documents in a folder of a file system whose only atomic step is to create a file.

    ROOT/orders/head/00000000000000000041.json     a swapped document is a sequence of files:
                    /00000000000000000042.json     the highest number counts

A swap creates the file with the next number, unless it exists. Old files are removed, so a writer
that was paused for a long time may find its number free again and create a file below the highest.
Therefore each writer lists the folder after its write. If its number is not the highest, either its
write did not count or another write has followed, and it must read the log again. The highest file
always holds the last write that counted.
"""

from __future__ import annotations

import contextlib
import re
import secrets
from collections.abc import Iterable, Sequence

from sparkonce.errors import ConfigurationError, DecisionUnknownError, LogUnavailableError
from sparkonce.failpoints import reach
from sparkonce.storage import Folder
from sparkonce.txn_log.place import Found, Version
from sparkonce.txn_log.races import racing

_MOST_FILES = 16
_KEPT_FILES = 8
_MOST_READS = 16
_RACERS = 8
_RACES = 12


class FolderPlace:
    """Documents in a `Folder`; see `sparkonce.txn_log.place.Place`."""

    def __init__(self, folder: Folder) -> None:
        self._folder = folder

    @property
    def address(self) -> str:
        return self._folder.address

    def close(self) -> None:
        pass

    def create(self, name: str, text: str) -> bool:
        return self._folder.create(name, text)

    def read(self, name: str) -> str | None:
        return self._folder.read(name)

    def names(self, folder: str) -> Sequence[str]:
        return [name for name in self._folder.names(folder) if name.endswith(".json")]

    def delete(self, names: Iterable[str]) -> None:
        for name in names:
            self._folder.delete(name)

    def load(self, name: str, known: Version | None) -> Found | None:
        for _ in range(_MOST_READS):  # another writer may remove the file once it was listed
            numbers = self._numbers(name)
            if not numbers:
                return None
            if numbers[-1] == known:
                return Found(known, None)
            reach("log.before", request="read")
            text = self._folder.read(_file(name, numbers[-1]))
            if text is not None:
                return Found(numbers[-1], text)
        raise LogUnavailableError(
            f"{self.address}: {_file(name, numbers[-1])} is listed there, but a read reports that "
            "it does not exist; nothing was written. If this persists (a broken link, half a "
            "restore), stop the query and restore it from a whole copy that has the newest batch "
            "(docs/reference/errors/log.md, Restore a log). Do not delete it, or an "
            "older file would count"
        )

    def swap(self, name: str, seen: Version | None, text: str) -> Version | None:
        number = int(seen or 0) + 1
        reach("log.before", request="create")
        if not self._folder.create(_file(name, number), text):
            return None
        try:
            numbers = self._numbers(name)
        except LogUnavailableError as error:
            raise DecisionUnknownError(
                f"{self.address} became unreachable during a write; read the log again"
            ) from error
        reach("log.after", request="create")
        if numbers[-1:] != [number]:  # also if the listing does not show our file yet
            raise DecisionUnknownError(
                f"{self.address}: others wrote at the same time; read the log again"
            )
        if len(numbers) > _MOST_FILES:
            with contextlib.suppress(LogUnavailableError):
                self.delete(_file(name, old) for old in numbers[:-_KEPT_FILES])
        return number

    def _numbers(self, name: str) -> list[int]:
        reach("log.before", request="list")
        # An operator may have put a copy of a file next to it.
        ours = re.compile(rf"(?:.*/)?{re.escape(name)}/([0-9]{{20}})\.json", re.DOTALL)
        found = map(ours.fullmatch, self._folder.names(name))
        return sorted(int(match[1]) for match in found if match)


def check_create(folder: Folder) -> None:
    """Check that of several writers that create one file at the same time, exactly one succeeds.

    Raises:
        ConfigurationError: several succeeded, or none; the message names other logs.
        LogUnavailableError: the file system did not respond; nothing of the log was written.
    """
    probe = f"probe-{secrets.token_hex(8)}"
    winners = []
    try:
        with racing(_RACERS) as race:
            for number in range(_RACES):
                name = f"{probe}-{number}.json"
                winners.append(sum(race(lambda racer, name: folder.create(name, str(racer)), name)))
                folder.delete(name)
    except DecisionUnknownError as error:  # it was a probe, so nothing is in doubt
        raise LogUnavailableError(
            f"{error}. It was a probe, so nothing is lost: start again later"
        ) from error
    if winners != [1] * _RACES:
        raise ConfigurationError(
            f"{folder.address}: {_RACERS} writers created one file at the same time, and the file "
            f"system reported success to up to {max(winners)} of them. A transaction log there "
            "would let two drivers decide; use log=postgresql://…, s3://… or sqlite:///…"
        )


def _file(name: str, number: int) -> str:
    return f"{name}/{number:020d}.json"
