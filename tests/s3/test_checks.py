"""What is said of a server at the start and by `doctor`; no local one answers like these."""

from __future__ import annotations

import logging
import pickle
import socket
import traceback
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import boto3
import pyarrow as pa
import pytest
from botocore.exceptions import SSLError
from botocore.stub import ANY, Stubber

from sparkonce.errors import ConfigurationError, SinkUnavailableError
from sparkonce.finding import Finding, Level
from sparkonce.sinks import S3Connection, S3Sink
from sparkonce.sinks.s3.connecting.checks import blame, check_server
from sparkonce.sinks.s3.connecting.client import Clients, Purpose
from sparkonce.sinks.s3.connecting.diagnosis import diagnose
from sparkonce.sinks.s3.connecting.place import Place
from sparkonce.sinks.s3.writing.objects import S3Objects
from sparkonce.spark_hooks.exactly_once import ExactlyOnce
from tests.support.s3_sinks import nowhere, s3_sink

if TYPE_CHECKING:
    from botocore.config import Config

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
        keys = [{"Key": "orders/_spark_metadata/0"}] if it_is else []
        found = {"Name": "lake", "Contents": keys}
        self.stubber.add_response("list_objects_v2", found, asked)

    def lists(self, name: str = "") -> None:
        """It lists uploads."""
        headers = {"HTTPHeaders": {"server": name} if name else {}}
        self.stubber.add_response(
            "list_multipart_uploads", {"Bucket": "lake", "ResponseMetadata": headers}
        )

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
    server.stubber.add_response("put_object", {"ETag": "1"}, {**PUT, "IfNoneMatch": "*"})
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


def test_server_that_knows_no_lifecycle_rules(server: Server) -> None:
    """As versitygw on a file system. There is nothing to allow, and no rule that could do harm."""
    server.reachable()
    for _ in range(2):
        server.refuses("get_bucket_lifecycle_configuration", "NotImplemented", 501)
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
    server.stubber.add_response("put_object", {"ETag": "1"}, PUT)
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
    with pytest.raises(ConfigurationError, match=r"s3://lake/orders .*give log= a separate prefix"):
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


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("InternalError", 500),
        ("ServiceUnavailable", 503),
        ("SlowDown", 503),
        ("Throttling", 400),
        ("RequestTimeout", 400),
        ("TooManyRequests", 429),
    ],
)
def test_server_that_cannot_answer_now(server: Server, code: str, status: int) -> None:
    """Nothing is wrong with a setting: the caller tries again."""
    server.refuses("list_multipart_uploads", code, status)
    with pytest.raises(SinkUnavailableError, match=f"try again later .*{code}"):
        check_server(server.clients, PLACE)


@pytest.mark.parametrize(
    ("code", "status"), [("NotImplemented", 501), ("InvalidRequest", 400), ("AccessDenied", 403)]
)
def test_server_that_will_never_answer(server: Server, code: str, status: int) -> None:
    """No second try helps."""
    server.refuses("list_multipart_uploads", code, status)
    with pytest.raises(ConfigurationError, match=code):
        check_server(server.clients, PLACE)


@pytest.fixture
def closed_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        return int(closed.getsockname()[1])


def refusal_of(sink: S3Sink) -> str:
    """What `validate` says where nothing answers."""
    with closing(sink), pytest.raises(SinkUnavailableError) as refused:
        sink.validate(pa.schema([("id", pa.int64())]))
    assert "hunter2" not in "".join(traceback.format_exception(refused.value))
    return str(refused.value)


KEYS: dict[str, Any] = {
    "region_name": "us-east-1",
    "aws_access_key_id": "a",
    "aws_secret_access_key": "b",
}


@pytest.mark.parametrize("name", ["AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"])
def test_server_that_the_environment_names(
    monkeypatch: pytest.MonkeyPatch, closed_port: int, name: str
) -> None:
    """The message names the variable and the address, without the credentials in it."""
    monkeypatch.setenv(name, f"http://me:hunter2@127.0.0.1:{closed_port}")
    told = refusal_of(s3_sink("s3://lake/orders", **KEYS))
    assert f"http://127.0.0.1:{closed_port} (the environment variable {name}) cannot" in told
    assert f"correct the environment variable {name}" in told
    assert "endpoint_url=" not in told
    assert "hunter2" not in told


@pytest.mark.parametrize("section", ["", "services"])
@pytest.mark.parametrize("chosen", ["argument", "AWS_PROFILE"])
def test_server_that_a_profile_names(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, closed_port: int, section: str, chosen: str
) -> None:
    config = tmp_path / "config"
    url = f"endpoint_url = http://127.0.0.1:{closed_port}"
    config.write_text(
        f"[profile lake]\nservices = mine\n[services mine]\ns3 =\n  {url}\n"
        if section
        else f"[profile lake]\n{url}\n"
    )
    monkeypatch.setenv("AWS_CONFIG_FILE", str(config))
    if chosen == "AWS_PROFILE":
        monkeypatch.setenv("AWS_PROFILE", "lake")
    settings = {"profile_name": "lake"} if chosen == "argument" else {}
    told = refusal_of(s3_sink("s3://lake/orders", **KEYS, **settings))
    assert f"http://127.0.0.1:{closed_port} (endpoint_url of the profile 'lake' in boto3's" in told


def test_server_that_the_settings_name(closed_port: int) -> None:
    told = refusal_of(
        s3_sink("s3://lake/orders", endpoint_url=f"http://127.0.0.1:{closed_port}", **KEYS)
    )
    assert "cannot be reached: start it, or correct endpoint_url= " in told


def test_profile_that_does_not_exist() -> None:
    with closing(s3_sink("s3://lake/orders", profile_name="no-such")) as sink:
        with pytest.raises(ConfigurationError, match=r"no-such.*correct profile_name="):
            sink.validate(pa.schema([("id", pa.int64())]))


def test_address_in_the_environment_that_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "me:hunter2@minio:9000")
    told = "the environment variable AWS_ENDPOINT_URL is not an address"
    with closing(s3_sink("s3://lake/orders", **KEYS)) as sink:
        with pytest.raises(ConfigurationError, match=told) as refused:
            sink.validate(pa.schema([("id", pa.int64())]))
    assert "hunter2" not in "".join(traceback.format_exception(refused.value))


def test_certificate_that_nobody_trusts(closed_port: int, server: Server) -> None:
    """Trying again does not help."""
    error = SSLError(endpoint_url="https://127.0.0.1", error="self-signed certificate")
    refused = blame(error, server.clients, PLACE)
    assert isinstance(refused, ConfigurationError)
    assert "correct verify=" in str(refused)


# -- client= ---------------------------------------------------------------------------------------


class Factory:
    """Makes clients of a port at which nothing listens."""

    def __init__(self, port: int, *, merges: bool = True) -> None:
        self.port = port
        self.merges = merges

    def __call__(self, config: Config) -> Any:
        return boto3.session.Session().client(
            "s3",
            endpoint_url=f"http://127.0.0.1:{self.port}",
            config=config if self.merges else None,
            **KEYS,
        )


def test_clients_of_the_users_factory(closed_port: int) -> None:
    """It travels to the executors, whose tasks share what it made there."""
    sink = S3Sink("s3://lake/orders", client=Factory(closed_port))
    copies = [pickle.loads(pickle.dumps(sink)) for _ in range(2)]  # noqa: S301
    first, second = (copy._clients.client(Purpose.ASK) for copy in copies)
    assert first is second
    assert sink._clients.other_server == f"http://127.0.0.1:{closed_port}"
    other = S3Sink("s3://lake/orders", client=Factory(closed_port))
    assert other._clients.client(Purpose.ASK) is not first
    other.close()
    assert "correct client=" in refusal_of(sink)


def test_factory_that_ignores_its_config(closed_port: int) -> None:
    """Its clients would repeat completions and add checksums."""
    with closing(S3Sink("s3://lake/orders", client=Factory(closed_port, merges=False))) as sink:
        with pytest.raises(ConfigurationError, match="without the Config"):
            sink.validate(pa.schema([("id", pa.int64())]))


def test_client_in_place_of_a_factory() -> None:
    client: Any = object()
    with pytest.raises(ConfigurationError, match="client= is a function"):
        S3Sink("s3://lake/orders", client=client)
    with pytest.raises(ConfigurationError, match="connection= or client="):
        S3Sink("s3://lake/orders", client=Factory(1), connection=S3Connection())
