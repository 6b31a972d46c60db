"""The Delta sink: tasks write Parquet files, and one commit of the table shows a whole batch.

sink        DeltaSink: settings
checking    can the table take these rows?
table       layout of files, conditional commit, proofs
live        the files of batches, for a rewind
statistics  what Delta's log says of the values in a file
places      the table's address, and the storage behind it
"""

from __future__ import annotations

from sparkonce.sinks.delta.sink import DeltaSink

__all__ = ["DeltaSink"]
