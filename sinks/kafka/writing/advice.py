"""What to do about an error that librdkafka reports for a row or a transaction."""

from __future__ import annotations

from typing import Final

from confluent_kafka import KafkaError

from sparkonce.sinks.kafka.connecting.refused import (
    GROUPS_RIGHT,
    TOPIC_RIGHTS,
    TRANSACTIONS_RIGHT,
)

_TOO_FAR: Final = (
    "further away than its message.timestamp.before.max.ms or message.timestamp.after.max.ms. A "
    "row without a timestamp has the time of the executor's clock: is it right?"
)
_ADVICE: Final = {
    KafkaError.MSG_SIZE_TOO_LARGE: (
        ". Raise max.message.bytes of the topic and config={'message.max.bytes': …} of the sink; "
        "or, where rows fit and batches of them do not, set config={'batch.size': …} below it"
    ),
    KafkaError.INVALID_RECORD: (  # also for timestamps, if several are wrong
        ". A topic with cleanup.policy=compact accepts no row without a key, and no topic accepts "
        f"a timestamp that is {_TOO_FAR}"
    ),
    KafkaError.INVALID_TIMESTAMP: f". A row's timestamp is {_TOO_FAR}",
    KafkaError.OFFSET_METADATA_TOO_LARGE: (
        ". The marker, which proves a commit, does not fit: raise offset.metadata.max.bytes of the "
        "brokers (4096 by default)"
    ),
    KafkaError.UNKNOWN_TOPIC_OR_PART: ". Create the topic",
    KafkaError._UNKNOWN_TOPIC: ". Create the topic",  # noqa: SLF001 - librdkafka's name
    KafkaError._UNKNOWN_PARTITION: ". The topic has fewer partitions",  # noqa: SLF001
    KafkaError.INVALID_TRANSACTION_TIMEOUT: (
        ". Set transaction_timeout_s= to the broker's transaction.max.timeout.ms or less"
    ),
    KafkaError._MSG_TIMED_OUT: (  # noqa: SLF001 - librdkafka's name
        ". It waited for the partition's leader, or for the number of replicas in the topic's "
        "min.insync.replicas; are the brokers up?"
    ),
    KafkaError.COORDINATOR_NOT_AVAILABLE: (
        ". It waited for the broker that coordinates transactions, or for the number of replicas "
        "in min.insync.replicas of __transaction_state; are the brokers up?"
    ),
    KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED: f". Allow {TRANSACTIONS_RIGHT}",
    KafkaError.GROUP_AUTHORIZATION_FAILED: f". Allow {GROUPS_RIGHT}",
    KafkaError.TOPIC_AUTHORIZATION_FAILED: f". Allow {TOPIC_RIGHTS}",
}


def advice(error: KafkaError) -> str:
    """The next step, to append to the error's text; empty if there is none."""
    return _ADVICE.get(error.code(), "")
