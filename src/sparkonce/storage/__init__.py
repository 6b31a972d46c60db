"""Files that are read, listed and created at most once: on local disk, on Hadoop, in S3.

    open_folder(location) ─► LocalFolder    a path, or a URL that begins with file:
                         └─► HadoopFolder   any other URL, through Spark's JVM
    S3Folder                                a prefix of a bucket, through boto3

The transaction log and the readers of Spark's checkpoint use this package. It knows neither: a
folder holds named texts. Only `hadoop` imports PySpark and only `s3` imports boto3; both modules
are imported at their first use.
"""

from __future__ import annotations

from sparkonce.storage.base import FileSystemFolder, Folder
from sparkonce.storage.local import LocalFolder, expanded, local_path
from sparkonce.storage.opening import open_folder

__all__ = [
    "FileSystemFolder",
    "Folder",
    "LocalFolder",
    "expanded",
    "local_path",
    "open_folder",
]
