"""Checks of `PostgresSink`'s settings, and its start-up line."""

from __future__ import annotations

from typing import Final, Literal, TypeAlias, get_args

from sparkonce.errors import ConfigurationError
from sparkonce.sinks.postgres.server.identity import Server
from sparkonce.sinks.postgres.server.sql import Timeouts

Load: TypeAlias = Literal["staged", "direct"]
"""How rows reach the target: through staging tables and one merge, or directly, task by task."""

_LEAST_S, _MOST_S = 0.001, 2_147_483
"""Postgres keeps a timeout as an int of milliseconds, and 0 means no timeout."""

_CREATES: Final = {None, "if_missing"}


def check_settings(
    sink: str, timeouts: Timeouts, load: str, create: str | None, dead_letter: str | None
) -> None:
    """Refuse settings that cannot work; `Writing` and `Address` check theirs."""
    if load not in get_args(Load):
        raise ConfigurationError(f'{sink}: load={load!r} must be "staged" or "direct"')
    if load == "direct" and dead_letter:
        raise ConfigurationError(
            f'{sink}: dead_letter= needs load="staged", in which the driver merges a whole batch'
        )
    if create not in _CREATES:
        raise ConfigurationError(f'{sink}: create={create!r} must be "if_missing", or be left out')
    for setting, value in (
        ("lock_timeout_s", timeouts.lock),
        ("statement_timeout_s", timeouts.statement),
    ):
        if not _LEAST_S <= value <= _MOST_S:
            raise ConfigurationError(
                f"{sink}: {setting}={value} must be {_LEAST_S} to {_MOST_S} seconds"
            )


def promise(load: Load, server: Server, why_open: str | None) -> str:
    """The start-up line: how a batch waits for the decision, and what readers see."""
    if load == "direct":
        return (
            "each Spark task leaves a prepared transaction, so a batch becomes visible task "
            f"by task, not as a whole; {server.prepared_most - server.prepared_now} of "
            f"max_prepared_transactions = {server.prepared_most} are free"
        )
    held_as = (
        "a prepared transaction"
        if why_open is None
        else f"an open transaction, since {why_open}: if its connection is lost after the "
        "decision, the batch is merged again, and the server may refuse it"
    )
    return f"a batch that takes two phases waits for its decision as {held_as}"
