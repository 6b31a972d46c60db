"""The identity guard: which starts are admitted, and what a refused one is told."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sparkonce.errors import ConfigurationError, FencedError
from sparkonce.model import Owner
from sparkonce.testing.log_cases import QUERY, claim, record
from sparkonce.txn_log.claim import RESTORING, Claim, Known
from sparkonce.txn_log.identity import admit, adopted
from sparkonce.txn_log.record import Head, Incarnation, Share, State, TransactionRecord

LOG_ID = "0123456789abcdef"
INCARNATION = Incarnation("orders", Owner(LOG_ID, QUERY), 4)
HEAD = Head("orders", QUERY, 4, "run", "host:1", 0.0, sinks={"kafka": "topic"})


def known(*batches: int, head: Head | None = HEAD, **changes: Any) -> Known:
    """A log that has completed `batches`."""
    records = {n: record(INCARNATION, n).moved(State.COMPLETE, 1.0) for n in batches}
    values: dict[str, Any] = {
        "log_id": LOG_ID,
        "log": "sqlite:////var/txn.db",
        "head": head,
        "newest": records[max(batches)] if batches else None,
        "records": records,
        "unfinished": [],
    }
    return Known(**{**values, **changes})


def prepared(batch_id: int) -> dict[str, Any]:
    """What of `Known` a batch changes that waits for Spark's checkpoint."""
    newest = replace(record(INCARNATION, batch_id, shares={}), state=State.PREPARED)
    return {"newest": newest, "unfinished": [newest]}


def offsets(*batches: int) -> dict[int, tuple[str, ...]]:
    return {n: (f"[{n}]",) for n in batches}


LEGITIMATE: dict[str, tuple[Claim, Known]] = {
    "first start": (claim(0), known(head=None)),
    "crash before the first decision": (claim(0), known()),
    "restart with the checkpoint bound": (
        claim(3, offsets=offsets(2, 3), checkpoint_log_id=LOG_ID, checkpoint_pipeline="orders"),
        known(1, 2),
    ),
    "run that goes on behind itself": (claim(3, run_id="run", had_token=True), known(2)),
    "replay of an abandoned batch": (
        claim(2, offsets=offsets(1, 2)),
        known(newest=replace(record(INCARNATION, 2), state=State.ABANDONED)),
    ),
    "abandoned batch that Spark has made anew": (
        claim(2, offsets={1: ("[1]",), 2: ("[77]",)}),
        known(
            newest=replace(record(INCARNATION, 2), state=State.ABANDONED),
            records={
                1: record(INCARNATION, 1),
                2: replace(record(INCARNATION, 2), state=State.ABANDONED),
            },
        ),
    ),
    "replay of a prepared batch": (claim(2, offsets=offsets(1, 2)), known(1, 2, **prepared(2))),
    "prepared batch whose offsets cannot be compared": (
        claim(2, offsets=offsets(1)),
        known(1, 2, **prepared(2)),
    ),
    "start behind a prepared batch": (claim(3, offsets=offsets(2)), known(1, 2, **prepared(2))),
    "state that Spark has repartitioned": (
        claim(4, offsets={3: ("[2]",)}, repartitions=1),
        known(1, 2),
    ),
    "state that Spark has repartitioned twice": (
        claim(5, offsets={4: ("[2]",)}, repartitions=2),
        known(1, 2),
    ),
    "state that Spark has repartitioned after a prepared batch": (
        claim(4, offsets={3: ("[2]",)}, repartitions=1),
        known(1, 2, **prepared(2)),
    ),
    "state that Spark has repartitioned right after a restore or a fork": (
        claim(4, offsets={3: ("[2]",)}, repartitions=1),
        known(head=replace(HEAD, first_batch=3)),
    ),
    "replay of the newest batch": (claim(2, offsets=offsets(1, 2)), known(1, 2)),
    "Spark purged the batch before": (claim(3, offsets=offsets(3)), known(2)),
    "query that takes its name back": (
        claim(2, offsets=offsets(1, 2), replaces="other"),
        known(1, 2, head=replace(HEAD, query_id="other", retired=(QUERY,))),
    ),
    "sink added": (claim(3, sinks={"kafka": "topic", "s3": "bucket"}), known(2)),
    "checkpoint that ran without us, adopted": (claim(9, adopt=("batch 9",)), known(head=None)),
    "checkpoint that ran without us, adopted at its batch": (
        claim(9, adopt=("batch 9",)),
        known(head=None),
    ),
    "adopted, and crashed before the first decision": (
        claim(9),
        known(head=replace(HEAD, first_batch=9)),
    ),
    "other log lost, adopted": (
        claim(9, adopt=("f" * 16,), checkpoint_log_id="f" * 16, checkpoint_pipeline="orders"),
        known(head=None),
    ),
    "fresh checkpoint that replaces the old one": (
        claim(0, query_id="new", replaces=QUERY),
        known(),
    ),
}


@pytest.mark.parametrize("name", LEGITIMATE)
def test_legitimate_start_is_admitted_with_the_next_token(name: str) -> None:
    claimed, what_is_known = LEGITIMATE[name]
    head = admit(claimed, what_is_known, now=5.0)
    assert head.token == (1 if what_is_known.head is None else what_is_known.head.token + 1)
    assert head.query_id == claimed.query_id
    assert set(head.sinks) == {"kafka", *claimed.sinks}


def test_tokens_follow_the_clock_and_always_rise() -> None:
    """A log that was restored from a backup does not give a token again that was lost with it."""

    def start(head: Head, now: float) -> Head:
        return admit(claim(3), known(2, head=head), now=now)

    backup = start(HEAD, 1.8e9)
    lost = start(backup, 1.8e9 + 60)
    restored = start(backup, 1.8e9 + 3600)
    assert HEAD.token < backup.token < lost.token < restored.token
    assert start(restored, 0.0).token == restored.token + 1


@pytest.mark.parametrize("replaces", [None, QUERY])
def test_nobody_begins_while_a_rewind_has_not_ended(replaces: str | None) -> None:
    """Not even an operator's command, or another checkpoint: the head would forget the rewind."""
    head = replace(HEAD, rewinding_to="before-42")
    start = claim(3) if replaces is None else claim(0, query_id="new", replaces=replaces)
    with pytest.raises(ConfigurationError, match="to the savepoint before-42 has not ended"):
        admit(start, known(2, head=head), now=5.0)


def test_starts_that_complete_no_batch_are_counted() -> None:
    heads = [HEAD]
    for _ in range(3):
        heads.append(admit(claim(3), known(2, head=heads[-1]), now=5.0))
    assert [head.starts for head in heads] == [1, 1, 2, 3], "HEAD has completed batch 2"


def unfinished(**shares: Share) -> list[TransactionRecord]:
    return [record(INCARNATION, 2, shares=shares)]


BRANCHES = record(INCARNATION, 2).shares["kafka"].committables

REFUSED: dict[str, tuple[Claim, Known, str]] = {
    "fresh checkpoint under an old name": (
        claim(0, query_id="new"),
        known(),
        f'begin right after the last delivered batch.*replaces="{QUERY}".*with targets of its own',
    ),
    "replaces names another query": (claim(0, query_id="new", replaces="x"), known(), "replaces="),
    "fresh log for an old checkpoint": (
        claim(5, checkpoint_log_id="f" * 16, checkpoint_pipeline="orders"),
        known(head=None),
        r"log= is sqlite:////var/txn\.db.* below 5 is complete .* nothing of batch 5, which Spark",
    ),
    "word for a batch, another log": (
        claim(5, adopt=("batch 5",), checkpoint_log_id="f" * 16, checkpoint_pipeline="orders"),
        known(head=None),
        f'adopt="{"f" * 16}"',
    ),
    "older copy of the checkpoint that has a batch prepared": (
        claim(2, offsets=offsets(1, 2)),
        known(1, 2, **prepared(4)),
        "at batch 2, has not begun it: it was rolled back, copied before, or lost.* --abandon 4",
    ),
    "copy from right before the batch that is prepared": (
        claim(3, offsets=offsets(2), has_begun=False),
        known(1, 2, **prepared(3)),
        "at batch 3, has not begun it",
    ),
    "fresh checkpoint while only the old one can say what commits": (
        claim(0, query_id="new", replaces=QUERY),
        known(unfinished=[replace(record(INCARNATION, 2), state=State.PREPARED)]),
        "start once with that checkpoint.* sparkonce recover JOB .*--abandon 2",
    ),
    "Spark has passed a batch that was abandoned": (
        claim(3),
        known(
            newest=replace(record(INCARNATION, 2), state=State.ABANDONED),
            records={2: replace(record(INCARNATION, 2), state=State.ABANDONED)},
        ),
        "Delete commits/2 and all later .* after offsets/2 .* below state/ with N above 2",
    ),
    "old checkpoint that never met a log": (
        claim(5),
        known(head=None),
        'adopt="batch 5" if .*nothing of batch 5',
    ),
    "old checkpoint that never met a log, adopted at another batch": (
        claim(5, adopt=("batch 4",)),
        known(head=None),
        'adopt="batch 5" if .*nothing of batch 5',
    ),
    "log that has lost its records": (
        claim(5, checkpoint_log_id=LOG_ID, adopt=(LOG_ID,)),
        known(head=None),
        "the log.s records are lost. Restore.*adopt=.batch 5",
    ),
    "query that takes its name back, behind a gap": (
        claim(9, replaces="other"),
        known(1, 2, head=replace(HEAD, query_id="other", retired=(QUERY,))),
        "the next batch of the transaction log .* is 3",
    ),
    "pipeline renamed": (
        claim(3, checkpoint_log_id=LOG_ID, checkpoint_pipeline="old-name"),
        known(head=None),
        "keep the old name.* would be written again",
    ),
    "copy of another pipeline's checkpoint": (
        claim(5, adopt=("batch 5",), namesake="orders-eu"),
        known(head=None),
        "'orders-eu': it is a copy.* a transaction log of its own",
    ),
    "copy of another pipeline's checkpoint that replaces the pipeline's own": (
        claim(5, query_id="copied", adopt=("batch 5",), replaces=QUERY, namesake="orders-eu"),
        known(),
        "'orders-eu': it is a copy",
    ),
    "rolled-back checkpoint, other offsets": (
        claim(2, offsets={2: ("[77]",)}),
        known(1, 2),
        "rolled back.* would be written again",
    ),
    "prepared batch that Spark has made anew": (
        claim(2, offsets={2: ("[77]",)}),
        known(1, records={2: replace(record(INCARNATION, 2), state=State.PREPARED)}),
        "abort what is prepared of it: sparkonce recover JOB",
    ),
    "copied checkpoint, its last batch differs": (
        claim(3, offsets={2: ("[77]",), 3: ("[3]",)}),
        known(1, 2),
        "copied",
    ),
    "rolled back beyond what the log remembers": (
        claim(1),
        known(7, 8),
        "no longer remembers.* would be written again",
    ),
    "checkpoint into which a savepoint is being restored, whatever is adopted": (
        claim(3, adopt=("batch 3", LOG_ID), checkpoint_log_id=RESTORING),
        known(1, 2),
        "a savepoint is being restored into the checkpoint file:/ckpt",
    ),
    "fork whose Spark has run a batch without it": (
        claim(10, checkpoint_log_id=LOG_ID, checkpoint_pipeline="orders"),
        known(head=replace(HEAD, first_batch=9)),
        "the next batch of the transaction log .* is 9",
    ),
    "fork at the savepoint's own batch": (
        claim(8, checkpoint_log_id=LOG_ID, checkpoint_pipeline="orders"),
        known(head=replace(HEAD, first_batch=9)),
        "has delivered up to batch 8",
    ),
    "batches ran without the log": (claim(9), known(2), "nothing of batch 9, which Spark"),
    "Spark's state was repartitioned offline": (
        claim(5),
        known(2, 3),
        'repartition.* a batch of its own.* adopt="batch 5"',
    ),
    "repartitioned after other input": (
        claim(5, offsets=offsets(4), repartitions=1),
        known(2, 3),
        'adopt="batch 5"',
    ),
    "repartitioned after a batch that ran without the log": (
        claim(6, offsets={5: ("[3]",)}, repartitions=1),
        known(2, 3),
        'adopt="batch 6"',
    ),
    "repartitioned, and the checkpoint lacks the offsets": (
        claim(5, repartitions=1),
        known(2, 3),
        'adopt="batch 5"',
    ),
    "repartitioned after an abandoned batch": (
        claim(4, offsets={3: ("[2]",)}, repartitions=1),
        known(1, 2, newest=replace(record(INCARNATION, 2), state=State.ABANDONED)),
        "abandoned and aborted",
    ),
    "repartitioned after a batch that ran without the log, right after a fork": (
        claim(5, offsets={4: ("[3]",)}, repartitions=1),
        known(head=replace(HEAD, first_batch=3)),
        'adopt="batch 5"',
    ),
    "log and targets restored to an earlier time": (
        claim(106),
        known(100),
        "restored to an earlier time, and nothing of batch 101 .* in any sink, delete commits/101",
    ),
    "sink removed while a record names it": (
        claim(3, sinks={}),
        known(2, unfinished=unfinished(kafka=Share("topic", (), BRANCHES))),
        "Start once with the old sinks",
    ),
    "sink's target changed while a record names it": (
        claim(3, sinks={"kafka": "elsewhere"}),
        known(2, unfinished=unfinished(kafka=Share("topic", (), BRANCHES))),
        "is now elsewhere",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_start_that_would_lose_or_repeat_rows_is_refused_with_the_way_out(name: str) -> None:
    claimed, what_is_known, message = REFUSED[name]
    with pytest.raises(ConfigurationError, match=message):
        admit(claimed, what_is_known, now=5.0)


def test_query_that_has_the_name_again_is_not_retired() -> None:
    before = known(1, 2, head=replace(HEAD, query_id="other", retired=("first", QUERY)))
    assert admit(claim(3, replaces="other"), before, now=5.0).retired == ("first", "other")


def test_adopt_that_is_left_in_the_settings_changes_nothing() -> None:
    """Once the checkpoint is adopted the log answers for its batches from the first one on."""
    adopted_head = replace(HEAD, first_batch=5)
    assert (
        admit(claim(9, adopt=("batch 5",)), known(8, head=adopted_head), now=5.0).first_batch == 5
    )
    with pytest.raises(ConfigurationError, match='pass adopt="batch 12" if you know'):
        admit(claim(12, adopt=("batch 5",)), known(8, head=adopted_head), now=5.0)


def test_gap_is_adopted_by_its_batch_and_only_once() -> None:
    """The word names where the log goes on, so that it says nothing of any later gap."""
    word = {"adopt": ("batch 12",)}
    assert admit(claim(12, **word), known(8), now=5.0).first_batch == 12
    head = replace(HEAD, first_batch=12)
    assert admit(claim(13, **word), known(12, head=head), now=5.0).first_batch == 12
    with pytest.raises(ConfigurationError, match='adopt="batch 15"'):
        admit(claim(15, **word), known(12, head=head), now=5.0)


def test_gap_that_the_lost_log_has_delivered_is_adopted() -> None:
    """Checkpoint and word name it; once the checkpoint has this log's id, the word says nothing."""
    word: dict[str, Any] = {"adopt": ("f" * 16,), "checkpoint_pipeline": "orders"}
    lost = claim(12, checkpoint_log_id="f" * 16, **word)
    assert admit(lost, known(8), now=5.0).first_batch == 12
    with pytest.raises(ConfigurationError, match="the batches between ran without it"):
        admit(claim(12, checkpoint_log_id=LOG_ID, **word), known(8), now=5.0)


ADOPTED: dict[str, dict[str, Any]] = {
    "batch 3": {"adopt": ("batch 3",)},
    "batch 7": {"adopt": ("batch 7",)},
    "lost log": {
        "adopt": ("f" * 16,),
        "checkpoint_log_id": "f" * 16,
        "checkpoint_pipeline": "orders",
    },
}


@pytest.mark.parametrize("batch_id", [3, 7])
@pytest.mark.parametrize("word", ADOPTED)
def test_abandoned_batch_is_never_adopted(word: str, batch_id: int) -> None:
    """Its rows are in no sink, whatever the settings say and however far Spark has come."""
    abandoned = replace(record(INCARNATION, 2), state=State.ABANDONED)
    with pytest.raises(ConfigurationError, match="it was abandoned and aborted.*Delete commits/2"):
        admit(claim(batch_id, **ADOPTED[word]), known(newest=abandoned), now=5.0)


def test_crash_before_the_first_decision_after_a_second_adoption_is_no_gap() -> None:
    """The log answers from the adopted batch on, also while older records are still there."""
    adopted_head = replace(HEAD, first_batch=20)
    assert admit(claim(20), known(10, head=adopted_head), now=5.0).first_batch == 20


def test_sink_without_branches_may_go() -> None:
    """An unfinished record in which the removed sink wrote nothing does not hold it back."""
    admit(
        claim(3, sinks={}),
        known(2, unfinished=unfinished(kafka=Share("topic"))),
        now=5.0,
    )


@pytest.mark.parametrize("head", [None, replace(HEAD, run_id="another")])
def test_run_that_goes_on_behind_another_is_fenced(head: Head | None) -> None:
    """Its token would fence that one, and abandon what it has prepared."""
    with pytest.raises(FencedError, match="was taken over by"):
        admit(claim(3, run_id="run", had_token=True), known(2, head=head), 0.0)


INSIDE = "checkpoint:/ckpt"

SAME_PLACE = [
    ("/ckpt", "file:/ckpt"),
    ("file:///ckpt", "file:/ckpt/"),
    ("file:/ckpt", "/ckpt//"),
    ("hdfs://NameNode:8020/a/ckpt/", "hdfs://namenode:8020/a//ckpt"),
    ("s3a://bucket/ckpt", "s3://bucket/ckpt"),
    ("s3a://bucket/a/../ckpt", "s3a://bucket//./ckpt/"),
]


@pytest.mark.parametrize(("recorded", "now"), SAME_PLACE)
def test_checkpoint_with_its_log_is_where_it_was(recorded: str, now: str) -> None:
    """However the location is written."""
    before = known(2, head=replace(HEAD, checkpoint=recorded), log=f"checkpoint:{now}")
    assert admit(claim(3, checkpoint=now), before, now=5.0).token == HEAD.token + 1


def test_checkpoint_with_its_log_behind_a_link(tmp_path: Path) -> None:
    """A checkpoint that was moved, and has a link at its old place, is one place."""
    (tmp_path / "ckpt").mkdir()
    (tmp_path / "old").symlink_to(tmp_path / "ckpt")
    before = known(
        2,
        head=replace(HEAD, checkpoint=f"file:{tmp_path}/old"),
        log=f"checkpoint:{tmp_path}/ckpt",
    )
    assert admit(claim(3, checkpoint=f"file:{tmp_path}/ckpt"), before, now=5.0).token


@pytest.mark.parametrize("name", ["a run of the query", "an operator", "a fresh checkpoint"])
def test_copied_checkpoint_with_its_log_is_refused(name: str) -> None:
    """What the two prepare would have equal names, and each would overwrite or abort the other's.

    The log was copied too, so that it fences nobody at the old place.
    """
    before = known(2, head=replace(HEAD, checkpoint="file:/old"), log=INSIDE)
    asks = claim(3, checkpoint="file:/ckpt")
    if name == "a fresh checkpoint":
        asks = claim(0, checkpoint="file:/ckpt", query_id="new", replaces=QUERY)
        before = replace(before, newest=None, records={})
    if name == "an operator":
        asks = replace(asks, run_id="operator 1")
    with pytest.raises(ConfigurationError, match="never run again.*adopt=.moved from file:/old."):
        admit(asks, before, now=5.0)
    for word in ("moved from /old", "moved from file:///old/"):
        head = admit(replace(asks, adopt=(word,)), before, now=5.0)
        assert (head.token, head.checkpoint) == (HEAD.token + 1, "file:/ckpt")
    for word in ("moved from /elsewhere", "moved from ", "batch 3", LOG_ID):
        with pytest.raises(ConfigurationError, match="never run again"):
            admit(replace(asks, adopt=(word,)), before, now=5.0)


def test_word_for_a_move_says_nothing_of_the_next_one() -> None:
    """Left in the settings, it admits no copy of what was moved."""
    word = ("moved from /old",)
    moved = known(2, head=replace(HEAD, checkpoint="file:/ckpt"), log="checkpoint:/third")
    with pytest.raises(ConfigurationError, match="moved from file:/ckpt"):
        admit(claim(3, checkpoint="/third", adopt=word), moved, now=5.0)


@pytest.mark.parametrize("log", ["sqlite:////var/txn.db", "checkpoint:/shared/logs"])
def test_log_elsewhere_takes_a_checkpoint_that_was_moved(log: str) -> None:
    """It is one log for both places, so that it fences, and compares offsets."""
    before = known(2, head=replace(HEAD, checkpoint="file:/old"), log=log)
    assert admit(claim(3, checkpoint="file:/ckpt"), before, now=5.0).checkpoint == "file:/ckpt"


def test_log_of_an_older_version_does_not_know_its_checkpoint() -> None:
    """It is admitted where it is, and its place is noted from then on."""
    before = known(2, head=replace(HEAD, checkpoint=""), log=INSIDE)
    assert admit(claim(3, checkpoint="file:/ckpt"), before, now=5.0).checkpoint == "file:/ckpt"


def test_gap_in_a_checkpoint_that_was_moved_takes_two_words() -> None:
    """Spark's state was repartitioned on the way."""
    before = known(2, head=replace(HEAD, checkpoint="file:/old"), log=INSIDE)
    words = ("moved from /old", "batch 5")
    assert admit(claim(5, checkpoint="/ckpt", adopt=words), before, now=5.0).first_batch == 5


@pytest.mark.parametrize("seen", ["", "older"])
def test_driver_that_slept_before_its_first_token_fences_nobody(seen: str) -> None:
    """Another run has begun since it looked: the last token would win, and stop a healthy one."""
    with pytest.raises(FencedError, match="host:1 .run run. .* start this query again"):
        admit(claim(3, run_id="new", seen_run=seen), known(2), now=5.0)


def test_start_without_a_batch_fences_no_other_object_of_its_run() -> None:
    """The other object serves the run: its batch would be abandoned while Spark commits it."""
    asks = claim(3, run_id="run", seen_run="older", has_batch=False)
    with pytest.raises(FencedError, match="there is nothing to do"):
        admit(asks, known(2), now=5.0)
    assert admit(replace(asks, had_token=True), known(2), now=5.0).run_id == "run"
    assert admit(replace(asks, has_batch=True), known(2), now=5.0).run_id == "run"
    assert admit(replace(asks, is_repeated=True), known(2), now=5.0).run_id == "run"


@pytest.mark.parametrize("head", [None, HEAD, replace(HEAD, run_id="new")])
def test_driver_that_has_seen_the_newest_run_is_admitted(head: Head | None) -> None:
    """Also where that run has taken one token more, or its own token was taken and not told."""
    seen = "" if head is None else "run"
    asks = claim(3 if head else 0, run_id="new", seen_run=seen)
    assert admit(asks, known(*[2] if head else [], head=head), now=5.0).run_id == "new"


@pytest.mark.parametrize("given", [True, False, "batch", "yes", "batch 1 ", ["batch 1", True]])
def test_adopt_says_what_is_adopted(given: Any) -> None:
    """A blank cheque is refused, and the forms are named."""
    with pytest.raises(ConfigurationError, match='"batch 12".*id.*"moved from /old/checkpoint"'):
        adopted(given)


def test_adopt_takes_one_word_or_several() -> None:
    assert adopted(None) == ()
    assert adopted("batch 12") == ("batch 12",)
    assert adopted(["moved from /a b", "f" * 16]) == ("moved from /a b", "f" * 16)
