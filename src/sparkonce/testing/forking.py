"""Other processes for the contracts, forked from a server that has imported the clients.

A new interpreter takes a second to import them. Spark forks its Python workers in the same way.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Callable, Mapping
from multiprocessing.context import ForkServerProcess

_PRELOADED = frozenset(
    ("sparkonce", "boto3", "confluent_kafka", "deltalake", "psycopg", "pyiceberg", "sqlalchemy")
)
"""Packages whose modules the server imports, if they are imported here when it starts."""


def start_process(main: Callable[..., None], *arguments: object) -> ForkServerProcess:
    """Run `main` in another process, with the environment that this one has now.

    The first call starts the server. What is given is pickled.
    """
    context = multiprocessing.get_context("forkserver")
    loaded = [name for name in sys.modules if name.partition(".")[0] in _PRELOADED]
    context.set_forkserver_preload(["pyspark.cloudpickle", *loaded])
    given = (dict(os.environ), main, arguments)
    process = context.Process(target=_run, args=given, daemon=True)
    process.start()
    return process


def _run(
    environment: Mapping[str, str], main: Callable[..., None], arguments: tuple[object, ...]
) -> None:
    os.environ.clear()
    os.environ.update(environment)
    main(*arguments)
