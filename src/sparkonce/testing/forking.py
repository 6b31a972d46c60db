"""Other processes for the contracts, forked from a server that has imported the clients.

A new interpreter takes a second to import them. Spark forks its Python workers in the same way.
"""

from __future__ import annotations

import multiprocessing
import sys
from multiprocessing.context import ForkServerContext

_PRELOADED = frozenset(
    ("sparkonce", "boto3", "confluent_kafka", "deltalake", "psycopg", "pyiceberg", "sqlalchemy")
)
"""Packages whose modules the server imports, if they are imported here when it starts."""


def fork_server() -> ForkServerContext:
    """The context whose processes are forked from the server, which the first one starts."""
    context = multiprocessing.get_context("forkserver")
    loaded = [name for name in sys.modules if name.partition(".")[0] in _PRELOADED]
    context.set_forkserver_preload(["pyspark.cloudpickle", *loaded])
    return context
