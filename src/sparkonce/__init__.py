"""Exactly-once, all-or-nothing writes from Spark Structured Streaming.

ExactlyOnce(name, sinks=[…], log=…)   goes into df.writeStream.foreachBatch(…)
SparkOnce, shaped                     df.writeStream.format("sparkonce"), also over Spark Connect
sparkonce.sinks                       the sinks, and the base class for your own
sparkonce.txn_log                     the transaction log
sparkonce.errors                      every error, by what to do next
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sparkonce.spark_hooks.data_source.shaped import shaped
    from sparkonce.spark_hooks.data_source.source import SparkOnce
    from sparkonce.spark_hooks.exactly_once import ExactlyOnce

__all__ = ["ExactlyOnce", "SparkOnce", "__version__", "shaped"]

__version__ = "0.1.0.dev0"


def __getattr__(name: str) -> object:
    # Resolved at first use: importing a sink on an executor must not import the driver's side.
    if name == "ExactlyOnce":
        from sparkonce.spark_hooks.exactly_once import ExactlyOnce  # noqa: PLC0415 - lazy on purpose

        return ExactlyOnce
    if name == "SparkOnce":
        from sparkonce.spark_hooks.data_source.source import SparkOnce  # noqa: PLC0415 - likewise

        return SparkOnce
    if name == "shaped":
        from sparkonce.spark_hooks.data_source.shaped import shaped  # noqa: PLC0415 - likewise

        return shaped
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
