"""The open uploads of one owner, as the server lists them."""

from __future__ import annotations

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
    are never used twice, so none of ours is skipped. It is the server's, which need not be a key:
    S3 Express sorts nothing.
    """
    client = connection.client(Purpose.ASK)
    found: dict[BranchId, list[StagedFile]] = {}
    marker = ""
    asked: set[str] = set()
    while marker not in asked:
        asked.add(marker)
        # Other applications' keys may hold characters that XML cannot; not every server encodes.
        # Amazon writes a space as + and a + as %2B, others a space as %20: one decoding fits both.
        page = client.list_multipart_uploads(
            Bucket=place.bucket,
            Prefix=place.prefix,
            KeyMarker=marker,
            MaxUploads=PAGE_UPLOADS,
            EncodingType="url",
        )
        decode = unquote_plus if page.get("EncodingType") == "url" else str
        last = marker
        for upload in page.get("Uploads", ()):
            last = decode(upload["Key"])
            branch_id = branch_of(last, owner)
            if branch_id is not None and last.startswith(place.prefix):
                found.setdefault(branch_id, []).append(StagedFile(last, upload["UploadId"]))
        if not page.get("IsTruncated"):
            break
        following = page.get("NextKeyMarker") or last
        # Where only the keys are encoded, decoding the last one twice would skip others.
        marker = last if following == last else decode(following)
    return found
