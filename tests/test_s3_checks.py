"""What is said of a server at the start and by `doctor`; no local one answers like these."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
from botocore.stub import ANY, Stubber

from sparkonce.errors import ConfigurationError, SinkUnavailableError
from sparkonce.sinks.finding import Finding, Level
from sparkonce.sinks.s3.connecting.checks import check_server
from sparkonce.sinks.s3.connecting.client import Clients, Purpose
from sparkonce.sinks.s3.connecting.diagnosis import diagnose
from sparkonce.sinks.s3.connecting.place import Place
from sparkonce.sinks.s3.writing.objects import S3Objects
from sparkonce.spark_hooks.exactly_once import ExactlyOnce
from tests.s3_sinks import nowhere, s3_sink

PLACE = Place("lake", "orders/")
PROTECTION = S3Objects(server_side_encryption="aws:kms", sse_kms_key_id="key").protection()


class Server:
    """Answers that come in the order of the requests."""

    def __init__(self, clients: Clients, stubber: Stubber) -> None:
        self.clients = clients
        self.stubber = stubber

    def reachable(self, name: str = "") -> None:
        """The uploads are listed, the probes are absent, and Spark's readers see all files."""
        self.lists(name)
        self.refuses("head_object", "404", 404)
        self.refuses("list_parts", "NoSuchUpload", 404)
        self.is_written_by_spark(False)

    def is_written_by_spark(self, it_is: bool) -> None:
        """Whether anything is below the folder of Spark's file sink."""
        asked = {"Bucket": "lake", "Prefix": "orders/_spark_metadata/", "MaxKeys": 1}
        found = {"Contents": [{"Key": "orders/_spark_metadata/0"}]} if it_is else {}
        self.stubber.add_response("list_objects_v2", found, asked)

    def lists(self, name: str = "") -> None:
        """It lists uploads."""
        headers = {"HTTPHeaders": {"server": name} if name else {}}
        self.stubber.add_response("list_multipart_uploads", {"ResponseMetadata": headers})

    def refuses(self, operation: str, code: str, status: int) -> None:
        self.stubber.add_client_error(operation, code, http_status_code=status)

    def has_rules(self, answer: dict[str, Any]) -> None:
        self.stubber.add_response("get_bucket_lifecycle_configuration", answer)

    def found(self) -> list[Finding]:
        return list(diagnose(self.clients, PLACE, PROTECTION))


@pytest.fixture
def server() -> Iterator[Server]:
    clients = nowhere()
    with Stubber(clients.client(Purpose.ASK)) as stubber:
        yield Server(clients, stubber)
        stubber.assert_no_pending_responses()
    clients.close()


PUT = {
    "Bucket": "lake",
    "Key": ANY,
    "Body": b"",
    "ContentMD5": "1B2M2Y8AsgTpgAmY7PhCfg==",
    "ServerSideEncryption": "aws:kms",
    "SSEKMSKeyId": "key",
}


def writes(server: Server) -> None:
    """The probe of conditional writes goes well."""
    server.stubber.add_response("put_object", {}, {**PUT, "IfNoneMatch": "*"})
    server.refuses("put_object", "PreconditionFailed", 412)
    server.stubber.add_response("delete_object", {})


def test_lifecycle_without_rules(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    """NooBaa and RustFS answer 200 where S3 says that there is no such configuration."""
    server.reachable()
    server.has_rules({})
    check_server(server.clients, PLACE)
    assert "no lifecycle rule of the bucket aborts uploads" in caplog.text
    server.reachable()
    server.has_rules({})
    server.has_rules({})
    writes(server)
    assert {finding.level for finding in server.found()} == {Level.OK}


def test_account_that_could_never_prove_a_loss(server: Server) -> None:
    """Without the right to list parts a lost branch would wait for ever."""
    server.lists()
    server.refuses("head_object", "404", 404)
    server.refuses("list_parts", "AccessDenied", 403)
    with pytest.raises(ConfigurationError, match="grant s3:ListMultipartUploadParts"):
        check_server(server.clients, PLACE)


@pytest.mark.parametrize(
    ("code", "status"), [("InvalidArgument", 400), ("InternalError", 500), ("", 200)]
)
def test_odd_answer_about_an_upload_that_never_was(server: Server, code: str, status: int) -> None:
    """It says nothing of our rights."""
    server.lists()
    server.refuses("head_object", "404", 404)
    if code:
        server.refuses("list_parts", code, status)
    else:
        server.stubber.add_response("list_parts", {})
    server.is_written_by_spark(False)
    server.has_rules({})
    check_server(server.clients, PLACE)


@pytest.mark.parametrize(
    ("code", "status", "kind", "told"),
    [
        ("403", 403, ConfigurationError, "grant s3:GetObject and s3:ListBucket"),
        ("503", 503, SinkUnavailableError, "cannot serve .* now"),
        ("301", 301, ConfigurationError, "another region"),
    ],
)
def test_object_that_cannot_be_looked_at(
    server: Server, code: str, status: int, kind: type[Exception], told: str
) -> None:
    """Only where the server refuses access is a right missing."""
    server.lists()
    server.refuses("head_object", code, status)
    with pytest.raises(kind, match=told) as refused:
        check_server(server.clients, PLACE)
    assert ("grant" in str(refused.value)) == (status == 403)


def test_prefix_that_sparks_file_sink_has_written(server: Server) -> None:
    """Spark's readers would see none of the rows. The order matters: others would be read twice."""
    server.lists()
    server.refuses("head_object", "404", 404)
    server.refuses("list_parts", "NoSuchUpload", 404)
    server.is_written_by_spark(True)
    told = "s3://lake/orders was written by Spark's file sink.*another prefix.*first remove.*then"
    with pytest.raises(ConfigurationError, match=told):
        check_server(server.clients, PLACE)


@pytest.mark.parametrize(
    ("name", "fix"),
    [
        ("MinIO", "stale_uploads_expiry=168h"),
        ("SeaweedFS 30GB 4.05 1a2b3c4", "s3.clean.uploads -timeAgo=168h"),
        ("SeaweedFS S3", "s3.clean.uploads -timeAgo=168h"),
    ],
)
def test_server_that_purges_uploads_by_itself(
    server: Server, caplog: pytest.LogCaptureFixture, name: str, fix: str
) -> None:
    """It goes by no lifecycle rules, and deletes open uploads after a day, prepared ones too."""
    server.reachable(name)
    with caplog.at_level(logging.WARNING, logger="sparkonce"):
        check_server(server.clients, PLACE)
    (said,) = caplog.messages
    assert fix in said
    assert "lifecycle" not in said
    server.reachable(name)
    writes(server)
    (finding,) = [finding for finding in server.found() if finding.level is not Level.OK]
    assert finding.level is Level.WARNING
    assert fix in finding.fix


def test_probe_where_there_are_no_conditional_writes(server: Server) -> None:
    """Backblaze B2 refuses the condition: the right to write is there, which is all it takes."""
    server.reachable()
    server.has_rules({})
    server.has_rules({})
    server.refuses("put_object", "NotImplemented", 501)
    server.stubber.add_response("put_object", {}, PUT)
    server.stubber.add_response("delete_object", {})
    (finding,) = [finding for finding in server.found() if finding.level is not Level.OK]
    assert finding.level is Level.WARNING
    assert "a transaction log in this bucket would be refused" in finding.what


@pytest.mark.parametrize("number", [1, 2])
def test_probe_that_may_not_be_written(server: Server, number: int) -> None:
    server.reachable()
    server.has_rules({})
    server.has_rules({})
    if number == 2:
        server.refuses("put_object", "NotImplemented", 501)
    server.refuses("put_object", "AccessDenied", 403)
    server.stubber.add_response("delete_object", {})
    (finding,) = [finding for finding in server.found() if finding.level is Level.ERROR]
    assert finding.fix == "grant s3:PutObject on the prefix"


OTHER = "endpoint_url=http://minio:9000"


@pytest.mark.parametrize(
    ("log", "settings"),
    [
        ("s3://lake/orders", {}),
        ("s3://lake/orders/log?region=eu-west-1", {}),
        ("s3://lake/orders/_sparkonce/", {}),
        ("s3://lake", {}),
        (f"s3://lake/orders?{OTHER}", {"endpoint_url": "http://minio:9000/"}),
    ],
)
def test_log_among_the_rows(log: str, settings: dict[str, Any]) -> None:
    """A pipeline and its folder may have one name: its head would be among the data."""
    sink = s3_sink("s3://lake/orders", region_name="us-east-1", **settings)
    with pytest.raises(ConfigurationError, match=r"s3://lake/orders .*give log= a prefix"):
        ExactlyOnce("orders", sinks=[sink], log=log)


@pytest.mark.parametrize(
    "log",
    [
        "s3://lake/orders-log",
        "s3://logs/orders",
        f"s3://lake/orders?{OTHER}",
        "s3://lake/orders?region=cn-north-1",
        "sqlite:///lake/orders",
    ],
)
def test_log_beside_the_rows(log: str) -> None:
    """In another prefix, bucket or partition of Amazon's, or on another server."""
    s3_sink("s3://lake/orders", region_name="us-east-1").check_log(log)
