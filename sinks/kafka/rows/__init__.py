"""From Spark's rows to the messages that librdkafka takes.

conventions    Spark's column names for Kafka, and what each column may hold
layout         typed columns into these conventions, as SQL that Spark evaluates
avro_schema    the Avro schema of a column: made from its type, or checked against it
avro_rows      a column's rows in Avro
avro_columns   which columns of a sink are Avro, and in which schemas
registry       the schema registry, which the driver asks
messages       Arrow rows as addresses and lengths, without a copy
"""
