"""The settings for a row whose key is already in the table, and which settings go together.

| mode   | the row's key is in the table | needs | takes                      |
|--------|-------------------------------|-------|----------------------------|
| append | an error, if it is unique     |       |                            |
| ignore | the table's row stays         | key   | order_by                   |
| upsert | the row is updated            | key   | order_by, update           |
| merge  | it is updated, or deleted     | key   | order_by, update, `delete` |
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Self, TypeAlias, get_args

from sparkonce.errors import ConfigurationError

Write: TypeAlias = Literal["append", "ignore", "upsert", "merge"]

_TAKEN_BY = {
    "key": ("ignore", "upsert", "merge"),
    "order_by": ("ignore", "upsert", "merge"),
    "update": ("upsert", "merge"),
    "delete": ("merge",),
}
_NEEDED_BY = {"key": ("ignore", "upsert", "merge"), "delete": ("merge",)}


@dataclass(frozen=True, slots=True)
class Writing:
    """Checked settings of a write.

    Attributes:
        mode: see the module's table.
        key: columns that identify a row; None to append.
        update: columns that an update sets; None for all of the batch's columns but the key.
        order_by: the row with the greatest value is the last row of its key.
        delete: SQL that says whether a row is a deletion.
    """

    mode: Write = "append"
    key: tuple[str, ...] | None = None
    update: tuple[str, ...] | None = None
    order_by: tuple[str, ...] = ()
    delete: str | None = None

    @classmethod
    def of(
        cls,
        name: str,
        write: Write | None,
        *,
        key: str | Sequence[str] | None,
        update: Sequence[str] | None,
        order_by: str | Sequence[str] | None,
        delete: str | None,
    ) -> Self:
        """Check the settings of the sink `name`; the default mode follows from the other settings.

        Raises:
            ConfigurationError: the settings do not go together.
        """
        if write is None:
            write = "append" if key is None else "upsert" if delete is None else "merge"
        given = {"key": key, "update": update, "order_by": order_by, "delete": delete}
        _check_mode(name, write, given)
        columns = {
            setting: _columns(name, setting, value)
            for setting, value in (
                ("key", one_or_several(key)),
                ("update", update),
                ("order_by", one_or_several(order_by)),
            )
        }
        if both := set(columns["key"] or ()) & set(columns["update"] or ()):
            raise ConfigurationError(
                f"{name}: update= names {min(both)!r}, which is part of key= and never changes"
            )
        if delete is not None and (not isinstance(delete, str) or not delete.strip()):
            raise ConfigurationError(
                f"{name}: delete={delete!r} must be a boolean column or a condition in SQL, such "
                "as \"op = 'D'\""
            )
        return cls(write, columns["key"], columns["update"], columns["order_by"] or (), delete)


def _check_mode(name: str, write: Write, given: Mapping[str, object]) -> None:
    if write not in get_args(Write):
        modes = ", ".join(map(repr, get_args(Write)))
        raise ConfigurationError(f"{name}: write={write!r} must be one of {modes}")
    for setting, value in given.items():
        if value is None and write in _NEEDED_BY.get(setting, ()):
            raise ConfigurationError(f"{name}: write={write!r} needs {setting}=")
        if value is not None and write not in _TAKEN_BY[setting]:
            modes = ", ".join(f"write={mode!r}" for mode in _TAKEN_BY[setting])
            raise ConfigurationError(
                f"{name}: {setting}={value!r} has no meaning for write={write!r}; it goes with "
                f"key= and {modes}"
            )


def one_or_several(columns: str | Sequence[str] | None) -> Sequence[str] | None:
    """The columns of a setting that takes a name or a list of names."""
    return [columns] if isinstance(columns, str) else columns


def _columns(name: str, setting: str, value: Sequence[str] | None) -> tuple[str, ...] | None:
    if value is None:
        return None
    if isinstance(value, str) or not all(value) or not value or len(set(value)) != len(value):
        raise ConfigurationError(
            f"{name}: {setting}={value!r} must be a list of different columns, or be left out"
        )
    return tuple(value)
