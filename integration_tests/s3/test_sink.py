"""`S3Sink` on each S3 server; every test looks at the bucket from outside, with its own client."""

from __future__ import annotations

import datetime as dt
import gzip
import io
import json
import logging
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import boto3
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from botocore.exceptions import ClientError

from integration_tests.support.proxy import Proxy, Swallow, http_request
from integration_tests.support.s3 import OWNER, ROWS, World, branch, files_of, key_of, prepare
from sparkonce.errors import (
    CommitRejectedError,
    CommitUnresolvedError,
    ConfigurationError,
    PreparedBranchLostError,
    PrepareRejectedError,
    SinkUnavailableError,
)
from sparkonce.finding import Level
from sparkonce.model import BranchId, Committable, Owner
from sparkonce.protocol.rulings import end_for_rewrite
from sparkonce.sinks import S3Sink
from sparkonce.sinks.s3.connecting.client import Purpose
from sparkonce.sinks.s3.finishing import listing, outcome
from sparkonce.sinks.s3.finishing.outcome import FileOutcome
from sparkonce.sinks.s3.writing import formats, upload, writer
from sparkonce.sinks.s3.writing.keys import branch_stem
from sparkonce.sinks.s3.writing.objects import BRANCH_METADATA
from sparkonce.sinks.s3.writing.staged import StagedFile, crc32c
from sparkonce.testing.services import S3Server

if TYPE_CHECKING:
    from botocore.config import Config
    from mypy_boto3_s3 import S3Client
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.usefixtures("lost_at_once")


MIB = 1 << 20
DEADLINE_S = 60.0
POLL_S = 0.002


def until(happened: Callable[[], Any], what: str) -> Any:
    deadline = time.monotonic() + DEADLINE_S
    while not (result := happened()):
        assert time.monotonic() < deadline, f"waited in vain until {what}"
        time.sleep(POLL_S)
    return result


def commit_patiently(sink: S3Sink, committable: Committable) -> None:
    """What the coordinator does."""

    def done() -> bool:
        try:
            sink.commit(committable)
        except CommitUnresolvedError:
            return False
        return True

    until(done, "the commit is proven")


def is_versitygw(request: pytest.FixtureRequest) -> bool:
    return bool(request.node.callspec.params["s3"] == "versitygw")


# -- every verb, and what is to be seen after it ---------------------------------------------------


def test_verbs(sink: S3Sink, world: World) -> None:
    """Nothing is visible before commit, and all of it after."""
    handle = sink.beginTransaction(branch())
    sink.write(handle, ROWS)
    assert world.objects() == {}
    committable = sink.preCommit(handle)
    assert world.counts() == (1, 0)
    sink.commit(committable)
    assert world.counts() == (0, 1)
    key = key_of(committable)
    assert key == f"lake/orders/{branch_stem(branch())}n0.parquet"
    assert committable.text == f"object s3://{world.bucket}/{key}"
    assert world.table(key).equals(pa.Table.from_batches([ROWS]))
    head = world.client.head_object(Bucket=world.bucket, Key=key)
    assert head["Metadata"] == {"sparkonce-branch": str(branch())}


def test_second_commit(sink: S3Sink, world: World) -> None:
    """It changes nothing visible, not even the object's time."""
    committable = prepare(sink, branch())
    sink.commit(committable)
    before = world.objects()
    sink.commit(committable)
    assert (world.objects(), world.uploads()) == (before, {})


def test_commits_at_the_same_time(sink: S3Sink, world: World) -> None:
    """Several threads commit one branch; each returns, and the object is there once."""
    committable = prepare(sink, branch())
    errors: list[BaseException] = []

    def commit() -> None:
        try:
            commit_patiently(sink, committable)
        except BaseException as error:
            errors.append(error)
            raise

    threads = [threading.Thread(target=commit) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert world.counts() == (0, 1)


def test_branch_without_rows(sink: S3Sink, world: World) -> None:
    """It makes no file, and every verb takes it."""
    committable = sink.preCommit(sink.beginTransaction(branch()))
    sink.commit(committable)
    sink.abort(committable)
    assert world.counts() == (0, 0)


def test_abort_of_a_prepared_branch(sink: S3Sink, world: World) -> None:
    """It leaves nothing; a second one is fine, and a commit after it is told that all is lost."""
    committable = prepare(sink, branch())
    sink.abort(committable)
    sink.abort(committable)
    sink.abort(branch())
    assert world.counts() == (0, 0)
    with pytest.raises(PreparedBranchLostError):
        sink.commit(committable)


def test_abort_by_name(sink: S3Sink, world: World) -> None:
    """A branch id alone aborts exactly that branch: not batch 12 or attempt 11 for 1."""
    others = [branch(12), branch(1, attempt=11), branch(1, token=11), branch(1, sink="s3-eu")]
    kept = [key_of(prepare(sink, other)) for other in others]
    prepare(sink, branch(1))
    sink.abort(branch(1))
    assert sorted(world.uploads().values()) == sorted(kept)


def test_abort_after_commit(sink: S3Sink, world: World) -> None:
    """It changes nothing, by committable and by name (S3Mock would delete the object)."""
    committable = prepare(sink, branch())
    sink.commit(committable)
    before = world.objects()
    sink.abort(committable)
    sink.abort(branch())
    stale = replace(
        committable,
        payload={
            **committable.payload,
            "files": [{k: file[k] for k in ("key", "upload_id")} for file in files_of(committable)],
        },
    )
    sink.abort(stale)
    assert world.objects() == before
    assert len(before) == 1


def test_left_over_upload_at_a_committed_key(sink: S3Sink, world: World) -> None:
    """Another upload of the committed key does not make abort delete the object."""
    committable = prepare(sink, branch())
    world.open_upload(key_of(committable))
    sink.commit(committable)
    before = world.objects()
    for found in sink.find_branches(OWNER):
        sink.abort(found)
    assert world.objects() == before
    assert len(before) == 1


def test_discard_while_writing(make_sink: Callable[..., S3Sink], world: World) -> None:
    """A failed task leaves no upload and no thread."""
    sink = make_sink(part_size=5 * MIB, compression="none")
    threads = set(threading.enumerate())
    handle = sink.beginTransaction(branch())
    big = pa.RecordBatch.from_pydict({"x": np.random.default_rng(0).random(10 * MIB)})
    sink.write(handle, big)  # 80 MiB: more than waits in memory
    until(lambda: world.counts() == (1, 0), "the upload is open")
    sink.discard(handle)
    assert world.counts() == (0, 0)
    assert set(threading.enumerate()) == threads


def test_threads_end_with_prepare(sink: S3Sink) -> None:
    """A prepared branch holds nothing in this process."""
    threads = set(threading.enumerate())
    prepare(sink, branch())
    assert set(threading.enumerate()) == threads


# -- other processes -------------------------------------------------------------------------------

PREPARER = """
import json, pickle, sys
import pyarrow as pa
sink, branch_id = pickle.load(open(sys.argv[1], "rb"))
handle = sink.beginTransaction(branch_id)
sink.write(handle, pa.RecordBatch.from_pydict({"id": list(range(100)), "day": ["mon", "tue"] * 50}))
print(json.dumps(sink.preCommit(handle).to_json()), flush=True)
sys.stdin.read()
"""


def test_preparer_killed_before_commit(sink: S3Sink, world: World, tmp_path: Path) -> None:
    """Another process commits what a process prepared that was killed with SIGKILL."""
    pickled = tmp_path / "sink"
    pickled.write_bytes(pickle.dumps((sink, branch())))
    with subprocess.Popen(
        [sys.executable, "-c", PREPARER, pickled], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as preparer:
        assert preparer.stdout is not None
        line = preparer.stdout.readline()
        os.kill(preparer.pid, signal.SIGKILL)
    assert preparer.returncode == -signal.SIGKILL
    assert world.counts() == (1, 0)
    committable = Committable.from_json(json.loads(line))
    sink.commit(committable)
    assert world.counts() == (0, 1)
    assert world.table(key_of(committable)).num_rows == 100


# -- servers that fail -----------------------------------------------------------------------------


def test_server_killed_between_prepare_and_commit(s3: S3Server, sink: S3Sink, world: World) -> None:
    """While it is down the outcome is unknown; when it is back the commit lands."""
    committable = prepare(sink, branch())
    s3.kill()
    try:
        with pytest.raises(CommitUnresolvedError, match="cannot look at s3://"):
            sink.commit(committable)
        with pytest.raises(CommitUnresolvedError):
            sink.abort(branch())
    finally:
        s3.start()
    commit_patiently(sink, committable)
    assert world.counts() == (0, 1)
    assert world.table(key_of(committable)).num_rows == 100


def data_folder(s3: S3Server) -> Path:
    """Where a versitygw that runs as a local process keeps its buckets."""
    plan = getattr(s3.runtime, "_plan", None)
    if plan is None:
        pytest.skip("the server's folder is inside a container")
    return Path(plan.command.argv[-1])


def test_server_killed_inside_complete(
    request: pytest.FixtureRequest,
    s3: S3Server,
    make_sink: Callable[..., S3Sink],
    world: World,
) -> None:
    """It is never called lost; after the server's repair the object appears, once and whole."""
    if not is_versitygw(request):
        pytest.skip("S3Mock cannot be seen from outside inside a completion")
    sink = make_sink(compression="none", part_size=32 * MIB)
    random = np.random.default_rng(0)
    big = [pa.RecordBatch.from_pydict({"x": random.random(4 * MIB)}) for _ in range(8)]
    committable = prepare(sink, branch(), *big)
    uploads = data_folder(s3) / world.bucket / ".sgwtmp" / "multipart"
    results: list[BaseException | None] = []

    def commit() -> None:
        try:
            sink.commit(committable)
        except CommitUnresolvedError as error:
            results.append(error)
        else:
            results.append(None)

    thread = threading.Thread(target=commit)
    thread.start()
    until(lambda: list(uploads.glob("*/*.inprogress")), "the completion is in progress")
    s3.kill()
    try:
        thread.join()
        assert len(results) == 1
    finally:
        s3.start()
    commit_patiently(sink, committable)
    commit_patiently(sink, committable)
    assert world.counts() == (0, 1)
    assert world.table(key_of(committable)).equals(pa.Table.from_batches(big))


def test_server_that_claims_success_without_an_object(
    request: pytest.FixtureRequest, s3: S3Server, sink: S3Sink, world: World
) -> None:
    """versitygw as a crash leaves it: completion says 200, upload and object are denied."""
    if not is_versitygw(request):
        pytest.skip("a state of versitygw")
    committable = prepare(sink, branch())
    uploads = data_folder(s3) / world.bucket / ".sgwtmp" / "multipart"
    (upload,) = uploads.glob(f"*/{files_of(committable)[0]['upload_id']}")
    upload.rename(f"{upload}.{files_of(committable)[0]['etag']}.inprogress")
    assert world.counts() == (0, 0)
    with pytest.raises(CommitUnresolvedError, match="there is no object"):
        sink.commit(committable)
    s3.kill()
    s3.start()  # repairs
    commit_patiently(sink, committable)
    assert world.counts() == (0, 1)


_BODY = (
    b"<?xml version='1.0' encoding='UTF-8'?>"
    b"<Error><Code>InternalError</Code><Message>We encountered an error</Message></Error>"
)
FAILED_WITH_200 = Swallow(
    end=b"</CompleteMultipartUpload>",
    answer=b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\nConnection: close\r\n\r\n%b"
    % (len(_BODY), _BODY),
)


def test_answer_to_complete_is_lost(
    make_sink: Callable[..., S3Sink], proxy: Proxy, world: World
) -> None:
    """The object proves the commit, so it is no error at all."""
    sink = make_sink(endpoint_url=f"http://127.0.0.1:{proxy.port}")
    committable = prepare(sink, branch())
    proxy.lose = http_request(b"POST ")
    sink.commit(committable)
    assert proxy.lost == 1
    assert world.counts() == (0, 1)
    sink.close()


def test_complete_says_200_with_an_error_in_the_body(
    make_sink: Callable[..., S3Sink], proxy: Proxy, world: World
) -> None:
    """It is no success: the upload is still open, and the next commit lands."""
    sink = make_sink(endpoint_url=f"http://127.0.0.1:{proxy.port}")
    committable = prepare(sink, branch())
    proxy.lose, proxy.swallow = http_request(b"POST "), FAILED_WITH_200
    with pytest.raises(CommitUnresolvedError, match="InternalError"):
        sink.commit(committable)
    assert proxy.lost == 1
    assert world.counts() == (1, 0)
    sink.commit(committable)
    assert world.counts() == (0, 1)
    sink.close()


def test_answer_to_create_is_lost(
    make_sink: Callable[..., S3Sink], proxy: Proxy, world: World
) -> None:
    """The next key is used; the upload nobody knows of is found by its name, and aborted."""
    sink = make_sink(endpoint_url=f"http://127.0.0.1:{proxy.port}")
    proxy.lose = http_request(b"?uploads")
    committable = prepare(sink, branch())
    assert proxy.lost == 1
    assert key_of(committable).endswith(".n1.parquet")
    assert len(set(world.uploads().values())) == 2
    sink.commit(committable)
    assert world.counts() == (1, 1)
    (found,) = sink.find_branches(OWNER)
    assert found.branch_id == branch()
    sink.abort(found)
    assert world.counts() == (0, 1)
    sink.close()


def test_answer_to_a_part_is_lost(
    make_sink: Callable[..., S3Sink], proxy: Proxy, world: World
) -> None:
    """It is sent again, and counts once."""
    sink = make_sink(endpoint_url=f"http://127.0.0.1:{proxy.port}")
    proxy.lose = http_request(b"PUT ")
    committable = prepare(sink, branch())
    assert proxy.lost == 1
    sink.commit(committable)
    assert world.table(key_of(committable)).num_rows == 100
    sink.close()


@pytest.mark.parametrize("part", [1, 3])
def test_part_arrives_damaged(
    make_sink: Callable[..., S3Sink],
    proxy: Proxy,
    world: World,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    part: int,
) -> None:
    """The server refuses it by its checksum, so the task fails and nothing of it is left.

    The third part carries no MD5 any more.
    """
    # As with https, where boto3 signs no bodies, so that no other sum finds the damage.
    config = tmp_path / "config"
    config.write_text("[default]\ns3 =\n  payload_signing_enabled = false\n")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(config))
    sink = make_sink(endpoint_url=f"http://127.0.0.1:{proxy.port}", part_size=5 * MIB)
    proxy.spoil = http_request(f"partNumber={part}".encode())
    handle = sink.beginTransaction(branch())
    rows = pa.RecordBatch.from_pydict({"x": np.random.default_rng(0).random(3 * MIB)})

    def fill() -> None:
        sink.write(handle, rows)
        sink.preCommit(handle)

    with pytest.raises(PrepareRejectedError, match="UploadPart answered"):
        fill()
    assert proxy.spoiled
    assert world.counts() == (1, 0)
    sink.discard(handle)
    assert world.counts() == (0, 0)
    proxy.spoil = None
    committable = prepare(sink, branch(attempt=2))
    sink.commit(committable)
    assert world.table(key_of(committable)).num_rows == 100
    sink.close()


@pytest.mark.parametrize("checksum", ["crc32c", "none"])
def test_checksums(make_sink: Callable[..., S3Sink], world: World, checksum: Any) -> None:
    """The server keeps CRC32C of the parts, and answers for the object what the parts give."""
    sink = make_sink(checksum=checksum, part_size=5 * MIB, compression="none")
    rows = pa.RecordBatch.from_pydict({"x": np.random.default_rng(0).random(MIB)})
    committable = prepare(sink, branch(), rows)
    (file,) = map(StagedFile.from_json, files_of(committable))
    assert (len(file.parts), len(file.checksums)) == (2, 2 * (checksum == "crc32c"))
    sink.commit(committable)
    head = world.client.head_object(Bucket=world.bucket, Key=file.key, ChecksumMode="ENABLED")
    assert head["ETag"].strip('"') == file.etag
    assert head.get("ChecksumCRC32C") == (file.checksum if checksum == "crc32c" else None)


def test_completed_from_elsewhere(sink: S3Sink, world: World) -> None:
    """An old driver's completion that arrives late, with our parts, is our commit."""
    committable = prepare(sink, branch())
    (file,) = map(StagedFile.from_json, files_of(committable))
    world.client.complete_multipart_upload(
        Bucket=world.bucket, Key=file.key, UploadId=file.upload_id, **file.completion()
    )
    before = world.objects()
    sink.commit(committable)
    assert world.objects() == before


# -- lost, or in doubt -----------------------------------------------------------------------------


def test_upload_aborted_by_hand(sink: S3Sink, world: World) -> None:
    """It is proven to be lost, by name."""
    committable = prepare(sink, branch(42))
    (file,) = files_of(committable)
    world.abort(file["key"], file["upload_id"])
    with pytest.raises(PreparedBranchLostError) as caught:
        sink.commit(committable)
    assert caught.value.branch_id == branch(42)
    for named in (world.bucket, file["key"], "batch 42", "lifecycle", "100 rows"):
        assert named in str(caught.value)


def test_lost_at_another_endpoint(
    make_sink: Callable[..., S3Sink], proxy: Proxy, world: World
) -> None:
    """What is absent at another address than it was prepared at is not lost."""
    committable = prepare(make_sink(), branch())
    (file,) = files_of(committable)
    world.abort(file["key"], file["upload_id"])
    moved = make_sink(endpoint_url=f"http://127.0.0.1:{proxy.port}")
    with pytest.raises(CommitUnresolvedError, match="another endpoint"):
        moved.commit(committable)
    moved.close()


def test_bucket_that_is_gone(sink: S3Sink, world: World) -> None:
    """A server that does not know the bucket says nothing about the branch."""
    committable = prepare(sink, branch())
    elsewhere = replace(committable, payload={**committable.payload, "bucket": "no-such-bucket"})
    with pytest.raises(CommitUnresolvedError, match="NoSuchBucket"):
        sink.commit(elsewhere)
    assert world.counts() == (1, 0)


def test_foreign_object_at_the_key(sink: S3Sink, world: World) -> None:
    """It proves nothing, even where the server says 200 to the completion because of it."""
    committable = prepare(sink, branch())
    (file,) = files_of(committable)
    world.abort(file["key"], file["upload_id"])
    world.put(file["key"])
    with pytest.raises(CommitUnresolvedError, match="not this branch's"):
        sink.commit(committable)
    assert world.body(file["key"]) == b"foreign"


def test_same_metadata_with_other_content(sink: S3Sink, world: World) -> None:
    """The branch's name alone is no proof: the content's ETag counts too."""
    committable = prepare(sink, branch())
    (file,) = files_of(committable)
    world.abort(file["key"], file["upload_id"])
    other = prepare(sink, branch(), pa.RecordBatch.from_pydict({"id": [1]}))
    sink.commit(other)
    assert key_of(other) == file["key"]
    with pytest.raises(CommitUnresolvedError, match="not this branch's"):
        sink.commit(committable)


def test_same_content_in_another_name(sink: S3Sink, world: World) -> None:
    """An object with our bytes and our ETag that is not this branch's is no proof."""
    committable = prepare(sink, branch())
    twin = prepare(sink, branch(2))
    sink.commit(twin)
    (file,) = files_of(committable)
    world.abort(file["key"], file["upload_id"])
    world.upload(file["key"], world.body(key_of(twin)))
    assert world.objects()[file["key"]][0].strip('"') == file["etag"]
    with pytest.raises(CommitUnresolvedError, match="not this branch's"):
        sink.commit(committable)


def test_refused_upload_that_is_still_open(sink: S3Sink, world: World) -> None:
    """It is not lost: somebody replaced a part, and may put it back."""
    committable = prepare(sink, branch())
    (file,) = files_of(committable)
    upload = {"Bucket": world.bucket, "Key": file["key"], "UploadId": file["upload_id"]}
    world.client.upload_part(**upload, PartNumber=1, Body=b"other", ChecksumCRC32C=crc32c(b"other"))
    with pytest.raises(CommitUnresolvedError, match="InvalidPart"):
        sink.commit(committable)
    assert world.counts() == (1, 0)


def test_completed_elsewhere_between_the_looks(
    sink: S3Sink, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The upload is gone because an older completion has just landed: committed, not lost."""
    committable = prepare(sink, branch())
    complete = FileOutcome.complete
    refusal = ClientError({"Error": {"Code": "NoSuchUpload"}}, "CompleteMultipartUpload")
    is_gone = FileOutcome._is_upload_gone

    def gone_now(settling: FileOutcome, file: StagedFile) -> bool:
        assert complete(settling, file) is None
        return is_gone(settling, file)

    monkeypatch.setattr(FileOutcome, "complete", lambda *_: refusal)
    monkeypatch.setattr(FileOutcome, "_is_upload_gone", gone_now)
    sink.commit(committable)
    assert world.counts() == (0, 1)


def test_completed_elsewhere_late(
    sink: S3Sink, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server denies upload and object while it copies; the object that appears is the proof."""
    committable = prepare(sink, branch())
    complete = FileOutcome.complete
    refusal = ClientError({"Error": {"Code": "NoSuchUpload"}}, "CompleteMultipartUpload")
    (file,) = (StagedFile.from_json(value) for value in files_of(committable))
    here = FileOutcome(sink._clients, world.bucket, branch())
    monkeypatch.setattr(outcome, "PATIENCE_S", DEADLINE_S)
    monkeypatch.setattr(FileOutcome, "complete", lambda *_: refusal)
    monkeypatch.setattr(FileOutcome, "_is_upload_gone", lambda *_: True)
    monkeypatch.setattr(outcome, "pause", lambda _: complete(here, file))
    sink.commit(committable)
    assert world.counts() == (0, 1)


def test_copied_checkpoint_replaces_no_object(sink: S3Sink, world: World) -> None:
    """Two runs of a copied checkpoint have equal names; the one that commits later is refused."""
    of_parent = prepare(sink, branch())
    of_copy = prepare(sink, branch(), pa.RecordBatch.from_pydict({"id": [1]}))
    assert key_of(of_copy) == key_of(of_parent)
    sink.commit(of_parent)
    before = world.objects()
    with pytest.raises(CommitUnresolvedError, match="other content.*copied checkpoint"):
        sink.commit(of_copy)
    assert world.objects() == before
    sink.commit(of_parent)
    assert world.objects() == before
    assert list(world.uploads()) == [files_of(of_copy)[0]["upload_id"]]


def test_copied_checkpoint_with_equal_rows(sink: S3Sink, world: World) -> None:
    """The object proves both commits: the rows are there once, as both runs decided."""
    of_parent, of_copy = prepare(sink, branch()), prepare(sink, branch())
    sink.commit(of_parent)
    before = world.objects()
    sink.commit(of_copy)
    assert world.objects() == before


@pytest.mark.parametrize("visible", [1, 2])
def test_branch_with_files_that_stand_is_not_written_again(
    make_sink: Callable[..., S3Sink], world: World, visible: int
) -> None:
    """An operator's `redo` would show their rows twice (I4): it names them, and commits go on."""
    sink = make_sink(partition_by=["day"])
    committable = prepare(sink, branch())
    files = [StagedFile.from_json(file) for file in files_of(committable)]
    for file in files[:visible]:
        FileOutcome(sink._clients, world.bucket, branch()).commit(file)
    unresolved = end_for_rewrite(sink, committable, CommitUnresolvedError("no answer"))
    assert isinstance(unresolved, CommitUnresolvedError)
    assert f"{visible} of the 2 files" in str(unresolved)
    assert files[0].key in str(unresolved)
    assert "sparkonce settle JOB 1 --branch" in str(unresolved)
    assert world.counts() == (0, visible)
    if visible == 2:
        sink.commit(committable)
    else:
        world.client.delete_object(Bucket=world.bucket, Key=files[0].key)
        redone = end_for_rewrite(sink, committable, CommitUnresolvedError("no answer"))
        assert isinstance(redone, PreparedBranchLostError)


def test_object_that_was_copied_in_place_is_not_written_again(sink: S3Sink, world: World) -> None:
    """Restored or encrypted anew, it proves no commit; plain readers see it all the same."""
    committable = prepare(sink, branch())
    (file,) = map(StagedFile.from_json, files_of(committable))
    FileOutcome(sink._clients, world.bucket, branch()).commit(file)
    source = {"Bucket": world.bucket, "Key": file.key}
    copied = world.client.create_multipart_upload(
        **source, Metadata={BRANCH_METADATA: str(branch())}
    )
    upload = {**source, "UploadId": copied["UploadId"]}
    part = world.client.upload_part(**upload, PartNumber=1, Body=b"the same rows, in other bytes")
    parts = [{"PartNumber": 1, "ETag": part["ETag"]}]
    world.client.complete_multipart_upload(**upload, MultipartUpload={"Parts": parts})
    unresolved = end_for_rewrite(sink, committable, CommitUnresolvedError("no answer"))
    assert isinstance(unresolved, CommitUnresolvedError)
    assert file.key in str(unresolved)


def test_object_that_appears_while_its_upload_is_ended(
    sink: S3Sink, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another driver completes it behind the look: what stands after the end counts."""
    committable = prepare(sink, branch())
    abort = FileOutcome.abort

    def completed(self: FileOutcome, file: StagedFile) -> None:
        client = sink._clients.client(Purpose.ASK)
        with monkeypatch.context() as patch:
            patch.setattr(client, "abort_multipart_upload", lambda **_: self.commit(file))
            abort(self, file)

    monkeypatch.setattr(FileOutcome, "abort", completed)
    unresolved = end_for_rewrite(sink, committable, CommitUnresolvedError("no answer"))
    assert isinstance(unresolved, CommitUnresolvedError)
    assert world.counts() == (0, 1)


def test_half_of_a_branch_is_lost(make_sink: Callable[..., S3Sink], world: World) -> None:
    """Writing it again would show the other half twice, so an operator is called."""
    sink = make_sink(partition_by=["day"])
    committable = prepare(sink, branch())
    first, second = files_of(committable)
    world.abort(first["key"], first["upload_id"])
    with pytest.raises(CommitRejectedError, match="1 of the 2 files"):
        sink.commit(committable)
    assert list(world.objects()) == [second["key"]]


# -- orphans ---------------------------------------------------------------------------------------


def test_orphans_of_the_owner_only(
    make_sink: Callable[..., S3Sink], world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are found page by page; nobody else's upload is listed, under whatever name."""
    monkeypatch.setattr(listing, "PAGE_UPLOADS", 2)
    sink = make_sink(partition_by=["day"])
    ours = {branch(n): prepare(sink, branch(n)) for n in range(1, 5)}
    stranger = replace(branch(), owner=Owner("f" * 16, OWNER.query_id))
    foreign = {key_of(prepare(make_sink(), stranger))}
    outside = make_sink("lake/orders-eu")
    foreign.add(key_of(prepare(outside, branch(9))))
    for key in ("lake/orders/part-0.parquet", "lake/orders/a +&ä", "zoo"):
        world.open_upload(key)
        foreign.add(key)
    found = {c.branch_id: c for c in sink.find_branches(OWNER)}
    assert {id_: {f["upload_id"] for f in files_of(c)} for id_, c in found.items()} == {
        id_: {f["upload_id"] for f in files_of(c)} for id_, c in ours.items()
    }
    for committable in found.values():
        sink.abort(committable)
    assert list(sink.find_branches(OWNER)) == []
    assert set(world.uploads().values()) == foreign


def test_orphans_below_awkward_folders(
    make_sink: Callable[..., S3Sink], world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blanks and what urls escape, in prefix and folders: found under their keys, and aborted."""
    monkeypatch.setattr(listing, "PAGE_UPLOADS", 2)
    sink = make_sink("new orders/a+b 100% ä", partition_by=["city"])
    cities = ["New York", "New+York", "100% ä", "%2B", "2026-01-01 12:00:00"]
    rows = pa.RecordBatch.from_pydict({"id": range(len(cities)), "city": cities})
    prepare(sink, branch(), rows)
    keys = set(world.uploads().values())
    assert len(keys) == len(cities)
    (found,) = sink.find_branches(OWNER)
    assert {file["key"] for file in files_of(found)} == keys
    sink.abort(found)
    assert world.counts() == (0, 0)


def test_whole_bucket_as_the_place(make_sink: Callable[..., S3Sink], world: World) -> None:
    """A url without a prefix works like any other one."""
    sink = make_sink("")
    committable = prepare(sink, branch())
    assert [c.branch_id for c in sink.find_branches(OWNER)] == [branch()]
    sink.commit(committable)
    assert list(world.objects()) == [f"{branch_stem(branch())}n0.parquet"]


# -- rows ------------------------------------------------------------------------------------------


def test_folders(make_sink: Callable[..., S3Sink], world: World) -> None:
    """One file per folder, named as Spark names them; the columns are in the name alone."""
    sink = make_sink(partition_by=["c", "n"])
    rows = pa.RecordBatch.from_pydict(
        {
            "id": [0, 1, 2, 3, 4],
            "c": ["a/b", None, "ä +%", "", "a/b"],
            "n": pa.array([1, 2, None, 2, 1], pa.int32()),
        }
    )
    sink.validate(rows.schema)
    committable = prepare(sink, branch(), rows, rows)
    sink.commit(committable)
    found = {
        key.removeprefix("lake/orders/").rpartition("/")[0]: sorted(
            world.table(key)["id"].to_pylist()
        )
        for key in world.objects()
    }
    assert found == {
        "c=a%2Fb/n=1": [0, 0, 4, 4],
        "c=__HIVE_DEFAULT_PARTITION__/n=2": [1, 1, 3, 3],
        "c=ä +%25/n=__HIVE_DEFAULT_PARTITION__": [2, 2],
    }
    assert all(world.table(key).column_names == ["id"] for key in world.objects())
    assert sum(file["rows"] for file in files_of(committable)) == 10


def test_too_many_folders(make_sink: Callable[..., S3Sink], world: World) -> None:
    """The task is told which setting does it, and how to repair it."""
    sink = make_sink(partition_by=["id"], max_open_files=3)
    handle = sink.beginTransaction(branch())
    told = r"partition_by=\['id'\].*leave writers= out.*df.repartition\('id'"
    with pytest.raises(PrepareRejectedError, match=told):
        sink.write(handle, ROWS)
    sink.discard(handle)
    assert world.counts() == (0, 0)


@pytest.mark.parametrize(
    ("names", "length", "expected"), [("a", 254, "255 bytes"), ("abcd", 250, "1024 bytes")]
)
def test_folder_that_makes_too_long_a_key(
    make_sink: Callable[..., S3Sink], names: str, length: int, expected: str
) -> None:
    """It is refused while the rows are written, not when they are decided.

    versitygw keeps objects as files. It takes all parts of such an upload, and never completes it.
    """
    sink = make_sink(partition_by=list(names))
    handle = sink.beginTransaction(branch())
    rows = pa.RecordBatch.from_pydict({"id": [1], **{key: ["x" * length] for key in names}})
    with pytest.raises(PrepareRejectedError, match=expected):
        sink.write(handle, rows)
    sink.discard(handle)


@pytest.mark.parametrize("value", ["x" * 253, "a\0b"], ids=["longest", "NUL"])
def test_folder_that_every_server_takes(
    make_sink: Callable[..., S3Sink], world: World, value: str
) -> None:
    sink = make_sink(partition_by=["a"])
    sink.commit(prepare(sink, branch(), pa.RecordBatch.from_pydict({"id": [1], "a": [value]})))
    (key,) = world.objects()
    assert f"/a={value.replace(chr(0), '%00')}/" in key


def test_parts_grow_with_the_file(
    make_sink: Callable[..., S3Sink], world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first parts are small, later ones larger up to a bound; the file is whole, and proven."""
    monkeypatch.setattr(upload, "PARTS_PER_SIZE", 2)
    monkeypatch.setattr(formats, "PART_BYTES", 5 * MIB)
    monkeypatch.setattr(formats, "MAX_PART_BYTES", 15 * MIB)
    sink = make_sink(compression="none", part_size="growing")
    rows = pa.RecordBatch.from_pydict({"x": np.random.default_rng(0).random(62 * MIB // 8)})
    handle = sink.beginTransaction(branch())
    sink.write(handle, rows)
    committable = sink.preCommit(handle)
    (file,) = map(StagedFile.from_json, files_of(committable))
    where: Any = {"Bucket": world.bucket, "Key": file.key, "UploadId": file.upload_id}
    sizes = [part["Size"] / MIB for part in world.client.list_parts(**where)["Parts"]]
    assert sizes[:-1] == [5, 5, 10, 10, 15, 15]
    assert 0 < sizes[-1] < 15
    sink.commit(committable)
    assert world.table(file.key).equals(pa.Table.from_batches([rows]))


def test_file_of_very_many_parts(
    make_sink: Callable[..., S3Sink], world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before S3's 10,000 parts are reached the next file is begun; no row is lost between them."""
    monkeypatch.setattr(writer, "ROLL_AT_PARTS", 2)
    monkeypatch.setattr(writer, "_WAITING_BYTES", 2 * MIB)
    sink = make_sink(part_size=5 * MIB, compression="none")
    random = np.random.default_rng(0)
    batches = [pa.RecordBatch.from_pydict({"x": random.random(MIB // 8)}) for _ in range(32)]
    committable = prepare(sink, branch(), *batches)
    assert [len(file["parts"]) for file in files_of(committable)] == [3, 3, 2]
    sink.commit(committable)
    tables = [world.table(file["key"]) for file in files_of(committable)]
    assert pa.concat_tables(tables).equals(pa.Table.from_batches(batches))
    assert world.counts() == (0, 3)


def test_rows_of_another_schema(sink: S3Sink, world: World) -> None:
    """They are refused, and the task's uploads go."""
    handle = sink.beginTransaction(branch())
    sink.write(handle, ROWS)
    with pytest.raises(PrepareRejectedError, match="do not fit"):  # noqa: PT012
        sink.write(handle, pa.RecordBatch.from_pydict({"other": ["x"]}))
        sink.preCommit(handle)
    sink.discard(handle)
    assert world.counts() == (0, 0)


def test_time_that_csv_cannot_hold(make_sink: Callable[..., S3Sink], world: World) -> None:
    """The batch is aborted, and the message names the column."""
    sink = make_sink(format="csv")
    end = pa.array([0, 253_402_300_800_000_000]).cast(pa.timestamp("us", "UTC"))  # of 9999
    handle = sink.beginTransaction(branch())
    with pytest.raises(PrepareRejectedError, match=r"column 'until' has times .* use another"):  # noqa: PT012
        sink.write(handle, pa.RecordBatch.from_pydict({"id": [1, 2], "until": end}))
        sink.preCommit(handle)
    sink.discard(handle)
    assert world.counts() == (0, 0)


def test_bucket_that_is_gone_while_writing(make_sink: Callable[..., S3Sink]) -> None:
    """The task fails with the server's reason."""
    sink = make_sink()
    sink._place = replace(sink._place, bucket="no-such-bucket")
    handle = sink.beginTransaction(branch())
    sink.write(handle, ROWS)
    with pytest.raises(PrepareRejectedError, match="NoSuchBucket"):
        sink.preCommit(handle)
    sink.discard(handle)


def typed_rows() -> pa.RecordBatch:
    """Every kind of column that Spark sends to mapInArrow; the second row is null."""
    now = dt.datetime(2026, 1, 2, 3, 4, 5, 678901, dt.UTC)
    struct = pa.struct([("a", pa.int32()), ("b", pa.list_(pa.string()))])
    columns: dict[str, tuple[pa.DataType, object]] = {
        "flag": (pa.bool_(), True),
        "tiny": (pa.int8(), -128),
        "small": (pa.int16(), 7),
        "int": (pa.int32(), 7),
        "big": (pa.int64(), 2**63 - 1),
        "float": (pa.float32(), 0.5),
        "double": (pa.float64(), float("inf")),
        "money": (pa.decimal128(38, 18), Decimal("12345678901234567890.123456789012345678")),
        "text": (pa.string(), "ä\0z"),
        "bytes": (pa.binary(), b"\xff\x00"),
        "date": (pa.date32(), dt.date(1582, 1, 1)),
        "zoned": (pa.timestamp("us", "Europe/Berlin"), now),
        "local": (pa.timestamp("us"), now.replace(tzinfo=None)),
        "span": (pa.duration("us"), dt.timedelta(days=-1, microseconds=1)),
        "list": (pa.list_(pa.int64()), [1, None]),
        "map": (pa.map_(pa.string(), pa.float64()), [("k", None)]),
        "struct": (struct, {"a": None, "b": ["x", None]}),
    }
    arrays = [pa.array([value, None], kind) for kind, value in columns.values()]
    return pa.RecordBatch.from_arrays(arrays, names=list(columns))


def test_types(sink: S3Sink, world: World) -> None:
    """What is read back equals what was written, with its types."""
    rows = typed_rows()
    sink.validate(rows.schema)
    committable = prepare(sink, branch(), rows)
    sink.commit(committable)
    assert world.table(key_of(committable)).equals(pa.Table.from_batches([rows]))


def test_spark_writes_and_reads(
    spark: SparkSession, make_sink: Callable[..., S3Sink], world: World, tmp_path: Path
) -> None:
    """Rows from Spark's own tasks, read by Spark: its folders and its values."""
    sink = make_sink(partition_by=["when", "price", "flag", "word"])
    frame = spark.sql(
        """
        SELECT id,
            timestamp'2026-01-02 03:04:05.67' + make_interval(0, 0, 0, id % 2, 0, 0, 0) AS when,
            CAST(id % 3 AS DECIMAL(10, 2)) AS price,
            id % 2 = 0 AS flag,
            element_at(array('a/b', '', NULL, 'x=y z%', "q'[{^ü", '__HIVE_DEFAULT_PARTITION__'),
                CAST(id % 6 + 1 AS INT)) AS word,
            CAST(id AS TIMESTAMP) AS zoned,
            CAST(CAST(id AS TIMESTAMP) AS TIMESTAMP_NTZ) AS local,
            map('k', array(id)) AS nested,
            CAST(id / 7 AS DECIMAL(38, 18)) AS exact
        FROM range(40)
        """
    ).repartition(2)

    def write(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        from pyspark import TaskContext

        context = TaskContext.get()
        attempt = 0 if context is None else context.partitionId()
        owner = Owner("0123456789abcdef", "11111111-2222-3333-4444-555555555555")
        handle = sink.beginTransaction(BranchId(owner, 1, 1, "s3", 0, attempt))
        for batch in batches:
            sink.write(handle, batch)
        text = json.dumps(sink.preCommit(handle).to_json())
        yield pa.RecordBatch.from_pydict({"committable": [text]})

    returned = frame.mapInArrow(write, "committable string").collect()
    for row in returned:
        sink.commit(Committable.from_json(json.loads(row["committable"])))
    for key in world.objects():
        path = tmp_path / "ours" / key.removeprefix("lake/orders/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(world.body(key))
    theirs = tmp_path / "theirs"
    frame.write.partitionBy("when", "price", "flag", "word").parquet(str(theirs))

    def folders(root: Path) -> set[str]:
        return {str(path.parent.relative_to(root)) for path in root.rglob("*.parquet")}

    assert folders(tmp_path / "ours") == folders(theirs)
    read = [spark.read.parquet(str(root)) for root in (tmp_path / "ours", theirs)]
    assert read[0].schema.simpleString() == read[1].schema.simpleString()
    ours, expected = (sorted(map(repr, f.select(read[1].columns).collect())) for f in read)
    assert ours == expected
    assert len(ours) == 40


BIG = """
import pickle, sys
import numpy as np, pyarrow as pa
sink, branch_ids, folders, mib = pickle.load(open(sys.argv[1], "rb"))
random = np.random.default_rng(0)

def rows(count):
    return pa.RecordBatch.from_pydict(
        {"x": random.random(count), "y": random.random(count),
         "f": random.integers(folders, size=count)}
    )

def memory(what):  # getrusage would show the peak of the process that started this one
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith(what)) / 1024

handle = sink.beginTransaction(branch_ids[0])
sink.write(handle, rows(1000))
sink.commit(sink.preCommit(handle))
before = memory("VmRSS:")
handle = sink.beginTransaction(branch_ids[1])
written = 0
while written < mib << 20:
    batch = rows(10_000)
    sink.write(handle, batch)
    written += batch.nbytes
committable = sink.preCommit(handle)
after = memory("VmHWM:")
sink.commit(committable)
files = committable.payload["files"]
print(after - before, sum(f["bytes"] for f in files), max(len(f["parts"]) for f in files))
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's /proc")
@pytest.mark.parametrize(("folders", "part_mib"), [(1, 8), (1, 32), (3, 32), (32, 8)])
def test_memory_of_a_big_branch(
    make_sink: Callable[..., S3Sink], world: World, tmp_path: Path, folders: int, part_mib: int
) -> None:
    """A task needs less than 256 MiB: in one folder or many, at the begin of a file or its end."""
    sink = make_sink(
        partition_by=["f"] if folders > 1 else [],
        compression="none",
        part_size=part_mib * MIB,  # as the default has them at the begin and the end of a file
        max_open_files=folders,
    )
    pickled = tmp_path / "sink"
    pickled.write_bytes(pickle.dumps((sink, [branch(1), branch(2)], folders, 360)))
    answer = subprocess.run(
        [sys.executable, "-c", BIG, pickled], capture_output=True, check=True, text=True
    )
    grown_mib, size, parts = map(float, answer.stdout.split())
    print(f"{grown_mib:.0f} MiB more for {size / MIB:.0f} MiB in {folders} folders")
    assert size > 200 * MIB
    assert parts > 1
    assert 10 < grown_mib < 256
    assert world.uploads() == {}
    listed = world.client.list_objects_v2(Bucket=world.bucket)["Contents"]
    assert sum(e["Size"] for e in listed if ".b2." in e["Key"]) == size


@pytest.mark.parametrize("compression", ["none", "gzip"])
@pytest.mark.parametrize("name", ["csv", "json"])
def test_text(make_sink: Callable[..., S3Sink], world: World, name: Any, compression: Any) -> None:
    """Lines are whole, in files of their folder, also when a file has many parts."""
    sink = make_sink(format=name, compression=compression, partition_by=["day"], part_size=5 * MIB)
    digits = [f"{n:0>200}" for n in range(40_000)]
    column = "sparkonce_line" if name == "json" else "text"
    rows = pa.RecordBatch.from_pydict({column: digits, "day": ["mon", "tue"] * 20_000})
    committable = prepare(sink, branch(), rows, rows)
    sink.commit(committable)
    assert max(len(file["parts"]) for file in files_of(committable)) > (compression == "none")
    bodies = {key.split("/")[2]: world.body(key) for key in world.objects()}
    if compression == "gzip":
        bodies = {day: gzip.decompress(body) for day, body in bodies.items()}
    head = [] if name == "json" else ['"text"']
    for day, own in (("day=mon", digits[::2]), ("day=tue", digits[1::2])):
        wanted = own if name == "json" else [f'"{line}"' for line in own]
        assert bodies[day].decode().splitlines() == [*head, *wanted, *wanted]


def test_target_file_size(make_sink: Callable[..., S3Sink], world: World) -> None:
    """A file that has become so large is followed by another one; no row is lost."""
    sink = make_sink(partition_by=["f"], compression="none", target_file_size=MIB)
    random = np.random.default_rng(0)
    batches = [
        pa.RecordBatch.from_pydict(
            {"id": range(n * 50_000, (n + 1) * 50_000), "f": random.integers(2, size=50_000)}
        )
        for n in range(12)
    ]
    committable = prepare(sink, branch(), *batches)
    sink.commit(committable)
    sizes = [file["bytes"] for file in files_of(committable)]
    assert len(sizes) >= 4
    assert sum(size >= MIB for size in sizes) >= len(sizes) - 2
    tables = [world.table(file["key"]) for file in files_of(committable)]
    assert sorted(pa.concat_tables(tables)["id"].to_pylist()) == list(range(600_000))


def test_parquet_settings(make_sink: Callable[..., S3Sink], world: World) -> None:
    """Row groups, dictionary, statistics and compression are as asked for; field metadata stays."""
    sink = make_sink(
        compression="gzip",
        parquet={"row_group_size": 40, "use_dictionary": ["day"], "write_statistics": ["id"]},
    )
    field = pa.field("id", pa.int64(), metadata={"comment": "key"})
    rows = pa.RecordBatch.from_arrays(
        ROWS.columns, schema=pa.schema([field, ROWS.schema.field("day")])
    )
    committable = prepare(sink, branch(), rows)
    sink.commit(committable)
    file = pq.ParquetFile(io.BytesIO(world.body(key_of(committable))))
    assert [file.metadata.row_group(n).num_rows for n in range(3)] == [40, 40, 20]
    plain, coded = (file.metadata.row_group(0).column(n) for n in range(2))
    assert (plain.compression, coded.compression) == ("GZIP", "GZIP")
    assert "RLE_DICTIONARY" in coded.encodings
    assert "RLE_DICTIONARY" not in plain.encodings
    assert (plain.is_stats_set, coded.is_stats_set) == (True, False)
    assert file.schema_arrow.field("id").metadata[b"comment"] == b"key"


def test_object_settings(make_sink: Callable[..., S3Sink], world: World) -> None:
    """The user's metadata and tags are on each object, beside our own."""
    sink = make_sink(
        metadata={"team": "lake"}, tags={"owner": "lake-team"}, storage_class="STANDARD"
    )
    committable = prepare(sink, branch())
    sink.commit(committable)
    where = {"Bucket": world.bucket, "Key": key_of(committable)}
    head = world.client.head_object(**where)
    assert head["Metadata"] == {"team": "lake", "sparkonce-branch": str(branch())}
    tags = world.client.get_object_tagging(**where)["TagSet"]
    assert tags == [{"Key": "owner", "Value": "lake-team"}]


def refused(code: str, status: bytes, end: bytes = b"</CompleteMultipartUpload>") -> Swallow:
    body = f"<Error><Code>{code}</Code><Message>no</Message></Error>".encode()
    head = b"HTTP/1.1 %b\r\nContent-Length: %d\r\nConnection: close\r\n\r\n" % (status, len(body))
    return Swallow(end=end, answer=head + body)


@pytest.mark.parametrize("code", ["SlowDown", "ServiceUnavailable", "InternalError"])
def test_throttled_while_committing(
    make_sink: Callable[..., S3Sink], proxy: Proxy, world: World, code: str
) -> None:
    """The commit is unresolved, and lands when it is tried again."""
    sink = make_sink(endpoint_url=f"http://127.0.0.1:{proxy.port}")
    committable = prepare(sink, branch())
    proxy.lose, proxy.swallow = http_request(b"POST "), refused(code, b"503 Slow Down")
    with pytest.raises(CommitUnresolvedError, match=code):
        sink.commit(committable)
    sink.commit(committable)
    assert world.counts() == (0, 1)
    sink.close()


@pytest.mark.parametrize(
    ("code", "message"),
    [("ExpiredToken", "credentials"), ("RequestTimeTooSkewed", "clock")],
)
def test_credentials_expire_or_clocks_differ(
    make_sink: Callable[..., S3Sink], proxy: Proxy, world: World, code: str, message: str
) -> None:
    """The task is refused with what to do; nothing is called lost, and nothing is left."""
    sink = make_sink(endpoint_url=f"http://127.0.0.1:{proxy.port}")
    committable = prepare(sink, branch(2))
    proxy.lose, proxy.swallow = http_request(b"POST "), refused(code, b"403 Forbidden")
    with pytest.raises(CommitUnresolvedError, match=f"{code}.*{message}"):
        sink.commit(committable)
    sink.commit(committable)
    handle = sink.beginTransaction(branch())
    sink.write(handle, ROWS)
    proxy.lose = http_request(b"?uploads")
    proxy.swallow = refused(code, b"403 Forbidden", end=b"\r\n\r\n")
    with pytest.raises(PrepareRejectedError, match=f"{code}.*{message}"):
        sink.preCommit(handle)
    sink.discard(handle)
    assert world.counts() == (0, 1)
    sink.close()


def test_server_killed_while_parts_are_uploaded(
    s3: S3Server, make_sink: Callable[..., S3Sink], world: World
) -> None:
    """The task fails; what it had uploaded is found by its name, and aborted."""
    sink = make_sink(part_size=5 * MIB, compression="none")
    handle = sink.beginTransaction(branch())
    big = pa.RecordBatch.from_pydict({"x": np.random.default_rng(0).random(10 * MIB)})
    sink.write(handle, big)
    until(lambda: world.counts() == (1, 0), "the upload is open")
    s3.kill()
    try:
        with pytest.raises(PrepareRejectedError, match="the upload into s3://"):
            sink.preCommit(handle)
        sink.discard(handle)
    finally:
        s3.start()
    found = list(sink.find_branches(OWNER))
    assert [committable.branch_id for committable in found] == [branch()]
    sink.abort(found[0])
    assert world.counts() == (0, 0)


def test_bucket_deleted_after_prepare(sink: S3Sink, world: World) -> None:
    """Absence proves nothing when nobody knows the bucket."""
    committable = prepare(sink, branch())
    for upload_id, key in world.uploads().items():
        world.abort(key, upload_id)
    world.client.delete_bucket(Bucket=world.bucket)
    with pytest.raises(CommitUnresolvedError, match="NoSuchBucket"):
        sink.commit(committable)
    sink.abort(committable)


# -- before any data moves -------------------------------------------------------------------------


def test_validate(sink: S3Sink, world: World) -> None:
    """A place that works is accepted, and nothing is left there."""
    sink.validate(ROWS.schema)
    assert world.counts() == (0, 0)


@pytest.mark.parametrize("prefix", ["", "lake/orders/"])
def test_prefix_that_sparks_file_sink_has_written(
    make_sink: Callable[..., S3Sink], world: World, prefix: str
) -> None:
    """Of this very prefix: a column's folder that begins like it, and those below, are others."""
    sink = make_sink(prefix)
    for key in ("_spark_metadata_of=x/f", "day=x/_spark_metadata/0", "x_spark_metadata/0"):
        world.put(prefix + key)
    sink.validate(ROWS.schema)
    world.put(f"{prefix}_spark_metadata/0")
    with pytest.raises(ConfigurationError, match="was written by Spark's file sink"):
        sink.validate(ROWS.schema)


def test_bucket_that_does_not_exist(make_sink: Callable[..., S3Sink]) -> None:
    sink = make_sink()
    sink._place = replace(sink._place, bucket="no-such-bucket")
    with pytest.raises(ConfigurationError, match="'no-such-bucket' does not exist"):
        sink.validate(ROWS.schema)


@pytest.mark.parametrize("setting", ["aws_access_key_id", "aws_secret_access_key"])
def test_wrong_credentials(
    request: pytest.FixtureRequest, make_sink: Callable[..., S3Sink], setting: str
) -> None:
    if not is_versitygw(request):
        pytest.skip("S3Mock checks no credentials")
    sink = make_sink(**{setting: "hunter2"})
    with pytest.raises(ConfigurationError, match="refuses the credentials") as caught:
        sink.validate(ROWS.schema)
    assert "hunter2" not in str(caught.value)


def test_no_credentials(
    make_sink: Callable[..., S3Sink], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("HOME", str(tmp_path))
    sink = make_sink(aws_access_key_id=None, aws_secret_access_key=None)
    with pytest.raises(ConfigurationError, match="no credentials"):
        sink.validate(ROWS.schema)


def test_credentials_of_the_environment(
    s3: S3Server, make_sink: Callable[..., S3Sink], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without keys of its own the sink asks boto3's chain."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", s3.access_key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", s3.secret_key)
    sink = make_sink(aws_access_key_id=None, aws_secret_access_key=None)
    sink.validate(ROWS.schema)


def test_clients_of_the_users_own(s3: S3Server, world: World) -> None:
    """A factory makes them; the sink keeps its own retries and checksums."""

    def make(config: Config) -> S3Client:
        return boto3.session.Session().client("s3", config=config, **s3.boto3_settings)

    with closing(S3Sink(f"s3://{world.bucket}/lake/orders", client=make)) as sink:
        sink.validate(ROWS.schema)
        committable = prepare(sink, branch())
        sink.commit(committable)
    assert world.table(key_of(committable)).num_rows == 100


def test_nothing_answers(make_sink: Callable[..., S3Sink]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    sink = make_sink(endpoint_url=f"http://127.0.0.1:{port}")
    with pytest.raises(SinkUnavailableError, match="cannot be reached: .*correct endpoint_url="):
        sink.validate(ROWS.schema)


def test_server_that_is_down_at_the_start(s3: S3Server, sink: S3Sink) -> None:
    """An outage is no wrong setting: the caller tries again, and succeeds once it is over."""
    s3.stop()
    try:
        with pytest.raises(SinkUnavailableError, match="cannot be reached"):
            sink.validate(ROWS.schema)
        (finding,) = sink.diagnose()
        assert finding.level is Level.ERROR
    finally:
        s3.start()
    sink.validate(ROWS.schema)


def test_server_that_never_answers_at_the_start(
    make_sink: Callable[..., S3Sink], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes the connection and says nothing."""
    monkeypatch.setattr(Purpose.ASK, "_value_", (1, 1))
    with socket.create_server(("127.0.0.1", 0)) as silent:
        sink = make_sink(endpoint_url=f"http://127.0.0.1:{silent.getsockname()[1]}")
        with pytest.raises(SinkUnavailableError, match="ReadTimeout"):
            sink.validate(ROWS.schema)


def warnings_of(sink: S3Sink, caplog: pytest.LogCaptureFixture) -> list[str]:
    caplog.clear()
    with caplog.at_level(logging.WARNING, logger="sparkonce"):
        sink.validate(ROWS.schema)
    return [record.getMessage() for record in caplog.records]


def test_lifecycle_rules(
    request: pytest.FixtureRequest,
    make_sink: Callable[..., S3Sink],
    world: World,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """One that could eat a decided batch is warned of, and one that is missing; no other is."""
    sink = make_sink()
    if is_versitygw(request):
        assert warnings_of(sink, caplog) == []  # it knows no lifecycles
        return

    def set_rules(*rules: tuple[str, str, int]) -> None:
        world.client.put_bucket_lifecycle_configuration(
            Bucket=world.bucket,
            LifecycleConfiguration={
                "Rules": [
                    {
                        "ID": name,
                        "Status": "Enabled",
                        "Filter": {"Prefix": prefix},
                        "AbortIncompleteMultipartUpload": {"DaysAfterInitiation": days},
                    }
                    for name, prefix, days in rules
                ]
            },
        )

    (said,) = warnings_of(sink, caplog)
    assert "no lifecycle rule" in said
    set_rules(("other", "sea/", 1))
    (said,) = warnings_of(sink, caplog)
    assert "no lifecycle rule" in said
    set_rules(("early", "lake/", 3), ("late", "lake/", 7), ("other", "sea/", 1))
    (said,) = warnings_of(sink, caplog)
    assert "'early' aborts uploads after 3 days" in said
    set_rules(("late", "", 7))
    assert warnings_of(sink, caplog) == []
