"""Open uploads as Amazon S3 lists them, which no local server does: a space in a key comes as +."""

from __future__ import annotations

import base64
import datetime as dt
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, quote_plus, unquote, urlsplit
from xml.sax.saxutils import escape

import pytest

from sparkonce.model import BranchId, Owner
from sparkonce.sinks import S3Sink
from sparkonce.sinks.s3.connecting.place import Place
from sparkonce.sinks.s3.finishing import listing
from sparkonce.sinks.s3.writing.keys import file_key, folder_name
from tests.support.s3_sinks import s3_sink

OWNER = Owner("0123456789abcdef", "11111111-2222-3333-4444-555555555555")
BUCKET = "lake"
VALUES = ["New York", "New+York", "a+b", "100% ä", "%2B", dt.datetime(2026, 1, 1, 12)]  # noqa: DTZ001


class Amazon:
    """The open uploads of a bucket.

    Attributes:
        uploads: (key, upload id), in the order in which they are listed.
        markers: with which pages were asked for.
        marks: what the next page is asked for with, of a page's last key; None gives no marker.
        encodes_marks: whether they come as the keys do.
    """

    def __init__(self) -> None:
        self.url = ""
        self.uploads: list[tuple[str, str]] = []
        self.markers: list[str] = []
        self.marks: Callable[[str], str] | None = str
        self.encodes_marks = True

    def page(self, query: dict[str, str]) -> str:
        """ListMultipartUploads, as Amazon's API reference and its answers have it."""
        self.markers.append(query.get("key-marker", ""))
        is_encoded = query.get("encoding-type") == "url"

        def said(text: str) -> str:
            return quote_plus(text, safe="/") if is_encoded else escape(text)

        rest = [upload for upload in self.uploads if upload[0].startswith(query.get("prefix", ""))]
        mark = self.marks or str
        known = [number for number, (key, _) in enumerate(rest) if mark(key) == self.markers[-1]]
        rest = rest[known[0] + 1 :] if known else rest
        page = rest[: int(query["max-uploads"])]
        entries = "".join(
            f"<Upload><Key>{said(key)}</Key><UploadId>{upload_id}</UploadId></Upload>"
            for key, upload_id in page
        )
        encoding = "<EncodingType>url</EncodingType>" if is_encoded else ""
        more = len(rest) > len(page)
        following = ""
        if more and self.marks is not None:
            marker = self.marks(page[-1][0])
            marker = said(marker) if self.encodes_marks else escape(marker)
            following = f"<NextKeyMarker>{marker}</NextKeyMarker>"
        return (
            '<?xml version="1.0" encoding="UTF-8"?><ListMultipartUploadsResult '
            f'xmlns="http://s3.amazonaws.com/doc/2006-03-01/"><Bucket>{BUCKET}</Bucket>'
            f"{following}{encoding}<IsTruncated>{str(more).lower()}</IsTruncated>{entries}"
            "</ListMultipartUploadsResult>"
        )

    def abort(self, key: str, upload_id: str) -> bool:
        """Whether there was such an upload."""
        if (key, upload_id) not in self.uploads:
            return False
        self.uploads.remove((key, upload_id))
        return True


class SeaweedFS(Amazon):
    """The same as SeaweedFS 4 answers: it says that it encodes, and does not.

    Uploads are sorted by their ids. A key marker is the one key that is listed.
    """

    def page(self, query: dict[str, str]) -> str:
        key_marker, marker = query.get("key-marker", ""), query.get("upload-id-marker", "")
        self.markers.append(marker)
        listed = [
            (key, upload_id)
            for key, upload_id in sorted(self.uploads, key=lambda upload: upload[1])
            if upload_id > marker
            and key_marker in {"", key}
            and key.startswith(query.get("prefix", ""))
        ]
        page = listed[: (most := int(query["max-uploads"]))]
        entries = "".join(
            f"<Upload><Key>{escape(key)}</Key><UploadId>{upload_id}</UploadId></Upload>"
            for key, upload_id in page
        )
        more = len(page) == most
        following = f"<NextUploadIdMarker>{page[-1][1]}</NextUploadIdMarker>" if more else ""
        return (
            '<?xml version="1.0" encoding="UTF-8"?><ListMultipartUploadsResult '
            f'xmlns="http://s3.amazonaws.com/doc/2006-03-01/"><Bucket>{BUCKET}</Bucket>'
            f"{following}<EncodingType>{query.get('encoding-type', '')}</EncodingType>"
            f"<IsTruncated>{str(more).lower()}</IsTruncated>{entries}"
            "</ListMultipartUploadsResult>"
        )


def handler_of(amazon: Amazon) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._answer(200, amazon.page(self._asked()[1]))

        def do_HEAD(self) -> None:
            self._answer(404)

        def do_DELETE(self) -> None:
            key, query = self._asked()
            if amazon.abort(key, query["uploadId"]):
                self._answer(204)
            else:
                self._answer(404, "<Error><Code>NoSuchUpload</Code></Error>")

        def _asked(self) -> tuple[str, dict[str, str]]:
            parts = urlsplit(self.path)
            query = parse_qs(parts.query, keep_blank_values=True)
            key = unquote(parts.path.removeprefix(f"/{BUCKET}").removeprefix("/"))
            return key, {name: values[0] for name, values in query.items()}

        def _answer(self, status: int, body: str = "") -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(body.encode())))
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, *args: Any) -> None:
            pass

    return Handler


@pytest.fixture
def amazon() -> Iterator[Amazon]:
    yield from served(Amazon())


@pytest.fixture
def seaweedfs() -> Iterator[Amazon]:
    yield from served(SeaweedFS())


def served(amazon: Amazon) -> Iterator[Amazon]:
    with ThreadingHTTPServer(("127.0.0.1", 0), handler_of(amazon)) as server:
        amazon.url = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        yield amazon
        server.shutdown()
        thread.join()


def obfuscated(key: str) -> str:
    """A marker that is no key."""
    return "+/" + base64.b64encode(key[::-1].encode()).decode()


def sink_of(amazon: Amazon, prefix: str = "orders/") -> S3Sink:
    return s3_sink(
        f"s3://{BUCKET}/{prefix}",
        partition_by=["x"],
        endpoint_url=amazon.url,
        aws_access_key_id="a",
        aws_secret_access_key="b",
        region_name="us-east-1",
    )


@pytest.mark.parametrize("prefix", ["orders/", "new orders/"])
def test_orphans_below_folders_with_spaces(
    amazon: Amazon, monkeypatch: pytest.MonkeyPatch, prefix: str
) -> None:
    """Each is found under its own key, page by page, and aborted there."""
    monkeypatch.setattr(listing, "PAGE_UPLOADS", 4)
    uploads = sweep(amazon, prefix)
    assert amazon.markers == ["", uploads[3][0]]


@pytest.mark.parametrize("prefix", ["orders/", "new orders/", "a+b/", "100%25/", ""])
def test_keys_that_the_server_calls_encoded(
    seaweedfs: Amazon, monkeypatch: pytest.MonkeyPatch, prefix: str
) -> None:
    """SeaweedFS gives them as they are, and pages by upload ids alone."""
    monkeypatch.setattr(listing, "PAGE_UPLOADS", 4)
    sweep(seaweedfs, prefix)
    assert seaweedfs.markers == ["", "upload-3", "upload-x"]


def sweep(amazon: Amazon, prefix: str) -> list[tuple[str, str]]:
    """Find the uploads of one owner, and abort them; a foreign one stays. What there was."""
    place = Place(BUCKET, prefix)
    ours = {}
    for number, value in enumerate([*VALUES, None]):
        branch_id = BranchId(OWNER, number, 1, "s3", 0, 0)
        folder = folder_name(["x"], [value]) if value else ""
        ours[branch_id] = (file_key(place, folder, branch_id, 0), f"upload-{number}")
    foreign = (f"{prefix}somebody's + 1", "upload-x")
    uploads = sorted([*ours.values(), foreign])
    amazon.uploads = uploads.copy()
    sink = sink_of(amazon, prefix)
    found = list(sink.find_branches(OWNER))
    files: dict[BranchId, Any] = {c.branch_id: c.payload["files"] for c in found}
    assert {
        branch_id: [(file["key"], file["upload_id"]) for file in files[branch_id]]
        for branch_id in files
    } == {branch_id: [upload] for branch_id, upload in ours.items()}
    for committable in found:
        sink.abort(committable)
    assert amazon.uploads == [foreign]
    sink.close()
    return uploads


@pytest.mark.parametrize(
    ("marks", "encodes_marks"), [(obfuscated, True), (str, True), (str, False), (None, True)]
)
@pytest.mark.parametrize("order", [[2, 0, 3, 1], [3, 2, 1, 0], [0, 1, 2, 3]])
def test_pages_in_any_order(
    amazon: Amazon,
    monkeypatch: pytest.MonkeyPatch,
    marks: Callable[[str], str] | None,
    encodes_marks: bool,
    order: list[int],
) -> None:
    """Not every server sorts; markers need not be keys, and some give none, or encode none."""
    monkeypatch.setattr(listing, "PAGE_UPLOADS", 1)
    place = Place(BUCKET, "orders/")
    branches = [BranchId(OWNER, number, 1, "s3", 0, 0) for number in range(4)]
    amazon.uploads = [
        (file_key(place, folder_name(["x"], ["a:b c"]), branches[number], 0), f"upload-{number}")
        for number in order
    ]
    amazon.marks, amazon.encodes_marks = marks, encodes_marks
    sink = sink_of(amazon)
    assert {found.branch_id for found in sink.find_branches(OWNER)} == set(branches)
    sink.close()


def test_pages_that_repeat(amazon: Amazon, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that passes over the marker gives the first page again, and ends all the same."""
    monkeypatch.setattr(listing, "PAGE_UPLOADS", 1)
    place = Place(BUCKET, "orders/")
    branches = [BranchId(OWNER, number, 1, "s3", 0, 0) for number in range(2)]
    amazon.uploads = [(file_key(place, "", branch_id, 0), "upload") for branch_id in branches]
    first_page = amazon.page({"max-uploads": "1"})
    monkeypatch.setattr(amazon, "page", lambda _: first_page)
    sink = sink_of(amazon)
    assert [found.branch_id for found in sink.find_branches(OWNER)] == branches[:1]
    sink.close()
