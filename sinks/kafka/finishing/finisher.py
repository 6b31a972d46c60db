"""All questions to the brokers, over one connection."""

from __future__ import annotations

from sparkonce.sinks.kafka.finishing.cluster import ClusterQuestions
from sparkonce.sinks.kafka.finishing.partitions import PartitionQuestions
from sparkonce.sinks.kafka.finishing.transactions import TransactionQuestions


class Finisher(TransactionQuestions, PartitionQuestions, ClusterQuestions):
    """Describes, lists and ends transactions from outside their producers."""
