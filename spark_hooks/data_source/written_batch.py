"""A batch whose tasks have run, as the protocol sees it: all that is left is what they returned."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sparkonce.errors import PrepareRejectedError
from sparkonce.protocol.pipeline import targets_of
from sparkonce.protocol.rewriting import Rewrite
from sparkonce.sinks.base import AnySink
from sparkonce.spark_hooks.data_source.tasks import Ticket
from sparkonce.spark_hooks.partition_writer import PartitionSummary, shares_of
from sparkonce.txn_log.record import Fingerprint, Incarnation, Share


@dataclass(frozen=True)
class WrittenBatch:
    """See `sparkonce.protocol.pipeline.Batch`."""

    batch_id: int
    offsets: tuple[str, ...]
    sinks: Sequence[AnySink] = ()
    ticket: Ticket | None = None
    summaries: Sequence[PartitionSummary] = ()

    def write(
        self, incarnation: Incarnation, rewrite: Rewrite | None = None
    ) -> Mapping[str, Share]:
        """What the tasks have written, which must be what is asked for now.

        Raises:
            PrepareRejectedError: since the batch was planned, branches were lost, or found again.
        """
        del incarnation
        if self.ticket is None or rewrite != self.ticket.rewrite:
            planned = "everything" if self.ticket is None else self.ticket.rewrite or "everything"
            raise PrepareRejectedError(
                f"batch {self.batch_id}: {rewrite or 'everything'} has to be written, and its "
                f"tasks were asked for {planned}: start the query again, which makes a new plan"
            )
        sinks = [s for s in self.sinks if rewrite is None or s.name in rewrite.partitions]
        return shares_of(sinks, self.summaries)

    def drain(self) -> Mapping[str, Fingerprint]:
        """Nothing: the tasks have read the batch to its end."""
        return {}


def check_targets(ticket: Ticket, sinks: Sequence[AnySink]) -> None:
    """Refuse a batch whose tasks had other sinks: a sink would be decided without its rows.

    Raises:
        PrepareRejectedError: the process that planned the batch has imported another version of
            the pipeline's module.
    """
    if targets_of(sinks) != ticket.targets:
        raise PrepareRejectedError(
            f"batch {ticket.batch_id} was written into {dict(ticket.targets)}, and the process "
            f"that commits it has the sinks {targets_of(sinks)}: the pipeline's module was changed "
            "meanwhile. Start the query again, which makes a new plan"
        )
