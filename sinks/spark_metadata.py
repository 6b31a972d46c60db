"""Folders of Spark's own file sink, in which Spark's readers see only the files that it lists."""

from __future__ import annotations

from sparkonce.errors import ConfigurationError

SPARK_METADATA = "_spark_metadata"
"""The subfolder in which Spark's file sink lists its files."""


def written_by_spark(target: str, other: str) -> ConfigurationError:
    """The error that refuses such a folder.

    Args:
        target: the sink's class, and where it writes.
        other: what the user can give instead.
    """
    return ConfigurationError(
        f"{target} was written by Spark's file sink: Spark's readers of it see only the files that "
        f"{SPARK_METADATA} lists, and no row of this sink. Give {other}. Or first remove the files "
        "that it does not list, because failed attempts may have written them, and then "
        f"{SPARK_METADATA} itself"
    )
