"""`writeStream.format("sparkonce")`: a pipeline where foreachBatch has no JVM, as over Connect.

    Spark plans batch N ─► a Python process on the driver: `planning.plan`
                             └─► token, recovery, what the tasks have to write ─► Ticket
    tasks               ─► `tasks.TaskWriter`: all sinks, as with foreachBatch ─► Prepared
    Spark commits it    ─► another Python process there: `committing.commit` ─► deliver(batch)
    Spark aborts it     ─► a third one: `committing.abort` ─► a token of its own ─► sweep

Spark keeps none of these processes for sure, and none knows the others. What one must know of
another travels with the rows: each task returns the ticket with what it has prepared. Everything
else is in the transaction log and in the checkpoint, which the driver's processes read as files.
"""
