"""The command `sparkonce`: for operators, at three in the morning.

main             the command line, errors, exit codes
jobs             JOB: module:attribute, or JSON ─► ExactlyOnce
targets          JOB, or --log URL: which log and which pipelines
facts            records, heads and orphans as JSON values    (one source for both forms of output)
screen           the same as text, for 80 columns
looking          status, log                                  change nothing, but for `log copy`
acting           recover, orphans                             take a fencing token, and ask first
settling         settle                                       the same
fencing          the question that they ask
doctor           doctor: what would cause trouble
spark_settings   Spark's settings that would
"""
