"""Columns that the rows have and the table lacks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import pyarrow as pa

from sparkonce.sinks.arrow_types import in_zone

MOST_TRIES: Final = 10
"""How often in a row another change of the table may come first."""


def lacking(rows: pa.Schema, names: Iterable[str]) -> pa.Schema:
    """What to add to a table with columns of these names; rows that it has get nulls.

    A name that differs only in upper and lower case is none of them: most engines take it for the
    other one.
    """
    has = {name.lower() for name in names}
    fields = [field for field in in_zone(rows, "UTC") if field.name.lower() not in has]
    return pa.schema([field.with_nullable(True) for field in fields])
