"""End a transaction from outside its producer, in any process, and prove how it ended.

questions        what every question to the brokers needs
open_partitions  which producers have an open transaction in which partitions
together         the commit of several branches of a healthy cluster, with few requests
cluster          questions about the cluster: topics, settings, rights
transactions     questions about transactions: end, describe and list them
partitions       questions about partitions: where a branch is open, and missing markers
finisher         all of these questions, over one connection

states           what a coordinator's state means for a branch: pure functions
asking           questions about a branch, repeated within one patience, and their errors
visibility       waits until a branch that ended has its markers in every partition
proof            after a refused EndTxn: committed, lost, or unknown
abort            ends what must not be committed
outcome          commit and abort, as the sink calls them
search           lists the open transactions of an owner
fresh            the clocks of a batch's branches, and which branches need no examination
"""
