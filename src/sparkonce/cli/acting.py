"""`recover`, `orphans --abort` and `settle`: they take a fencing token, so they ask first.

look ─► nothing to do: end, nobody is fenced
└► say who holds the token and whether it runs ─► ask ─► take a token ─► act ─► look again

`settle` acts in this order: the word is written, then what stands of the branch is ended.
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

from sparkonce.cli import facts
from sparkonce.cli.facts import Facts
from sparkonce.cli.looking import FOUND, find_record, json_option
from sparkonce.cli.screen import Screen, age, holder_line, show_orphans, show_pipeline
from sparkonce.cli.targets import checkpoint_option, log_options, open_job, open_target
from sparkonce.errors import (
    ConfigurationError,
    DecisionUnknownError,
    LogUnavailableError,
    SinkError,
    SparkOnceError,
)
from sparkonce.model import Committable, TransactionId
from sparkonce.protocol.operating import (
    claim_again,
    end_branches,
    head_of,
    look_for_orphans,
    take_over,
)
from sparkonce.protocol.processes import is_running
from sparkonce.protocol.rulings import End
from sparkonce.sinks.capabilities import FindsBranches
from sparkonce.spark_hooks.checkpoint import LostCheckpoint, find_checkpoint
from sparkonce.txn_log import TransactionLog
from sparkonce.txn_log.record import Head, State, TransactionRecord
from sparkonce.txn_log.settlement import Ruling, Settlement

if TYPE_CHECKING:
    from sparkonce.protocol.pipeline import Checkpoint
    from sparkonce.spark_hooks.exactly_once import ExactlyOnce

yes_option = click.option("--yes", is_flag=True, help="Do not ask.")

_MEANING = {
    Ruling.COMMITTED: "taken for committed: its rows must be in the target already, or be put "
    "there by you once this has ended the branch. That removes what it holds, such as staging "
    "tables: if you need rows from there, copy them first",
    Ruling.ABORTED: "given up: its rows will be missing in this sink, while the other sinks keep "
    "theirs",
    Ruling.REDO: "written again from Spark's replay: if any of its rows are visible already, they "
    "will be there twice",
}

_HAS_ENDED = {
    Ruling.COMMITTED: "If its rows are still to be put in by hand, put them in now.",
    Ruling.ABORTED: "Its rows are missing in this sink.",
}
_IS_COMMITTED = {
    Ruling.COMMITTED: "If they were put in by hand as well, they are there twice: remove those.",
    Ruling.ABORTED: "They are not missing: settle it as committed, so that the record says so.",
}
_ORDER = (
    "Stop the driver, then run `sparkonce recover JOB`, and only then put rows in by hand, where "
    "that is still to be done: not where it is said to be committed. Mend that reason first."
)


@click.command()
@click.argument("job")
@checkpoint_option
@click.option(
    "--abandon",
    type=int,
    metavar="BATCH",
    help="Its checkpoint is lost for good: abort this batch, which is prepared.",
)
@yes_option
@json_option
def recover(job: str, checkpoint: str | None, abandon: int | None, yes: bool, as_json: bool) -> int:
    """Finish what is decided and abort orphans, without Spark.

    Takes a fencing token, so a driver that still runs fails at its next write; it asks first unless
    the driver is known to be gone. Ends with 3 when something is left.
    """
    screen = Screen(as_json=as_json)
    with open_job(job, checkpoint) as pipeline:
        head = head_of(pipeline.log, pipeline.name)
        place: Checkpoint = find_checkpoint(head, checkpoint)
        prepared = _prepared(pipeline)
        if abandon is not None:
            place = _lost_checkpoint(prepared, place, abandon)
        before = _standing(pipeline)
        if not (before["unfinished"] or before["orphans"] or before["not_listed"]):
            return _report(screen, pipeline, before, before, None)
        _may_fence(pipeline.log, pipeline.name, yes=yes, always=abandon is not None)
        error: SinkError | None = None
        driver = take_over(pipeline, place)
        if abandon is not None and _prepared(pipeline) != prepared:
            raise ConfigurationError(
                f"{pipeline.name!r} has gone on while you were asked, and batch {abandon} is not "
                "what it was: nothing was aborted. The driver that runs now is fenced; see "
                "`sparkonce status`"
            )
        try:
            driver.recover()
        except SinkError as found:  # what is left is shown, with what was said of it
            error = found
        left = _standing(pipeline)
        if _prepared(pipeline) and error is None:
            why = "cannot be read from here" if place.committed() is None else "has not begun it"
            click.echo(
                f"What is prepared is left to the query's next start: only Spark's checkpoint says "
                f"whether it commits, and {place.location} {why}. Say where it is with "
                "--checkpoint; or, if it is lost for good, abort the batch with --abandon.",
                err=True,
            )
        return _report(screen, pipeline, before, left, error)


@click.command()
@click.argument("job")
@checkpoint_option
@click.option("--abort", is_flag=True, help="Abort them; default: only show them.")
@yes_option
@json_option
def orphans(job: str, checkpoint: str | None, abort: bool, yes: bool, as_json: bool) -> int:
    """What stands outside in our name and no decision names.

    With --abort it takes a fencing token first: what it then aborts nobody is writing. Ends with 3
    when something was found, or is left.
    """
    screen = Screen(as_json=as_json)
    with open_job(job, checkpoint) as pipeline:
        head = head_of(pipeline.log, pipeline.name)
        found = _standing(pipeline)
        if abort and (found["orphans"] or found["not_listed"]):  # what is not asked stays so
            _may_fence(pipeline.log, pipeline.name, yes=yes)
            take_over(pipeline, find_checkpoint(head, checkpoint)).sweep()
            left = _standing(pipeline)
            found = left | {"aborted": _gone(found, left)}
        if as_json:
            screen.json({key: found[key] for key in found if key != "unfinished"})
        elif found["orphans"]:
            show_orphans(screen, found["orphans"])
        elif found["not_listed"]:
            screen.say(f"no answer from: {', '.join(found['not_listed'])}")
        else:
            said = "no orphans left" if "aborted" in found else "no orphans"
            unasked = found["not_asked"] or found["cannot_list"]
            screen.say(f"{said} where somebody has looked" if unasked else said)
    _tell_not_listed(found)
    return FOUND if found["orphans"] or found["not_listed"] or found["not_asked"] else 0


@click.command()
@click.argument("arguments", metavar="[JOB] BATCH", nargs=-1, required=True)
@log_options
@click.option("--branch", "branches", multiple=True, required=True, help="As `log show` names it.")
@click.option(
    "--as", "ruling", type=click.Choice([r.value for r in Ruling]), required=True, help="The word."
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
    """Say what holds of a branch that is lost, rejected or unresolved. The last resort.

    committed: its rows are in the target. aborted: its rows are given up in this sink. redo:
    Spark's replay writes it again. The word is kept in the record for ever, with who, when and
    why; the next start, or `sparkonce recover`, goes by it.

    Stop the driver first, and put rows in by hand last. Given a JOB, committed and aborted end what
    stands of the branch, its staging too, and say what it has come to. Ends with 3 when that is in
    doubt, or when the branch is visible after all.
    """
    *before, batch = arguments
    if len(before) > 1 or not batch.isdecimal():
        raise click.UsageError("expected BATCH, a number, behind a JOB or with --log URL")
    screen = Screen(as_json=as_json)
    with open_target(before[0] if before else None, url, pipeline, checkpoint) as target:
        head = target.one()
        record = find_record(target, head, int(batch))
        chosen = _chosen(record, branches)
        word = Ruling(ruling)
        _check_ruling(head, record, word)
        for share_name, committable in chosen:
            rows = facts.rows_of(record.shares[share_name], committable)
            click.echo(
                f"{committable.branch_id.short}, {rows} rows for {share_name} "
                f"({record.shares[share_name].target}), is {_MEANING[word]}.",
                err=True,
            )
        _may_fence(target.log, head.pipeline, yes=yes, always=True)
        if reason is None:
            if not sys.stdin.isatty():
                raise click.UsageError("--reason is needed: it is kept for ever")
            reason = click.prompt("Why", err=True)
        settled = _settle(
            target.log, head, record, [c for _, c in chosen], ruling=word, reason=reason
        )
        click.echo(f"The word stands: batch {batch}, {len(chosen)} settled as {ruling}.", err=True)
        found = facts.record(settled)
        ended = None if word is Ruling.REDO else _end(target.job, record, chosen, word)
        found["ended"] = ended
    if as_json:
        screen.json(found)
    else:
        screen.say(
            f"batch {batch}: {len(chosen)} settled as {ruling}. The query's next start goes by "
            "it, and so does `sparkonce recover JOB`."
        )
    return 0 if all(end["how"] == End.ENDED for end in ended or ()) else FOUND


def _end(
    job: ExactlyOnce | None,
    record: TransactionRecord,
    chosen: Sequence[tuple[str, Committable]],
    ruling: Ruling,
) -> list[Facts] | None:
    """End the branches and say what each has come to; None where no sink is at hand."""
    if job is None:
        click.echo(
            "No sink was asked, since no JOB was given: what stands of the branch is ended by "
            "`sparkonce recover JOB`, or the query's next start, and until then a driver that runs "
            f"may still commit it. {_ORDER}",
            err=True,
        )
        return None
    told = []
    all_ended = end_branches(job, record, [c for _, c in chosen])
    why = "another word has followed it; look with `sparkonce log show` first"
    try:
        now = job.log.find(record.id)
    except SparkOnceError as error:
        now, why = None, f"the log does not tell whether another word has followed ({error})"
    for (_, committable), ended in zip(chosen, all_ended, strict=True):
        name = committable.branch_id.short
        if now is None or now.ruling(committable) is not ruling:
            click.echo(f"It is not known that {name} is {ruling} still: {why}.", err=True)
            told.append({"branch": name, "how": End.UNKNOWN.value, "why": why})
            continue
        text = {
            End.ENDED: f"{name} has ended: its sink proves that it was not committed, and nobody "
            "can commit it now. " + _HAS_ENDED[ruling],
            End.VISIBLE: f"{name} IS COMMITTED: its own rows are visible, and nothing takes them "
            "back. " + _IS_COMMITTED[ruling],
            End.UNKNOWN: f"It is not proven that {name} has ended: {ended.why}. A driver that runs "
            f"may still commit it. {_ORDER}",
        }[ended.how]
        click.echo(text, err=True)
        told.append({"branch": name, "how": ended.how.value, "why": ended.why})
    return told


def _settle(
    log: TransactionLog,
    head: Head,
    record: TransactionRecord,
    branches: Sequence[Committable],
    *,
    ruling: Ruling,
    reason: str,
) -> TransactionRecord:
    """Take a token and write the word, until it is known to stand."""
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
    except (KeyError, OSError):  # a container whose user has a number alone
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
                f"{branch!r} is no branch of {record.id}, which has {names}", param_hint="--branch"
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
            "branch as committed and then put its rows into the target by hand, or give them up "
            "with aborted"
        )


# -- what the commands share -----------------------------------------------------------------------


def _may_fence(log: TransactionLog, pipeline: str, *, yes: bool, always: bool = False) -> None:
    """Return if the operator says so, or if whoever holds it now is known to be gone.

    Raises:
        click.ClickException: there is nobody to ask.
        click.Abort: the answer is no.
    """
    head = head_of(log, pipeline)
    # An operator's command that has ended counts as gone, too: the driver before it is fenced.
    if yes or (is_running(head.driver) is False and not always):
        return
    holder = facts.holder(log, head)
    wrote = age(holder["last_write"])
    click.echo(f"Token {holder_line(holder)}. Last write of a batch: {wrote}.", err=True)
    if holder["is_running"] is not False:
        click.echo(
            "A driver that runs is fenced by this: its query fails at its next write, and has to "
            "be started again.",
            err=True,
        )
    if not sys.stdin.isatty():
        raise click.ClickException("nobody can be asked here: pass --yes if you are sure")
    click.confirm("Go on?", abort=True, err=True)


def _prepared(pipeline: ExactlyOnce) -> list[TransactionRecord]:
    unfinished = pipeline.log.unfinished(pipeline.name)
    return [record for record in unfinished if record.state is State.PREPARED]


def _lost_checkpoint(
    prepared: Sequence[TransactionRecord], place: Checkpoint, batch_id: int
) -> Checkpoint:
    """The operator's word in the place of a checkpoint that nobody can read any more."""
    committed = place.committed()
    if committed is not None and (committed >= batch_id or place.has_offsets(batch_id)):
        raise ConfigurationError(
            f"the checkpoint {place.location} can be read, and says itself what becomes of batch "
            f"{batch_id}: leave --abandon out"
        )
    if batch_id not in {record.id.batch_id for record in prepared}:
        raise ConfigurationError(
            f"batch {batch_id} is not prepared: `sparkonce status` shows what is unfinished"
        )
    click.echo(
        f"Batch {batch_id} will be in no sink. Its checkpoint {place.location} must be lost for "
        "good: with that, the query could not go on from here.",
        err=True,
    )
    return LostCheckpoint(place.location, abandoned=batch_id)


def _standing(pipeline: ExactlyOnce) -> Facts:
    """What is unfinished in the log, and what is left over outside."""
    failures: dict[str, Exception] = {}
    orphans_found = look_for_orphans(pipeline, failures)
    sinks = {sink.name: sink for sink in pipeline.all_sinks}
    known = head_of(pipeline.log, pipeline.name).sinks
    return {
        "pipeline": pipeline.name,
        "unfinished": [facts.record(r) for r in pipeline.log.unfinished(pipeline.name)],
        "orphans": [facts.orphan(orphan) for orphan in orphans_found],
        "not_listed": {name: str(error) for name, error in failures.items()},
        "not_asked": {name: target for name, target in known.items() if name not in sinks},
        "cannot_list": [
            name for name, sink in sinks.items() if not isinstance(sink, FindsBranches)
        ],
    }


def _tell_not_listed(found: Facts) -> None:
    for name, error in found["not_listed"].items():
        click.echo(f"{name}: what stands there cannot be listed: {error}", err=True)
    for name, target in found["not_asked"].items():
        click.echo(
            f"{name}: nobody looks for orphans in {target}, since the pipeline has no such sink: "
            "pass it in removed=",
            err=True,
        )
    for name in found["cannot_list"]:
        click.echo(f"{name}: the sink has no find_branches, so orphans in it stay unseen", err=True)


def _gone(before: Facts, left: Facts, abandoned: Sequence[TransactionRecord] = ()) -> int:
    """How many branches were left over, or are of an abandoned batch, and are seen to be gone."""
    stand = {orphan["full"] for orphan in left["orphans"]}
    gone = {o["full"]: o["sink"] for o in before["orphans"] if o["full"] not in stand}
    for branch_id in (c.branch_id for record in abandoned for c in record.committables()):
        if not {branch_id.name, str(branch_id)} & stand:  # not every sink's names have the batch
            gone[str(branch_id)] = branch_id.sink
    return sum(sink not in left["not_listed"] for sink in gone.values())


def _in_words(finished: Sequence[int], abandoned: Sequence[int], gone: int) -> str:
    def listed(batches: Sequence[int]) -> str:
        return ", ".join(map(str, batches))

    said = {
        f"batches finished: {listed(finished)}": finished,
        f"batches abandoned: {listed(abandoned)} (left to Spark's replay, if any)": abandoned,
        f"branches aborted: {gone}": gone,
    }
    return "; ".join(text for text, which in said.items() if which)


def _report(
    screen: Screen, pipeline: ExactlyOnce, before: Facts, left: Facts, error: SinkError | None
) -> int:
    ids = [TransactionId(r["pipeline"], r["query_id"], r["batch"]) for r in before["unfinished"]]
    now = {found: pipeline.log.find(found) for found in ids}
    finished = [  # nothing but what is complete is ever dropped from the log
        found.batch_id for found, r in now.items() if r is None or r.state.is_finished
    ]
    abandoned = [r for r in now.values() if r is not None and r.state is State.ABANDONED]
    replayed = [record.id.batch_id for record in abandoned]
    gone = _gone(before, left, abandoned)
    said = _in_words(finished, replayed, gone)
    if screen.as_json:
        told = None if error is None else {"type": type(error).__name__, "message": str(error)}
        ended = {"finished": finished, "abandoned": replayed, "aborted": gone}
        screen.json({**left, **ended, "error": told})
    elif not any((said, left["unfinished"], left["orphans"], left["not_listed"])):
        screen.say("nothing to recover")
    else:
        if said:
            screen.say(said)
        if left["unfinished"]:
            show_pipeline(
                screen, facts.pipeline(pipeline.log, head_of(pipeline.log, pipeline.name))
            )
        if left["orphans"]:
            show_orphans(screen, left["orphans"])
    _tell_not_listed(left)
    if error is not None:
        click.echo(f"sparkonce: {type(error).__name__}: {error}", err=True)
    elif any(record["state"] == State.DECIDED.value for record in left["unfinished"]):
        click.echo(
            "What is left goes on with the query's next start: Spark's replay of the batch writes "
            "lost branches again.",
            err=True,
        )
    return FOUND if left["unfinished"] or left["orphans"] or left["not_listed"] else 0
