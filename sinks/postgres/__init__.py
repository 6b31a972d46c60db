"""Rows of a batch in a Postgres table, all at once or not at all; see `PostgresSink`."""

from sparkonce.sinks.postgres.sink import PostgresSink

__all__ = ["PostgresSink"]
