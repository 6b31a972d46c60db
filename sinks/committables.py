"""Checks what a sink returns, and what its `commit` gets."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Protocol

from sparkonce.errors import (
    ConfigurationError,
    PrepareRejectedError,
    ProtocolError,
    TakeBackRefusedError,
)
from sparkonce.model import DRIVER_ATTEMPT, BranchId, Committable


class Named(Protocol):
    """A sink, for error messages."""

    name: str


def check_committable(sink: Named, committable: object, branch_id: BranchId) -> Committable:
    """Check what `preCommit` or `vote` returned; return it as the log will return it later.

    JSON turns numeric dictionary keys into text, and tuples into lists. `branch_id` is that of the
    task, or of the driver if `vote` returned the committable.

    Raises:
        ProtocolError: it is no committable, or of another branch, or its payload is not JSON.
    """
    where = f"{type(sink).__name__} {sink.name!r}"
    if not isinstance(committable, Committable):
        raise ProtocolError(
            f"{where} returned {_kind_of(committable)} instead of a Committable: end preCommit "
            "with return Committable(handle.branch_id, {…})"
        )
    found = committable.branch_id
    by_driver = branch_id.attempt == DRIVER_ATTEMPT  # it may pass on a task's committable
    wanted = branch_id if not by_driver else replace(branch_id, attempt=found.attempt)
    if found != wanted:
        raise ProtocolError(
            f"{where} returned a committable of another branch, {found}, for {branch_id}: "
            "keep the branch id of beginTransaction in the handle, and return that one"
        )
    try:
        payload = json.loads(json.dumps(dict(committable.payload), allow_nan=False))
    except (TypeError, ValueError) as error:
        raise ProtocolError(
            f"{where}: the payload of {found} is not JSON ({_not_json(committable.payload)}"
            f"{error}): use text, numbers, lists and dictionaries, or make it a Payload "
            "(sparkonce.sinks), which also holds bytes"
        ) from error
    return replace(committable, payload=payload)


def name_used_before(where: str, branch_id: BranchId) -> PrepareRejectedError:
    """The error for a branch that is new to the log, while the sink has one of its name."""
    return PrepareRejectedError(
        f"{where}: another branch had the name {branch_id} before, so the log is an older copy, as "
        "after a restored backup of the checkpoint with its log. Bring the newer ones back. "
        "Without them, the next start delivers what came since then again",
        branch_id,
    )


def check_rows(sink: Named, committable: Committable, written: int) -> None:
    """Refuse a branch of which the target has other than the `written` rows, if the sink counts.

    Raises:
        PrepareRejectedError: the numbers differ.
    """
    if committable.rows not in {None, written}:
        raise PrepareRejectedError(
            f"{type(sink).__name__} {sink.name!r} prepared {committable.rows} rows of the "
            f"{written} that it got: its client or its target has lost or doubled some",
            committable.branch_id,
        )


def check_all_there(where: str, branch_id: BranchId, rows: int, expected: int) -> None:
    """Refuse to take back a branch of which the target has other than the `expected` rows.

    Raises:
        TakeBackRefusedError: the numbers differ.
    """
    if rows != expected:
        raise TakeBackRefusedError(
            f"{where} has {rows} of the {expected} rows of {branch_id}: another writer has "
            "changed or removed rows of this batch since",
            branch_id,
        )


def check_version(committable: Committable, newest: int) -> None:
    """Refuse a branch that a newer version of the sink prepared: its proofs may differ.

    Raises:
        ConfigurationError: the payload's version is above `newest`.
    """
    if committable.version > newest:
        raise ConfigurationError(
            f"{committable.branch_id}: written by a newer sparkonce (payload version "
            f"{committable.version}, this one reads up to {newest}): use the newer one"
        )


def takes_committables(
    commit: Callable[[Any, Committable], None],
) -> Callable[[Any, Committable], None]:
    """Wrap a sink's `commit` so that it refuses anything but a committable.

    A sink could not distinguish a handle, passed by mistake, from a lost branch.
    """

    @functools.wraps(commit)
    def checked(self: Any, committable: Committable) -> None:
        if not isinstance(committable, Committable):
            raise ProtocolError(
                f"commit of {type(self).__name__} got {_kind_of(committable)}: call "
                "preCommit(handle) first, and commit what it returns"
            )
        commit(self, committable)

    return checked


def _not_json(payload: Mapping[str, Any]) -> str:
    for key, value in payload.items():
        try:
            json.dumps(value, allow_nan=False)
        except (TypeError, ValueError):
            return f"{key!r} holds {_kind_of(value)}; "
    return ""


def _kind_of(value: object) -> str:
    return "None" if value is None else f"a {type(value).__name__}"
