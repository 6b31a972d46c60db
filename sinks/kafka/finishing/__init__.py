"""Any process's half: end a transaction from outside its producer, and prove how it ended.

questions      what every question to the brokers needs
cluster        ├ about the cluster: topics, settings, rights
transactions   ├ about transactions: end, describe, list them
open_partitions├ which producers have an open transaction in which partitions
partitions     └ about partitions: where a branch is open, and missing commit markers
finisher       all of these questions, over one connection
together       the commit of several branches of a healthy cluster, with few requests

states         what a coordinator's state means for a branch: functions of values
asking         questions that are repeated within one patience, and their errors
visibility     waits until a branch that ended has its markers in every partition
proof          after a refused EndTxn: committed, lost, or unknown
abort          ends what must not be committed
outcome        commit and abort, as the sink calls them
search         lists the open transactions of an owner
"""
