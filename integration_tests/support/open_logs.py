"""How the tests of the logs open them; another process imports this, and none of the tests."""

from __future__ import annotations

from sparkonce.txn_log import TransactionLog
from sparkonce.txn_log.document import DocumentLog
from sparkonce.txn_log.object_store import ObjectPlace
from sparkonce.txn_log.postgres import PostgresLog


def open_postgres(address: str) -> TransactionLog:
    return PostgresLog(address, statement_timeout_s=10.0)


def open_objects(address: str) -> TransactionLog:
    return DocumentLog(ObjectPlace(address))  # without the race, which takes a second
