"""The table's name in lineage: ``postgres://HOST:PORT``, ``DATABASE.SCHEMA.TABLE``."""

from __future__ import annotations

import contextlib
from typing import NoReturn

from sparkonce.datasets import Dataset
from sparkonce.errors import SinkUnavailableError
from sparkonce.sinks.capabilities import NamesDatasets
from sparkonce.sinks.postgres.server.connections import Address
from sparkonce.sinks.postgres.target.catalog import find_table
from sparkonce.sinks.postgres.target.table import Request, Target


class NamesTable(NamesDatasets):
    """Part of `PostgresSink`."""

    _address: Address
    _request: Request
    _target: Target | None

    def dataset(self) -> Dataset:
        schema, table = self._schema_and_table()
        return Dataset(
            f"postgres://{first_server(self._address.shown)}",
            f"{self._address.database}.{schema}.{table}",
        )

    def _schema_and_table(self) -> tuple[str, str]:
        if (target := self._target) is not None:
            return target.schema, target.table
        with contextlib.closing(self._address.connect()) as connection:
            found = find_table(connection, self._request.table, _refuse)
        if found is None:
            _refuse("it does not exist")
        return found.schema, found.name


def first_server(shown: str) -> str:
    """The first of several servers, given as ``HOST,HOST:PORT,PORT``; a socket is localhost."""
    hosts, _, ports = shown.rpartition(":")
    host, port = hosts.split(",")[0], ports.split(",")[0]
    return f"{'localhost' if host.startswith('/') or not host else host}:{port or 5432}"


def _refuse(why: str) -> NoReturn:
    raise SinkUnavailableError(f"PostgresSink: the table has no name in lineage now: {why}")
