"""Files that are read, listed and created at most once: on local disk, on Hadoop, in S3.

    open_folder(location) ─► LocalFolder    a path, or a URL that begins with file:
                         └─► HadoopFolder   any other URL, through Spark's JVM
    S3Folder                                a prefix of a bucket, through boto3

The transaction log and the readers of Spark's checkpoint stand on this. It knows neither: a folder
has names and texts. `hadoop` alone imports PySpark and `s3` alone imports boto3, each at its first
use.
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
