# ruff: noqa: E501 - source text as it is
"""Bugs to seed: each breaks one rule of the protocol, and some test must fail.

A mutant is a named replacement of source text. `tests.simulation.mutate` applies it to a copy of
the tree and runs its catchers: the simulation, unit tests, or both.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

PAGE: Final = "protocol/transaction.py"
DECISIONS: Final = "protocol/decisions.py"
DECIDERS: Final = "protocol/deciders.py"
LEASE: Final = "protocol/lease.py"
DRIVER: Final = "protocol/driver.py"
WRITTEN: Final = "spark_hooks/data_source/written_batch.py"
PREPARING: Final = "protocol/preparing.py"
COMMITTING: Final = "protocol/committing.py"
AMENDING: Final = "protocol/amending.py"
REWRITE: Final = "protocol/rewriting.py"
RULED: Final = "protocol/rulings.py"
SWEEPING: Final = "protocol/sweeping.py"
LOG: Final = "txn_log/base.py"
RULES: Final = "txn_log/rules.py"
RECORD: Final = "txn_log/record.py"
SEALING: Final = "txn_log/sealing.py"
IDENTITY: Final = "txn_log/identity.py"
SQLITE: Final = "txn_log/sqlite.py"
CREATING: Final = "spark_hooks/savepoints/creating.py"
FILLING: Final = "spark_hooks/savepoints/filling.py"
RESTORING: Final = "spark_hooks/savepoints/restoring.py"
REWINDING: Final = "spark_hooks/savepoints/rewinding.py"
VERBS: Final = "sinks/verbs.py"
COMMITTABLES: Final = "sinks/committables.py"
FILE_SINK: Final = "sinks/file.py"
MODEL: Final = "src/sparkonce/model.py"
STEPS: Final = "src/sparkonce/steps.py"


@dataclass(frozen=True, slots=True)
class Edit:
    """One replacement; the file contains the old text exactly once."""

    file: str
    old: str
    new: str


@dataclass(frozen=True, slots=True)
class Mutant:
    """A seeded bug.

    Attributes:
        name: the bug in words.
        invariant: the invariant that it breaks first.
        edits: the replacements that make the bug.
        tests: ids of the pytest tests that must fail.
        simulated: whether the simulation must fail too.
    """

    name: str
    invariant: str
    edits: tuple[Edit, ...]
    tests: tuple[str, ...] = ()
    simulated: bool = True


def _simulated(name: str, invariant: str, file: str, old: str, new: str, *tests: str) -> Mutant:
    """A bug that the simulation finds, and these tests too."""
    return Mutant(name, invariant, (Edit(file, old, new),), tests)


def _tested(name: str, invariant: str, file: str, old: str, new: str, *tests: str) -> Mutant:
    """A bug that only these tests find."""
    return Mutant(name, invariant, (Edit(file, old, new),), tests, simulated=False)


_BEFORE_THE_DECISION: Final = (
    _simulated(
        "commit before decide",
        "I2",
        PAGE,
        "            record = decider.decide(prepared, lease, write_began=write_began)\n",
        "            commit_branches(prepared, lease, is_replayed=True)\n            record = decider.decide(prepared, lease, write_began=write_began)\n",
    ),
    _simulated(
        "safe_until ignored",
        "I2",
        PREPARING,
        "        if kept_s <= passed_s:\n",
        "        if False:\n",
    ),
    _tested(
        "clock that was set back believed",
        "I2",
        PREPARING,
        "    passed_s = max(by_clock_s, steady_s)\n",
        "    passed_s = by_clock_s\n",
        "tests/protocol/test_protocol.py::test_clock_that_is_set_back_after_the_write",
    ),
    _simulated(
        "abort after decide was sent",
        "I7",
        DECIDERS,
        "except (PrepareRejectedError, ProtocolError):\n        sweep",
        "except Exception:\n        sweep",
    ),
    _simulated(
        "decide again after the abort",
        "I7",
        DECIDERS,
        "        sweep(lease)  # it reads the log first, and leaves what a record names\n        raise\n",
        "        sweep(lease)\n        return lease.pipeline.ask_log(lambda: write(record), what)\n",
    ),
    _simulated(
        "batch N+1 begun while N is undecided",
        "I5",
        PAGE,
        "    if not commit_pending(lease, decider):\n",
        "    if False:\n",
    ),
    _simulated(
        "no orphan is ever aborted",
        "I8",
        SWEEPING,
        "errors = verbs.abort_many(sink, orphans) if orphans else ()",
        "errors = [None for _ in orphans]",
    ),
    _tested(
        "recovery with a problem leaves merges that hold locks",
        "I8",
        PAGE,
        "    sweep(lease)  # also after a problem",
        "    if not any(problems):\n        sweep(lease)  # also after a problem",
        "tests/protocol/test_protocol.py::test_recovery_that_fails_sweeps_all_the_same",
    ),
    _tested(
        "batch decided after a driver with a copy of the log",
        "I6",
        DECIDERS,
        "            lease.check_not_overtaken(record.id)\n        elif",
        "        elif",
        "tests/protocol/test_protocol.py::test_driver_that_wakes_behind_one_with_another_copy_of_the_log",
    ),
    _tested(
        "unknown decision sent again behind a driver with a copy of the log",
        "I6",
        DECIDERS,
        "        elif not lease.is_newest_entry():",
        "        elif False:",
        "tests/protocol/test_protocol.py::"
        "test_unknown_decision_is_not_sent_again_behind_a_driver_with_a_copy_of_the_log",
    ),
    _tested(
        "batch decided that Spark's commit log has",
        "I6",
        LEASE,
        "        if not is_newest or is_checkpointed(batch_id, committed):\n",
        "        if not is_newest:\n",
        "tests/protocol/test_protocol.py::test_driver_that_begins_late_behind_one_with_a_copy_of_the_log",
    ),
    _tested(
        "another driver's commits/N taken for its own",
        "I6",
        DECIDERS,
        "    if not lease.is_newest_entry():\n",
        "    if False:\n",
        "tests/protocol/test_protocol.py::"
        "test_driver_that_wakes_with_its_batch_prepared_behind_one_with_a_copy_of_the_log",
    ),
    _tested(
        "two branches of one name decided",
        "I1",
        PREPARING,
        "    if len(set(names)) != len(names):\n",
        "    if False:\n",
        "tests/protocol/test_protocol.py::test_two_branches_of_one_name_abort_the_batch",
    ),
)

_RECOVERY: Final = (
    _simulated(
        "abandonment not logged before the abort",
        "I1",
        PAGE,
        '    with step("abandon", batch=batch_id, pipeline=lease.name) as abandoning:\n',
        '    for found in record.committables():\n        lease.pipeline.all_sinks[found.branch_id.sink].abort(found)\n    with step("abandon", batch=batch_id, pipeline=lease.name) as abandoning:\n',
    ),
    _simulated(
        "PREPARED decided without looking at Spark's commit log",
        "I5",
        DECISIONS,
        "    if is_checkpointed(batch_id, committed):\n",
        "    if True:\n",
    ),
    _simulated(
        "PREPARED abandoned without looking at Spark's commit log",
        "I5",
        DECISIONS,
        "    if is_checkpointed(batch_id, committed):\n",
        "    if False:\n",
    ),
    _simulated(
        "abandoned batch committed",
        "I2",
        PAGE,
        "        if record.state is not State.DECIDED:\n            return None\n",
        "        if record.state is State.COMPLETE:\n            return None\n",
    ),
    _simulated(
        "recovery skips decided batches",
        "I8",
        PAGE,
        "        if record.state is not State.DECIDED:\n            return None\n",
        "        if True:\n            return None\n",
    ),
    _simulated(
        "no sweep at recovery",
        "I8",
        PAGE,
        "    sweep(lease)  # also after a problem",
        "    pass  # also after a problem",
    ),
    _simulated(
        "no drain of a batch that is complete",
        "I5",
        PAGE,
        "        contents = batch.drain()\n",
        "        contents = {}\n",
    ),
    _simulated(
        "decided and unfinished batch drained, not finished",
        "I5",
        PAGE,
        "        if record.state is State.DECIDED:\n            record = commit_or_rewrite(record, batch, lease)",
        "        if not is_replay and record.state is State.DECIDED:\n            record = commit_or_rewrite(record, batch, lease)",
    ),
    _tested(
        "batch that another driver has prepared drained",
        "I5",
        PAGE,
        "    if record.state is State.PREPARED or record.token > lease.token:\n        # Spark has",
        "    if False:\n        # Spark has",
        "tests/protocol/test_protocol.py"
        "::test_driver_paused_before_it_looks_leaves_what_another_has_prepared",
    ),
)

_COMMIT: Final = (
    _simulated(
        "complete before the commits",
        "I1",
        PAGE,
        "    is_replayed = batch is not None\n    lost",
        "    is_replayed = batch is not None\n    complete(record, lease)\n    lost",
    ),
    _simulated(
        "unknown taken for committed",
        "I1",
        VERBS,
        '        return outcome_of_error(sink, "commit", error, committable.branch_id)\n',
        "        return error if isinstance(error, SparkOnceError) else None\n",
    ),
    _simulated(
        "unknown taken for lost",
        "I3",
        COMMITTING,
        "                left = [c for c, error in outcomes if",
        "                outcomes = [(c, PreparedBranchLostError(str(error)) if isinstance(error, CommitUnresolvedError) else error) for c, error in outcomes]\n                left = [c for c, error in outcomes if",
    ),
    _simulated(
        "loss ignored",
        "I1",
        PAGE,
        "    if lost:\n        why = ",
        "    if False:\n        why = ",
    ),
    _simulated(
        "rewrite without amendment",
        "I2",
        AMENDING,
        "    return lease.pipeline.log.amend(amended, lease.token)\n",
        "    return amended\n",
    ),
    _simulated(
        "content not compared in the rewrite",
        "I1",
        AMENDING,
        "    if difference := rewrite.difference(record, written):\n",
        "    if (difference := rewrite.difference(record, written)) and not difference:\n",
    ),
    Mutant(
        "rewrite of one branch writes every partition",
        "I3",
        (
            Edit(
                REWRITE,
                "        return wanted is None or partition in wanted\n",
                "        return sink in self.partitions\n",
            ),
            Edit(
                AMENDING,
                "    if difference := rewrite.difference(record, written):\n",
                "    if (difference := rewrite.difference(record, written)) and not difference:\n",
            ),
        ),
    ),
    _simulated(
        "rewrite of one branch writes the whole sink",
        "I4",
        REWRITE,
        "            partitions[name] = frozenset(by_task[branch] for branch in gone)\n",
        "            partitions[name] = None\n",
    ),
    _simulated(
        "rewrite forgets the branches that are not lost",
        "I3",
        REWRITE,
        "if c.branch_id.name not in gone),\n",
        "if False),\n",
    ),
    _tested(
        "safe_until ignored in the rewrite",
        "I2",
        AMENDING,
        "    check_safe(record.id, branches, now=lease.pipeline.moment(), write_began=write_began)\n",
        "",
        "tests/protocol/test_protocol.py::test_branch_written_again_that_is_too_old_is_not_named",
    ),
)

_SWEEP: Final = (
    _simulated("sweep hits a decided branch", "I1", SWEEPING, " or branch_id.name in named:", ":"),
    _simulated(
        "sweep hits a younger driver's branch",
        "I6",
        SWEEPING,
        " or branch_id.token not in tokens",
        "",
    ),
    _simulated(
        "staging part not protected from a sweep",
        "I1",
        RECORD,
        "            yield from (part.branch for part in share.parts)\n",
        "",
    ),
    _simulated(
        "names without the token",
        "I6",
        MODEL,
        "{self.owner.prefix}t{self.token}.",
        "{self.owner.prefix}t1.",
    ),
)

_LOG_RULES: Final = (
    _simulated(
        "token not checked",
        "I6",
        RULES,
        "if head is None or head.token != token:",
        "if head is None:",
    ),
    Mutant(
        "token checked in a step before the write",
        "I6",
        (
            Edit(
                RULES,
                "    head = require_token(store, record.id.pipeline, record.token)\n",
                "    head = store.head(record.id.pipeline)\n",
            ),
            Edit(
                LOG,
                "        return self._write(lambda store: rules.decide(",
                "        now = record.token if token is None else token\n"
                "        self._read(lambda s: rules.require_token(s, record.id.pipeline, now))\n"
                "        return self._write(lambda store: rules.decide(",
            ),
        ),
    ),
    _simulated("token not raised by a new driver", "I6", IDENTITY, "head.token + 1", "head.token"),
    _tested(
        "token of a lost history given again by a restored log",
        "I6",
        IDENTITY,
        ", int(now) - _START_OF_2025)",
        ", 1)",
        "tests/txn_log/test_identity.py::test_tokens_follow_the_clock_and_always_rise",
    ),
    Mutant(
        "second decision replaces the first",
        "I3",
        (
            Edit(
                RULES,
                "    if stored is not None and stored.state is not State.ABANDONED:\n"
                "        return stored\n",
                "",
            ),
            Edit(RULES, "    if record.id.batch_id != expected:\n", "    if False:\n"),
        ),
    ),
    _simulated(
        "records forgotten up to the newest",
        "I3",
        RULES,
        "below = min(record.id.batch_id, record.id.batch_id - retain + 1)",
        "below = record.id.batch_id + 1",
    ),
    _simulated(
        "late abandonment hits the replay",
        "I5",
        RULES,
        "    if stored.token != record.token:",
        "    if False:",
        "tests/txn_log/test_log.py::TestSqliteLog::test_abandonment_that_lands_late_spares_the_replay",
    ),
    _tested(
        "log accepts a batch after an undecided one",
        "I5",
        RULES,
        "    if undecided:\n",
        "    if False:\n",
        "tests/txn_log/test_log.py::TestSqliteLog::test_batch_does_not_follow_an_undecided_one",
    ),
    _tested(
        "no fsync (synchronous=OFF)",
        "I3",
        SQLITE,
        "PRAGMA synchronous = FULL",
        "PRAGMA synchronous = OFF",
        "tests/txn_log/test_log.py::TestSqliteLog::test_write_is_synced_to_the_disk",
    ),
    _tested(
        "checksum of a record not compared",
        "I3",
        SEALING,
        "    if checksum != _checksum(body):\n",
        "    if False:\n",
        "tests/txn_log/test_log.py::TestSqliteLog::test_changed_record_is_corrupt",
    ),
)

_GUARD_AND_SINKS: Final = (
    _simulated(
        "guard lets a start pass an abandoned batch",
        "I5",
        IDENTITY,
        "    if claim.batch_id > expected:\n",
        "    if False:\n",
    ),
    _tested(
        "adopt= lets a start pass an abandoned batch",
        "I5",
        IDENTITY,
        "    if claim.batch_id > expected:\n",
        "    if claim.batch_id > expected and not claim.adopt:\n",
        "tests/protocol/test_protocol.py::test_frozen_driver_whose_spark_passes_an_abandoned_batch",
    ),
    _simulated(
        "driver paused before its first token fences its successor",
        "I6",
        IDENTITY,
        "    if head is None or claim.seen_run is None:\n",
        "    if True:\n",
        "tests/txn_log/test_identity.py::test_driver_that_slept_before_its_first_token_fences_nobody",
    ),
    _tested(
        "start without a batch fences the object that serves its run",
        "I5",
        IDENTITY,
        "    if head.run_id == claim.run_id and not (claim.has_batch or may_be_its_own):\n",
        "    if False:\n",
        "tests/txn_log/test_identity.py::test_start_without_a_batch_fences_no_other_object_of_its_run",
    ),
    _tested(
        "own token whose answer was lost taken for another object's",
        "I5",
        IDENTITY,
        "    may_be_its_own = claim.had_token or claim.is_repeated\n",
        "    may_be_its_own = claim.had_token\n",
        "tests/txn_log/test_identity.py::test_start_without_a_batch_fences_no_other_object_of_its_run",
    ),
    _tested(
        "copy of a checkpoint with its log taken for the checkpoint",
        "I1",
        IDENTITY,
        "    if place is None or head is None or not",
        "    if True or not",
        "tests/txn_log/test_identity.py::test_copied_checkpoint_with_its_log_is_refused",
    ),
    _tested(
        "file of another run replaced",
        "I7",
        FILE_SINK,
        "os.link(hidden, visible)",
        "hidden.rename(visible)",
        "tests/sinks/test_file.py::test_commit_replaces_no_file",
    ),
    _tested(
        "guard compares no offsets",
        "I5",
        IDENTITY,
        " or tuple(shown) == record.offsets:\n",
        " or True:\n",
        "tests/protocol/test_protocol.py::test_batch_that_is_known_with_other_offsets_is_refused",
        "tests/protocol/test_protocol.py::test_second_replayed_batch_with_other_offsets_is_refused",
    ),
    _simulated(
        "vote drops branches of the tasks",
        "I1",
        VERBS,
        "    return committables\n",
        "    return committables[:1]\n",
    ),
    _tested(
        "perishable branches are not committed first",
        "I1",
        COMMITTING,
        "key=lambda c: c.safe_until or math.inf",
        "key=lambda c: 0",
        "tests/protocol/test_protocol.py::test_branches_that_expire_first_are_committed_first",
    ),
)

_SETTLEMENT: Final = (
    _simulated(
        "branch that is ruled out is committed",
        "I3",
        COMMITTING,
        "        if not record.is_ruled_out(committable):\n",
        "        if True:\n",
        "tests/protocol/test_settlement.py::test_lost_branch_that_is_settled_keeps_nothing_back",
    ),
    _simulated(
        "settled branch stays prepared for a zombie",
        "I7",
        COMMITTING,
        "    running.lease.pipeline.patience.together(end, branches)\n",
        "",
        "tests/protocol/test_settlement.py::test_branch_that_stands_is_ended_before_the_batch_is_finished",
    ),
    _simulated(
        "commit retried without checking the token",
        "I6",
        COMMITTING,
        "        if self._unknown is not None:\n",
        "        if False:\n",
        "tests/protocol/test_settlement.py::test_driver_that_repeats_a_commit_is_stopped_by_the_word",
        "tests/protocol/test_protocol.py::test_log_that_is_away_puts_the_repeat_of_a_commit_off",
    ),
    _simulated(
        "settled branch is asked for its proof and not aborted",
        "I7",
        RULED,
        "        sink.abort(committable)\n",
        "",
        "tests/protocol/test_settlement.py::test_driver_that_ran_on_is_fenced_by_the_word",
    ),
    _tested(
        "operator's ruling above proof",
        "I4",
        RULED,
        "    if proven is None or isinstance(proven, PreparedBranchLostError):\n",
        "    if isinstance(proven, PreparedBranchLostError):\n",
        "tests/protocol/test_settlement.py::test_branch_that_was_visible_all_along_is_not_redone",
    ),
    _simulated(
        "operator's ruling shown as proof",
        "I3",
        RULES,
        "State.SETTLED if stored.settled else State.COMPLETE",
        "State.COMPLETE",
        "tests/txn_log/test_log.py::TestSqliteLog::test_settled_branch_is_remembered_for_ever",
    ),
    _tested(
        "older copy of the checkpoint taken for the one that ran",
        "I3",
        DECISIONS,
        "    if committed is None or not has_begun:\n",
        "    if committed is None:\n",
        "tests/protocol/test_protocol.py::test_checkpoint_that_has_not_begun_the_batch_abandons_nothing",
    ),
    _tested(
        "abandoned by what Spark's commit log showed before a wait",
        "I1",
        PAGE,
        "        if fate() is not Fate.ABANDON:\n",
        "        if False:\n",
        "tests/protocol/test_protocol.py::"
        "test_batch_that_spark_commits_while_the_log_is_unreachable_is_not_abandoned",
    ),
    _tested(
        "checkpoint that cannot be read taken for empty",
        "I5",
        PAGE,
        "        has_begun = committed is not None and checkpoint.has_offsets(batch_id)\n",
        "        committed, has_begun = -1 if committed is None else committed, True\n",
        "tests/protocol/test_settlement.py::test_recovery_without_the_checkpoint_decides_nothing",
    ),
    _tested(
        "settlement without a token",
        "I6",
        RULES,
        "    require_token(store, transaction_id.pipeline, token)\n",
        "",
        "tests/txn_log/test_log.py::TestSqliteLog::test_only_what_is_decided_is_settled",
    ),
    _tested(
        "branch that is ruled out committed by the sweep",
        "I3",
        SWEEPING,
        " and not record.is_ruled_out(committable)",
        "",
        "tests/protocol/test_settlement.py::test_ruled_branch_on_a_server_that_went_back_in_time",
    ),
    _tested(
        "committed branches of a settled batch swept",
        "I1",
        SWEEPING,
        "    if not record.state.is_finished:\n",
        "    if record.state is not State.COMPLETE:\n",
        "tests/protocol/test_settlement.py::test_ruled_branch_on_a_server_that_went_back_in_time",
    ),
)

_ASK_FOR_THE_ONE_COMMIT: Final = (
    "                pipeline.ask_log(lambda: pipeline.log.complete(done, lease.token), looking)\n"
)
_ONE_PHASE: Final = (
    _tested(
        "lost answer of the one COMMIT taken for a yes",
        "I5",
        DECIDERS,
        _ASK_FOR_THE_ONE_COMMIT,
        "                pass\n",
        "tests/protocol/test_one_phase.py::test_message_is_lost",
    ),
    _tested(
        "any record taken for the one COMMIT's",
        "I5",
        DECIDERS,
        _ASK_FOR_THE_ONE_COMMIT,
        "                if pipeline.log.find(done.id) is None:\n                    raise ProtocolError(done.id)\n",
        "tests/protocol/test_one_phase.py::test_replay_of_an_abandoned_batch_that_does_not_commit",
    ),
    _tested(
        "one phase, though Spark must commit first",
        "I5",
        DECIDERS,
        '    if pipeline.commit == "after_checkpoint":\n',
        "    if False:\n",
        "tests/protocol/test_one_phase.py::test_policy_that_waits_for_spark_takes_two_phases",
    ),
)

_LEASE_AND_STEPS: Final = (
    _tested(
        "released lease acts on",
        "I6",
        LEASE,
        "        if self._is_released:\n",
        "        if False:\n",
        "tests/protocol/test_lease.py::test_lease_that_was_released",
    ),
    _tested(
        "token taken again though the run has ended",
        "I6",
        LEASE,
        "            entrance.check_may_begin(is_first_try=not is_again)\n",
        "",
        "tests/protocol/test_protocol.py::test_run_that_ends_while_it_waits_for_a_token_takes_none",
    ),
    _tested(
        "driver that could not enter the checkpoint continues",
        "I6",
        LEASE,
        "        if not entrance.enter(incarnation):\n",
        "        if False:\n",
        "tests/protocol/test_lease.py::test_checkpoint_that_another_driver_has_entered",
    ),
    _tested(
        "fenced driver leaves its prepared branches",
        "I8",
        SWEEPING,
        "        if lease.fenced() is not None:\n",
        "        if False:\n",
        "tests/protocol/test_protocol.py::test_fenced_driver_ends_what_it_prepared",
    ),
    _tested(
        "driver fenced by the checkpoint sweeps",
        "I6",
        SWEEPING,
        "        if lease.fenced() is not None:\n",
        "        if True:\n",
        "tests/protocol/test_protocol.py::test_driver_that_wakes_behind_one_with_another_copy_of_the_log",
    ),
    _tested(
        "vote lost to a left-over branch is not repeated",
        "I8",
        PREPARING,
        "        if not sweep(lease, tokens=range(lease.token)):\n",
        "        if True:\n",
        "tests/protocol/test_protocol.py::test_vote_that_a_left_over_branch_is_in_the_way_of",
    ),
    _tested(
        "sweep before the second vote hits this driver's own branches",
        "I2",
        PREPARING,
        "sweep(lease, tokens=range(lease.token))",
        "sweep(lease, tokens=range(lease.token + 1))",
        "tests/protocol/test_protocol.py::test_vote_that_a_left_over_branch_is_in_the_way_of",
    ),
    _tested(
        "prepared batch forgotten by its decider",
        "I5",
        DECIDERS,
        "            self.pending = _record_first",
        "            return _record_first",
        "tests/protocol/test_protocol.py::test_settling_that_is_interrupted_goes_on",
    ),
    _tested(
        "fail points reached after a step that failed",
        "I8",
        STEPS,
        "        if error is None and failpoints",
        "        if failpoints",
        "tests/protocol/test_steps.py::test_step_that_fails_reaches_no_point_after_it",
    ),
)

_SEVERAL_PROCESSES: Final = (  # format("sparkonce"): plan, commit and abort are separate
    _simulated(
        "token kept over a replay",
        "I8",
        DECISIONS,
        "    return batch_id == last + 1 and committed == last\n",
        "    return batch_id in {last, last + 1} and committed == batch_id - 1\n",
    ),
    _simulated(
        "token kept after another run",
        "I8",
        LEASE,
        "                self.pipeline.ask_log(self.check, looking)\n        except FencedError:\n",
        "                pass\n        except FencedError:\n",
    ),
    _simulated(
        "abort keeps the token of its batch",
        "I7",
        DRIVER,
        "        cls.start(pipeline, claim, entrance).sweep()\n",
        "        head = pipeline.log.head(pipeline.name)\n"
        "        if head is not None and head.run_id == claim.run_id:\n"
        "            from sparkonce.model import Owner\n"
        "            owner = Owner(pipeline.log.id_of(pipeline.name), claim.query_id)\n"
        "            held = Incarnation(pipeline.name, owner, head.token)\n"
        "            cls(Lease(pipeline, held, entrance)).sweep()\n",
    ),
    _simulated(
        "abort sweeps without the log",
        "I1",
        DRIVER,
        "        cls.start(pipeline, claim, entrance).sweep()\n",
        "        lease = cls.start(pipeline, claim, entrance).lease\n"
        "        for sink in pipeline.sinks.values():\n"
        "            for branch in list(sink.find_branches(lease.owner)):\n"
        "                sink.abort(branch)\n",
    ),
    _simulated(
        "abort fences the run that came after",
        "I6",
        IDENTITY,
        "    if claim.had_token and (head is None or head.run_id != claim.run_id):\n"
        "        raise refusals.overtaken(claim, head)\n"
        "    if head is None or claim.seen_run is None:\n",
        "    if head is None or claim.seen_run is None or claim.had_token:\n",
    ),
    _simulated(
        "plan asks for everything of a decided batch",
        "I8",
        PAGE,
        "    record = find(batch, lease)\n    if record is None:\n        return None\n",
        "    record = find(batch, lease)\n"
        "    if record is None or record.state is State.DECIDED:\n        return None\n",
    ),
    _simulated(
        "plan asks for nothing of what is lost",
        "I8",
        PAGE,
        "    return rewrite or Rewrite(record.revision + 1, {})\n",
        "    return Rewrite(record.revision + 1, {})\n",
    ),
    _simulated(
        "sinks of the plan and of the commit not compared",
        "I1",
        WRITTEN,
        "    if targets_of(sinks) != ticket.targets:\n",
        "    if False:\n",
        "tests/spark_hooks/test_data_source.py::test_job_that_changed_while_the_batch_was_written",
    ),
    Mutant(
        "what was planned is not compared with what is lost",
        "I3",
        (
            Edit(
                WRITTEN,
                "        if self.ticket is None or rewrite != self.ticket.rewrite:\n",
                "        if self.ticket is None:\n",
            ),
            Edit(COMMITTABLES, "    if found != wanted:\n", "    if False:\n"),
        ),
    ),
)

_STARTS: Final = "tests/spark_hooks/test_savepoint_starts.py"

_SAVEPOINTS: Final = (
    _simulated(
        "a new checkpoint keeps the query id",
        "I6",
        FILLING,
        "        changes = Changes(str(uuid.uuid4()), ",
        "        changes = Changes(manifest.head.query_id, ",
        f"{_STARTS}::test_log_elsewhere[fork_whose_checkpoint_is_lost]",
        f"{_STARTS}::test_log_elsewhere[old_one_before_the_restored_one]",
    ),
    _simulated(
        "fork begins with the savepoint's own batch",
        "I8",
        RESTORING,
        "        first_batch=manifest.batch + 1,\n",
        "        first_batch=manifest.batch,\n",
        f"{_STARTS}::test_log_elsewhere[forked]",
    ),
    _simulated(
        "restore does not look for later batches",
        "I5",
        REWINDING,
        "    if later := [record.id.batch_id for record in records if not head.is_rewound(record.id)]:\n",
        "    if later := [record.id.batch_id for record in records if False]:\n",
        f"{_STARTS}::test_log_elsewhere[restored_again_while_the_first_ran_on]",
    ),
    _simulated(
        "savepoint of a batch that is not complete",
        "I5",
        CREATING,
        "        if record.state.is_finished and record.id.batch_id <= committed:\n",
        "        if record.id.batch_id <= committed:\n",
    ),
    _tested(
        "savepoint of a batch that Spark has not committed",
        "I5",
        CREATING,
        "        if record.state.is_finished and record.id.batch_id <= committed:\n",
        "        if record.state.is_finished:\n",
        "tests/spark_hooks/test_savepoints.py::test_batch_that_is_not_complete_is_refused",
    ),
    _tested(
        "savepoint restored into a place that has lost the log",
        "I4",
        REWINDING,
        "head.moved_to == log.address and log.head(pipeline) is None:\n",
        "head.moved_to == log.address and False:\n",
        f"{_STARTS}::test_log_inside_the_checkpoint[restored_into_the_place_that_was_lost]",
    ),
)

MUTANTS: Final = (
    *_LEASE_AND_STEPS,
    *_BEFORE_THE_DECISION,
    *_RECOVERY,
    *_COMMIT,
    *_SWEEP,
    *_LOG_RULES,
    *_GUARD_AND_SINKS,
    *_SETTLEMENT,
    *_ONE_PHASE,
    *_SEVERAL_PROCESSES,
    *_SAVEPOINTS,
)
