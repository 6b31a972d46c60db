"""The Kafka sink: one open Kafka transaction per Spark task, ended by the driver.

    sink                          `KafkaSink`, the front
       │
    validation, diagnosis         what the driver checks, and what `sparkonce doctor` reports
       │
    writing ──► branch ◄── finishing
       │                      │
    rows                  connecting

writing      executor: one transaction, flushed and marked, left open
branch       a transaction that any process can end, and its form in a committable
finishing    any process: commit and abort, and the proof of each unknown outcome
rows         Spark's columns, typed columns, Avro; Arrow rows to messages
connecting   settings and security of both clients, and the connection for requests that
             confluent-kafka does not have

Every arrow points down; import-linter checks that. `writing` also uses `connecting`.
"""

from sparkonce.sinks.kafka.sink import KafkaSink

__all__ = ["KafkaSink"]
