"""A command that takes a token fences a driver that still runs, so it asks first."""

from __future__ import annotations

import sys

import click

from sparkonce import facts
from sparkonce.cli.screen import holder_line
from sparkonce.protocol.operating import head_of
from sparkonce.protocol.processes import is_running
from sparkonce.txn_log import TransactionLog
from sparkonce.words import age

yes_option = click.option("--yes", is_flag=True, help="Do not ask.")


def may_fence(log: TransactionLog, pipeline: str, *, yes: bool, always: bool = False) -> None:
    """Return if the operator agrees, or if the process that holds the token is known to be gone.

    With `always` it asks even then.

    Raises:
        click.ClickException: there is nobody to ask.
        click.Abort: the answer is no.
    """
    head = head_of(log, pipeline)
    # This includes an operator's command that has ended: the driver before it is fenced already.
    if yes or (is_running(head.driver) is False and not always):
        return
    holder = facts.holder(log, head)
    wrote = age(holder["last_write"])
    click.echo(f"Token {holder_line(holder)}. Last write of a batch: {wrote}.", err=True)
    if holder["is_running"] is not False:
        click.echo(
            "A driver that runs is fenced by this: its query fails at its next write, and must be "
            "started again.",
            err=True,
        )
    if not sys.stdin.isatty():
        raise click.ClickException("nobody can be asked here: pass --yes if you are sure")
    click.confirm("Continue?", abort=True, err=True)
