"""Exactly-once, all-or-nothing writes from Spark Structured Streaming.

ExactlyOnce(name, sinks=[…], log=…)   goes into df.writeStream.foreachBatch(…)
read_committed, committed_dataset     what S3Sink has committed, batch by batch, never a half one
newest_committed                      up to which batch that is
sparkonce.sinks                       the sinks, and the base class for your own
sparkonce.txn_log                     the transaction log
sparkonce.errors                      every error, by what to do next
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sparkonce.sinks.s3.manifests.readers import (
        committed_dataset,
        newest_committed,
        read_committed,
    )
    from sparkonce.spark_hooks.exactly_once import ExactlyOnce

__all__ = ["ExactlyOnce", "__version__", "committed_dataset", "newest_committed", "read_committed"]

__version__ = "0.1.0.dev0"


def __getattr__(name: str) -> object:
    # Resolved at first use: importing a sink on an executor must not import the driver's side.
    if name == "ExactlyOnce":
        from sparkonce.spark_hooks.exactly_once import ExactlyOnce  # noqa: PLC0415 - lazy on purpose

        return ExactlyOnce
    if name in {"committed_dataset", "newest_committed", "read_committed"}:
        from sparkonce.sinks.s3.manifests import readers  # noqa: PLC0415 - needs the extra s3

        return getattr(readers, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
