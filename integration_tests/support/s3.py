"""A bucket, examined from outside, and a branch's way through the sink."""

from __future__ import annotations

import datetime as dt
import io
import json
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq

from sparkonce.model import BranchId, Committable, Owner
from sparkonce.sinks import S3Sink

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client

OWNER = Owner("0123456789abcdef", "11111111-2222-3333-4444-555555555555")
ROWS = pa.RecordBatch.from_pydict({"id": list(range(100)), "day": ["mon", "tue"] * 50})


def branch(batch_id: int = 1, **changes: Any) -> BranchId:
    values = {"token": 1, "sink": "s3", "write_pass": 0, "attempt": 1}
    return BranchId(owner=OWNER, batch_id=batch_id, **{**values, **changes})


def prepare(sink: S3Sink, branch_id: BranchId, *batches: pa.RecordBatch) -> Committable:
    handle = sink.beginTransaction(branch_id)
    for batch in batches or (ROWS,):
        sink.write(handle, batch)
    committable = sink.preCommit(handle)
    # As it comes out of the transaction log.
    return Committable.from_json(json.loads(json.dumps(committable.to_json())))


class World:
    """The bucket, seen from outside."""

    def __init__(self, client: S3Client, bucket: str) -> None:
        self.client = client
        self.bucket = bucket

    def objects(self) -> dict[str, tuple[str, dt.datetime]]:
        listed = self.client.list_objects_v2(Bucket=self.bucket).get("Contents", ())
        return {entry["Key"]: (entry["ETag"], entry["LastModified"]) for entry in listed}

    def uploads(self) -> dict[str, str]:
        listed = self.client.list_multipart_uploads(Bucket=self.bucket).get("Uploads", ())
        return {entry["UploadId"]: entry["Key"] for entry in listed}

    def counts(self) -> tuple[int, int]:
        """Open uploads and visible objects."""
        return len(self.uploads()), len(self.objects())

    def body(self, key: str) -> bytes:
        return self.client.get_object(Bucket=self.bucket, Key=key)["Body"].read()

    def table(self, key: str) -> pa.Table:
        return pq.ParquetFile(io.BytesIO(self.body(key))).read()

    def put(self, key: str, body: bytes = b"foreign") -> None:
        self.client.put_object(Bucket=self.bucket, Key=key, Body=body)

    def open_upload(self, key: str) -> str:
        return self.client.create_multipart_upload(Bucket=self.bucket, Key=key)["UploadId"]

    def upload(self, key: str, body: bytes) -> None:
        """Put an object as an upload of one part, which gives it the ETag of an upload."""
        upload = {"Bucket": self.bucket, "Key": key, "UploadId": self.open_upload(key)}
        part = self.client.upload_part(**upload, PartNumber=1, Body=body)
        self.client.complete_multipart_upload(
            **upload, MultipartUpload={"Parts": [{"PartNumber": 1, "ETag": part["ETag"]}]}
        )

    def abort(self, key: str, upload_id: str) -> None:
        self.client.abort_multipart_upload(Bucket=self.bucket, Key=key, UploadId=upload_id)


def files_of(committable: Committable) -> list[dict[str, Any]]:
    files: Any = committable.payload["files"]
    return list(files)


def key_of(committable: Committable) -> str:
    return str(files_of(committable)[0]["key"])
