"""Files in S3 that appear whole, and only after their batch is decided.

    sink                    S3Sink: the verbs, and its settings
      ├─ finishing          commits, aborts and finds the uploads of a branch
      ├─── writing          turns rows into files, and files into multipart uploads
      └─── connecting       reaches the server: settings, clients, checks, diagnosis

Imports go down only.
"""

from sparkonce.sinks.s3.connecting.settings import S3Connection
from sparkonce.sinks.s3.sink import S3Sink
from sparkonce.sinks.s3.writing.objects import S3Objects

__all__ = ["S3Connection", "S3Objects", "S3Sink"]
