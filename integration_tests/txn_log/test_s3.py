"""The transaction log in a bucket, on real S3 servers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl, urlsplit

import pytest

from integration_tests.support.open_logs import open_objects
from integration_tests.support.proxy import Proxy
from sparkonce.errors import ConfigurationError, LogUnavailableError
from sparkonce.testing import checks
from sparkonce.testing.log_cases import claim, deliver, record
from sparkonce.testing.log_contract import LogContract
from sparkonce.testing.services import S3Server, ServiceKind, Services
from sparkonce.txn_log import TransactionLog, open_log
from sparkonce.txn_log.document import DocumentLog
from sparkonce.txn_log.object_store import ObjectPlace

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client

StartKind = Callable[[ServiceKind], Services]


class TestObjectStoreLog(LogContract):
    secrets = ("sparkonce-secret",)
    server: S3Server

    @pytest.fixture
    def address(self, start_kind: StartKind, fresh_log: Callable[[S3Server], str]) -> str:
        type(self).server = start_kind("versitygw").s3["versitygw"]
        return fresh_log(self.server)

    open_log = staticmethod(open_objects)

    @contextmanager
    def objects(self, address: str) -> Iterator[tuple[S3Client, str, list[Any]]]:
        client, bucket = checks.s3_client(self.server), urlsplit(address).netloc
        pages = client.get_paginator("list_objects_v2").paginate(Bucket=bucket)
        yield client, bucket, [found for page in pages for found in page.get("Contents", [])]
        client.close()

    def damage(self, address: str, old: str, new: str) -> None:
        with self.objects(address) as (client, bucket, found):
            for key in (each["Key"] for each in found if "log.json" not in each["Key"]):
                body = client.get_object(Bucket=bucket, Key=key)["Body"].read().decode()
                client.put_object(Bucket=bucket, Key=key, Body=body.replace(old, new).encode())

    @contextmanager
    def losing_the_answer(self, address: str) -> Iterator[TransactionLog]:
        endpoint = dict(parse_qsl(urlsplit(address).query))["endpoint_url"]
        proxy = Proxy(int(endpoint.rpartition(":")[2]))
        log = self.open_log(address.replace(endpoint, f"http://127.0.0.1:{proxy.port}"))
        proxy.lose = lambda data: data.startswith(b"PUT") and b"/head" in data.split(b"\r\n")[0]
        try:
            yield log
        finally:
            log.close()
            proxy.close()
        assert proxy.lost == 1

    @contextmanager
    def out_of_reach(self, address: str) -> Iterator[None]:
        self.server.kill()
        yield
        self.server.start()

    def remove(self, address: str) -> None:
        with self.objects(address) as (client, bucket, found):
            for each in found:
                client.delete_object(Bucket=bucket, Key=each["Key"])

    def stored_bytes(self, address: str) -> int:
        with self.objects(address) as (_, _, found):
            return sum(each["Size"] for each in found)

    def test_requests(self, address: str) -> None:
        """`decide` and `complete` are one request each; every 31st batch has one more."""
        place = ObjectPlace(address)
        log = DocumentLog(place)
        sent: list[str] = []
        place.client.meta.events.register(
            "before-send.s3", lambda request, **_: sent.append(request.method)
        )
        incarnation = log.begin(claim())
        sent.clear()
        for batch_id in range(62):
            deliver(log, incarnation, batch_id)
        assert set(sent) == {"PUT"}
        assert len(sent) == 62 * 2 + 1
        log.close()

    def test_server_that_keeps_conditions_is_taken(self, address: str) -> None:
        """The race at the start leaves nothing behind."""
        log = open_log(address)
        log.close()
        with self.objects(address) as (_, _, found):
            assert [each["Key"] for each in found] == ["logs/a/log.json"]

    def test_log_that_is_not_there_is_not_made(self, address: str) -> None:
        """Who looks at a log and mistypes its address is told so."""
        with pytest.raises(ConfigurationError, match="there is no transaction log at s3://"):
            open_log(address, create=False)
        with self.objects(address) as (_, _, found):
            assert found == []
        log = self.open_log(address)
        again = open_log(address, create=False)
        assert again.log_id == log.log_id
        again.close()
        log.close()

    def test_bucket_that_is_not_there(self, address: str) -> None:
        with pytest.raises(LogUnavailableError, match="NoSuchBucket"):
            open_log(address.replace("s3://t", "s3://missing"))

    def test_two_prefixes_are_two_logs(self, log: TransactionLog, address: str) -> None:
        """A prefix that begins like another one sees nothing of it."""
        other = self.open_log(address.replace("/logs/a?", "/logs/ab?"))
        assert other.log_id != log.log_id
        other.begin(claim())
        assert log.head("orders") is None
        other.close()

    def test_write_that_lands_late(self, log: TransactionLog, other: TransactionLog) -> None:
        """A request that was given up and arrives after others wrote meets another tag."""
        incarnation = log.begin(claim())
        assert isinstance(log, DocumentLog)
        seen = log._load("orders", is_fresh=True)
        deliver(other, incarnation, 0)
        assert log._place.swap("orders/head", seen.version, "late") is None
        assert other.find(record(incarnation, 0).id) is not None


def test_server_that_lets_several_win_is_refused(
    start_kind: StartKind, fresh_log: Callable[[S3Server], str]
) -> None:
    """S3Mock 5.2.0 looks first and writes later."""
    server = start_kind("s3mock").s3["s3mock"]
    with pytest.raises(ConfigurationError, match=f"{server.endpoint_url}.*conditional PUT"):
        open_log(fresh_log(server))


def test_server_that_ignores_the_condition_is_refused(
    start_kind: StartKind,
    fresh_log: Callable[[S3Server], str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Such as garage 2.5.0; here a versitygw that never gets to see the condition."""
    place = ObjectPlace(fresh_log(start_kind("versitygw").s3["versitygw"]))

    def sign_without(params: Any, **_: Any) -> None:
        for name in ("If-None-Match", "If-Match"):
            params["headers"].pop(name, None)

    place.client.meta.events.register("before-call.s3.PutObject", sign_without)
    with pytest.raises(ConfigurationError, match="VERSITYGW.*ignores the condition"):
        place.check()
    place.close()


@pytest.mark.parametrize(
    "url",
    ["s3://", "s3://bucket/p?secret_key=x", "s3://key:x@bucket/p", "s3://b/p?endpoint_url=u:x@h"],
)
def test_url_that_cannot_be_read(url: str) -> None:
    """Secrets do not belong into a URL."""
    with pytest.raises(ConfigurationError, match="environment"):
        ObjectPlace(url)
