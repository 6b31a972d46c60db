"""The open uploads of one owner, as the server lists them."""

from __future__ import annotations

from typing import Any
from urllib.parse import unquote_plus

from sparkonce.model import BranchId, Owner
from sparkonce.sinks.s3.connecting.client import Clients, Purpose
from sparkonce.sinks.s3.connecting.place import Place
from sparkonce.sinks.s3.writing.keys import branch_of
from sparkonce.sinks.s3.writing.staged import StagedFile

PAGE_UPLOADS = 1000
"""The most uploads that S3 lists at once."""


def open_uploads(clients: Clients, place: Place, owner: Owner) -> dict[BranchId, list[StagedFile]]:
    """Uploads under the place whose file names carry the owner's digest, by branch.

    Paging uses a single marker: versitygw refuses a marker of key and upload id, and a query never
    uses a key twice, so no upload of ours is skipped. The server chooses the marker, which need
    not be a key. SeaweedFS pages by upload ids and gives no other marker.
    """
    client = clients.client(Purpose.ASK)
    found: dict[BranchId, list[StagedFile]] = {}
    marker = {"KeyMarker": ""}
    asked: list[dict[str, str]] = []
    while marker not in asked:
        asked.append(marker)
        # Keys of other applications may contain characters that XML cannot hold, and not every
        # server encodes them. Amazon writes a space as + and a + as %2B, others a space as %20:
        # one decoding fits both.
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
        # If only the keys are encoded, decoding the last key twice would skip others.
        if is_encoded and following != last:
            following = unquote_plus(following)
        upload_id = "" if page.get("NextKeyMarker") else page.get("NextUploadIdMarker")
        marker = {"UploadIdMarker": upload_id} if upload_id else {"KeyMarker": following}
    return found


def _decoded(listed: str, place: Place) -> str:
    """The key in an answer that claims to be encoded; SeaweedFS claims it and does not encode."""
    key = unquote_plus(listed)
    # An encoded key has no =, which every folder of ours has; and decoding keeps our prefix.
    return listed if "=" in listed or not key.startswith(place.prefix) else key
