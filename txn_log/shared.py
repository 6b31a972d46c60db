"""A log in a sink's database: the sink can commit the log's write in its own transaction.

    decider: log.why_apart(database of the sink) is None
             log.shared_write(record) ──► SharedWrite(record, statement)
             sink: merge; statement; COMMIT                    one transaction, decided and complete

Only the log and the sinks of one vendor know the types of the database and the statement; see
`sparkonce.clients`. All other code only passes them on.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from sparkonce.txn_log.record import TransactionRecord


@dataclass(frozen=True, slots=True)
class SharedWrite:
    """A write of the log for a sink's transaction.

    Attributes:
        record: the complete record, as the write stores it.
        statement: the sink runs it. It fails, and with it the sink's transaction, if another
            driver has written the pipeline's log since.
    """

    record: TransactionRecord
    statement: object


class SharedTransactions(ABC):
    """A log whose writes a sink's transaction can include."""

    @abstractmethod
    def why_apart(self, database: object) -> str | None:
        """Why a transaction in this database cannot include the log's writes.

        Args:
            database: of a sink, as the sink's role sees it.

        Returns:
            The reason; None if it can, and `shared_write` may be used.
        """

    @abstractmethod
    def shared_write(self, record: TransactionRecord) -> SharedWrite:
        """The write that decides and completes a new record at once.

        Raises:
            ProtocolError: the batch is known already, or a batch was skipped.
        """
