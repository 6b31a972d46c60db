"""The driver's side of Spark: foreachBatch, and what runs in each task.

exactly_once       ExactlyOnce, what a user hands to foreachBatch
run                one run of one query, from its first batch to its last
starts             starts of a query that find no new data
lifecycle          the two moments without a batch: a query starts, the interpreter ends
entering           how a run enters the checkpoint and takes its token
settings           what the user has set, checked
batch              a micro-batch, as the protocol sees it
shaping            each sink's columns, and a hash of each row
partition_writer   a task: one pass over its rows, every sink at once
lanes              one sink's share of a task: its rows, its branch, its thread
small_batches      the same over a small batch, in the driver
record_batches     rows on their way to Python, and the limit on their size
fingerprint        of a sink's rows, whatever their order
sink_use           a sink's object serves one query at a time
running_query      the query that runs, through Spark's own JVM
checkpoint         a query's checkpoint, as files in a folder
source_offsets     the source offsets of a batch, as the checkpoint shows them
binding            which log and pipeline a checkpoint belongs to, written into it
"""
