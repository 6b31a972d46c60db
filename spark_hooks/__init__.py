"""The driver's side: foreachBatch, the coordinator, and what runs in each Spark task.

exactly_once       ExactlyOnce, what a user hands to foreachBatch
lifecycle          the two moments without a batch: a query starts, the interpreter ends
running_query      the query that runs, through Spark's own JVM
checkpoint         a query's checkpoint, as files in a folder
source_offsets     the source offsets of a batch, as the checkpoint shows them
binding            which log and pipeline a checkpoint belongs to, written into it
coordinator        the protocol, free of Spark
rewrite            lost branches, written again from Spark's replay
orphans            which branches that stand in our name belong to nobody
ruled              the end of a branch that an operator has given up or put in by hand
batch              a micro-batch, as the coordinator sees it
partition_writer   a task: one pass over its rows, every sink at once
small_batches      the same over a small batch, in the driver
record_batches     rows on their way to Python, and the limit on their size
fingerprint        of a sink's rows, whatever their order
recovery           an operator, without Spark: look, recover, sweep, settle
drivers            who a driver is, and whether it still runs
waiting            nothing hangs in silence
"""
