"""Names the objects of each committed batch, and reads whole batches by these names.

Nothing else in `sinks.s3` imports this package, except `sink`.
"""
