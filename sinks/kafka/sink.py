"""`KafkaSink`: every Spark task is one Kafka transaction, and the driver ends them.

executor  beginTransaction ─► write* ─► preCommit     (`writing`)
driver    validate                                    (`validation`)
any       commit | abort | find_branches              (`finishing`)
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal

from sparkonce.datasets import Dataset
from sparkonce.errors import ConfigurationError, PrepareRejectedError, SparkOnceError
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
    NamesDatasets,
    Votes,
)
from sparkonce.sinks.kafka.branch import KafkaBranch
from sparkonce.sinks.kafka.connecting.settings import KafkaSettings
from sparkonce.sinks.kafka.diagnosis import diagnose
from sparkonce.sinks.kafka.finishing import search
from sparkonce.sinks.kafka.finishing.finisher import Finisher
from sparkonce.sinks.kafka.finishing.fresh import FreshBranches, check_clocks
from sparkonce.sinks.kafka.finishing.outcome import PATIENCE_S, Outcome
from sparkonce.sinks.kafka.rows.conventions import RowError, check_schema, check_topic_name
from sparkonce.sinks.kafka.rows.layout import KeyFormat, Layout, ValueFormat
from sparkonce.sinks.kafka.validation import DEFAULT_TIMEOUT_MS, Seen, Validation
from sparkonce.sinks.kafka.writing.producer import OpenTransaction
from sparkonce.sinks.verbs import commit_each, outcome_of_abort

if TYPE_CHECKING:
    import pyarrow as pa

    from sparkonce.sinks.kafka.rows.avro_columns import AvroColumns

logger = logging.getLogger("sparkonce")

MIN_TIMEOUT_S: Final = 1.0


class KafkaSink(
    TwoPhaseCommitSink[OpenTransaction],
    Votes,
    CommitsMany,
    AbortsMany,
    AbortsDecided,
    FindsBranches,
    Diagnoses,
    NamesDatasets,
):
    """Writes rows to Kafka topics; visible to consumers with ``isolation.level=read_committed``.

    The rows have the columns of Spark's own Kafka sink: `value`, and optionally `key`, `topic`,
    `partition`, `headers` and `timestamp`. Keys land in the same partition as with Java. With
    `value_format` the rows may have any columns, which together make the value, or a column `value`
    of structs alongside Spark's other columns. A null `value` is a tombstone. See
    docs/howto/kafka.md and docs/howto/kafka-typed-rows.md.

    A prepared transaction lives for its timeout: by default the broker's
    ``transaction.max.timeout.ms``, 15 minutes. If the driver is down for longer, the branch is
    lost. It is rewritten from Spark's replay if its rows are equal. With commit="after_checkpoint"
    Spark does not replay it, and an operator settles it.

    Needs Kafka 3.0; from Kafka 4.0 on the broker itself fences a zombie executor. With ACLs the
    sink needs Read and Write on the topics, Write on transactional ids and Read on groups that
    start with ``sparkonce.``, and preferably DescribeConfigs on the cluster and the topics.

    Args:
        topic: where rows go that name no topic in a column `topic`; None if every row names one.
        bootstrap_servers: ``host:port,host:port``.
        config: further settings in librdkafka's names, for example for security: TLS with or
            without a client certificate, SASL with PLAIN, SCRAM or OAUTHBEARER (`oauth_cb`). The
            client on the driver gets the security settings too.
        transaction_timeout_s: the broker aborts a transaction that nobody commits within this
            number of seconds, at least 1. Default: the longest time that the brokers allow.
        value_format: "json" writes what Spark's `to_json` makes of the value; "avro" writes Avro
            for the readers of a Confluent schema registry. Default: the column `value` is written
            unchanged.
        value_schema: the text of the Avro schema; default: derived from the columns' types.
        key: for rows without a column `value`: the name of the column that makes the key, or a list
            of names.
        key_format: how the key is encoded. "text", the default with `key`, sends one column: text
            and bytes unchanged; integers, booleans and dates as their text. "json" and "avro" write
            a record of the columns in `key`, or the value of a column `key`.
        schema_registry: settings in confluent-kafka's names: ``url``, ``basic.auth.user.info`` and
            others, and ``auto.register.schemas`` (by default true) or ``use.latest.version``. The
            schemas belong to the subjects ``<topic>-value`` and ``<topic>-key``. Only the driver
            contacts the registry.
        name: see `TwoPhaseCommitSink`.
        select: see `TwoPhaseCommitSink`.
        transform: see `TwoPhaseCommitSink`.
        writers: see `TwoPhaseCommitSink`; 1 puts a whole batch into one Kafka transaction.

    Raises:
        ConfigurationError: a setting is wrong, breaks exactly-once, or is unknown to the client
            that commits.
        ModuleNotFoundError: a format is "avro", and sparkonce[avro] is not installed.
    """

    kind: ClassVar[str] = "kafka"
    why_kept: ClassVar[str] = (
        "cannot take records back: a topic drops only its oldest ones, and readers may have these"
    )

    def __init__(
        self,
        topic: str | None = None,
        *,
        bootstrap_servers: str,
        config: Mapping[str, object] = MappingProxyType({}),
        transaction_timeout_s: float | None = None,
        value_format: ValueFormat | None = None,
        value_schema: str | None = None,
        key: str | Sequence[str] | None = None,
        key_format: KeyFormat | None = None,
        schema_registry: Mapping[str, object] | None = None,
        name: str | None = None,
        select: Sequence[str] | None = None,
        transform: Transform | None = None,
        writers: Literal[1] | None = None,
    ) -> None:
        super().__init__(name=name, select=select, transform=transform, writers=writers)
        if topic is not None:
            check_topic_name(topic)
        self._topic = topic
        self._settings = KafkaSettings(bootstrap_servers, dict(config))
        self._timeout_ms = _timeout_ms(transaction_timeout_s)
        self._patience_s = PATIENCE_S
        self._seen: Seen | None = None
        if key is not None or key_format is not None or value_format is not None:
            names = (key,) if isinstance(key, str) else key
            self.columns = Layout(None if names is None else tuple(names), key_format, value_format)
        formats = {"value": value_format, "key": key_format}
        avro = [column for column, chosen in formats.items() if chosen == "avro"]
        self._avro = _avro_columns(avro, topic, value_schema, schema_registry)
        self._finisher = Finisher(self._settings)
        self._fresh = FreshBranches()

    # -- on the executors --------------------------------------------------------------------------

    def beginTransaction(self, branch_id: BranchId) -> OpenTransaction:
        seen = self._seen or Seen(None, self._timeout_ms or DEFAULT_TIMEOUT_MS, None)
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
                    f"a row for topic {self._topic!r} does not fit its Avro schema: {error}",
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

    def find_branches(self, owner: Owner) -> Iterable[Committable]:
        """List the owner's open transactions; those that are already ending are omitted.

        Raises:
            SinkError: some could not be listed. It is raised after all others were listed.
        """
        return search.find_branches(self._finisher, owner, self.where, self._patience_s)

    # -- on the driver -----------------------------------------------------------------------------

    def vote(
        self, branch_id: BranchId, committables: Sequence[Committable]
    ) -> Sequence[Committable]:
        """Warn when the batch's transactions have come near to their timeout.

        Raises:
            PrepareRejectedError: a task's clock is ahead, so that it is unknown when the brokers
                abort its transaction.
        """
        branches = [KafkaBranch.of(committable) for committable in committables]
        check_clocks(branches, self.where, branch_id)
        self._fresh.receive(branches)
        return committables

    def validate(self, schema: pa.Schema) -> None:
        check_schema(schema if self._avro is None else self._avro.sent(schema), self._topic)
        if self._topic is not None and "topic" in schema.names:
            logger.warning(
                "%s: rows go to the topic in their column 'topic', not to %r (in Spark's own sink "
                "the option topic takes precedence): omit the column with select= unless you want "
                "that",
                self.where,
                self._topic,
            )
        self._seen = self._validation.run()
        if self._avro is not None:
            # Last, since the registry never forgets a schema.
            self._avro.choose_schemas(schema)

    def diagnose(self) -> Iterable[Finding]:
        look = self._validation.look
        yield from diagnose(self._finisher, self._topic, self.where, look, self._timeout_ms)
        if self._avro is not None:
            yield from self._avro.diagnose()

    def dataset(self) -> Dataset:
        # Rows that name their topics may go to any.
        return Dataset.of_topic(self._settings.bootstrap_servers, self._topic or "*")

    def close(self) -> None:
        self._finisher.close()

    @property
    def target(self) -> str:
        return "kafka " + ("topics of its rows" if self._topic is None else f"topic {self._topic}")

    @property
    def where(self) -> str:
        return f"{self.target} at {self._settings.bootstrap_servers}"

    @property
    def _validation(self) -> Validation:
        return Validation(
            self._finisher,
            self._settings,
            self._topic,
            self._timeout_ms,
            self.where,
            self._patience_s,
        )

    @property
    def _outcome(self) -> Outcome:
        """A new one for each call: its patience begins now, and the call's branches share it."""
        return Outcome(self._finisher, self.where, self._patience_s, self._fresh.names)

    # Connections stay in their process. The settings, and what `validate` saw, travel.

    def __getstate__(self) -> dict[str, Any]:
        state = {**self.__dict__}
        del state["_finisher"], state["_fresh"]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._finisher = Finisher(self._settings)
        self._fresh = FreshBranches()


def _timeout_ms(timeout_s: float | None) -> int | None:
    if timeout_s is None:
        return None
    if not timeout_s >= MIN_TIMEOUT_S:  # this also refuses NaN
        raise ConfigurationError(
            f"transaction_timeout_s={timeout_s}: give {MIN_TIMEOUT_S:g} or more seconds"
        )
    return round(timeout_s * 1000)


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
            from sparkonce.sinks.kafka.rows.avro_columns import (  # noqa: PLC0415 - an extra
                AvroColumns,
            )
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                f"rows in Avro need {error.name!r}: pip install 'sparkonce[avro]'", name=error.name
            ) from error
        return AvroColumns(columns, topic, value_schema, schema_registry)
    if schema_registry is not None:
        raise ConfigurationError("schema_registry= is for Avro: set value_format='avro'")
    return None
