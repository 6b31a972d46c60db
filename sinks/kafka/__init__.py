"""The Kafka sink: one open Kafka transaction per Spark task, ended by the driver.

settings    what the user wrote, as librdkafka and as kafka-python understand it
tls         TLS for kafka-python
oauth       tokens for both
access      why brokers refuse, in words
rows        Spark's column conventions, Arrow rows to messages
layout      typed columns into these conventions, as SQL that Spark evaluates
avro        typed columns as Avro, checked against their schema; avro_columns: those of a sink
registry    driver: the schema registry
producer    executor: one transaction, flushed and marked, left open
branch      a transaction that any process can end, as it stands in a committable
client      any process: the connection for requests that confluent-kafka does not have
finisher    any process: the requests that end, describe and list transactions
open_partitions  which producers have an open transaction in which partitions
outcome     any process: commit and abort, each unknown outcome settled by proof
together    the commit of several branches of a healthy cluster, with one question to each broker
diagnosis   what would bite, for `sparkonce doctor`
sink        KafkaSink, which ties them together
"""

from sparkonce.sinks.kafka.sink import KafkaSink

__all__ = ["KafkaSink"]
