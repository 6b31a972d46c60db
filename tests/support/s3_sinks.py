"""Sinks and clients for the tests of `S3Sink`: flat settings, sorted into their dataclasses."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from sparkonce.sinks import S3Connection, S3Objects, S3Sink
from sparkonce.sinks.s3.connecting.client import Clients


def s3_sink(url: str, **settings: Any) -> S3Sink:
    """The sink with these settings; None stands for one that is left out."""

    def of(kind: type[Any]) -> Any:
        names = {field.name for field in fields(kind)} & set(settings)
        return kind(**{name: settings.pop(name) for name in names})

    return S3Sink(url, connection=of(S3Connection), objects=of(S3Objects), **settings)


def clients_of(endpoint_url: str, *, with_keys: bool = True) -> Clients:
    """Clients of a server at this address."""
    keys: dict[str, Any] = {"aws_access_key_id": "a", "aws_secret_access_key": "b"}
    return Clients(
        S3Connection(
            "us-east-1",
            endpoint_url=endpoint_url,
            addressing_style="path",
            **(keys if with_keys else {}),
        )
    )


def nowhere() -> Clients:
    """Clients whose answers come from stubs: no server has this address."""
    return clients_of("http://127.0.0.1:1")
