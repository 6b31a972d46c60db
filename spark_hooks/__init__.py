"""The driver's side of Spark: foreachBatch, and what runs in each Spark task.

exactly_once       ExactlyOnce, which a user hands to foreachBatch
settings           its settings, checked
gate               the gate before each batch, which `stop` closes
starts             starts that find no new data
lifecycle          Spark's listener for starts, and the interpreter's exit
serving            the query that an object serves, and its run now
run                one run of one query
running_query      the query that runs, through Spark's own JVM
entering           how a start claims its pipeline and enters the checkpoint
checkpoint         a query's checkpoint, as files in a folder
source_offsets     the source offsets of a batch, as the checkpoint shows them
binding            which log and pipeline a checkpoint belongs to, written into it
sink_use           which driver uses a sink's object
batch              a micro-batch, as the protocol sees it
shaping            each sink's columns, and a hash of each row
fingerprint        the hash of a row, and a sum of hashes that ignores their order
partition_writer   a task: one pass over its rows, every sink at once
lanes              one sink's branch in a task, and its thread
small_batches      when the driver writes a batch itself
record_batches     the limit on the size of record batches
"""
