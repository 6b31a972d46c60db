"""What `sparkonce doctor` reports about a Kafka cluster: what would hurt a pipeline later."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Final

from kafka import errors

from sparkonce.errors import ConfigurationError
from sparkonce.finding import Finding, Level
from sparkonce.sinks.kafka.connecting.connection import Patience
from sparkonce.sinks.kafka.connecting.refused import RefusedError, in_words, missing_right
from sparkonce.sinks.kafka.finishing.cluster import TopicInfo
from sparkonce.sinks.kafka.finishing.finisher import Finisher
from sparkonce.words import counted

PATIENCE_S: Final = 10.0

_LONG_TIMEOUT_S: Final = 3600
"""A driver may be down for a whole night, but most alarms are handled within an hour."""

_TIMEOUT: Final = "transaction.max.timeout.ms"
_OWN_TIMEOUT: Final = "transaction_timeout_s"
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
    """Run the sink's own checks, `look`, and examine the settings of the cluster.

    `timeout_ms` is the sink's own transaction timeout, if it has one; `look` checks that the
    brokers allow it.
    """
    patience = Patience(PATIENCE_S)
    failure = _failure(patience, look, where)
    if failure is not None:
        yield failure
        return
    yield Finding(Level.OK, f"{where}: reachable, and every right that the sink needs is allowed")
    names = (_TIMEOUT, _IDS_KEPT, _STATE_COPIES, _STATE_ISR)
    found = patience(lambda: finisher.broker_config(names))
    config = {name: min(values) for name, values in found.items()}
    if config or timeout_ms is not None:
        yield _timeout(timeout_ms, config.get(_TIMEOUT, 0))
    yield from _replicas(config)
    if topic is not None:
        seen = patience(lambda: finisher.topic(topic))
        isr = patience(lambda: finisher.topic_config(topic, [_TOPIC_ISR])).get(_TOPIC_ISR)
        yield _topic(topic, seen, None if isr is None else int(isr))
        if seen.down:
            down = ", ".join(map(str, sorted(seen.down)))
            yield Finding(
                Level.WARNING, f"brokers that hold topic {topic} are down: {down}", "start them"
            )
            return
    if len(patience(finisher.nodes)) == 1:
        yield Finding(
            Level.WARNING,
            "the cluster has one broker: while it is down no batch is written or committed",
            "run three brokers in a cluster that matters",
        )


def _failure(patience: Patience, look: Callable[[], object], where: str) -> Finding | None:
    try:
        patience(look)
    except (ConfigurationError, RefusedError) as error:
        return Finding(Level.ERROR, str(error))
    except errors.KafkaError as error:
        right = missing_right(error)
        if right is not None:
            return Finding(
                Level.ERROR,
                f"{right} is not allowed",
                "add the ACL (see docs/howto/kafka-security.md)",
            )
        return Finding(
            Level.ERROR,
            f"{where}: no response ({in_words(error)})",
            "check bootstrap_servers=, the brokers, and the security settings in config=",
        )
    return None


def _timeout(own_ms: int | None, allowed_ms: int) -> Finding:
    timeout_s = (allowed_ms if own_ms is None else own_ms) / 1000
    if own_ms is None:
        setting, enough = f"{_TIMEOUT}={allowed_ms}", f"{_TIMEOUT}={_LONG_TIMEOUT_S * 1000}"
        where = "the brokers"
    else:
        setting, enough = f"{_OWN_TIMEOUT}={timeout_s:g}", f"{_OWN_TIMEOUT}={_LONG_TIMEOUT_S}"
        where = f"the sink; the brokers must allow that with {_TIMEOUT}"
    if timeout_s >= _LONG_TIMEOUT_S:
        return Finding(Level.OK, setting)
    return Finding(
        Level.WARNING,
        f"{setting}: the brokers abort a prepared transaction {_span(timeout_s)} after it "
        "began; a driver that is down for longer must rewrite it",
        f'set {enough} or more on {where}; commit="after_checkpoint" depends on it',
    )


def _span(seconds: float) -> str:
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes > 1 else f"{seconds:g} s"


def _replicas(config: Mapping[str, int]) -> Iterator[Finding]:
    if not config:
        yield Finding(
            Level.WARNING,
            "the sink may not read the brokers' settings, so their timeouts and replicas are not "
            "known",
            "allow DescribeConfigs on the cluster",
        )
        return
    if 0 < config.get(_STATE_ISR, 0) < 2:  # noqa: PLR2004 - a single copy is no replica
        copies = config.get(_STATE_COPIES, "?")
        yield Finding(
            Level.WARNING,
            f"{_STATE_ISR}={config[_STATE_ISR]}, {_STATE_COPIES}={copies}: if a broker is lost, "
            "prepared transactions are lost with it",
            f"use three replicas of __transaction_state, and {_STATE_ISR}=2",
        )


def _topic(topic: str, seen: TopicInfo, isr: int | None) -> Finding:
    if isr is None:
        return Finding(
            Level.WARNING,
            f"the sink may not read the settings of topic {topic}",
            "allow DescribeConfigs on the topic",
        )
    if seen.in_sync < isr:
        return Finding(
            Level.ERROR,
            f"a partition of topic {topic} has {counted(seen.in_sync, 'in-sync replica')}, and "
            f"{_TOPIC_ISR}={isr}: nothing is written to it",
            "start the brokers that are down, or wait until they have caught up",
        )
    if isr < 2:  # noqa: PLR2004 - a single copy is no replica
        return Finding(
            Level.WARNING,
            f"topic {topic} has {_TOPIC_ISR}={isr}: an acknowledged row may exist on one broker "
            "only",
            f"use three replicas (kafka-reassign-partitions.sh), and only then {_TOPIC_ISR}=2: "
            "with fewer replicas nothing could be written or committed any more",
        )
    return Finding(Level.OK, f"topic {topic}: {_TOPIC_ISR}={isr}")
