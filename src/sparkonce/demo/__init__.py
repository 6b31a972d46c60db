"""`make demo`: one streaming query, three real sinks, a driver that is killed again and again.

orders     the rows: a seeded generator, and what each order must look like in a sink
job        the program that is killed: Kafka ─► Spark ─► Kafka, Postgres and S3
naive      the same program with Spark's own sinks, for contrast
kills      when it is killed
outside    what others see of the sinks meanwhile
screen     the display
verdict    the comparison at the end
show       all of it, in order
"""
