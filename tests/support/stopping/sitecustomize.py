"""Stops this process before its change number STOP_AT of what is below STOP_BELOW.

Python imports a module of this name at its start, from PYTHONPATH. A change is a file or folder
that is created, linked, renamed or removed, or a statement of SQLite that writes. The number and
kind of the change go to stderr first.
"""

from __future__ import annotations

import os
import signal
import sqlite3
import sys
from typing import Any

_BELOW, _AT = os.environ["STOP_BELOW"], int(os.environ["STOP_AT"])
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_CHANGES = {"os.link", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.symlink"}
_STATEMENTS = ("INSERT", "UPDATE", "DELETE", "CREATE", "COMMIT")
_seen: list[str] = []


def _count(change: str) -> None:
    _seen.append(change)
    if len(_seen) == _AT:
        os.write(2, f"\nstopped before {change}\n".encode())
        os.kill(os.getpid(), signal.SIGSTOP)


def _count_statement(statement: str) -> None:
    verb = statement.lstrip().partition(" ")[0].upper()
    if verb in _STATEMENTS:
        _count(f"{verb} of the log")


def _hook(event: str, arguments: tuple[Any, ...]) -> None:
    is_open = event == "open" and bool(arguments[2] & _WRITES)
    if not is_open and event not in _CHANGES:
        return
    path = arguments[1 if event in {"os.link", "os.rename", "os.symlink"} else 0]
    if isinstance(path, int):
        return
    absolute = os.path.abspath(os.fsdecode(path))  # noqa: PTH100 - calls no hook
    if absolute.startswith(_BELOW):
        _count(f"{event} {absolute.removeprefix(_BELOW)}")


def _connect(*arguments: Any, **settings: Any) -> sqlite3.Connection:
    connection = _sqlite_connect(*arguments, **settings)
    connection.set_trace_callback(_count_statement)
    return connection


_sqlite_connect, sqlite3.connect = sqlite3.connect, _connect
sys.addaudithook(_hook)
