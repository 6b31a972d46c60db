"""A pipeline that is killed, frozen and cut off for hours, and compared with its source.

query       the program that is killed: endless rows into the pipeline
drivers     starts, freezes and kills it
faults      what is done to it, and to networks and servers
checking    what readers get, compared with what was sent
running     the loop
report      the result as a page
"""
