"""What of a Kafka cluster bites a pipeline in a bad hour."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Final

from kafka import errors

from sparkonce.errors import ConfigurationError
from sparkonce.finding import Finding, Level
from sparkonce.sinks.kafka.access import RefusedError, missing_right
from sparkonce.sinks.kafka.client import Patience
from sparkonce.sinks.kafka.finisher import Finisher

PATIENCE_S: Final = 10.0

_LONG_TIMEOUT_MS: Final = 3_600_000
"""A night without a driver is longer, but an hour is what most alarms need."""
_TIMEOUT: Final = "transaction.max.timeout.ms"
_OWN_TIMEOUT: Final = "transaction_timeout_ms"
_IDS_KEPT: Final = "transactional.id.expiration.ms"
_STATE_COPIES: Final = "transaction.state.log.replication.factor"
_STATE_ISR: Final = "transaction.state.log.min.isr"
_TOPIC_ISR: Final = "min.insync.replicas"


def diagnose(
    finisher: Finisher,
    topic: str | None,
    where: str,
    look: Callable[[], object],
    timeout_ms: int | None,
) -> Iterator[Finding]:
    """Ask the cluster.

    Args:
        finisher: asks the brokers.
        topic: where rows go that name none.
        where: the sink's target, for messages.
        look: what the sink checks before a query's first batch.
        timeout_ms: of the sink's transactions, where it has one of its own; `look` has seen that
            the brokers allow it.
    """
    patience = Patience(PATIENCE_S)
    try:
        patience(look)
    except (ConfigurationError, RefusedError) as error:
        yield Finding(Level.ERROR, str(error))
        return
    except errors.KafkaError as error:
        right = missing_right(error)
        if right is None:
            yield Finding(
                Level.ERROR,
                f"{where}: no answer ({type(error).__name__}: {error})",
                "check bootstrap_servers=, the brokers, and the security settings in config=",
            )
        else:
            yield Finding(Level.ERROR, f"{right} is not allowed", "add the ACL (see docs/kafka.md)")
        return
    yield Finding(Level.OK, f"{where}: reachable, and every right that is needed is there")
    names = (_TIMEOUT, _IDS_KEPT, _STATE_COPIES, _STATE_ISR)
    found = patience(lambda: finisher.broker_config(names))
    config = {name: min(values) for name, values in found.items()}
    if config or timeout_ms is not None:
        yield _timeout(timeout_ms, config.get(_TIMEOUT, 0))
    yield from _replicas(config)
    brokers = len(patience(finisher.nodes))
    if brokers == 1:
        yield Finding(
            Level.WARNING,
            "the cluster has one broker: while it is down no batch is written or committed",
            "give a cluster that matters three brokers",
        )
    if topic is not None:
        yield from _topic(topic, patience(lambda: finisher.topic_config(topic, [_TOPIC_ISR])))


def _timeout(own_ms: int | None, allowed_ms: int) -> Finding:
    name, timeout_ms = (_TIMEOUT, allowed_ms) if own_ms is None else (_OWN_TIMEOUT, own_ms)
    if timeout_ms >= _LONG_TIMEOUT_MS:
        return Finding(Level.OK, f"{name}={timeout_ms}")
    where = "the brokers" if own_ms is None else f"the sink, which {_TIMEOUT} has to allow"
    return Finding(
        Level.WARNING,
        f"{name}={timeout_ms}: the brokers abort what is prepared {timeout_ms / 60_000:.0f}"
        " min after it began; a driver that is down for longer has to write it again",
        f"set {name}={_LONG_TIMEOUT_MS} or more on {where}; "
        'commit="after_checkpoint" cannot do without',
    )


def _replicas(config: Mapping[str, int]) -> Iterator[Finding]:
    if not config:
        yield Finding(
            Level.WARNING,
            "the brokers' settings may not be read, so timeouts and replicas are not known",
            "allow DescribeConfigs on the cluster",
        )
        return
    if 0 < config.get(_STATE_ISR, 0) < 2:  # noqa: PLR2004 - one copy is none
        copies = config.get(_STATE_COPIES, "?")
        yield Finding(
            Level.WARNING,
            f"{_STATE_ISR}={config[_STATE_ISR]}, {_STATE_COPIES}={copies}: a broker that is lost "
            "takes prepared transactions with it",
            f"three replicas of __transaction_state, and {_STATE_ISR}=2",
        )


def _topic(topic: str, config: Mapping[str, str]) -> Iterator[Finding]:
    if not config:
        yield Finding(
            Level.WARNING,
            f"the settings of topic {topic} may not be read",
            "allow DescribeConfigs on the topic",
        )
    elif int(config[_TOPIC_ISR]) < 2:  # noqa: PLR2004 - one copy is none
        yield Finding(
            Level.WARNING,
            f"topic {topic} has {_TOPIC_ISR}={config[_TOPIC_ISR]}: an acknowledged row may be on "
            "one broker only",
            f"give it three replicas (kafka-reassign-partitions.sh), and only then {_TOPIC_ISR}=2: "
            "with fewer, nothing could be written or committed any more",
        )
    else:
        yield Finding(Level.OK, f"topic {topic}: {_TOPIC_ISR}={config[_TOPIC_ISR]}")
