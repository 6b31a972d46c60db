"""The Iceberg sink: tasks write Parquet files, and one commit of the table shows a whole batch.

sink        IcebergSink: settings
checking    can the table take these rows?
table       layout of files, conditional commit
appending   the snapshot of a commit
removing    the snapshot of a rewind
reading     can the current schema read files of an older one?
properties  those of the table that prove how batches ended
files       data files and manifests as JSON
tables      catalog, table and its folders
"""

from __future__ import annotations

from sparkonce.sinks.iceberg.sink import IcebergSink

__all__ = ["IcebergSink"]
