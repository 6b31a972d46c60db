"""The two-phase commit, free of Spark, of any store and of any vendor.

transaction     the protocol on one page: deliver a batch, recover, commit what is pending
decisions       what to do with a batch, as pure functions of what is known of it
lease           the right to act: the fencing token and the entry in the checkpoint
deciders        when a batch is decided: at once, after Spark's checkpoint, or with its rows
preparing       before the decision: write, vote, and abort on any failure
committing      after it: commit until proven, publish
rewriting       what to rewrite of lost branches, and whether the replay holds the same rows
amending        lost branches are rewritten from the replay, and the decision names the new ones
rulings         branches on which an operator has ruled
sweeping        branches in our name that no record needs
driver          one run of a query: its lease, its decider, and the page above
pipeline        what all of these work with
operating       what an operator does without Spark
processes       which process a driver is, and whether it still runs
"""
