"""From Spark's rows to the messages that librdkafka takes.

conventions    Spark's column names for Kafka, and what each column may hold
layout         typed columns brought into these conventions, by SQL that Spark evaluates
avro_schema    the Avro schema of a column: derived from its type, or checked against it
avro_rows      a column's rows in Avro
avro_columns   which columns of a sink are Avro, and in which schemas
registry       the schema registry, which the driver asks
messages       Arrow rows as addresses and lengths, without a copy
"""
