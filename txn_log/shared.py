"""A log in a database: a sink there can commit the log's write in its own transaction.

    decider: log.why_apart(database of the sink) is None
             log.shared_write(record) ──► SharedWrite(record, statement)
             sink: merge; statement; COMMIT                    one transaction, decided and complete

What a database and a statement are, only the log and the sinks of one vendor know; see
`sparkonce.clients`. For everybody else they are values to pass on.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from sparkonce.txn_log.record import TransactionRecord


@dataclass(frozen=True, slots=True)
class SharedWrite:
    """A write of the log for a sink's transaction.

    Attributes:
        record: as the write leaves it, complete.
        statement: for the sink to run. It fails, and with it the sink's transaction, if another
            driver has written the pipeline's log since.
    """

    record: TransactionRecord
    statement: object


class SharedTransactions(ABC):
    """The ability of a log whose writes a sink's transaction can hold."""

    @abstractmethod
    def why_apart(self, database: object) -> str | None:
        """Why a transaction in this database cannot hold the log's writes.

        Args:
            database: of a sink, as the sink's role sees it.

        Returns:
            None where it can, and `shared_write` may be used.
        """

    @abstractmethod
    def shared_write(self, record: TransactionRecord) -> SharedWrite:
        """The write that decides and completes a new record at once.

        Raises:
            ProtocolError: the batch is known, or a batch was left out.
        """
