"""`sparkonce settle`: an operator rules on branches whose outcome no server can prove any more.

show what the ruling means ─► ask ─► take a fencing token ─► record the ruling ─► end the branches
"""

from __future__ import annotations

import getpass
import os
import socket
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import click
from tenacity import Retrying, retry_if_exception_type, stop_after_attempt, wait_fixed

from sparkonce import facts
from sparkonce.cli.fencing import may_fence, yes_option
from sparkonce.cli.looking import FOUND, find_record, json_option
from sparkonce.cli.screen import Screen
from sparkonce.cli.targets import log_options, open_target
from sparkonce.errors import (
    ConfigurationError,
    DecisionUnknownError,
    LogUnavailableError,
    SparkOnceError,
)
from sparkonce.facts import Facts
from sparkonce.model import Committable
from sparkonce.protocol.operating import claim_again, end_branches
from sparkonce.protocol.rulings import End
from sparkonce.txn_log import TransactionLog
from sparkonce.txn_log.record import Head, State, TransactionRecord
from sparkonce.txn_log.settlement import Ruling, Settlement
from sparkonce.words import counted

if TYPE_CHECKING:
    from sparkonce.spark_hooks.exactly_once import ExactlyOnce

_ORDER = (
    "Stop the driver, then run `sparkonce recover JOB`. Only after that enter rows manually, if "
    "they are still missing: not where the branch is reported as committed."
)
_HAS_ENDED = {
    Ruling.COMMITTED: "If its rows must still be entered manually, enter them now.",
    Ruling.ABORTED: "Its rows are missing in this sink.",
}
_IS_COMMITTED = {
    Ruling.COMMITTED: "If they were entered manually too, they are there twice: remove those.",
    Ruling.ABORTED: "They are not missing: settle it as committed, so that the record says so.",
}

_MEANING = {
    Ruling.COMMITTED: "taken as committed: its rows must be in the target already, or you must "
    "enter them once this has ended the branch. That removes what it holds, such as staging "
    "tables: if you need rows from there, copy them first",
    Ruling.ABORTED: "abandoned: its rows will be missing in this sink, while the other sinks keep "
    "theirs",
    Ruling.REDO: "committed if that is still possible, and rewritten from Spark's replay if not: "
    "rows that are visible already, without a proof, will be there twice",
}


@click.command()
@click.argument("arguments", metavar="[JOB] BATCH", nargs=-1, required=True)
@log_options
@click.option("--branch", "branches", multiple=True, required=True, help="As `log show` names it.")
@click.option(
    "--as", "ruling", type=click.Choice([r.value for r in Ruling]), required=True, help="Ruling."
)
@click.option("--reason", help="Why; kept for ever.")
@yes_option
@json_option
def settle(
    *,
    arguments: Sequence[str],
    url: str | None,
    pipeline: str | None,
    checkpoint: str | None,
    branches: Sequence[str],
    ruling: str,
    reason: str | None,
    yes: bool,
    as_json: bool,
) -> int:
    """Rule on a branch that is lost, rejected or unresolved. The last resort.

    committed: its rows are in the target. aborted: its rows are abandoned in this sink. redo: it is
    rewritten from Spark's replay. The record keeps the ruling for ever, with who, when and why; the
    next start, or `sparkonce recover`, follows it.

    Stop the driver first, and enter rows manually last. Given a JOB, committed and aborted end the
    branch, its staging too, and report what it has come to. Exits with 3 when that is in doubt, or
    when the branch is visible after all.
    """
    *before, batch = arguments
    if len(before) > 1 or not batch.isdecimal():
        raise click.UsageError("expected BATCH, a number, after a JOB or with --log URL")
    screen = Screen(as_json=as_json)
    with open_target(before[0] if before else None, url, pipeline, checkpoint) as target:
        head = target.one()
        record = find_record(target, head, int(batch))
        chosen = _chosen(record, branches)
        ruled = Ruling(ruling)
        _check_ruling(head, record, ruled)
        for share_name, committable in chosen:
            rows = record.shares[share_name].rows_of(committable)
            click.echo(
                f"{committable.branch_id.short}, {counted(rows, 'row')} for {share_name} "
                f"({record.shares[share_name].target}), is {_MEANING[ruled]}.",
                err=True,
            )
        may_fence(target.log, head.pipeline, yes=yes, always=True)
        if reason is None:
            if not sys.stdin.isatty():
                raise click.UsageError("--reason is needed: it is kept for ever")
            reason = click.prompt("Why", err=True)
        settled = _settle(
            target.log, head, record, [c for _, c in chosen], ruling=ruled, reason=reason
        )
        what = f"{counted(len(chosen), 'branch')} of batch {batch} settled as {ruling}"
        click.echo(f"The ruling is recorded: {what}.", err=True)
        found = facts.record(settled)
        ended = None if ruled is Ruling.REDO else _end(target.job, record, chosen, ruled)
        found["ended"] = ended
    if as_json:
        screen.json(found)
    else:
        screen.say(
            f"{what}. The query's next start follows the ruling, and so does "
            "`sparkonce recover JOB`"
            + (", which rewrites nothing." if ruled is Ruling.REDO else ".")
        )
    return 0 if all(end["how"] == End.ENDED for end in ended or ()) else FOUND


def _end(
    job: ExactlyOnce | None,
    record: TransactionRecord,
    chosen: Sequence[tuple[str, Committable]],
    ruling: Ruling,
) -> list[Facts] | None:
    """End the branches and report what each has come to; None where no sink is known."""
    if job is None:
        click.echo(
            "No sink was asked, since no JOB was given: `sparkonce recover JOB` or the query's "
            "next start ends the branch, and until then a driver that runs may still commit it. "
            f"{_ORDER}",
            err=True,
        )
        return None
    reported = []
    all_ended = end_branches(job, record, [c for _, c in chosen])
    why = "another ruling has followed it; look with `sparkonce log show` first"
    try:
        now = job.log.find(record.id)
    except SparkOnceError as error:
        now, why = None, f"the log cannot show whether another ruling has followed ({error})"
    for (_, committable), ended in zip(chosen, all_ended, strict=True):
        name = committable.branch_id.short
        if now is None or now.ruling(committable) is not ruling:
            click.echo(f"It is not known that {name} is still {ruling}: {why}.", err=True)
            reported.append({"branch": name, "how": End.UNKNOWN.value, "why": why})
            continue
        text = {
            End.ENDED: f"{name} is gone: its sink proves that it was not committed, and nobody "
            "can commit it now. " + _HAS_ENDED[ruling],
            End.VISIBLE: f"{name} IS COMMITTED: its own rows are visible, and nothing takes them "
            "back. " + _IS_COMMITTED[ruling],
            End.UNKNOWN: f"It is not proven that {name} has ended: {ended.why}. Resolve that "
            f"first. A driver that runs may still commit it. {_ORDER}",
        }[ended.how]
        click.echo(text, err=True)
        reported.append({"branch": name, "how": ended.how.value, "why": ended.why})
    return reported


def _settle(
    log: TransactionLog,
    head: Head,
    record: TransactionRecord,
    branches: Sequence[Committable],
    *,
    ruling: Ruling,
    reason: str,
) -> TransactionRecord:
    """Take a token and record the ruling; repeat the write until its outcome is known."""
    who = f"{_user()}@{socket.gethostname()}"
    unfinished = log.unfinished(head.pipeline)
    shares = {name: s.target for r in unfinished for name, s in r.shares.items()}
    again = Retrying(
        retry=retry_if_exception_type((LogUnavailableError, DecisionUnknownError)),
        wait=wait_fixed(0.5),
        stop=stop_after_attempt(10),
        reraise=True,
    )
    claim = claim_again(log, head, {**head.sinks, **shares})
    incarnation = again(lambda: log.begin(claim))
    settlements = [
        Settlement(
            branch=str(committable.branch_id),
            ruling=ruling,
            who=who,
            why=reason,
            at=time.time(),
            token=incarnation.token,
        )
        for committable in branches
    ]
    return again(lambda: log.settle(record.id, settlements, incarnation.token))


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container whose user has only a number
        return f"uid {os.getuid()}"


def _chosen(record: TransactionRecord, branches: Sequence[str]) -> list[tuple[str, Committable]]:
    known = {
        name: (sink, committable)
        for sink, share in record.shares.items()
        for committable in share.committables
        for name in (committable.branch_id.short, str(committable.branch_id))
    }
    for branch in branches:
        if branch not in known:
            names = ", ".join(c.branch_id.short for c in record.committables())
            raise click.BadParameter(
                f"{branch!r} is not a branch of {record.id}, which has {names}",
                param_hint="--branch",
            )
    return list({str(known[b][1].branch_id): known[b] for b in branches}.values())


def _check_ruling(head: Head, record: TransactionRecord, ruling: Ruling) -> None:
    if record.state is not State.DECIDED:
        raise ConfigurationError(
            f"{record.id} is {record.state}: only what is decided and not finished can be settled"
        )
    if ruling is not Ruling.REDO:
        return
    why = None
    if State.PREPARED in record.times:
        why = 'it was delivered with commit="after_checkpoint", so Spark\'s checkpoint has it'
    elif record.id.query_id != head.query_id:
        why = f"it is of the query {record.id.query_id}, which another one has replaced"
    if why is not None:
        raise ConfigurationError(
            f"Spark does not replay {record.id}, so nothing can be redone: {why}. Settle the "
            "branch as committed and then enter its rows into the target manually, or abandon them "
            "with aborted"
        )
