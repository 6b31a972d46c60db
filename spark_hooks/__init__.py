"""The driver's side: foreachBatch, the coordinator, and what runs in each Spark task."""
