"""Makes ``format("sparkonce")`` known to each Spark whose Python has this package installed.

Spark imports every top-level module whose name begins with ``pyspark_``, and registers its
`DefaultSource`.
"""

from __future__ import annotations

from sparkonce.spark_hooks.data_source.source import SparkOnce as DefaultSource

__all__ = ["DefaultSource"]
