"""The sinks, and the base classes for your own.

Each sink is imported at its first use, so a pipeline needs only the client libraries of its own
sinks.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from sparkonce.datasets import Dataset
from sparkonce.sinks.base import TwoPhaseCommitSink
from sparkonce.sinks.capabilities import (
    AbortsDecided,
    AbortsMany,
    ChecksLog,
    ChecksOthers,
    CommitsMany,
    CommitsOnePhase,
    Delivered,
    Diagnoses,
    FindsBranches,
    ForgetsProofs,
    NamesDatasets,
    Publishes,
    TakesBack,
    Visible,
    Votes,
)
from sparkonce.sinks.payload import Payload
from sparkonce.sinks.rows import RowSink

if TYPE_CHECKING:
    from sparkonce.sinks.delta import DeltaSink
    from sparkonce.sinks.file import FileSink
    from sparkonce.sinks.iceberg import IcebergSink
    from sparkonce.sinks.idempotent import IdempotentSink
    from sparkonce.sinks.kafka import KafkaSink
    from sparkonce.sinks.postgres import PostgresSink
    from sparkonce.sinks.s3 import S3Connection, S3Objects, S3Sink
    from sparkonce.sinks.sqlite import SqliteSink

__all__ = [
    "AbortsDecided",
    "AbortsMany",
    "ChecksLog",
    "ChecksOthers",
    "CommitsMany",
    "CommitsOnePhase",
    "Dataset",
    "Delivered",
    "DeltaSink",
    "Diagnoses",
    "FileSink",
    "FindsBranches",
    "ForgetsProofs",
    "IcebergSink",
    "IdempotentSink",
    "KafkaSink",
    "NamesDatasets",
    "Payload",
    "PostgresSink",
    "Publishes",
    "RowSink",
    "S3Connection",
    "S3Objects",
    "S3Sink",
    "SqliteSink",
    "TakesBack",
    "TwoPhaseCommitSink",
    "Visible",
    "Votes",
]

_MODULE_AND_EXTRA = {
    "DeltaSink": ("delta", "delta"),
    "FileSink": ("file", None),
    "IcebergSink": ("iceberg", "iceberg"),
    "IdempotentSink": ("idempotent", None),
    "KafkaSink": ("kafka", "kafka"),
    "PostgresSink": ("postgres", "postgres"),
    "S3Connection": ("s3", "s3"),
    "S3Objects": ("s3", "s3"),
    "S3Sink": ("s3", "s3"),
    "SqliteSink": ("sqlite", None),
}


def __getattr__(name: str) -> object:
    if name not in _MODULE_AND_EXTRA:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, extra = _MODULE_AND_EXTRA[name]
    try:
        return getattr(import_module(f"sparkonce.sinks.{module}"), name)
    except ModuleNotFoundError as error:
        if extra is None or (error.name or "").startswith("sparkonce"):
            raise
        raise ModuleNotFoundError(
            f"{name} needs {error.name!r}: pip install 'sparkonce[{extra}]'", name=error.name
        ) from error
