"""Files that are read, listed and created at most once: on local disk, on Hadoop, in S3.

    open_folder(location) ─► LocalFolder    a path, or a URL that begins with file:
                         ├─► HadoopFolder   any other URL, through a JVM
                         └─► S3FileFolder   a bucket's, through boto3, where it is asked for
    S3Folder                                a prefix of a bucket, for logs at s3://…

The transaction log and the readers of Spark's checkpoint use this package. It knows neither: a
folder holds named texts. Only `hadoop` imports PySpark; only `s3` and `s3_files` import boto3.
These modules are imported at their first use.
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
