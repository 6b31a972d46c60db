"""`recover` and `orphans --abort`: they take a fencing token, so they ask first.

look ─► nothing to do: end, nobody is fenced
└► show which driver holds the token and whether it runs ─► ask ─► take a token ─► act ─► look again
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from sparkonce import facts
from sparkonce.cli.fencing import may_fence, yes_option
from sparkonce.cli.looking import FOUND, json_option
from sparkonce.cli.screen import Screen, show_orphans, show_pipeline
from sparkonce.cli.targets import checkpoint_option, open_job
from sparkonce.errors import ConfigurationError, SinkError
from sparkonce.facts import Facts
from sparkonce.model import TransactionId
from sparkonce.protocol.operating import head_here, head_of, look_for_orphans, take_over
from sparkonce.sinks.capabilities import FindsBranches
from sparkonce.spark_hooks.checkpoint import LostCheckpoint, find_checkpoint
from sparkonce.txn_log.record import State, TransactionRecord
from sparkonce.txn_log.refusals import rewinding

if TYPE_CHECKING:
    from sparkonce.protocol.pipeline import Checkpoint
    from sparkonce.spark_hooks.exactly_once import ExactlyOnce


@click.command()
@click.argument("job")
@checkpoint_option
@click.option(
    "--abandon",
    type=int,
    metavar="BATCH",
    help="Abort this prepared batch, since its checkpoint is lost for good.",
)
@yes_option
@json_option
def recover(job: str, checkpoint: str | None, abandon: int | None, yes: bool, as_json: bool) -> int:
    """Finish what is decided and abort orphans, without Spark.

    Takes a fencing token, so a driver that still runs fails at its next write; it asks first unless
    the driver is known to be gone. Exits with 3 when something is left.
    """
    screen = Screen(as_json=as_json)
    with open_job(job, checkpoint) as pipeline:
        head = head_here(pipeline.log, pipeline.name)
        if head.rewinding_to:
            raise rewinding(head)
        place: Checkpoint = find_checkpoint(head, checkpoint)
        prepared = _prepared(pipeline)
        if abandon is not None:
            place = _lost_checkpoint(prepared, place, abandon)
        before = _look(pipeline)
        if not (before["unfinished"] or before["orphans"] or before["not_listed"]):
            return _report(screen, pipeline, before, before, None)
        may_fence(pipeline.log, pipeline.name, yes=yes, always=abandon is not None)
        error: SinkError | None = None
        driver = take_over(pipeline, place)
        if abandon is not None and _prepared(pipeline) != prepared:
            raise ConfigurationError(
                f"{pipeline.name!r} has continued while you were asked, and batch {abandon} has "
                "changed: nothing was aborted. The driver that runs now is fenced; see "
                "`sparkonce status`"
            )
        try:
            driver.recover()
        except SinkError as found:  # shown below, with what is left
            error = found
        left = _look(pipeline)
        if _prepared(pipeline) and error is None:
            why = "cannot be read from here" if place.committed() is None else "has not begun it"
            click.echo(
                f"What is prepared is left to the query's next start: only Spark's checkpoint "
                f"shows whether it commits, and {place.location} {why}. Name its location with "
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
    """Show branches that are ours in the targets, and that no decision names.

    With --abort it takes a fencing token first, so nobody is still writing what it aborts. Exits
    with 3 when something was found, or is left.
    """
    screen = Screen(as_json=as_json)
    with open_job(job, checkpoint) as pipeline:
        head = head_here(pipeline.log, pipeline.name)
        found = _look(pipeline)
        if abort and (found["orphans"] or found["not_listed"]):
            may_fence(pipeline.log, pipeline.name, yes=yes)
            aborted = take_over(pipeline, find_checkpoint(head, checkpoint)).sweep()
            found = _look(pipeline) | {"aborted": aborted}
        if as_json:
            screen.json({key: found[key] for key in found if key != "unfinished"})
        elif found["orphans"]:
            show_orphans(screen, found["orphans"])
        elif found["not_listed"]:
            screen.say(f"no response from: {', '.join(found['not_listed'])}")
        else:
            text = "no orphans left" if "aborted" in found else "no orphans"
            unasked = found["not_asked"] or found["cannot_list"]
            screen.say(f"{text} in the sinks that were asked" if unasked else text)
    _report_not_listed(found)
    return FOUND if found["orphans"] or found["not_listed"] or found["not_asked"] else 0


# -- what the commands share -----------------------------------------------------------------------


def _prepared(pipeline: ExactlyOnce) -> list[TransactionRecord]:
    unfinished = pipeline.log.unfinished(pipeline.name)
    return [record for record in unfinished if record.state is State.PREPARED]


def _lost_checkpoint(
    prepared: Sequence[TransactionRecord], place: Checkpoint, batch_id: int
) -> Checkpoint:
    """A stand-in for a checkpoint that nobody can read any more, with what the operator asserts."""
    if batch_id not in {record.id.batch_id for record in prepared}:
        raise ConfigurationError(
            f"batch {batch_id} is not prepared: `sparkonce status` shows what is unfinished"
        )
    committed = place.committed()
    if committed is not None and (committed >= batch_id or place.has_offsets(batch_id)):
        raise ConfigurationError(
            f"the checkpoint {place.location} can be read, and decides what becomes of batch "
            f"{batch_id}: leave --abandon out"
        )
    click.echo(
        f"Batch {batch_id} will be in no sink. Its checkpoint {place.location} must be lost for "
        "good: after this, the query cannot continue with that checkpoint.",
        err=True,
    )
    return LostCheckpoint(place.location, abandoned=batch_id)


def _look(pipeline: ExactlyOnce) -> Facts:
    """What is unfinished in the log, and what is left over in the targets."""
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


def _report_not_listed(found: Facts) -> None:
    for name, error in found["not_listed"].items():
        click.echo(f"{name}: its branches cannot be listed: {error}", err=True)
    for name, target in found["not_asked"].items():
        click.echo(
            f"{name}: nobody looks for orphans in {target}, since the pipeline has no such sink: "
            "pass it in removed=",
            err=True,
        )
    for name in found["cannot_list"]:
        click.echo(f"{name}: the sink has no find_branches, so its orphans are not found", err=True)


def _gone(before: Facts, left: Facts, abandoned: Sequence[TransactionRecord] = ()) -> int:
    """How many branches that were left over, or are of an abandoned batch, are seen to be gone."""
    still = {orphan["full"] for orphan in left["orphans"]}
    gone = {
        orphan["full"]: orphan["sink"]
        for orphan in before["orphans"]
        if orphan["full"] not in still and not orphan["is_committed"]
    }
    for branch_id in (c.branch_id for record in abandoned for c in record.committables()):
        if not {branch_id.name, str(branch_id)} & still:  # not every sink's names have the batch
            gone[str(branch_id)] = branch_id.sink
    return sum(sink not in left["not_listed"] for sink in gone.values())


def _in_words(finished: Sequence[int], abandoned: Sequence[int], gone: int) -> str:
    def listed(batches: Sequence[int]) -> str:
        return ", ".join(map(str, batches))

    texts = {
        f"batches finished: {listed(finished)}": finished,
        f"batches abandoned: {listed(abandoned)} (left to Spark's replay, if any)": abandoned,
        f"branches aborted: {gone}": gone,
    }
    return "; ".join(text for text, which in texts.items() if which)


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
        failure = None if error is None else {"type": type(error).__name__, "message": str(error)}
        ended = {"finished": finished, "abandoned": replayed, "aborted": gone}
        screen.json({**left, **ended, "error": failure})
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
    _report_not_listed(left)
    if error is not None:
        click.echo(f"sparkonce: {type(error).__name__}: {error}", err=True)
    elif any(record["state"] == State.DECIDED.value for record in left["unfinished"]):
        click.echo(
            "The query's next start continues with what is left: it rewrites lost branches from "
            "Spark's replay of the batch, which needs the query's checkpoint.",
            err=True,
        )
    return FOUND if left["unfinished"] or left["orphans"] or left["not_listed"] else 0
