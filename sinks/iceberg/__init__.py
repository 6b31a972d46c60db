"""The Iceberg sink: tasks write Parquet files, and one commit of the table shows a whole batch.

sink        IcebergSink: settings and verbs
finishing   the end of a batch: proof, conditional commit, abort
proofs      the table properties that prove how a batch ended
writing     rows to Parquet files
files       a task's files, and a batch's manifest, as payloads
marks       what exists that is not finished
tables      catalog, table and its storage
"""

from __future__ import annotations

from sparkonce.sinks.iceberg.sink import IcebergSink

__all__ = ["IcebergSink"]
