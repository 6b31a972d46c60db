"""`KafkaSink`: every Spark task is one Kafka transaction, and the driver ends them."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal, TypeAlias

from confluent_kafka import KafkaException
from kafka import errors
from kafka.admin import ACLOperation

from sparkonce.errors import ConfigurationError, PrepareRejectedError, SinkError, SparkOnceError
from sparkonce.finding import Finding
from sparkonce.model import BranchId, Committable, Owner
from sparkonce.parallel import at_once
from sparkonce.sinks.base import Transform, TwoPhaseCommitSink
from sparkonce.sinks.capabilities import (
    AbortsDecided,
    AbortsMany,
    CommitsMany,
    Diagnoses,
    FindsBranches,
    Votes,
)
from sparkonce.sinks.kafka.access import PREFIX, RefusedError, missing_right
from sparkonce.sinks.kafka.branch import MAX_MARGIN_S, TIMEOUT, KafkaBranch
from sparkonce.sinks.kafka.client import Patience
from sparkonce.sinks.kafka.diagnosis import diagnose
from sparkonce.sinks.kafka.finisher import Finisher
from sparkonce.sinks.kafka.layout import Format, Layout
from sparkonce.sinks.kafka.librdkafka import TransactionalProducer
from sparkonce.sinks.kafka.outcome import PATIENCE_S, Outcome, proof_kept_s
from sparkonce.sinks.kafka.producer import OpenTransaction, Reports
from sparkonce.sinks.kafka.rows import RowError, check_schema
from sparkonce.sinks.kafka.settings import KafkaSettings, check_topic_name
from sparkonce.sinks.verbs import commit_each, outcome_of_abort

if TYPE_CHECKING:
    import pyarrow as pa

    from sparkonce.sinks.kafka.avro_columns import AvroColumns

logger = logging.getLogger("sparkonce")

DEFAULT_TIMEOUT_MS: Final = 900_000
"""Kafka's default of transaction.max.timeout.ms, for where the broker does not say."""

MIN_TIMEOUT_MS: Final = 1_000

NEW_TOPIC_S: Final = 2.0
"""How long a topic may take from its creation until every broker knows it."""

_LONG_WRITE: Final = 0.5
"""The share of the transaction timeout from which on a batch's write is worth a warning."""

RIGHTS_NAME: Final = f"{PREFIX}validate"
"""A transactional id and a group that nobody uses, to ask for rights by."""

FRESH_S: Final = 30.0
"""Within this time nobody finds an open transaction and aborts it by hand."""

_MAX_TIMEOUT: Final = "transaction.max.timeout.ms"


@dataclass(frozen=True, slots=True)
class _Seen:
    """What the driver learned of the cluster; it travels to the executors with the sink."""

    cluster_id: str | None
    timeout_ms: int
    max_message_bytes: int | None
    brokers: int | None = None
    proof_kept_s: float | None = None


_TakenOver: TypeAlias = tuple[frozenset[str], float, float]
"""The branches that this process had from its tasks last, when the oldest began, and when it was by
the clock that nobody sets."""

_NOTHING_YET: Final[_TakenOver] = (frozenset(), 0.0, 0.0)


class KafkaSink(
    TwoPhaseCommitSink[OpenTransaction],
    Votes,
    CommitsMany,
    AbortsMany,
    AbortsDecided,
    FindsBranches,
    Diagnoses,
):
    """Writes rows to Kafka topics; visible to consumers with ``isolation.level=read_committed``.

    The rows have the columns that Spark's own Kafka sink knows: `value`, and optionally `key`,
    `topic`, `partition`, `headers` and `timestamp`. Keys land in the same partition as with Java.
    With `value_format` they have any columns, which together make the value; or a column `value` of
    structs beside Spark's other columns. A null `value` is a tombstone. See docs/kafka.md.

    A prepared transaction lives as long as its timeout allows: the broker's
    ``transaction.max.timeout.ms``, 15 minutes by default. A driver that is down for longer finds
    the branch gone, and it is written again from Spark's replay, if its rows are equal. With
    commit="after_checkpoint" Spark no longer replays it, and an operator settles it.

    Needs Kafka 3.0; from Kafka 4.0 on the broker itself keeps a zombie executor out. With ACLs:
    Read and Write on the topics, Write on transactional ids and Read on groups that start with
    ``sparkonce.``, and best also DescribeConfigs on the cluster and the topics; see docs/kafka.md.

    Args:
        topic: for rows that name none in a column `topic`.
        bootstrap_servers: ``host:port,host:port``.
        config: further librdkafka settings, for security among others: TLS with and without a
            client certificate, SASL with PLAIN, SCRAM or OAUTHBEARER (`oauth_cb`). The client on
            the driver gets them too; see docs/kafka.md.
        transaction_timeout_ms: after which the broker aborts what nobody commits; default: the
            longest that it allows.
        value_format: "json" writes what Spark's `to_json` makes of the value; "avro" writes Avro
            as the readers of a Confluent schema registry know it. Default: the column `value` is
            the value.
        value_schema: the text of the Avro schema; default: made from the columns' types.
        key: of whole rows: the column that is also the key, or a list of columns that make its
            record. Text and bytes are sent as they are, whole numbers and dates as their text.
        key_format: writes the key as `value_format` writes the value.
        schema_registry: settings in confluent-kafka's names: ``url``, ``basic.auth.user.info`` and
            the like, and ``auto.register.schemas`` (by default true) or ``use.latest.version``.
            Schemas are those of the subjects ``<topic>-value`` and ``<topic>-key``. Asked on the
            driver only.
        name: see `TwoPhaseCommitSink`.
        select: see `TwoPhaseCommitSink`.
        transform: see `TwoPhaseCommitSink`.
        writers: see `TwoPhaseCommitSink`; 1 puts a whole batch into one Kafka transaction.

    Raises:
        ConfigurationError: a setting is wrong, breaks exactly-once, or cannot reach the client
            that commits.
    """

    kind: ClassVar[str] = "kafka"

    def __init__(
        self,
        topic: str | None = None,
        *,
        bootstrap_servers: str,
        config: Mapping[str, object] = MappingProxyType({}),
        transaction_timeout_ms: int | None = None,
        value_format: Format | None = None,
        value_schema: str | None = None,
        key: str | Sequence[str] | None = None,
        key_format: Format | None = None,
        schema_registry: Mapping[str, object] | None = None,
        name: str | None = None,
        select: Sequence[str] | None = None,
        transform: Transform | None = None,
        writers: Literal[1] | None = None,
    ) -> None:
        super().__init__(name=name, select=select, transform=transform, writers=writers)
        if topic is not None:
            check_topic_name(topic)
        if transaction_timeout_ms is not None and transaction_timeout_ms < MIN_TIMEOUT_MS:
            raise ConfigurationError(
                f"transaction_timeout_ms={transaction_timeout_ms}: give {MIN_TIMEOUT_MS} or more"
            )
        self._topic = topic
        self._settings = KafkaSettings(bootstrap_servers, dict(config))
        self._timeout_ms = transaction_timeout_ms
        self._patience_s = PATIENCE_S
        self._seen: _Seen | None = None
        self._taken_over = _NOTHING_YET
        if key is not None or key_format is not None or value_format is not None:
            names = key if key is None or isinstance(key, str) else tuple(key)
            self.columns = Layout(names, key_format, value_format)
        self._avro = _avro_columns(
            [name for name, f in (("value", value_format), ("key", key_format)) if f == "avro"],
            topic,
            value_schema,
            schema_registry,
        )
        self._finisher = Finisher(self._settings)

    # -- on the executors --------------------------------------------------------------------------

    def beginTransaction(self, branch_id: BranchId) -> OpenTransaction:
        seen = self._seen or _Seen(None, self._timeout_ms or DEFAULT_TIMEOUT_MS, None)
        config = self._settings.for_producer(
            branch_id.name, seen.timeout_ms, seen.max_message_bytes, seen.brokers
        )
        return OpenTransaction(
            branch_id,
            config,
            topic=self._topic,
            cluster_id=seen.cluster_id,
            proof_kept_s=seen.proof_kept_s,
        )

    def write(self, handle: OpenTransaction, batch: pa.RecordBatch) -> None:
        if not batch.num_rows:
            return
        if self._avro is not None:
            try:
                batch = self._avro.encoded(batch)
            except RowError as error:
                raise PrepareRejectedError(
                    f"a row for topic {self._topic!r} is not as its Avro schema wants it: {error}",
                    handle.branch_id,
                ) from error
        handle.write(batch)

    def preCommit(self, handle: OpenTransaction) -> Committable:
        return handle.prepare().committable(handle.branch_id)

    def idle(self, handle: OpenTransaction) -> None:
        handle.idle()

    def discard(self, handle: OpenTransaction) -> None:
        handle.abandon()

    # -- in any process ----------------------------------------------------------------------------

    def commit(self, committable: Committable) -> None:
        self._outcome.commit(committable)

    def commit_many(self, committables: Sequence[Committable]) -> Sequence[SparkOnceError | None]:
        proven = self._outcome.commit_together(committables)
        left = [c for c in committables if c.branch_id.name not in proven]
        errors_left = iter(commit_each(self, left, self._outcome.commit))
        return [None if c.branch_id.name in proven else next(errors_left) for c in committables]

    def abort(self, branch: BranchId | Committable) -> None:
        self._outcome.abort(branch)

    def abort_many(self, found: Sequence[Committable]) -> Sequence[Exception | None]:
        return at_once(partial(outcome_of_abort, self, abort=self._outcome.abort), found)

    def abort_decided(self, committable: Committable) -> None:
        self._outcome.abort_decided(committable)

    def vote(
        self, branch_id: BranchId, committables: Sequence[Committable]
    ) -> Sequence[Committable]:
        """Say so when the batch's transactions have come near to their timeout.

        Raises:
            PrepareRejectedError: a task's clock is ahead, so that nobody knows when the brokers
                abort its transaction.
        """
        branches = sorted(map(KafkaBranch.of, committables), key=lambda b: b.began_at)
        if branches:
            oldest, newest = branches[0], branches[-1]
            if (ahead_s := newest.began_at - time.time()) > MAX_MARGIN_S:
                raise PrepareRejectedError(
                    f"{self.where}: the transaction {newest.transactional_id} will begin in "
                    f"{ahead_s:.0f} s by the driver's clock: the clocks of executors and driver "
                    "are apart. Keep them alike to a minute (NTP)",
                    branch_id,
                )
            took_s, timeout_s = time.time() - oldest.began_at, oldest.timeout_ms / 1000
            if took_s > timeout_s * _LONG_WRITE:
                logger.warning(
                    "%s: writing batch %s took %.0f s of the %.0f s after which the brokers abort "
                    "its transactions: make the batches smaller, or %s longer",
                    self.where,
                    branch_id.batch_id,
                    took_s,
                    timeout_s,
                    TIMEOUT,
                )
            names = frozenset(branch.transactional_id for branch in branches)
            self._taken_over = names, oldest.began_at, time.monotonic()
        return committables

    def find_branches(self, owner: Owner) -> Iterable[Committable]:
        """List the owner's open transactions; those that are already ending are left out.

        Raises:
            SinkError: some could not be listed; after those that could.
        """
        patience, failures = Patience(self._patience_s), list[errors.KafkaError]()
        names: set[str] = set()
        try:
            patience(lambda: self._list_into(names, owner))
        except errors.KafkaError as error:
            failures.append(error)
        for name in sorted(names):
            try:
                found = patience(partial(self._find, name, owner))
            except errors.KafkaError as error:
                failures.append(error)
                continue
            if found is not None:
                yield found
        if failures:
            self._finisher.close()
            raise SinkError(
                f"{self.where}: open transactions cannot be listed, or not all of them: "
                f"{failures[0]}"
            ) from failures[0]

    def _list_into(self, names: set[str], owner: Owner) -> None:
        """Ask every broker for the open transactions that it coordinates, also if one fails.

        Asked again, the cluster may have fewer brokers, and others coordinate what was theirs.
        """
        failure: errors.KafkaError | None = None
        for node in self._finisher.nodes():
            try:
                names.update(self._finisher.ongoing(owner.prefix, node))
            except errors.KafkaError as error:
                failure = error
        if failure is not None:
            raise failure

    def _find(self, transactional_id: str, owner: Owner) -> Committable | None:
        branch_id = BranchId.from_name(transactional_id)
        if branch_id is None or branch_id.owner != owner:
            return None
        state = self._finisher.describe([transactional_id]).get(transactional_id)
        if state is None or state.state != "Ongoing":
            return None
        return state.branch(transactional_id, self._finisher.cluster_id()).committable(branch_id)

    # -- on the driver -----------------------------------------------------------------------------

    def validate(self, schema: pa.Schema) -> None:
        check_schema(schema if self._avro is None else self._avro.sent(schema), self._topic)
        if self._topic is not None and "topic" in schema.names:
            logger.warning(
                "%s: rows go where their column 'topic' says, not to %r (with Spark's own sink the "
                "option topic goes before the column): leave the column out with select= unless "
                "that is meant",
                *(self.where, self._topic),
            )
        try:
            self._seen = Patience(self._patience_s)(self._look)
            self._check_producer(self._seen)
        except RefusedError as error:
            self._finisher.close()
            raise ConfigurationError(f"{self.where}: {error}") from error
        except errors.AuthorizationError as error:
            self._finisher.close()
            raise ConfigurationError(
                f"{self.where}: {missing_right(error) or error} is not allowed, and is needed; "
                "add the ACL (see docs/kafka.md)"
            ) from error
        except errors.KafkaError as error:
            self._finisher.close()
            raise ConfigurationError(
                f"bootstrap_servers={self._settings.bootstrap_servers!r}: no answer within "
                f"{self._patience_s:.0f} s ({type(error).__name__}: {error}). Is the address "
                "right, are the brokers up, and do the security settings in config= fit them?"
            ) from error
        if self._avro is not None:
            self._avro.settle(schema)  # last: what the registry has once it keeps

    def diagnose(self) -> Iterable[Finding]:
        return diagnose(self._finisher, self._topic, self.where, self._look, self._timeout_ms)

    def _look(self) -> _Seen:
        unsupported = self._finisher.unsupported()
        if unsupported is not None:
            raise ConfigurationError(
                f"{self.where}: the brokers do not know {unsupported}; Kafka 3.0 or newer, or a "
                "server that is compatible with it, is needed"
            )
        if self._topic is not None:
            self._check_topic(self._topic)
        self._finisher.try_rights(RIGHTS_NAME)
        return _Seen(
            self._finisher.cluster_id(),
            self._resolve_timeout(),
            self._max_message_bytes(),
            len(self._finisher.nodes()),
            proof_kept_s(self._finisher),
        )

    def _check_topic(self, topic: str) -> None:
        found = self._finisher.topic(topic)
        until = time.monotonic() + min(self._patience_s, NEW_TOPIC_S)
        while found.error == errors.UnknownTopicOrPartitionError.errno and (
            time.monotonic() < until
        ):
            time.sleep(0.05)
            found = self._finisher.topic(topic)
        if found.error == errors.UnknownTopicOrPartitionError.errno:
            raise ConfigurationError(
                f"{self.where}: there is no topic {topic!r}. Create it: kafka-topics.sh "
                f"--bootstrap-server {self._settings.bootstrap_servers} --create --topic {topic} "
                "--partitions 6"
            )
        if found.error:
            raise errors.for_code(found.error)
        needed = ACLOperation.READ, ACLOperation.WRITE  # either implies Describe
        allowed = frozenset(needed) if found.operations is None else found.operations
        missing = [operation.name.title() for operation in needed if operation not in allowed]
        if missing:
            raise ConfigurationError(
                f"{self.where}: {' and '.join(missing)} on the topic is not allowed, and is needed "
                "(Read for the marker that proves a commit); add the ACL (see docs/kafka.md)"
            )

    def _resolve_timeout(self) -> int:
        values = self._finisher.broker_config([_MAX_TIMEOUT]).get(_MAX_TIMEOUT)
        allowed = min(values) if values else None
        if self._timeout_ms is None:
            return DEFAULT_TIMEOUT_MS if allowed is None else allowed
        if allowed is not None and self._timeout_ms > allowed:
            raise ConfigurationError(
                f"transaction_timeout_ms={self._timeout_ms} is longer than the brokers allow "
                f"({_MAX_TIMEOUT}={allowed}); make it shorter, or theirs longer"
            )
        return self._timeout_ms

    def _max_message_bytes(self) -> int | None:
        if self._topic is None:
            return None
        limit = self._finisher.topic_config(self._topic, ["max.message.bytes"])
        return int(limit["max.message.bytes"]) if limit else None

    def _check_producer(self, seen: _Seen) -> None:
        """Let librdkafka connect too: it has its own ideas of settings, of TLS above all."""
        config = self._settings.for_producer(
            RIGHTS_NAME, seen.timeout_ms, seen.max_message_bytes, seen.brokers
        )
        reports = Reports()
        try:
            producer = TransactionalProducer({**config, "log_level": 0}, reports)
        except KafkaException as error:
            said = self._settings.without_secrets(error.args[0].str())
            raise ConfigurationError(
                f"config: librdkafka refuses it: {said}"
            ) from None  # the cause could show a secret
        try:
            producer.look(self._topic, self._patience_s)
        except KafkaException as error:
            producer.poll(0)
            said = reports.last_error or error.args[0].str()
            raise ConfigurationError(
                f"{self.where}: the client that finishes transactions can connect, and "
                f"librdkafka, which writes, cannot: {self._settings.without_secrets(said)}"
            ) from None

    def close(self) -> None:
        self._finisher.close()

    @property
    def target(self) -> str:
        return "kafka " + ("topics of its rows" if self._topic is None else f"topic {self._topic}")

    @property
    def where(self) -> str:
        return f"{self.target} at {self._settings.bootstrap_servers}"

    @property
    def _outcome(self) -> Outcome:
        """Begins its patience now; branches that are given to the same one share that."""
        names, began_at, taken_at = self._taken_over
        # One clock stands still while the machine does, the other one may be wrong.
        is_fresh = abs(time.time() - began_at) < FRESH_S and time.monotonic() - taken_at < FRESH_S
        fresh = names if is_fresh else frozenset[str]()
        return Outcome(self._finisher, self.where, self._patience_s, fresh)

    # Connections and locks stay in their process; settings and what `validate` saw travel.

    def __getstate__(self) -> dict[str, Any]:
        state = {**self.__dict__, "_taken_over": _NOTHING_YET}
        del state["_finisher"]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._finisher = Finisher(self._settings)


def _avro_columns(
    columns: Sequence[str],
    topic: str | None,
    value_schema: str | None,
    schema_registry: Mapping[str, object] | None,
) -> AvroColumns | None:
    if value_schema is not None and "value" not in columns:
        raise ConfigurationError("value_schema= is for value_format='avro'")
    if columns:
        try:
            from sparkonce.sinks.kafka.avro_columns import AvroColumns  # noqa: PLC0415 - an extra
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                f"rows in Avro need {error.name!r}: pip install 'sparkonce[avro]'", name=error.name
            ) from error
        return AvroColumns(columns, topic, value_schema, schema_registry)
    if schema_registry is not None:
        raise ConfigurationError("schema_registry= is for Avro: set value_format='avro'")
    return None
