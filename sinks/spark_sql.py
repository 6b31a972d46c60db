"""SQL expressions that a sink gives to Spark: quoted names, and calls that are refused."""

from __future__ import annotations

import re
from collections.abc import Sequence

from sparkonce.errors import ConfigurationError

_INPUT_FILE = re.compile(r"(?i)(?<!\w)input_file_(?:name|block_start|block_length)(?=`?\s*\()")
"""Calls for which Spark returns '' or -1 when the rows come from a snapshot."""

_TEXT = re.compile(r"""'(?:\\.|[^'\\])*'|["](?:\\.|[^"\\])*["]""")
"""A string literal; a call inside it does not count."""


def quoted(name: str) -> str:
    """Quote a column name for Spark's SQL, whatever characters it has."""
    return "`" + name.replace("`", "``") + "`"


def check_select(sink: str, select: Sequence[str] | None) -> tuple[str, ...] | None:
    """Check the `select` of the sink with this name, and return it as a tuple.

    Raises:
        ConfigurationError: it is empty, not a list, or asks for the input file.
    """
    if select is None:
        return None
    if isinstance(select, str) or not select:
        raise ConfigurationError(
            f"{sink}: select={select!r} must be a list of SQL expressions, or be left out"
        )
    for expression in select:
        if call := _INPUT_FILE.search(_TEXT.sub("''", expression)):
            raise ConfigurationError(
                f"{sink}: select= cannot call {call[0]}(): Spark has no answer once the batch is "
                "copied into a snapshot, which another sink's transform= or writers= requires. "
                "Instead, make the column in the query"
            )
    return tuple(select)
