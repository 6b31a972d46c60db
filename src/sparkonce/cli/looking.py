"""`status` and `log`: but for `log copy` they change nothing and fence nobody."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import click

from sparkonce import facts
from sparkonce.cli.screen import Screen, show_event, show_list, show_pipeline, show_record
from sparkonce.cli.targets import Target, log_options, open_target
from sparkonce.errors import ConfigurationError
from sparkonce.model import TransactionId
from sparkonce.protocol.operating import head_of
from sparkonce.txn_log import copy as copy_log
from sparkonce.txn_log import open_log
from sparkonce.txn_log.record import Head, TransactionRecord
from sparkonce.words import counted

FOUND = 3
POLL_S = 0.5
_MOST_BETWEEN_LOOKS = 200

json_option = click.option("--json", "as_json", is_flag=True, help="JSON on standard output.")


@click.command()
@click.argument("job", required=False)
@log_options
@json_option
def status(
    *, job: str | None, url: str | None, pipeline: str | None, checkpoint: str | None, as_json: bool
) -> int:
    """Which driver holds each pipeline, what is complete, what is not.

    Exits with 3 when something is in doubt (PREPARED) or unfinished (DECIDED), when the newest
    batch is abandoned and in no sink yet, when a rewind has not ended, or when the pipeline was
    moved to another log.
    """
    screen = Screen(as_json=as_json)
    with open_target(job, url, pipeline, checkpoint) as target:
        found = facts.status(target.log, [head_of(target.log, name) for name in target.names])
    if as_json:
        screen.json(found)
    else:
        screen.say(found["log"])
        for one in found["pipelines"]:
            screen.say()
            show_pipeline(screen, one)
        if not found["pipelines"]:
            screen.say("no pipeline has written into it yet")
    return 0 if all(one["state"] == "fine" for one in found["pipelines"]) else FOUND


@click.group()
def log() -> None:
    """A batch's life, as the transaction log shows it."""


@log.command(name="list")
@click.argument("job", required=False)
@log_options
@click.option("--limit", default=20, show_default=True, help="How many of the newest batches.")
@json_option
def list_(
    *,
    job: str | None,
    url: str | None,
    pipeline: str | None,
    checkpoint: str | None,
    limit: int,
    as_json: bool,
) -> int:
    """The newest batches, newest first; those of earlier queries (replaces=) come last."""
    screen = Screen(as_json=as_json)
    with open_target(job, url, pipeline, checkpoint) as target:
        head = target.one()
        records = facts.newest(target.log, head, limit)
        found = [facts.record(record, head) for record in records]
    if as_json:
        screen.json(found)
    else:
        show_list(screen, found, head.query_id)
    return 0


@log.command()
@click.argument("arguments", metavar="[JOB] BATCH", nargs=-1, required=True)
@log_options
@json_option
def show(
    *,
    arguments: Sequence[str],
    url: str | None,
    pipeline: str | None,
    checkpoint: str | None,
    as_json: bool,
) -> int:
    """One batch: source offsets, rows, branches, what they are in the targets, times."""
    *before, batch = arguments
    if len(before) > 1 or not batch.isdecimal():
        raise click.UsageError("expected BATCH, a number, after a JOB or with --log URL")
    screen = Screen(as_json=as_json)
    with open_target(before[0] if before else None, url, pipeline, checkpoint) as target:
        head = target.one()
        found = facts.record(find_record(target, head, int(batch)), head)
    if as_json:
        screen.json(found)
    else:
        show_record(screen, found)
    return 0


@log.command()
@click.argument("job", required=False)
@log_options
@click.option("--follow", "-f", is_flag=True, help="Continue until interrupted.")
@click.option("--limit", default=10, show_default=True, help="How many batches to begin with.")
@json_option
def tail(
    *,
    job: str | None,
    url: str | None,
    pipeline: str | None,
    checkpoint: str | None,
    follow: bool,
    limit: int,
    as_json: bool,
) -> int:
    """A line for each state that a batch reaches."""
    screen = Screen(as_json=as_json)
    seen: set[tuple[str, int, str, str]] = set()
    with open_target(job, url, pipeline, checkpoint) as target:
        head = target.one()
        records: Sequence[TransactionRecord] = facts.newest(target.log, head, limit)
        # The lowest batch that is shown of each query; a query that comes later is shown whole.
        first = {record.id.query_id: record.id.batch_id for record in records}
        while True:
            for event in _new_events(records, first, seen):
                screen.json(event) if as_json else show_event(screen, event)
            if not follow:
                return 0
            time.sleep(POLL_S)
            head = head_of(target.log, head.pipeline)
            records = target.log.history(head.pipeline, _MOST_BETWEEN_LOOKS, head.query_id)


def _new_events(
    records: Sequence[TransactionRecord],
    first: Mapping[str, int],
    seen: set[tuple[str, int, str, str]],
) -> Iterator[dict[str, Any]]:
    for record in reversed(records):
        for event in _events(record):
            key = event["query_id"], event["batch"], event["state"], event["at"]
            if record.id.batch_id >= first.get(record.id.query_id, 0) and key not in seen:
                seen.add(key)
                yield event


@log.command()
@click.argument("source", metavar="FROM")
@click.argument("target", metavar="TO")
@click.option("--pipeline", metavar="NAME", help="Which pipeline of the log.")
@json_option
def copy(source: str, target: str, pipeline: str | None, as_json: bool) -> int:
    """Move a pipeline to another log; the old one refuses it from then on.

    Its driver is fenced: stop it first, and start it again with log=TO. After an error, run the
    command again.
    """
    screen = Screen(as_json=as_json)
    with open_target(None, source, pipeline) as old:
        name = old.one().pipeline
        with contextlib.closing(open_log(target)) as new:
            records = copy_log(old.log, new, name)
    if as_json:
        screen.json({"pipeline": name, "to": new.address, "batches": len(records)})
    else:
        held = counted(len(records), "batch")
        screen.say(
            f"{name} is in {new.address} now, with {held}: give the job the log= that you gave here"
        )
    return 0


def _events(record: TransactionRecord) -> Iterator[dict[str, Any]]:
    rows = {name: share.rows for name, share in record.shares.items()}
    for state, at in sorted(record.times.items(), key=lambda item: item[1]):
        yield {
            "query_id": record.id.query_id,
            "batch": record.id.batch_id,
            "state": state.value,
            "at": facts.utc(at),
            "rows": rows,
        }


def find_record(target: Target, head: Head, batch: int) -> TransactionRecord:
    """The batch's record, of any query that had the pipeline's name: an unfinished one first.

    Among finished records, the present query comes before earlier ones.

    Raises:
        ConfigurationError: the log has none.
    """
    unfinished = {record.id: record for record in target.log.unfinished(head.pipeline)}
    queries = (head.query_id, *reversed(head.retired))
    ids = [TransactionId(head.pipeline, query_id, batch) for query_id in queries]
    for found in chain(map(unfinished.get, ids), map(target.log.find, ids)):
        if found is not None:
            return found
    newest = target.log.newest(head.pipeline, head.query_id)
    upto = "no batch yet" if newest is None else f"batches up to {newest.id.batch_id}"
    raise ConfigurationError(
        f"the log has no batch {batch} of pipeline {head.pipeline!r}: it has {upto}, and forgets "
        "old ones (retain=)"
    )
