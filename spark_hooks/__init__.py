"""The driver's side: foreachBatch, the coordinator, and what runs in each Spark task."""

from __future__ import annotations

from sparkonce.spark_hooks.exactly_once import ExactlyOnce

__all__ = ["ExactlyOnce"]
