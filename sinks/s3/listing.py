"""The open uploads of one owner, as the server lists them."""

from __future__ import annotations

from typing import Any
from urllib.parse import unquote_plus

from sparkonce.model import BranchId, Owner
from sparkonce.sinks.s3.client import Connection, Purpose
from sparkonce.sinks.s3.layout import Place, branch_of
from sparkonce.sinks.s3.upload import StagedFile

PAGE_UPLOADS = 1000
"""As many as S3 gives at once."""


def open_uploads(
    connection: Connection, place: Place, owner: Owner
) -> dict[BranchId, list[StagedFile]]:
    """Uploads under the place whose file names carry the owner's digest, by branch.

    Pages go on from one marker alone: versitygw refuses a marker of key and upload id, and our keys
    are never used twice, so none of ours is skipped. It is the server's, which need not be a key.
    SeaweedFS goes by upload ids, and gives no other marker.
    """
    client = connection.client(Purpose.ASK)
    found: dict[BranchId, list[StagedFile]] = {}
    marker = {"KeyMarker": ""}
    asked: list[dict[str, str]] = []
    while marker not in asked:
        asked.append(marker)
        # Other applications' keys may hold characters that XML cannot; not every server encodes.
        # Amazon writes a space as + and a + as %2B, others a space as %20: one decoding fits both.
        wanted: Any = marker
        page = client.list_multipart_uploads(
            Bucket=place.bucket,
            Prefix=place.prefix,
            MaxUploads=PAGE_UPLOADS,
            EncodingType="url",
            **wanted,
        )
        is_encoded = page.get("EncodingType") == "url"
        last = ""
        for upload in page.get("Uploads", ()):
            last = _decoded(upload["Key"], place) if is_encoded else upload["Key"]
            branch_id = branch_of(last, owner)
            if branch_id is not None and last.startswith(place.prefix):
                found.setdefault(branch_id, []).append(StagedFile(last, upload["UploadId"]))
        if not page.get("IsTruncated"):
            break
        following = page.get("NextKeyMarker") or last
        # Where only the keys are encoded, decoding the last one twice would skip others.
        if is_encoded and following != last:
            following = unquote_plus(following)
        upload_id = "" if page.get("NextKeyMarker") else page.get("NextUploadIdMarker")
        marker = {"UploadIdMarker": upload_id} if upload_id else {"KeyMarker": following}
    return found


def _decoded(said: str, place: Place) -> str:
    """The key of an answer that calls itself encoded, which SeaweedFS' does and is not."""
    key = unquote_plus(said)
    # Encoding leaves no =, which each folder of ours has, and no prefix that decoding changes.
    return said if "=" in said or not key.startswith(place.prefix) else key
