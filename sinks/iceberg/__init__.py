"""The Iceberg sink: tasks write Parquet files, and one commit of the table shows a whole batch.

sink        IcebergSink: settings and verbs
checking    can the table take these rows?
writing     rows to Parquet files
finishing   the end of a batch or a task: proof, conditional commit, abort
appending   the snapshot of a commit
proofs      the table properties that prove how a batch ended
files       a task's files, and a batch's manifest, as payloads
marks       what exists that is not finished
ranges      sets of numbers as short text
tables      catalog, table and its storage
"""

from __future__ import annotations

from sparkonce.sinks.iceberg.sink import IcebergSink

__all__ = ["IcebergSink"]
