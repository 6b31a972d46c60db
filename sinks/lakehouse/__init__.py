"""What sinks of table formats share: files that no table names, and one commit that adds them.

sink        LakehouseSink: the verbs
finishing   the end of a batch or a task: proof, conditional commit, abort
taking_back the removal of batches, for a rewind
writing     rows to Parquet files
table       what a table format must tell, and do
payloads    what a committable says of files
proofs      how batches ended
marks       what exists that is not finished
ranges      sets of numbers as short text
storage     the files of a table
missing     messages for a table that does not exist
"""
