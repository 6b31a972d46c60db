"""A benchmark of exactly-once sinks that any engine can join; `__main__` runs it."""
