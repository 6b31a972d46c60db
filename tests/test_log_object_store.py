"""The transaction log in a bucket, against answers that no server of the tests gives."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from botocore.stub import Stubber

from sparkonce.errors import LogUnavailableError
from sparkonce.txn_log.object_store import ObjectPlace
from tests.renewed_credentials import SECRET, Sidecar, server_that_takes

_MANY = 1000


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectPlace]:
    monkeypatch.setattr(time, "sleep", lambda _s: None)
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
