"""Failing twins of `LogContract`, one verb or one fault each; test_log_twins.py has the others."""

from __future__ import annotations

import itertools
import os
import sqlite3
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from sparkonce.errors import DecisionUnknownError, LogCorruptError, LogUnavailableError
from sparkonce.model import TransactionId
from sparkonce.testing import LogContract
from sparkonce.txn_log.base import ResultT, Store
from sparkonce.txn_log.claim import Claim
from sparkonce.txn_log.record import Head, Incarnation, State, TransactionRecord
from sparkonce.txn_log.settlement import Settlement
from sparkonce.txn_log.sqlite import _SqliteStore
from tests.support.log_twins import DeletingStore, FolderTwin, SqliteTwin, Twin, caught
from tests.support.twins import name_of


class RoundsTimes(SqliteTwin):
    """Has a column of whole seconds for the times of a record."""

    class Store(_SqliteStore):
        def put(self, record: TransactionRecord) -> None:
            super().put(replace(record, times={s: float(int(t)) for s, t in record.times.items()}))


class KeepsTheFirst(SqliteTwin):
    """Inserts a record, and does not replace the one that is there."""

    class Store(_SqliteStore):
        def put(self, record: TransactionRecord) -> None:
            if self.find(record.id) is None:
                super().put(record)


class DropsAmendments(SqliteTwin):
    """Has no column for what an amendment adds."""

    class Store(_SqliteStore):
        def put(self, record: TransactionRecord) -> None:
            super().put(replace(record, revision=0, lost=()))


class ForgetsSettled(SqliteTwin):
    """Forgets what is finished, also what an operator has settled."""

    class Store(DeletingStore):
        deleted = (
            "pipeline = :pipeline AND query_id = :query_id AND batch_id < :below"
            " AND state IN ('complete', 'settled')"
        )


class ForgetsTheNewest(SqliteTwin):
    """Forgets one batch more than it should."""

    class Store(_SqliteStore):
        def forget(self, pipeline: str, query_id: str, below: int) -> None:
            super().forget(pipeline, query_id, below + 1)


class ForgetsNothing(SqliteTwin):
    class Store(_SqliteStore):
        def forget(self, pipeline: str, query_id: str, below: int) -> None:
            pass


class SettlesAnything(SqliteTwin):
    """Adds a ruling without a look at the batch."""

    def settle(
        self, transaction_id: TransactionId, settlements: Sequence[Settlement], token: int
    ) -> TransactionRecord:
        found = self.find(transaction_id)
        assert found is not None
        settled = replace(found, settled=(*found.settled, *settlements))
        self._write(lambda store: store.put(settled))
        return settled


class DropsRetired(SqliteTwin):
    """Knows the present query only, and none that it has replaced."""

    class Store(_SqliteStore):
        def put_head(self, head: Head) -> None:
            super().put_head(replace(head, retired=()))


class DropsTheCheckpoint(SqliteTwin):
    """Stores the location that the last claim has, also if it has none."""

    def begin(self, claim: Claim) -> Incarnation:
        begun = super().begin(claim)
        head = self.head(claim.pipeline)
        assert head is not None
        self._write(lambda store: store.put_head(replace(head, checkpoint=claim.checkpoint)))
        return begun


class NewestOfAnyQuery(SqliteTwin):
    class Store(_SqliteStore):
        def newest(self, pipeline: str, query_id: str) -> TransactionRecord | None:
            return next(iter(self.history(pipeline, 1)), None)


class PagesOverlap(SqliteTwin):
    """Begins a page with the record that ended the page before."""

    class Store(_SqliteStore):
        def history(
            self, pipeline: str, limit: int, query_id: str | None = None, before: int | None = None
        ) -> Sequence[TransactionRecord]:
            below = None if before is None else before + 1
            return super().history(pipeline, limit, query_id, below)


class DecidesAgain(SqliteTwin):
    """The last decision replaces the first."""

    def decide(self, record: TransactionRecord, token: int | None = None) -> TransactionRecord:
        decided = record.moved(State.DECIDED, 12.25)
        self._write(lambda store: store.put(decided))
        return decided


class ListsDecidedOnly(SqliteTwin):
    """Does not count a prepared batch as unfinished."""

    class Store(_SqliteStore):
        def unfinished(self, pipeline: str) -> Sequence[TransactionRecord]:
            return [r for r in super().unfinished(pipeline) if r.state is State.DECIDED]


class ListsAbandoned(SqliteTwin):
    """Counts every batch as unfinished that is not complete."""

    class Store(_SqliteStore):
        def unfinished(self, pipeline: str) -> Sequence[TransactionRecord]:
            return self._records(
                "WHERE pipeline = ? AND state NOT IN ('complete', 'settled') ORDER BY batch_id",
                pipeline,
            )


class ListsEveryPipeline(SqliteTwin):
    """Lists unfinished batches without the pipeline in its condition."""

    class Store(_SqliteStore):
        def unfinished(self, pipeline: str) -> Sequence[TransactionRecord]:
            return self._records("WHERE state IN ('prepared', 'decided') ORDER BY batch_id")


class AbandonsTheReplay(SqliteTwin):
    """Abandons the batch, whichever driver has prepared it."""

    def abandon(self, record: TransactionRecord, token: int) -> TransactionRecord:
        stored = self.find(record.id)
        return super().abandon(stored or record, token)


class CompletesAgain(SqliteTwin):
    """Stores the time of the last completion, from any driver."""

    def complete(self, record: TransactionRecord, token: int) -> TransactionRecord:
        done = record.moved(State.COMPLETE, time.time())
        self._write(lambda store: store.put(done))
        return done


class TakesTokensFirst(SqliteTwin):
    """Takes the token in one step, and looks at the claim in the next one."""

    def begin(self, claim: Claim) -> Incarnation:
        head = self.head(claim.pipeline)
        if head is not None:
            self._write(lambda store: store.put_head(replace(head, token=head.token + 1)))
        return super().begin(claim)


class AnswersFromItsCache(FolderTwin):
    """Checks the version of a step that writes, and not that of a step that only answers."""

    def _view(self) -> Any:
        view = super()._view()
        view.is_current = lambda: True  # type: ignore[method-assign]
        return view


class CountsTokensItself(SqliteTwin):
    """Every object counts the tokens that it gives."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._count = itertools.count(1)

    def begin(self, claim: Claim) -> Incarnation:
        return replace(super().begin(claim), token=next(self._count))


class ChecksTheTokenFirst(SqliteTwin):
    """Checks the token in one transaction, and writes in the next one."""

    def _write(self, step: Callable[[Store], ResultT]) -> ResultT:
        late: list[Callable[[_SqliteStore], None]] = []

        class Later(_SqliteStore):
            def put(self, record: TransactionRecord) -> None:
                late.append(lambda store: store.put(record))

            def put_head(self, head: Head) -> None:
                late.append(lambda store: store.put_head(head))

        with self._transaction() as connection:
            result = step(Later(connection, self.address))
        with self._transaction() as connection:
            for put in late:
                put(_SqliteStore(connection, self.address))
        return result


class LostIsFailed(SqliteTwin):
    """Takes a write without an answer for one that did not land."""

    def _write(self, step: Callable[[Store], ResultT]) -> ResultT:
        try:
            return super()._write(step)
        except DecisionUnknownError as error:
            raise LogUnavailableError(str(error)) from error


class TrustsColumns(SqliteTwin):
    """Reads what is stored without a look at its checksum."""

    class Store(_SqliteStore):
        def head(self, pipeline: str) -> Head | None:
            with suppress(LogCorruptError):
                return super().head(pipeline)
            return None

        def _records(self, where: str, *values: object) -> list[TransactionRecord]:
            with suppress(LogCorruptError):
                return super()._records(where, *values)
            return []


class ShowsItsPassword(SqliteTwin):
    secrets = ("hunter2",)

    def __repr__(self) -> str:
        return "<ShowsItsPassword ann:hunter2@host>"


class DropsTheFirstLog(SqliteTwin):
    """Has no column for the id of the log in which a pipeline began."""

    class Store(_SqliteStore):
        def put_head(self, head: Head) -> None:
            super().put_head(replace(head, log_id=None))


class CutsRecords(SqliteTwin):
    """Keeps no more than a number of branches of a record, silently."""

    class Store(_SqliteStore):
        def put(self, record: TransactionRecord) -> None:
            shares = {
                name: replace(share, committables=share.committables[:5000])
                for name, share in record.shares.items()
            }
            super().put(replace(record, shares=shares))


class DecidesTogether(DecidesAgain):
    """Decides without a look at the log, just when another process does so too."""

    def decide(self, record: TransactionRecord, token: int | None = None) -> TransactionRecord:
        Path(f"{self._path}.decides-{os.getpid()}").touch()
        latest = time.monotonic() + 30
        while len(list(self._path.parent.glob("*.decides-*"))) < 2 and time.monotonic() < latest:
            time.sleep(0.001)
        return super().decide(record, token)


class BoundToItsProcess(SqliteTwin):
    """Has a client that works only in the process that opened it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._process = os.getpid()
        super().__init__(*args, **kwargs)

    def _connect(self) -> sqlite3.Connection:
        if self._process != os.getpid():
            raise LogUnavailableError("the client was opened in another process")
        return super()._connect()


C = LogContract
PAIRS: list[tuple[Twin, Callable[..., None], str | None]] = [
    (RoundsTimes, C.test_decided_record_reads_back_equal, None),
    (KeepsTheFirst, partial(C.test_verb_in_state, verb="complete", state=State.DECIDED), None),
    (ForgetsSettled, C.test_settled_branch_is_remembered_for_ever, None),
    (SettlesAnything, C.test_only_what_is_decided_is_settled, "DID NOT RAISE"),
    (DropsRetired, C.test_namesake_is_found, None),
    (NewestOfAnyQuery, C.test_newest_record_of_a_query, None),
    (PagesOverlap, C.test_history_is_read_page_by_page, None),
    (DropsTheCheckpoint, C.test_checkpoint_is_remembered, None),
    (DecidesAgain, C.test_first_decision_stands, None),
    (ListsDecidedOnly, C.test_prepared_record_is_decided_once, None),
    (ListsAbandoned, C.test_abandoned_batch_is_recreated_by_its_replay, None),
    (AbandonsTheReplay, C.test_abandonment_that_lands_late_spares_the_replay, None),
    (ListsDecidedOnly, C.test_batch_does_not_follow_an_undecided_one, "DID NOT RAISE"),
    (DropsAmendments, C.test_amendment_takes_the_place_of_the_decision_it_amends, None),
    (CompletesAgain, C.test_complete_is_idempotent, None),
    (ListsEveryPipeline, C.test_pipelines_are_separate, None),
    (TakesTokensFirst, C.test_refused_claim_fences_nobody, "took token"),
    (DropsRetired, C.test_replaced_query_is_remembered, "does not keep"),
    (CompletesAgain, C.test_older_token_can_write_nothing, "DID NOT RAISE"),
    (
        AnswersFromItsCache,
        partial(C.test_answer_without_a_write_is_of_the_newest_state, verb="complete"),
        "DID NOT RAISE",
    ),
    (CountsTokensItself, C.test_tokens_of_racing_processes_differ, None),
    (
        ChecksTheTokenFirst,
        partial(C.test_newer_driver_passes_between_two_round_trips, verb="decide"),
        "log.after commit",
    ),
    (ChecksTheTokenFirst, partial(C.test_much_happens_between_two_round_trips, verb="begin"), None),
    (LostIsFailed, partial(C.test_answer_is_lost, verb="decide"), "failed while committing"),
    (LostIsFailed, C.test_token_whose_answer_is_lost, "failed while committing"),
    (
        TrustsColumns,
        partial(C.test_damaged_record_is_corrupt, old="topic", new="tropic"),
        "DID NOT RAISE",
    ),
    (ShowsItsPassword, C.test_no_secret_is_shown, None),
    (DropsTheFirstLog, C.test_pipeline_moves_here_and_away, "belongs to the transaction log"),
    (ForgetsTheNewest, C.test_forget_keeps_the_newest_and_what_is_unfinished, None),
    (ForgetsNothing, C.test_history_is_bounded, None),
    (ForgetsNothing, C.test_long_history_is_bounded, None),
    (DecidesTogether, C.test_racing_processes_never_both_decide, None),
    (BoundToItsProcess, C.test_forked_child_and_its_parent, None),
    (BoundToItsProcess, C.test_fork_while_another_thread_writes, None),
    (CutsRecords, C.test_ten_thousand_branches_fit_a_record, None),
]


@pytest.mark.parametrize(
    ("twin", "test", "says"),
    PAIRS,
    ids=[f"{twin.__name__}-{name_of(test)}" for twin, test, _ in PAIRS],
)
def test_mistake_of_a_verb_turns_a_test_red(
    tmp_path: Path, twin: Twin, test: Callable[..., None], says: str | None
) -> None:
    caught(twin, test, tmp_path, says)
