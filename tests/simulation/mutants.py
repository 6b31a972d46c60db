"""Bugs to seed: each breaks one rule of the protocol, and something has to turn red.

A mutant is a named replacement of source text. `tests.simulation.mutate` applies it to a copy of
the tree and runs what is meant to catch it: the simulation, unit tests, or both.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

COORDINATOR: Final = "spark_hooks/coordinator.py"
ORPHANS: Final = "spark_hooks/orphans.py"
REWRITE: Final = "spark_hooks/rewrite.py"
RULED: Final = "spark_hooks/ruled.py"
LOG: Final = "txn_log/base.py"
RULES: Final = "txn_log/rules.py"
RECORD: Final = "txn_log/record.py"
IDENTITY: Final = "txn_log/identity.py"
SQLITE: Final = "txn_log/sqlite.py"
SINK: Final = "sinks/base.py"
FILE_SINK: Final = "sinks/file.py"
MODEL: Final = "src/sparkonce/model.py"


@dataclass(frozen=True, slots=True)
class Edit:
    """One replacement; the old text is in the file exactly once."""

    file: str
    old: str
    new: str


@dataclass(frozen=True, slots=True)
class Mutant:
    """A seeded bug.

    Attributes:
        name: what is wrong.
        invariant: the one that it breaks first.
        edits: the bug.
        tests: pytest node ids that have to fail.
        simulated: whether the simulation has to fail, too.
    """

    name: str
    invariant: str
    edits: tuple[Edit, ...]
    tests: tuple[str, ...] = ()
    simulated: bool = True


def _coordinator(name: str, invariant: str, old: str, new: str) -> Mutant:
    return Mutant(name, invariant, (Edit(COORDINATOR, old, new),))


def _tested(name: str, invariant: str, edit: Edit, *tests: str) -> Mutant:
    return Mutant(name, invariant, (edit,), tests, simulated=False)


_BEFORE_THE_DECISION: Final = (
    _coordinator(
        "commit before decide",
        "I2",
        '        if self._policy == "immediate":\n',
        '        if self._policy == "immediate":\n'
        "            self._commit(record, is_replayed=True)\n",
    ),
    _coordinator(
        "safe_until ignored",
        "I2",
        "committable.safe_until <= now:",
        "committable.safe_until <= -1.0:",
    ),
    _coordinator(
        "abort after decide was sent",
        "I7",
        "except (PrepareRejectedError, ProtocolError):",
        "except Exception:",
    ),
    _coordinator(
        "decide again after the abort",
        "I7",
        "            self.sweep()  # every try before was answered: nothing was written\n"
        "            raise\n",
        "            self.sweep()\n"
        "            return self._patiently(lambda: write(record), what)\n",
    ),
    _coordinator(
        "batch N+1 begun while N is undecided",
        "I5",
        "if self.pending is not None and not self.settle():",
        "if False:",
    ),
    _coordinator(
        "no orphan is ever aborted",
        "I8",
        "errors = sink.abort_many(orphans) if orphans else ()",
        "errors = [None for _ in orphans]",
    ),
    _tested(
        "recovery with a problem leaves merges that hold locks",
        "I8",
        Edit(
            COORDINATOR,
            "if not any(isinstance(problem, FencedError) for problem in problems):",
            "if not problems:",
        ),
        "tests/test_coordinator.py::test_recovery_that_fails_sweeps_all_the_same",
    ),
    _tested(
        "batch decided behind a driver with a copy of the log",
        "I6",
        Edit(COORDINATOR, "                self._check_is_next(record)\n", ""),
        "tests/test_coordinator.py::test_driver_that_wakes_behind_one_with_another_copy_of_the_log",
    ),
    _tested(
        "batch decided that Spark's commit log has",
        "I6",
        Edit(
            COORDINATOR,
            "self._is_ours() and not self._is_checkpointed(record)",
            "self._is_ours()",
        ),
        "tests/test_coordinator.py::test_driver_that_begins_late_behind_one_with_a_copy_of_the_log",
    ),
    _tested(
        "another driver's commits/N taken for this one's",
        "I6",
        Edit(COORDINATOR, "            if not self._is_ours():  #", "            if False:  #"),
        "tests/test_coordinator.py::"
        "test_driver_that_wakes_with_its_batch_prepared_behind_one_with_a_copy_of_the_log",
    ),
    _tested(
        "two branches of one name decided",
        "I1",
        Edit(COORDINATOR, "        if len(set(names)) != len(names):\n", "        if False:\n"),
        "tests/test_coordinator.py::test_two_branches_of_one_name_abort_the_batch",
    ),
)

_RECOVERY: Final = (
    _coordinator(
        "abandonment not logged before the abort",
        "I1",
        '        reach("abandon.before", batch=batch_id)\n',
        "        for found in record.committables():\n"
        "            self._all_sinks[found.branch_id.sink].abort(found)\n"
        '        reach("abandon.before", batch=batch_id)\n',
    ),
    _coordinator(
        "PREPARED decided without looking at Spark's commit log",
        "I5",
        "        if is_checkpointed:\n",
        "        if True:\n",
    ),
    _coordinator(
        "PREPARED abandoned without looking at Spark's commit log",
        "I5",
        "        if is_checkpointed:\n",
        "        if False:\n",
    ),
    _coordinator(
        "abandoned batch committed",
        "I2",
        "            if record.state is not State.DECIDED:\n",
        "            if record.state is State.COMPLETE:\n",
    ),
    _coordinator(
        "recovery passes over what is decided",
        "I8",
        "            if record.state is not State.DECIDED:\n",
        "            if True:\n",
    ),
    _coordinator(
        "no sweep at recovery",
        "I8",
        "            self.sweep()  # what is left over may",
        "            pass  # what is left over may",
    ),
    _coordinator(
        "no drain of a batch that is complete",
        "I5",
        "            batch.drain()\n",
        "            pass\n",
    ),
    _coordinator(
        "decided and unfinished batch drained, not finished",
        "I5",
        "            if standing.state is State.DECIDED:\n                self._finish",
        "            if standing.state is None:\n                self._finish",
    ),
    _tested(
        "batch that another driver has prepared drained",
        "I5",
        Edit(
            COORDINATOR,
            "            if standing.state is State.PREPARED:\n                # Nothing",
            "            if False:\n                # Nothing",
        ),
        "tests/test_coordinator.py"
        "::test_driver_paused_before_it_looks_leaves_what_another_has_prepared",
    ),
)

_COMMIT: Final = (
    _coordinator(
        "complete before the commits",
        "I1",
        "        is_replayed = batch is not None\n        lost = self._commit",
        "        is_replayed = batch is not None\n"
        "        self._complete(record)\n        lost = self._commit",
    ),
    Mutant(
        "unknown taken for committed",
        "I1",
        (
            Edit(
                SINK,
                "            # An error that the sink does not name says nothing about the "
                "outcome.\n",
                "            return None\n",
            ),
        ),
    ),
    _coordinator(
        "unknown taken for lost",
        "I3",
        "            left[:] = [c for c, error in outcomes if",
        "            outcomes = [(c, PreparedBranchLostError(str(error))"
        " if isinstance(error, CommitUnresolvedError) else error) for c, error in outcomes]\n"
        "            left[:] = [c for c, error in outcomes if",
    ),
    _coordinator(
        "loss passed over",
        "I1",
        "        if lost:\n            why = ",
        "        if False:\n            why = ",
    ),
    _coordinator(
        "redo without amendment",
        "I2",
        "            return self._log.amend(amended, self.incarnation.token)\n",
        "            return amended\n",
    ),
    _coordinator(
        "content not compared in the redo",
        "I1",
        "            if told := rewrite.difference(record, written):\n",
        "            if (told := rewrite.difference(record, written)) and not told:\n",
    ),
    Mutant(
        "redo of one branch writes every partition",
        "I3",
        (
            Edit(
                REWRITE,
                "        return wanted is None or partition in wanted\n",
                "        return sink in self.partitions\n",
            ),
            Edit(
                COORDINATOR,
                "            if told := rewrite.difference(record, written):\n",
                "            if (told := rewrite.difference(record, written)) and not told:\n",
            ),
        ),
    ),
    Mutant(
        "redo of one branch writes the sink whole",
        "I4",
        (
            Edit(
                REWRITE,
                "            partitions[name] = frozenset(by_task[branch] for branch in gone)\n",
                "            partitions[name] = None\n",
            ),
        ),
    ),
    Mutant(
        "redo forgets the branches that are not lost",
        "I3",
        (Edit(REWRITE, "if c.branch_id.name not in gone),\n", "if False),\n"),),
    ),
    _tested(
        "safe_until ignored in the redo",
        "I2",
        Edit(
            COORDINATOR,
            "            self._check_safe(record.id, "
            "(c for s in voted.values() for c in s.committables))\n",
            "",
        ),
        "tests/test_coordinator.py::test_branch_written_again_that_is_too_old_is_not_named",
    ),
)

_SWEEP: Final = (
    Mutant(
        "sweep hits a decided branch",
        "I1",
        (Edit(ORPHANS, " or branch_id.name in named:", ":"),),
    ),
    Mutant(
        "sweep hits a younger driver's branch",
        "I6",
        (Edit(ORPHANS, " or branch_id.token > token", ""),),
    ),
    Mutant(
        "staging part not protected from a sweep",
        "I1",
        (Edit(RECORD, "            yield from (part.branch for part in share.parts)\n", ""),),
    ),
    Mutant(
        "names without the token",
        "I6",
        (Edit(MODEL, "{self.owner.prefix}t{self.token}.", "{self.owner.prefix}t1."),),
    ),
)

_LOG_RULES: Final = (
    Mutant(
        "token not checked",
        "I6",
        (Edit(RULES, "if head is None or head.token != token:", "if head is None:"),),
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
    Mutant(
        "token not raised by a new driver",
        "I6",
        (Edit(IDENTITY, "head.token + 1", "head.token"),),
    ),
    Mutant(
        "second decision replaces the first",
        "I3",
        (
            Edit(
                RULES,
                "    if standing is not None and standing.state is not State.ABANDONED:\n"
                "        return standing\n",
                "",
            ),
            Edit(RULES, "    if record.id.batch_id != expected:\n", "    if False:\n"),
        ),
    ),
    Mutant(
        "records forgotten up to the newest",
        "I3",
        (
            Edit(
                RULES,
                "below = min(record.id.batch_id, record.id.batch_id - retain + 1)",
                "below = record.id.batch_id + 1",
            ),
        ),
    ),
    Mutant(
        "late abandonment hits the replay",
        "I5",
        (Edit(RULES, "    if standing.token != record.token:", "    if False:"),),
        ("tests/test_log.py::TestSqliteLog::test_abandonment_that_lands_late_spares_the_replay",),
    ),
    _tested(
        "log takes a batch behind an undecided one",
        "I5",
        Edit(RULES, "    if undecided:\n", "    if False:\n"),
        "tests/test_log.py::TestSqliteLog::test_batch_does_not_follow_an_undecided_one",
    ),
    _tested(
        "no fsync (synchronous=OFF)",
        "I3",
        Edit(SQLITE, "PRAGMA synchronous = FULL", "PRAGMA synchronous = OFF"),
        "tests/test_log.py::TestSqliteLog::test_write_is_synced_to_the_disk",
    ),
    _tested(
        "checksum of a record not compared",
        "I3",
        Edit(RECORD, "    if checksum != _checksum(body):\n", "    if False:\n"),
        "tests/test_log.py::TestSqliteLog::test_changed_record_is_corrupt",
    ),
)

_GUARD_AND_SINKS: Final = (
    Mutant(
        "guard lets a start pass an abandoned batch",
        "I5",
        (
            Edit(
                IDENTITY,
                "    if claim.batch_id > expected:\n",
                "    if False:\n",
            ),
        ),
    ),
    _tested(
        "adopt= lets a start pass an abandoned batch",
        "I5",
        Edit(
            IDENTITY,
            "    if claim.batch_id > expected:\n",
            "    if claim.batch_id > expected and not claim.adopt:\n",
        ),
        "tests/test_coordinator.py::test_frozen_driver_whose_spark_passes_an_abandoned_batch",
    ),
    Mutant(
        "driver that slept before its first token fences its successor",
        "I6",
        (Edit(IDENTITY, "    if head is None or claim.seen_run is None:\n", "    if True:\n"),),
        ("tests/test_identity.py::test_driver_that_slept_before_its_first_token_fences_nobody",),
    ),
    _tested(
        "copy of a checkpoint with its log taken for the checkpoint",
        "I1",
        Edit(IDENTITY, "    if place is None or head is None or not", "    if True or not"),
        "tests/test_identity.py::test_copied_checkpoint_with_its_log_is_refused",
    ),
    _tested(
        "file of another run replaced",
        "I7",
        Edit(FILE_SINK, "os.link(hidden, visible)", "hidden.rename(visible)"),
        "tests/test_file_sink.py::test_commit_replaces_no_file",
    ),
    _tested(
        "guard compares no offsets",
        "I5",
        Edit(IDENTITY, " or tuple(shown) == record.offsets:\n", " or True:\n"),
        "tests/test_coordinator.py::test_batch_that_is_known_with_other_offsets_is_refused",
        "tests/test_coordinator.py::test_second_replayed_batch_with_other_offsets_is_refused",
    ),
    Mutant(
        "vote drops what the tasks prepared",
        "I1",
        (Edit(SINK, "        return committables\n", "        return committables[:1]\n"),),
    ),
    _tested(
        "perishable branches are not committed first",
        "I1",
        Edit(COORDINATOR, "key=lambda c: c.safe_until or math.inf", "key=lambda c: 0"),
        "tests/test_coordinator.py::test_branches_that_expire_first_are_committed_first",
    ),
)

_SETTLEMENT: Final = (
    Mutant(
        "given up branch is committed all the same",
        "I3",
        (
            Edit(
                COORDINATOR,
                "            if record.is_ruled_out(committable):",
                "            if False:",
            ),
        ),
        ("tests/test_settlement.py::test_lost_branch_that_is_settled_keeps_nothing_back",),
    ),
    Mutant(
        "settled branch is left standing for a zombie",
        "I7",
        (
            Edit(
                COORDINATOR,
                "self._all(end, settled)",
                "pass",
            ),
        ),
        (
            "tests/test_settlement.py::test_branch_that_stands_is_ended_before_the_batch_is_finished",
        ),
    ),
    Mutant(
        "commit repeated without a look at the log",
        "I6",
        (Edit(COORDINATOR, "            if unknown is not None:\n", "            if False:\n"),),
        (
            "tests/test_settlement.py::test_driver_that_repeats_a_commit_is_stopped_by_the_word",
            "tests/test_coordinator.py::test_log_that_is_away_puts_the_repeat_of_a_commit_off",
        ),
    ),
    Mutant(
        "settled branch is asked for its proof and not ended",
        "I7",
        (Edit(RULED, "        sink.abort(committable)\n", ""),),
        ("tests/test_settlement.py::test_driver_that_ran_on_is_fenced_by_the_word",),
    ),
    _tested(
        "operator's word above proof",
        "I4",
        Edit(
            COORDINATOR,
            "    if proven is None or isinstance(proven, PreparedBranchLostError):\n",
            "    if isinstance(proven, PreparedBranchLostError):\n",
        ),
        "tests/test_settlement.py::test_branch_that_was_visible_all_along_is_not_redone",
    ),
    Mutant(
        "operator's word shown as proof",
        "I3",
        (Edit(RULES, "State.SETTLED if standing.settled else State.COMPLETE", "State.COMPLETE"),),
        ("tests/test_log.py::TestSqliteLog::test_settled_branch_is_remembered_for_ever",),
    ),
    _tested(
        "older copy of the checkpoint taken for the one that ran",
        "I3",
        Edit(
            COORDINATOR,
            "if is_checkpointed is None or not self._checkpoint.has_offsets(batch_id):",
            "if is_checkpointed is None:",
        ),
        "tests/test_coordinator.py::test_checkpoint_that_has_not_begun_the_batch_abandons_nothing",
    ),
    _tested(
        "checkpoint that cannot be read taken for empty",
        "I5",
        Edit(
            COORDINATOR,
            "if is_checkpointed is None or not",
            "if is_checkpointed is not None and not",
        ),
        "tests/test_settlement.py::test_recovery_without_the_checkpoint_decides_nothing",
    ),
    _tested(
        "settlement without a token",
        "I6",
        Edit(
            RULES,
            "    require_token(store, transaction_id.pipeline, token)\n",
            "",
        ),
        "tests/test_log.py::TestSqliteLog::test_only_what_is_decided_is_settled",
    ),
    _tested(
        "given up branch committed by the sweep",
        "I3",
        Edit(COORDINATOR, " and not record.is_ruled_out(committable)", ""),
        "tests/test_settlement.py::test_ruled_branch_on_a_server_that_went_back_in_time",
    ),
    _tested(
        "committed branches of a settled batch swept",
        "I1",
        Edit(
            COORDINATOR,
            "if record is None or not record.state.is_finished:",
            "if record is None or record.state is not State.COMPLETE:",
        ),
        "tests/test_settlement.py::test_ruled_branch_on_a_server_that_went_back_in_time",
    ),
)

_ASK_FOR_THE_ONE_COMMIT: Final = (
    "                self._patiently(lambda: self._log.complete(done, record.token), "
    'f"find {record.id}")\n'
)
_ONE_PHASE: Final = (
    _tested(
        "lost answer of the one COMMIT taken for a yes",
        "I5",
        Edit(COORDINATOR, _ASK_FOR_THE_ONE_COMMIT, "                pass\n"),
        "tests/test_one_phase.py::test_message_is_lost",
    ),
    _tested(
        "any record taken for the one COMMIT's",
        "I5",
        Edit(
            COORDINATOR,
            _ASK_FOR_THE_ONE_COMMIT,
            "                if self._log.find(record.id) is None:\n"
            "                    raise ProtocolError(record.id)\n",
        ),
        "tests/test_one_phase.py::test_replay_of_an_abandoned_batch_that_does_not_commit",
    ),
    _tested(
        "one phase, though Spark has to commit first",
        "I5",
        Edit(COORDINATOR, '        if self._policy != "immediate":\n', "        if False:\n"),
        "tests/test_one_phase.py::test_policy_that_waits_for_spark_takes_two_phases",
    ),
)

MUTANTS: Final = (
    *_BEFORE_THE_DECISION,
    *_RECOVERY,
    *_COMMIT,
    *_SWEEP,
    *_LOG_RULES,
    *_GUARD_AND_SINKS,
    *_SETTLEMENT,
    *_ONE_PHASE,
)
