"""A committable's payload as a frozen dataclass with a version.

    @dataclass(frozen=True)
    class Upload(Payload):
        VERSION = 2
        key: str
        etag: bytes

        @classmethod
        def upgrade(cls, fields, version):           # of records that version 1 wrote
            return {**fields, "etag": b""} if version == 1 else fields

    return Upload(key, etag).committable(handle.branch_id)   # in preCommit
    upload = Upload.of(committable)                           # in commit

Fields hold what JSON can hold, and bytes and tuples, at any depth.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, ClassVar, Self

from sparkonce.errors import ConfigurationError, ProtocolError
from sparkonce.model import BranchId, Committable, JsonValue

_BYTES, _TUPLE = "$bytes", "$tuple"


class Payload:
    """Base of a frozen dataclass that is stored in a committable and read back from it.

    Attributes:
        VERSION: increase it when the fields change, and let `upgrade` read the older ones.
    """

    VERSION: ClassVar[int] = 1

    def committable(
        self,
        branch_id: BranchId,
        *,
        safe_until: float | None = None,
        text: str = "",
        rows: int | None = None,
    ) -> Committable:
        """Make the committable that `preCommit` returns.

        Args:
            branch_id: of the branch.
            safe_until: see `Committable`.
            text: see `Committable`.
            rows: see `Committable`.

        Raises:
            ProtocolError: a field holds a value that JSON cannot hold.
        """
        payload = {
            field.name: _encoded(getattr(self, field.name), f"{type(self).__name__}.{field.name}")
            for field in fields(self)  # type: ignore[arg-type]  # subclasses are dataclasses
        }
        return Committable(branch_id, payload, self.VERSION, safe_until, text, rows)

    @classmethod
    def of(cls, committable: Committable) -> Self:
        """Read the payload of a committable, also of an older version.

        Raises:
            ConfigurationError: a newer version wrote it, or its fields do not match.
        """
        found = {name: _decoded(value) for name, value in committable.payload.items()}
        if committable.version > cls.VERSION:
            raise ConfigurationError(
                f"{committable.branch_id} was prepared by version {committable.version} of "
                f"{cls.__name__}, and this is version {cls.VERSION}: install the newer code again"
            )
        values = cls.upgrade(found, committable.version)
        try:
            return cls(**values)
        except TypeError as error:
            raise ConfigurationError(
                f"{committable.branch_id} was prepared with the fields {sorted(found)} (version "
                f"{committable.version}), which {cls.__name__} cannot read ({error}): raise "
                "VERSION when fields change, and read older ones in upgrade"
            ) from error

    @classmethod
    def upgrade(cls, fields: dict[str, Any], version: int) -> dict[str, Any]:  # noqa: ARG003 - optional
        """Turn the fields that `version` wrote into the current ones."""
        return fields


def _encoded(value: object, where: str) -> JsonValue:
    if value is None or isinstance(value, str | int | float | bool):
        return value
    if isinstance(value, bytes):
        return {_BYTES: base64.b64encode(value).decode()}
    if isinstance(value, list | tuple):
        items: list[JsonValue] = [_encoded(item, where) for item in value]
        return {_TUPLE: items} if isinstance(value, tuple) else items
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {str(key): _encoded(item, where) for key, item in value.items()}
    raise ProtocolError(
        f"{where} holds a {type(value).__name__}, which a record cannot hold: make it text, a "
        "number, bytes, or a list, tuple or dictionary (with text as keys) of these"
    )


def _decoded(value: JsonValue) -> Any:
    match value:
        case {"$bytes": str(text), **rest} if not rest:
            return base64.b64decode(text)
        case {"$tuple": list(items), **rest} if not rest:
            return tuple(_decoded(item) for item in items)
        case dict():
            return {key: _decoded(item) for key, item in value.items()}
        case list():
            return [_decoded(item) for item in value]
    return value
