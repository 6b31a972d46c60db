"""Exactly-once, all-or-nothing writes from Spark Structured Streaming.

ExactlyOnce(name, sinks=[…], log=…)   goes into df.writeStream.foreachBatch(…)
SparkOnce                             is the format "sparkonce", over Spark Connect too
sparkonce.sinks                       the sinks, and the base class for your own
sparkonce.txn_log                     the transaction log
sparkonce.errors                      every error, by what to do next
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sparkonce.spark_hooks.data_source.source import SparkOnce
    from sparkonce.spark_hooks.exactly_once import ExactlyOnce

__all__ = ["ExactlyOnce", "SparkOnce", "__version__"]

__version__ = "0.1.0.dev0"


def __getattr__(name: str) -> object:
    # Resolved at first use: importing a sink on an executor must not import the driver's side.
    if name == "ExactlyOnce":
        from sparkonce.spark_hooks.exactly_once import ExactlyOnce  # noqa: PLC0415 - lazy on purpose

        return ExactlyOnce
    if name == "SparkOnce":
        from sparkonce.spark_hooks.data_source.source import SparkOnce  # noqa: PLC0415 - likewise

        return SparkOnce
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
