"""Answers that the local S3 servers never give, from a stub: encrypted, versioned, forbidden."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import closing, contextmanager
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
from botocore.awsrequest import AWSPreparedRequest, AWSResponse
from botocore.exceptions import ClientError
from botocore.stub import ANY, Stubber
from urllib3 import HTTPResponse

from sparkonce.errors import CommitUnresolvedError, PreparedBranchLostError
from sparkonce.model import BranchId, Committable, Owner
from sparkonce.sinks import S3Sink
from sparkonce.sinks.s3.connecting.answers import describe
from sparkonce.sinks.s3.connecting.client import Purpose, server_at
from sparkonce.sinks.s3.connecting.place import Place
from sparkonce.sinks.s3.finishing import outcome
from sparkonce.sinks.s3.finishing.branch import committable_of
from sparkonce.sinks.s3.finishing.outcome import FileOutcome
from sparkonce.sinks.s3.writing.objects import S3Objects
from sparkonce.sinks.s3.writing.staged import StagedFile, crc32c, etag_of_parts
from sparkonce.sinks.s3.writing.upload import PartSizes, PartStream, Transfers
from tests.support.renewed_credentials import SECRET, Sidecar, server_that_takes
from tests.support.s3_sinks import clients_of, nowhere, s3_sink

BRANCH = BranchId(Owner("0" * 16, "q"), 7, 1, "s3", 0, 0)
MD5 = "5d41402abc4b2a76b9719d911017c592"
FILE = StagedFile("orders/x", "upload", (MD5,), f"{MD5}-1", bytes=10, rows=1)
OURS = {"sparkonce-branch": str(BRANCH)}


@pytest.fixture(autouse=True)
def _lost_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outcome, "PATIENCE_S", 0.0)


@pytest.fixture(scope="module")
def commit() -> Iterator[Callable[..., None]]:
    """`commit(heads, …)` with the server's answers to complete, HEAD and ListParts (text)."""
    clients = nowhere()

    def run(
        *heads: dict[str, Any] | int | str,
        refusal: str | Sequence[str] = "",
        parts: str = "",
        file: StagedFile = FILE,
    ) -> None:
        ask, once = (Stubber(clients.client(p)) for p in (Purpose.ASK, Purpose.ONCE))
        with ask, once:
            for number, code in enumerate([refusal] if isinstance(refusal, str) else refusal):
                call = {"Bucket": "lake", "Key": file.key, "UploadId": "upload"}
                condition = {} if number else {"IfNoneMatch": "*"}
                expected = {**call, **file.completion(), **condition}
                if code:
                    once.add_client_error(
                        "complete_multipart_upload", code, expected_params=expected
                    )
                else:
                    once.add_response("complete_multipart_upload", {"ETag": "1"}, expected)
            for index, head in enumerate(heads):
                if index == 1 and parts:
                    ask.add_client_error("list_parts", parts)
                if isinstance(head, str):
                    ask.add_client_error("list_parts", head)
                elif isinstance(head, int):
                    ask.add_client_error("head_object", str(head), http_status_code=head)
                elif "marker" in head:
                    ask.add_client_error(
                        "head_object",
                        "404",
                        http_status_code=404,
                        response_meta={"HTTPHeaders": {"x-amz-delete-marker": "true"}},
                    )
                else:
                    ask.add_response("head_object", head)
            try:
                FileOutcome(clients, "lake", BRANCH).commit(file)
                ask.assert_no_pending_responses()
            finally:
                once.assert_no_pending_responses()

    yield run
    clients.close()


@pytest.mark.parametrize("etag", ["0" * 32 + "-1", "opaque", "0" * 32])
def test_encrypted_with_a_key(commit: Callable[..., None], etag: str) -> None:
    """ETags are no MD5s then: the branch id and the size prove the object."""
    head = {"Metadata": OURS, "ETag": f'"{etag}"', "ServerSideEncryption": "aws:kms"}
    commit({**head, "ContentLength": 10})
    with pytest.raises(CommitUnresolvedError, match="not this branch's"):
        commit({**head, "ContentLength": 11})


def test_names_of_metadata_have_no_case(commit: Callable[..., None]) -> None:
    """HTTP's headers have none: servers and proxies in Go give `Sparkonce-Branch`."""
    commit(
        {
            "Metadata": {"Sparkonce-Branch": str(BRANCH)},
            "ETag": f'"{FILE.etag}"',
            "ContentLength": 10,
        }
    )


def test_encrypted_with_a_key_and_a_checksum(commit: Callable[..., None]) -> None:
    """The checksum proves the content where the ETag cannot; without it the size does."""
    file = replace(FILE, etag=None, checksums=(crc32c(b"x"),))
    head = {"Metadata": OURS, "ETag": '"opaque"', "ContentLength": 10}
    commit({**head, "ChecksumCRC32C": file.checksum}, file=file)
    commit(head, file=file)
    with pytest.raises(CommitUnresolvedError, match="not this branch's"):
        commit({**head, "ChecksumCRC32C": f"{crc32c(b'y')}-1"}, file=file)


@pytest.mark.parametrize("other", ["etag", "checksum"])
def test_etag_and_checksum_both_prove(commit: Callable[..., None], other: str) -> None:
    file = replace(FILE, checksums=(crc32c(b"x"),))
    head = {
        "Metadata": OURS,
        "ETag": f'"{FILE.etag}"',
        "ChecksumCRC32C": file.checksum,
        "ContentLength": 10,
    }
    commit(head, file=file)
    wrong = {"etag": {"ETag": f'"{"0" * 32}-1"'}, "checksum": {"ChecksumCRC32C": "AAAAAA==-1"}}
    with pytest.raises(CommitUnresolvedError, match="not this branch's"):
        commit({**head, **wrong[other]}, file=file)


@pytest.mark.parametrize(
    ("changes", "stands"),
    [
        ({}, True),
        ({"ETag": f'"{"0" * 32}-2"'}, True),
        ({"ETag": f'"{MD5}"', "ChecksumCRC32C": "AAAAAA=="}, True),
        ({"Metadata": {}}, True),
        (404, False),
    ],
)
def test_whatever_stands_at_a_key_of_ours_stands(changes: Any, stands: bool) -> None:
    """Encrypted anew or restored in place it proves no commit, and readers see it all the same."""
    clients = nowhere()
    file = replace(FILE, checksums=(crc32c(b"x"),))
    head = {"Metadata": OURS, "ETag": f'"{FILE.etag}"', "ChecksumCRC32C": file.checksum}
    with Stubber(clients.client(Purpose.ASK)) as ask:
        if changes == 404:
            ask.add_client_error("head_object", "404", http_status_code=404)
        else:
            ask.add_response("head_object", {**head, **changes})
        assert FileOutcome(clients, "lake", BRANCH).is_visible(file) is stands
    clients.close()


@contextmanager
def uploading(
    settings: S3Objects | None = None, part_bytes: int = 5 << 20
) -> Iterator[tuple[PartStream, Stubber, Stubber]]:
    """A stream, and the clients that create its upload and send its parts."""
    clients = nowhere()
    transfers = Transfers()
    once, send = (Stubber(clients.client(p)) for p in (Purpose.ONCE, Purpose.UPLOAD))
    with once, send:
        yield (
            PartStream(
                clients,
                "lake",
                BRANCH,
                settings or S3Objects(),
                lambda: "key",
                part_sizes=PartSizes(part_bytes, part_bytes),
                transfers=transfers,
            ),
            once,
            send,
        )
    transfers.close()
    clients.close()


PART = {"Bucket": "lake", "Key": "key", "UploadId": "upload", "PartNumber": 1}


def test_server_that_keeps_no_checksums() -> None:
    """It passes over the wish, and then gets none: it might refuse them."""
    with uploading() as (stream, once, send):
        once.add_response("create_multipart_upload", {"UploadId": "upload"})
        send.add_response(
            "upload_part", {"ETag": f'"{MD5}"'}, {**PART, "Body": b"hello", "ContentMD5": ANY}
        )
        stream.write(b"hello")
        stream.end()
        assert stream.staged(1).completion() == {
            "MultipartUpload": {"Parts": [{"PartNumber": 1, "ETag": f'"{MD5}"'}]}
        }


@pytest.mark.parametrize("shows", [True, False])
def test_parts_carry_an_md5_until_the_server_has_shown_its_checksum(shows: bool) -> None:
    """The first one tells whether the server's ETags are MD5s; then CRC32C finds damage."""
    first, second = b"a" * 4096, b"b"
    etags = [hashlib.md5(body, usedforsecurity=False).hexdigest() for body in (first, second)]
    with uploading(part_bytes=len(first)) as (stream, once, send):
        created = {"UploadId": "upload", "ChecksumAlgorithm": "CRC32C"}
        once.add_response("create_multipart_upload", created)
        for number, body in [(1, first), (2, second)]:
            shown = {"ChecksumCRC32C": crc32c(body)}
            carried = shown if shows and number > 1 else {**shown, "ContentMD5": ANY}
            answer = {"ETag": f'"{etags[number - 1]}"', **(shown if shows else {})}
            send.add_response(
                "upload_part", answer, {**PART, "PartNumber": number, "Body": body, **carried}
            )
            stream.write(body)
            wait(stream._parts)
        stream.end()
        assert stream.staged(1).etag == etag_of_parts(etags)


def test_etags_that_only_look_like_md5s() -> None:
    """With KMS keys they do; what the first part shows holds for all."""
    with uploading(part_bytes=4) as (stream, once, send):
        created = {"UploadId": "upload", "ChecksumAlgorithm": "CRC32C"}
        once.add_response("create_multipart_upload", created)
        for body in (b"aaaa", b"b"):
            send.add_response("upload_part", {"ETag": f'"{MD5}"', "ChecksumCRC32C": crc32c(body)})
            stream.write(body)
            wait(stream._parts)
        stream.end()
        assert stream.staged(1).etag is None


@pytest.mark.parametrize("kind", [bytes, pa.py_buffer])
def test_one_write_that_fills_several_parts(kind: Callable[[bytes], Any]) -> None:
    with uploading(part_bytes=4) as (stream, once, send):
        once.add_response("create_multipart_upload", {"UploadId": "upload"})
        for number, body in enumerate([b"0123", b"4567", b"89ab", b"c"], start=1):
            expected = {**PART, "PartNumber": number, "Body": body, "ContentMD5": ANY}
            send.add_response("upload_part", {"ETag": f'"{MD5}"'}, expected)
        stream._transfers._pool = ThreadPoolExecutor(1)  # the stub wants them in their order
        stream.write(kind(b"01"))
        stream.write(kind(b"23456789abc"))
        stream.end()
        assert stream.staged(1).bytes == 13


def test_memory_of_the_caller_is_copied() -> None:
    """An encoder may fill the buffer anew that it has handed over."""
    buffer = bytearray(b"hello")
    with uploading() as (stream, once, send):
        once.add_response("create_multipart_upload", {"UploadId": "upload"})
        expected = {**PART, "Body": b"hello, hello", "ContentMD5": ANY}
        send.add_response("upload_part", {"ETag": f'"{MD5}"'}, expected)
        stream.write(memoryview(buffer))
        buffer[:] = b", hel"
        stream.write(memoryview(buffer))
        buffer[:] = b"XXXXX"
        stream.write(b"lo")
        stream.end()
        assert stream.staged(1).bytes == 12


@pytest.mark.parametrize(
    ("scheme", "wanted", "is_hashed"),
    [("http", "", True), ("https", "", False), ("https", "true", True), ("http", "false", False)],
)
def test_payload_is_hashed_for_the_signature_without_tls_only(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, scheme: str, wanted: str, is_hashed: bool
) -> None:
    """Behind TLS a checksum protects a part; what boto3's own file says stands above that."""
    config = tmp_path / "config"
    config.write_text(f"[default]\ns3 =\n  payload_signing_enabled = {wanted}\n" * bool(wanted))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(config))
    clients = clients_of(f"{scheme}://127.0.0.1:1")
    client = clients.client(Purpose.UPLOAD)
    seen: list[bytes] = []

    def answer(request: AWSPreparedRequest, **_: object) -> AWSResponse:
        seen.append(request.headers["X-Amz-Content-SHA256"])
        return AWSResponse(request.url, 200, {"ETag": '"x"'}, HTTPResponse(BytesIO(b"")))

    client.meta.events.register("before-send.s3.UploadPart", answer)
    client.upload_part(
        Bucket="b", Key="k", UploadId="u", PartNumber=1, Body=b"x", ChecksumCRC32C=crc32c(b"x")
    )
    hashed = hashlib.sha256(b"x").hexdigest().encode()
    assert seen == [hashed if is_hashed else b"UNSIGNED-PAYLOAD"]
    clients.close()


def test_server_with_etags_of_its_own(commit: Callable[..., None]) -> None:
    """An ETag that is no MD5 of parts says nothing; the size does."""
    commit({"Metadata": OURS, "ETag": '"opaque"', "ContentLength": 10})


def test_other_content(commit: Callable[..., None]) -> None:
    """An ETag that is an MD5 of parts, and another one, is other content, whatever the size."""
    with pytest.raises(CommitUnresolvedError, match="not this branch's"):
        commit({"Metadata": OURS, "ETag": f'"{"0" * 32}-1"', "ContentLength": 10})


def test_delete_marker(commit: Callable[..., None]) -> None:
    """An object that was deleted may have been visible: that is not "never committed"."""
    with pytest.raises(CommitUnresolvedError, match="delete marker"):
        commit({"marker": True}, refusal="NoSuchUpload")


def test_forbidden_to_look(commit: Callable[..., None]) -> None:
    """403 hides whether the object is there."""
    with pytest.raises(CommitUnresolvedError, match="cannot look"):
        commit(403, refusal="NoSuchUpload")


def test_forbidden_to_look_the_second_time(commit: Callable[..., None]) -> None:
    """The proof is the second look, and it has to be an answer."""
    with pytest.raises(CommitUnresolvedError, match="cannot look"):
        commit(404, 403, refusal="NoSuchUpload", parts="NoSuchUpload")


@pytest.mark.parametrize("verb", ["commit", "is_visible", "abort"])
def test_credentials_that_are_renewed_while_the_process_runs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, verb: str
) -> None:
    """Once the server has refused them the chain is asked again, also after it had none."""
    sidecar = Sidecar(tmp_path, monkeypatch)
    sidecar.write("old")
    object_headers = {"ETag": f'"{FILE.etag}"', "x-amz-meta-sparkonce-branch": str(BRANCH)}
    with server_that_takes("new", object_headers) as url:
        clients = clients_of(url, with_keys=False)
        act = getattr(FileOutcome(clients, "lake", BRANCH), verb)
        with pytest.raises(CommitUnresolvedError, match="HeadObject answered 400") as unresolved:
            act(FILE)
        assert SECRET not in str(unresolved.value)
        sidecar.clear()
        with pytest.raises(CommitUnresolvedError, match="NoCredentials"):
            act(FILE)
        sidecar.write("new")
        act(FILE)
        clients.close()


def test_refused_completion_that_nobody_can_look_after(commit: Callable[..., None]) -> None:
    """A HEAD has no body to say why; the completion's own answer does."""
    with pytest.raises(CommitUnresolvedError, match=r"answered 400.*answered ExpiredToken.*renew"):
        commit(400, refusal="ExpiredToken")


@pytest.mark.parametrize(
    ("parts", "told"),
    [
        ("AccessDenied", r"ListParts answered AccessDenied.*grant s3:ListMultipartUploadParts"),
        ("SlowDown", "ListParts answered SlowDown"),
    ],
)
def test_upload_that_cannot_be_looked_at(
    commit: Callable[..., None], parts: str, told: str
) -> None:
    """Nobody says that it is gone, and the message says why not: the batch waits for that."""
    with pytest.raises(CommitUnresolvedError, match=told):
        commit(404, 404, refusal="NoSuchUpload", parts=parts)


def test_proven_lost(commit: Callable[..., None]) -> None:
    """Completion refused, no object, no upload, and still no object."""
    with pytest.raises(PreparedBranchLostError):
        commit(404, 404, refusal="NoSuchUpload", parts="NoSuchUpload")


@contextmanager
def nothing_there(sink: S3Sink) -> Iterator[None]:
    """The server knows neither the upload nor the object."""
    ask, once = (Stubber(sink._clients.client(p)) for p in (Purpose.ASK, Purpose.ONCE))
    with ask, once:
        once.add_client_error("complete_multipart_upload", "NoSuchUpload")
        ask.add_client_error("head_object", "404", http_status_code=404)
        ask.add_client_error("list_parts", "NoSuchUpload")
        ask.add_client_error("head_object", "404", http_status_code=404)
        yield


@pytest.mark.parametrize(
    ("prepared", "now", "is_proven"),
    [
        ("us-east-1", "eu-west-1", True),
        ("us-east-1", "cn-north-1", False),
        ("us-gov-west-1", "us-east-1", False),
        ("eusc-de-east-1", "eu-central-1", False),
        (None, "cn-north-1", True),
    ],
)
def test_lost_in_another_partition_of_amazons(
    prepared: str | None, now: str, is_proven: bool
) -> None:
    """Names of buckets are unique in each alone. Records of older versions do not tell theirs."""
    keys: Any = {"aws_access_key_id": "a", "aws_secret_access_key": "b"}
    with closing(s3_sink("s3://lake/orders", region_name=prepared or now, **keys)) as sink:
        committable = committable_of(sink._clients, sink._place, BRANCH, [FILE])
    if prepared is None:
        payload: Any = {n: value for n, value in committable.payload.items() if n != "partition"}
        committable = Committable(BRANCH, payload)
    with closing(s3_sink("s3://lake/orders", region_name=now, **keys)) as sink:
        error: type[Exception] = CommitUnresolvedError
        told = "prepared at another endpoint than Amazon's"
        if is_proven:
            error, told = PreparedBranchLostError, "is lost"
        with nothing_there(sink), pytest.raises(error, match=told):
            sink.commit(committable)


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "no objects"),
        (1, "object s3://lake/orders/0.parquet"),
        (2, "2 objects: s3://lake/orders/0.parquet, s3://lake/orders/1.parquet"),
        (
            40,
            (
                "40 objects: s3://lake/orders/0.parquet, s3://lake/orders/1.parquet, "
                "s3://lake/orders/2.parquet and 37 more"
            ),
        ),
    ],
)
def test_text_for_people(count: int, text: str) -> None:
    """One line, however many objects there are."""
    files = [StagedFile(f"orders/{number}.parquet", "upload") for number in range(count)]
    assert committable_of(nowhere(), Place("lake", "orders/"), BRANCH, files).text == text


@pytest.mark.parametrize(
    ("prepared", "now"),
    [
        ("http://minio:9000", "http://minio:9000/"),
        ("https://s3.eu-west-1.amazonaws.com", None),
        (None, "https://s3.eu-west-1.amazonaws.com/"),
    ],
)
def test_same_server_may_be_spelled_otherwise(prepared: str | None, now: str | None) -> None:
    """Else a branch that is lost would never be proven so, and never be written again."""
    settings: Any = {
        "aws_access_key_id": "a",
        "aws_secret_access_key": "b",
        "region_name": "eu-west-1",
    }
    with closing(s3_sink("s3://lake/orders", endpoint_url=prepared, **settings)) as sink:
        committable = committable_of(sink._clients, sink._place, BRANCH, [FILE])
    with closing(s3_sink("s3://lake/orders", endpoint_url=now, **settings)) as sink:
        with nothing_there(sink), pytest.raises(PreparedBranchLostError, match="is lost"):
            sink.commit(committable)


@pytest.mark.parametrize(
    "host", ["ec2-1-2-3-4.compute-1.amazonaws.com:9000", "s3-lake-1.elb.us-east-1.amazonaws.com"]
)
def test_server_on_a_machine_of_amazons_is_another(host: str) -> None:
    """What is absent from S3 proves nothing of a branch on that one."""
    assert server_at(f"http://{host}") == f"http://{host}"


def test_completion_that_fails_otherwise_is_not_lost(commit: Callable[..., None]) -> None:
    """A refusal that says nothing about the upload is asked again."""
    for code in ("EntityTooSmall", "ExpiredToken"):
        with pytest.raises(CommitUnresolvedError, match=code):
            commit(404, refusal=code)


STANDING = {"Metadata": OURS, "ETag": f'"{FILE.etag}"', "ContentLength": 10}


@pytest.mark.parametrize(
    "code", ["", "PreconditionFailed", "ConditionalRequestConflict", "AccessDenied"]
)
def test_completion_replaces_no_object(commit: Callable[..., None], code: str) -> None:
    """It carries If-None-Match, which a policy may demand; the object that is there counts."""
    commit(STANDING, refusal=code)
    with pytest.raises(CommitUnresolvedError, match=code or "answered 200"):
        commit(404, refusal=code)


OF_OTHER_RUN = {**STANDING, "ETag": f'"{"0" * 32}-1"'}


@pytest.mark.parametrize("code", ["NotImplemented", "InvalidArgument", "InvalidRequest"])
def test_server_without_the_condition(commit: Callable[..., None], code: str) -> None:
    """A look at the key takes its place; its answer to the condition is not why it refuses."""
    commit(404, STANDING, refusal=[code, ""])
    commit({"marker": True}, STANDING, refusal=[code, ""])
    commit(STANDING, STANDING, refusal=[code])
    with pytest.raises(CommitUnresolvedError, match="other content, and is not replaced"):
        commit(OF_OTHER_RUN, OF_OTHER_RUN, refusal=[code])
    with pytest.raises(CommitUnresolvedError, match="AccessDenied.*grant s3:PutObject"):
        commit(404, 404, refusal=[code, "AccessDenied"])


def test_lost_on_a_server_without_the_condition(commit: Callable[..., None]) -> None:
    """It takes the same proof."""
    refusal = ["NotImplemented", "NoSuchUpload"]
    with pytest.raises(PreparedBranchLostError):
        commit(404, 404, "NoSuchUpload", 404, refusal=refusal)
    with pytest.raises(CommitUnresolvedError):
        commit(404, 404, "NoSuchUpload", 403, refusal=refusal)


KMS = S3Objects(
    storage_class="STANDARD_IA",
    server_side_encryption="aws:kms",
    sse_kms_key_id="arn:aws:kms:key",
    acl="bucket-owner-full-control",
    metadata={"team": "lake"},
    tags={"cost centre": "a=1"},
)


def test_settings_of_every_object() -> None:
    """Encryption, storage class and tags are asked for when the upload is created."""
    with uploading(KMS) as (stream, once, _):
        once.add_response(
            "create_multipart_upload",
            {"UploadId": "upload"},
            {
                "Bucket": "lake",
                "Key": "key",
                "Metadata": {"team": "lake", **OURS},
                "ServerSideEncryption": "aws:kms",
                "SSEKMSKeyId": "arn:aws:kms:key",
                "ACL": "bucket-owner-full-control",
                "StorageClass": "STANDARD_IA",
                "Tagging": "cost+centre=a%3D1",
                "ChecksumAlgorithm": "CRC32C",
            },
        )
        assert stream._upload() == ("key", "upload")


@pytest.mark.parametrize(
    ("operation", "is_told"),
    [("CreateMultipartUpload", True), ("GetBucketLifecycleConfiguration", False)],
)
def test_way_out_is_told_where_it_is_one(operation: str, is_told: bool) -> None:
    """A server that has no CRC32C says so when the upload is created, and of much else too."""
    error = ClientError({"Error": {"Code": "NotImplemented", "Message": "no"}}, operation)
    assert ("checksum=" in describe(error)) == is_told


def test_driver_that_stands_still_looks_once_more(
    commit: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Frozen right behind its first look, for longer than a completion elsewhere may take."""
    clock = iter([0.0, 0.0, 15.0, 15.0])
    monkeypatch.setattr(outcome, "PATIENCE_S", 10.0)
    monkeypatch.setattr(outcome, "time", SimpleNamespace(monotonic=lambda: next(clock, 15.0)))
    monkeypatch.setattr(outcome, "pause", lambda seconds: None)
    commit(
        404,
        404,
        {"Metadata": OURS, "ETag": f'"{FILE.etag}"', "ContentLength": 10},
        refusal="NoSuchUpload",
        parts="NoSuchUpload",
    )
