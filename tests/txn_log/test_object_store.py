"""The transaction log in a bucket, against answers that no server of the tests gives."""

from __future__ import annotations

import base64
import hashlib
import io
import itertools
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from ssl import SSLCertVerificationError
from urllib.parse import parse_qs, urlsplit

import pytest
from botocore.awsrequest import AWSPreparedRequest, AWSResponse
from botocore.exceptions import (
    ClientError,
    ConnectionClosedError,
    ConnectTimeoutError,
    CredentialRetrievalError,
    EndpointConnectionError,
    MetadataRetrievalError,
    PartialCredentialsError,
    ProxyConnectionError,
    ReadTimeoutError,
    SSLError,
    SSOTokenLoadError,
    TokenRetrievalError,
    UnauthorizedSSOTokenError,
)
from botocore.stub import Stubber
from urllib3 import HTTPResponse
from urllib3.exceptions import SSLError as Urllib3SSLError

from sparkonce.errors import ConfigurationError, DecisionUnknownError, LogUnavailableError
from sparkonce.testing.log_cases import QUERY, claim, deliver, record
from sparkonce.txn_log.document import DocumentLog
from sparkonce.txn_log.object_store import ObjectPlace
from tests.support.renewed_credentials import SECRET, Sidecar, server_that_takes

_MANY = 1000


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectPlace]:
    monkeypatch.setattr(time, "sleep", lambda _s: None)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "x")
    place = ObjectPlace("s3://logs/a?endpoint_url=http://127.0.0.1:9&region=us-east-1")
    yield place
    place.close()


@pytest.mark.parametrize(
    ("code", "status"), [("NoSuchKey", 404), ("ConditionalRequestConflict", 409)]
)
def test_document_that_can_neither_be_created_nor_read_is_said(
    place: ObjectPlace, code: str, status: int
) -> None:
    """A server that contradicts itself: an end, and a message that names the object."""
    with Stubber(place.client) as server:
        for _ in range(_MANY):
            server.add_client_error("put_object", code, http_status_code=status)
            server.add_client_error("get_object", "NoSuchKey", http_status_code=404)
        with pytest.raises(LogUnavailableError, match=r"a/log\.json.*nothing was written"):
            place.create("log.json", "{}")


def test_create_that_collides_is_tried_again(place: ObjectPlace) -> None:
    """Another write of the object was under way, and came to nothing."""
    with Stubber(place.client) as server:
        server.add_client_error("put_object", "ConditionalRequestConflict", http_status_code=409)
        server.add_client_error("get_object", "NoSuchKey", http_status_code=404)
        server.add_response("put_object", {"ETag": '"1"'})
        assert place.create("log.json", "{}")
        server.assert_no_pending_responses()


@pytest.mark.parametrize("code", ["404", "NoSuchBucket", "NotFound"])
def test_answer_that_does_not_say_that_the_document_is_absent(
    place: ObjectPlace, code: str
) -> None:
    """A proxy that answers 404 in the server's place: the log is away, not empty."""
    with Stubber(place.client) as server:
        server.add_client_error("get_object", code, http_status_code=404)
        with pytest.raises(LogUnavailableError, match=f"answered {code}"):
            place.load("orders/head", None)


BEFORE_IT_IS_SENT = [
    CredentialRetrievalError(provider="sso", error_msg="no answer"),
    MetadataRetrievalError(error_msg="no answer"),
    TokenRetrievalError(provider="sso", error_msg="no answer"),
    SSOTokenLoadError(error_msg="no file"),
    UnauthorizedSSOTokenError(),
    PartialCredentialsError(provider="env", cred_var="secret_key"),
    ClientError({"Error": {}, "ResponseMetadata": {"HTTPStatusCode": 500}}, "AssumeRole"),  # type: ignore[typeddict-item]
    ReadTimeoutError(endpoint_url="https://sts"),
]
WHILE_IT_IS_SENT = [
    (EndpointConnectionError(endpoint_url="https://s3", error="refused"), True),
    (ConnectTimeoutError(endpoint_url="https://s3", error="silence"), True),
    (SSLError(endpoint_url="https://s3", error=Urllib3SSLError(SSLCertVerificationError())), True),
    (SSLError(endpoint_url="https://s3", error=Urllib3SSLError(ssl.SSLError("mac"))), False),
    # urllib3 says so of a connection too that is cut behind the request.
    (ProxyConnectionError(proxy_url="http://proxy", error="reset"), False),
    (ConnectionClosedError(endpoint_url="https://s3"), False),
    (ReadTimeoutError(endpoint_url="https://s3"), False),
]


@pytest.mark.parametrize(
    ("event", "error", "is_unsent"),
    [
        *(("before-sign", error, True) for error in BEFORE_IT_IS_SENT),
        *(("before-send", *case) for case in WHILE_IT_IS_SENT),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else None,
)
def test_write_that_was_never_sent(
    place: ObjectPlace, server: Server, event: str, error: Exception, is_unsent: bool
) -> None:
    """No decision is in doubt then, whatever the time before has brought."""

    def fail(**_: object) -> None:
        raise error

    place.swap("orders/head", None, "{}")
    place.client.meta.events.unregister("before-send.s3", server.send)
    place.client.meta.events.register(f"{event}.s3", fail)
    expected = LogUnavailableError if is_unsent else DecisionUnknownError
    with pytest.raises(expected):
        place.swap("orders/head", None, "{}")


class Server:
    """A store of objects that keeps the conditions of a PUT, and says no as it is told to.

    Attributes:
        objects: by key.
        refuse: gives the status and the code of a refusal, or None.
        headers: of the answers with an error, by its code.
        late: gives the status and the body of a proxy's answer, after the server has done what the
            request wants; None lets the server answer.
    """

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.refuse: Callable[[AWSPreparedRequest], tuple[int, str] | None] = lambda _: None
        self.headers: dict[str, dict[str, str]] = {}
        self.late: Callable[[AWSPreparedRequest], tuple[int, bytes] | None] = lambda _: None
        self._lock = threading.Lock()

    def send(self, request: AWSPreparedRequest, **_: object) -> AWSResponse:
        with self._lock:
            status, code, body = self._answer(request)
        proxy = self.late(request)
        if proxy is not None:
            raw = HTTPResponse(io.BytesIO(proxy[1]), {}, proxy[0], preload_content=False)
            return AWSResponse(request.url, proxy[0], {}, raw)
        headers = {"ETag": tag_of(body), "Server": "nginx"}
        if code in self.headers:
            headers.update(self.headers[code])
        if code:
            body = f"<Error><Code>{code}</Code></Error>".encode()
        answered = io.BytesIO(b"" if request.method == "PUT" and not code else body)
        raw = HTTPResponse(answered, headers, status, preload_content=False)
        return AWSResponse(request.url, status, headers, raw)

    def _answer(self, request: AWSPreparedRequest) -> tuple[int, str, bytes]:
        refusal = self.refuse(request)
        if refusal is not None:
            return *refusal, b""
        parts = urlsplit(request.url)
        key = parts.path.removeprefix("/logs/")
        there = self.objects.get(key)
        if request.method == "DELETE":
            self.objects.pop(key, None)
            return 204, "", b""
        if request.method == "GET" and "list-type" in parts.query:
            prefix = parse_qs(parts.query).get("prefix", [""])[0]
            found = (f"<Key>{name}</Key>" for name in self.objects if name.startswith(prefix))
            entries = "".join(f"<Contents>{entry}</Contents>" for entry in found)
            body = f"<ListBucketResult><Name>logs</Name>{entries}</ListBucketResult>"
            return 200, "", body.encode()
        if request.method == "GET":
            return (404, "NoSuchKey", b"") if there is None else (200, "", there)
        wanted = request.headers.get("If-Match")
        is_other = wanted is not None and wanted.decode() != tag_of(there or b"")
        if is_other or ("If-None-Match" in request.headers and there is not None):
            return 412, "PreconditionFailed", b""
        self.objects[key] = request.body.read()
        return 200, "", self.objects[key]


def tag_of(body: bytes) -> str:
    return f'"{hashlib.md5(body, usedforsecurity=False).hexdigest()}"'


@pytest.fixture
def server(place: ObjectPlace) -> Server:
    server = Server()
    place.client.meta.events.register("before-send.s3", server.send)
    return server


def test_server_that_limits_the_writes_of_an_object(
    place: ObjectPlace, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cloudflare R2 takes one a second: a racer that is refused for that has not won."""
    now = [0]
    latest: dict[str, int] = {}

    def rate(request: AWSPreparedRequest) -> tuple[int, str] | None:
        if request.method != "PUT":
            return None
        if latest.get(request.url, -1) == now[0]:
            return 429, "TooManyRequests"
        latest[request.url] = now[0]
        return None

    def sleep(_: float) -> None:
        now[0] += 1

    monkeypatch.setattr(time, "sleep", sleep)
    server.refuse = rate
    place.check()
    assert now[0] > 0
    assert server.objects == {}


def test_server_that_only_ever_refuses(place: ObjectPlace, server: Server) -> None:
    """Whether it keeps conditions is not known then: the log is away."""
    server.refuse = lambda request: (503, "SlowDown") if request.method == "PUT" else None
    with pytest.raises(LogUnavailableError, match="SlowDown"):
        place.check()


def test_server_that_limits_writes_and_ignores_conditions(
    place: ObjectPlace, server: Server
) -> None:
    """It is asked until it answers."""
    answers = itertools.cycle([None, (429, "SlowDown")])

    def unconditional(request: AWSPreparedRequest) -> tuple[int, str] | None:
        for name in ("If-Match", "If-None-Match"):
            request.headers.pop(name, None)
        return next(answers) if request.method == "PUT" else None

    server.refuse = unconditional
    with pytest.raises(ConfigurationError, match="nginx.*ignores the condition"):
        place.check()


def test_server_without_conditional_writes(place: ObjectPlace, server: Server) -> None:
    """Backblaze B2 says so, and wrote nothing: it is refused by its name."""
    server.refuse = lambda request: (
        (501, "NotImplemented") if "If-None-Match" in request.headers else None
    )
    with pytest.raises(ConfigurationError, match=r"127\.0\.0\.1:9, nginx.*NotImplemented"):
        place.check()


@pytest.mark.parametrize(
    ("status", "code"),
    [
        (404, ""),  # an ingress that has no server behind it yet
        (404, "404"),
        (409, "OperationAborted"),  # the bucket is being made
        (500, "InternalError"),
        (502, ""),
        (503, "XMinioServerNotInitialized"),
        (504, "GatewayTimeout"),
    ],
)
def test_server_that_starts_up_while_a_log_is_opened(
    place: ObjectPlace, server: Server, status: int, code: str
) -> None:
    """An outage of some seconds is no wrong setting, and a probe leaves nothing in doubt."""
    server.refuse = lambda request: (status, code) if request.method == "PUT" else None
    with pytest.raises(LogUnavailableError):
        place.check()


@pytest.mark.parametrize("alive", range(4))
@pytest.mark.parametrize(
    "error",
    [
        EndpointConnectionError(endpoint_url="https://s3", error="refused"),
        ConnectTimeoutError(endpoint_url="https://s3", error="silence"),
        ReadTimeoutError(endpoint_url="https://s3"),
        ConnectionClosedError(endpoint_url="https://s3"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_server_that_goes_down_while_a_log_is_opened(
    place: ObjectPlace, server: Server, error: Exception, alive: int
) -> None:
    """At its first, second … request; in the race, where many are throttled, all the same."""
    sent = itertools.count()

    def fail(request: AWSPreparedRequest) -> None:
        if next(sent) >= alive:
            raise error

    server.refuse = fail
    with pytest.raises(LogUnavailableError):
        place.check()


def test_server_that_goes_down_once_it_is_known_to_ignore_conditions(
    place: ObjectPlace, server: Server
) -> None:
    """What it said stays true, and its name is not needed."""
    puts = itertools.count(1)

    def unconditional(request: AWSPreparedRequest) -> tuple[int, str] | None:
        if request.method != "PUT":
            raise EndpointConnectionError(endpoint_url="https://s3", error="refused")
        next(puts)
        for name in ("If-Match", "If-None-Match"):
            request.headers.pop(name, None)
        return None

    server.refuse = unconditional
    with pytest.raises(ConfigurationError, match="no name given.*ignores the condition"):
        place.check()
    assert next(puts) == 4


def test_server_that_creates_nothing_on_a_condition(place: ObjectPlace, server: Server) -> None:
    """It says that a condition is not met which is: no outage."""
    server.refuse = lambda request: (412, "PreconditionFailed") if request.method == "PUT" else None
    with pytest.raises(ConfigurationError, match="refuses to create an object"):
        place.check()


@pytest.mark.parametrize(
    ("variable", "setting", "told"),
    [
        (None, "endpoint_url=http://127.0.0.1:9", "which endpoint_url= names"),
        ("AWS_ENDPOINT_URL_S3", "", "the environment variable AWS_ENDPOINT_URL_S3 names"),
        ("AWS_ENDPOINT_URL", "", "the environment variable AWS_ENDPOINT_URL names"),
        ("AWS_CONFIG_FILE", "", r"endpoint_url in boto3's configuration file .* names"),
    ],
)
def test_setting_that_names_a_server_that_is_away(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, variable: str | None, setting: str, told: str
) -> None:
    """The one to correct; a password in it does not show."""
    Sidecar(tmp_path, monkeypatch).write("token")
    url = f"http://me:{SECRET}@127.0.0.1:9"
    if variable == "AWS_CONFIG_FILE":
        (tmp_path / "config").write_text(f"[default]\nendpoint_url = {url}\n")
    elif variable is not None:
        monkeypatch.setenv(variable, url)
    place = ObjectPlace(f"s3://logs/a?region=us-east-1&{setting}")
    with pytest.raises(
        LogUnavailableError, match=f"server at http://127.0.0.1:9, .*{told}"
    ) as away:
        place.read("log.json")
    assert SECRET not in str(away.value)
    place.close()


@pytest.mark.parametrize(
    ("profile", "url"),
    [("missing", "s3://logs/a?region=eu-west-1"), (None, "s3://logs/a?endpoint_url=nowhere")],
)
def test_settings_of_which_boto3_makes_no_client(
    monkeypatch: pytest.MonkeyPatch, profile: str | None, url: str
) -> None:
    """Time does not mend them."""
    if profile is not None:
        monkeypatch.setenv("AWS_PROFILE", profile)
    with pytest.raises(ConfigurationError, match="boto3 cannot create a client"):
        ObjectPlace(url)


def test_write_that_the_server_does_not_know(place: ObjectPlace, server: Server) -> None:
    """Nothing was written, so nothing is in doubt."""
    server.refuse = lambda _: (501, "NotImplemented")
    with pytest.raises(LogUnavailableError, match="NotImplemented"):
        place.swap("orders/head", None, "{}")


LOGIN_PAGES = [
    b"",
    b"<html><body>Please log in</body></html>",
    b"<!DOCTYPE html><html><body>Please log in<br></body></html>",
]


@pytest.mark.parametrize("page", LOGIN_PAGES)
def test_login_page_is_no_empty_log(place: ObjectPlace, server: Server, page: bytes) -> None:
    """A proxy answers 200 in the server's place: the log is unreachable, not empty."""
    log = DocumentLog(place)
    log.begin(claim())
    server.late = lambda _: (200, page)
    for ask in (log.pipelines, lambda: log.history("orders", 10), lambda: DocumentLog(place)):
        with pytest.raises(LogUnavailableError, match="nothing was written"):
            ask()


@pytest.mark.parametrize("page", LOGIN_PAGES)
def test_login_page_is_no_answer_to_a_write(
    place: ObjectPlace, server: Server, page: bytes
) -> None:
    server.late = lambda _: (200, page)
    with pytest.raises(DecisionUnknownError, match="read the log again"):
        place.swap("orders/head", None, "{}")


@pytest.mark.parametrize("status", [403, 404, 408, 409, 412, 429, 501, 503])
def test_error_of_a_proxy_after_the_write_landed(
    place: ObjectPlace, server: Server, status: int
) -> None:
    """It has no code of S3's, so it does not prove that nothing was written."""
    server.late = lambda request: (status, b"") if request.method == "PUT" else None
    with pytest.raises(DecisionUnknownError):
        place.swap("orders/head", None, "{}")
    assert "a/orders/head" in server.objects


@pytest.mark.parametrize("status", [412, 501, 503])
def test_error_of_a_proxy_while_a_log_is_opened(
    place: ObjectPlace, server: Server, status: int
) -> None:
    """The first probe lands, and its answer is lost: that says nothing about the server."""
    puts = itertools.count()

    def late(request: AWSPreparedRequest) -> tuple[int, bytes] | None:
        return (status, b"") if request.method == "PUT" and next(puts) == 0 else None

    server.late = late
    with pytest.raises(LogUnavailableError, match="It was a probe"):
        place.check()
    assert server.objects == {}


def test_log_that_may_not_be_listed(place: ObjectPlace, server: Server) -> None:
    """Found at the start, and not when an archive is looked for."""
    server.refuse = lambda request: (403, "AccessDenied") if "list-type" in request.url else None
    with pytest.raises(LogUnavailableError, match="ListObjectsV2 answered AccessDenied"):
        place.check()


def test_server_that_does_not_list_what_it_has(place: ObjectPlace, server: Server) -> None:
    """Old records would be missing without a word."""
    listing = b"<ListBucketResult><Name>logs</Name></ListBucketResult>"
    server.late = lambda request: (200, listing) if "list-type" in request.url else None
    with pytest.raises(ConfigurationError, match="does not list an object that it has"):
        place.check()


@pytest.mark.parametrize("prefix", ["a//b", "./a", "a/../b", "a/.", "a/\n", "a/\x00b", "//a"])
def test_prefix_that_servers_read_in_two_ways(prefix: str) -> None:
    """Servers that keep files find an object at its key, and list it under another."""
    with pytest.raises(ConfigurationError, match="prefix"):
        ObjectPlace(f"s3://logs/{prefix}?region=us-east-1")


def test_bucket_that_locks_its_objects(place: ObjectPlace, server: Server) -> None:
    """With a default retention S3 wants to know that what it keeps for years has arrived whole."""

    def lock(request: AWSPreparedRequest) -> tuple[int, str] | None:
        if request.method != "PUT":
            return None
        md5 = hashlib.md5(request.body.read(), usedforsecurity=False).digest()
        request.body.seek(0)
        is_told = request.headers.get("Content-MD5") == base64.b64encode(md5)
        return None if is_told else (400, "InvalidRequest")

    server.refuse = lock
    place.check()


@pytest.mark.parametrize("name", ["", f"{QUERY}/", f"{QUERY}/0-1", "notes.txt", "a-b-c.json"])
def test_foreign_object_below_the_log(place: ObjectPlace, server: Server, name: str) -> None:
    """Consoles and tools make objects for folders: they are no archive, and stay."""
    log = DocumentLog(place)
    incarnation = log.begin(claim())
    for batch_id in range(70):
        done = deliver(log, incarnation, batch_id)
    foreign = f"a/orders/archive/{name}"
    server.objects[foreign] = b""
    assert len(log.history("orders", 100)) == 70
    assert log.find(record(incarnation, 3).id) is not None
    log.forget(done, incarnation.token, retain=10)
    assert [found.id.batch_id for found in log.history("orders", 100)] == list(range(69, 59, -1))
    assert foreign in server.objects


def test_id_that_was_deleted_while_pipelines_stand(place: ObjectPlace, server: Server) -> None:
    """Nobody would sweep what stands in its name; what else is below the prefix is no pipeline."""
    server.objects["a/other/head/file"] = server.objects["a/other.tool/head"] = b""
    log = DocumentLog(place)
    log.begin(claim())
    kept = server.objects.pop("a/log.json")
    with pytest.raises(LogUnavailableError, match=r"//logs/a\?.*log\.json is gone.*orders"):
        DocumentLog(place)
    assert "a/log.json" not in server.objects
    server.objects["a/log.json"] = kept
    assert DocumentLog(place).log_id == log.log_id


def test_head_that_was_deleted_in_a_versioned_bucket(place: ObjectPlace, server: Server) -> None:
    """It is no pipeline that never was: the bucket has its versions."""
    log = DocumentLog(place)
    deliver(log, log.begin(claim()), 0)
    del server.objects["a/orders/head"]
    server.headers["NoSuchKey"] = {"x-amz-delete-marker": "true"}
    with pytest.raises(LogUnavailableError, match=r"delete marker at a/orders/head"):
        DocumentLog(place).head("orders")
    assert place.read("orders/archive/forgotten") is None  # we delete those ourselves


@pytest.mark.parametrize("verb", ["read", "swap", "delete"])
def test_credentials_that_are_renewed_while_the_process_runs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, verb: str
) -> None:
    """Once the server has refused them the chain is asked again, also after it had none."""
    sidecar = Sidecar(tmp_path, monkeypatch)
    sidecar.write("old")
    with server_that_takes("new", {"ETag": '"1"'}) as url:
        place = ObjectPlace(f"s3://logs/a?endpoint_url={url}&region=us-east-1&path_style=true")

        def act() -> None:
            if verb == "swap":
                place.swap("head", None, "{}")
            elif verb == "delete":
                place.delete(["head"])
            else:
                place.read("head")

        with pytest.raises(LogUnavailableError, match="answered ExpiredToken") as away:
            act()
        assert SECRET not in str(away.value)
        sidecar.clear()
        with pytest.raises(LogUnavailableError, match="NoCredentials"):
            act()
        sidecar.write("half of a file")
        with (tmp_path / "credentials").open("a") as file:
            file.write("[half")
        with pytest.raises(LogUnavailableError, match="nothing was written"):
            act()
        sidecar.write("new")
        act()
        place.close()


@pytest.mark.parametrize(
    ("setting", "refusal"),
    [
        ("path_style=yes", "path_style='yes': give true or false"),
        ("path_style=", "path_style='': give true or false"),
        ("endpoint_url=", "endpoint_url= is empty"),
    ],
)
def test_path_style_that_is_neither_true_nor_false(setting: str, refusal: str) -> None:
    with pytest.raises(ConfigurationError, match=refusal):
        ObjectPlace(f"s3://logs/a?region=eu-west-1&{setting}")


@pytest.mark.parametrize("url", ["s3://logs/a#eu", "s3://logs/a?region=eu-west-1#eu", "s3://logs#"])
def test_fragment_in_the_url(url: str) -> None:
    """It would be dropped, and logs that differ in it alone would share one place."""
    with pytest.raises(ConfigurationError, match=r"log=s3://…: # .*give each log a prefix"):
        ObjectPlace(url)


@pytest.mark.parametrize(
    ("setting", "said_by_boto3", "host"),
    [
        ("", "", "https://oss.example/logs/"),
        ("", "virtual", "https://logs.oss.example/"),
        ("&path_style=false", "", "https://logs.oss.example/"),
        ("&path_style=true", "virtual", "https://oss.example/logs/"),
    ],
)
def test_where_the_bucket_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, setting: str, said_by_boto3: str, host: str
) -> None:
    """Some servers refuse it in the path, others know it only there."""
    Sidecar(tmp_path, monkeypatch).write("token")
    line = f"  addressing_style = {said_by_boto3}\n"
    (tmp_path / "config").write_text(f"[default]\ns3 =\n{line}" if said_by_boto3 else "")
    place = ObjectPlace(f"s3://logs/a?endpoint_url=https://oss.example&region=us-east-1{setting}")
    told = place.client.generate_presigned_url("get_object", {"Bucket": "logs", "Key": "k"})
    assert told.startswith(host)
    place.close()


@pytest.mark.parametrize(
    "bucket",
    [
        "arn:aws:s3::123456789012:accesspoint:mfzwi23gnjvgw.mrap",
        "arn:aws:s3:eu-west-1:123456789012:accesspoint:logs",
    ],
)
def test_log_of_several_sites_is_refused(bucket: str) -> None:
    """A multi-region access point writes now here, now there: conditions do not hold over both."""
    with pytest.raises(ConfigurationError, match="access point"):
        ObjectPlace(f"s3://{bucket}/p")


def test_log_in_a_directory_bucket() -> None:
    """S3 Express One Zone refuses Content-MD5, and so each write."""
    with pytest.raises(ConfigurationError, match="log=.*x-s3'.*general purpose bucket"):
        ObjectPlace("s3://logs--use1-az4--x-s3/p")
