"""The protocol as a small model, checked in every state that it can reach.

    state     what the log, Spark's checkpoint, the sinks and each driver hold: frozen values
    protocol  what a driver does: each function is one atomic step, with its guard
    moves, rules  how it goes from one part to the next; what a log and a sink do with a call
    world     what happens around the drivers: starts, crashes, losses, late writes, an operator
    properties  I1 to I8, each as a function; when everything is delivered
    checker   every reachable state, breadth first; the shortest way to a broken property
    models    what is checked: bounds, probes, and the guards that are removed one at a time
    traces    replays the recorded steps of a run of the real code through the model

Run it with `python -m specs`. docs/contributing/spec.md explains it.
"""
