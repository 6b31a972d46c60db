"""Sinks with one mistake each, and the test of the contract that sees it.

The sinks that they are made from pass all of it (sinks/test_contracts.py).
"""

from __future__ import annotations

import shutil
import sqlite3
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from examples.http_sink import HttpSink

from sparkonce.errors import (
    CommitUnresolvedError,
    PreparedBranchLostError,
    PrepareRejectedError,
    SparkOnceError,
)
from sparkonce.model import BranchId, Committable, CommittedBatch, Owner
from sparkonce.sinks import FileSink, SqliteSink
from sparkonce.sinks.base import AnySink
from sparkonce.sinks.capabilities import AbortsMany, CommitsMany, Publishes, Votes
from sparkonce.sinks.file import FileHandle, branches_in
from sparkonce.sinks.sqlite import Staged, Staging
from sparkonce.sinks.verbs import abort_each, commit_each
from sparkonce.testing import Proxy, SinkContract, SinkWorld
from sparkonce.testing.sink_world import SCHEMA, Stage
from tests.support.sink_worlds import caught, file_world, http_world, sqlite_world


@pytest.mark.parametrize(
    ("part", "constant"),
    [
        ("batch", {"batch_id": None}),
        ("token", {"token": 0}),
        ("pass", {"write_pass": 0}),
        ("log", {"owner": Owner("0" * 16, "11111111-2222-3333-4444-555555555555")}),
        ("query", {"owner": Owner("0123456789abcdef", "0")}),
    ],
)
def test_part_of_the_branch_id_is_left_out(
    tmp_path: Path, part: str, constant: dict[str, Any]
) -> None:
    """A later branch takes the visible name, which is the proof, of an earlier one."""

    class ShortNames(FileSink):
        def _visible_path(self, branch_id: BranchId) -> Path:
            return super()._visible_path(replace(branch_id, **constant))

    caught(
        file_world(tmp_path, ShortNames),
        lambda contract, stage: contract.test_branches_one_part_apart(stage, stage.sink(), part),
    )


@pytest.mark.parametrize(
    "copy",
    [lambda hidden, visible: visible.write_bytes(hidden.read_bytes()), shutil.copyfile],
    ids=["pathlib", "shutil"],
)
def test_commit_is_a_copy(tmp_path: Path, copy: Callable[[Path, Path], object]) -> None:
    """The copy is there, and so the proof, before its rows are."""

    class Copies(FileSink):
        def commit(self, committable: Committable) -> None:
            hidden = self._hidden_path(committable.branch_id)
            visible = self._visible_path(committable.branch_id)
            if not visible.exists():
                copy(hidden, visible)
                hidden.unlink()

    def killed(contract: SinkContract, stage: Stage) -> None:
        contract.test_process_killed_between_the_lines_of_commit(stage, stage.sink())

    caught(file_world(tmp_path, Copies), killed, pa.ArrowInvalid)


def test_outcome_of_a_batch_is_that_of_all(tmp_path: Path) -> None:
    """One statement for the batch, and one count of its rows: a lost branch is called committed."""

    class Joint(SqliteSink, CommitsMany):
        def commit_many(
            self, committables: Sequence[Committable]
        ) -> Sequence[SparkOnceError | None]:
            branches = [str(c.branch_id) for c in committables]
            marks = ", ".join("?" * len(branches))
            with self._transaction() as db:
                moved = db.execute(
                    f'INSERT INTO "{self._table}" (id, name) SELECT id, name '
                    f'FROM "{self._staging}" WHERE sparkonce_branch IN ({marks})',
                    branches,
                ).rowcount
            lost = moved == 0 and sum(Staged.of(c).rows for c in committables) > 0
            return [
                PreparedBranchLostError("gone", c.branch_id) if lost else None for c in committables
            ]

    def one_is_gone(contract: SinkContract, stage: Stage) -> None:
        contract.test_commit_of_a_batch_gives_an_outcome_for_each(stage, stage.sink())

    caught(sqlite_world(tmp_path / "shop.db", SCHEMA, Joint), one_is_gone)


def test_vote_counts_on_a_task(tmp_path: Path) -> None:
    class FirstOf(FileSink, Votes):
        def vote(
            self, branch_id: BranchId, committables: Sequence[Committable]
        ) -> Sequence[Committable]:
            assert committables[0].version == 1
            return committables

    def without_rows(contract: SinkContract, stage: Stage) -> None:
        contract.test_batch_without_rows(stage, stage.sink())

    caught(file_world(tmp_path, FirstOf), without_rows, IndexError)


def test_attribute_hides_one_of_the_contract(tmp_path: Path) -> None:
    """The query would fail with it at its first batch."""

    class Own(FileSink):
        def __init__(self, folder: Path) -> None:
            super().__init__(folder)
            self.columns = ["id", "name"]  # type: ignore[assignment]

    caught(file_world(tmp_path, Own), SinkContract.test_sink_that_was_never_validated)


def test_commit_counts_on_validate(tmp_path: Path) -> None:
    """A recovery would write files without columns."""

    class Columns(FileSink):
        _columns: tuple[str, ...] = ()

        def validate(self, schema: pa.Schema) -> None:
            super().validate(schema)
            self._columns = tuple(schema.names)

        def commit(self, committable: Committable) -> None:
            hidden = self._hidden_path(committable.branch_id)
            if hidden.exists():
                pq.write_table(pq.read_table(hidden).select(self._columns), hidden)
            super().commit(committable)

    caught(file_world(tmp_path, Columns), SinkContract.test_sink_that_was_never_validated)


class AbortsByPrefix(FileSink):
    """`a1` ends `a12` too."""

    def abort(self, branch: BranchId | Committable) -> None:
        branch_id = branch.branch_id if isinstance(branch, Committable) else branch
        for path in self._hidden.glob(branch_id.name.rstrip(".") + "*"):
            path.unlink()


class AbortsAll(FileSink, AbortsMany):
    """One order for all of an owner's branches, whichever were asked for."""

    def abort_many(self, found: Sequence[Committable]) -> Sequence[Exception | None]:
        return abort_each(self, [c for b in found for c in self.find_branches(b.branch_id.owner)])


class AbortsSilently(FileSink, AbortsMany):
    """Gives no outcomes."""

    def abort_many(self, found: Sequence[Committable]) -> Sequence[Exception | None]:
        return abort_each(self, found)[:0]


class DiscardsAll(FileSink):
    """Tidies the temporary folder up."""

    def discard(self, handle: FileHandle) -> None:
        super().discard(handle)
        for path in self._hidden.iterdir():
            path.unlink()


@pytest.mark.parametrize(
    ("sink", "end"),
    [
        (AbortsByPrefix, "abort"),
        (AbortsAll, "abort_many"),
        (AbortsSilently, "abort_many"),
        (DiscardsAll, "discard"),
    ],
)
def test_end_of_a_branch_ends_others(tmp_path: Path, sink: type[FileSink], end: str) -> None:
    def neighbours(contract: SinkContract, stage: Stage) -> None:
        contract.test_end_of_a_branch_leaves_others_alone(stage, stage.sink(), end, 12, 1)

    caught(file_world(tmp_path, sink), neighbours)


class ChecksThenActs(SqliteSink):
    """Looks for the proof in one transaction, and writes the rows in the next one."""

    def commit(self, committable: Committable) -> None:
        branch, staged = str(committable.branch_id), Staged.of(committable)
        columns = ", ".join(staged.columns)
        with self._transaction() as db:
            proof = "SELECT 1 FROM sparkonce_commits WHERE branch = ?"
            if db.execute(proof, [branch]).fetchone():
                return
            rows = db.execute(
                f'SELECT {columns} FROM "{self._staging}" WHERE sparkonce_branch = ?', [branch]
            ).fetchall()
        if len(rows) != staged.rows:
            raise PreparedBranchLostError("gone", committable.branch_id)
        with self._transaction() as db:
            marks = ", ".join("?" * len(staged.columns))
            db.executemany(f'INSERT INTO "{self._table}" ({columns}) VALUES ({marks})', rows)
            db.execute("INSERT OR IGNORE INTO sparkonce_commits VALUES (?)", [branch])
            db.execute(f'DELETE FROM "{self._staging}" WHERE sparkonce_branch = ?', [branch])


def test_proof_is_looked_for_before_the_act(tmp_path: Path) -> None:
    """A commit that stood still in between acts on what it saw then."""

    def behind_another(contract: SinkContract, stage: Stage) -> None:
        contract.test_commit_that_resumes_after_another_one(stage, stage.sink())

    caught(sqlite_world(tmp_path / "shop.db", SCHEMA, ChecksThenActs), behind_another)


LAG_S = 0.3


def lagging_world(folder: Path, sink: Callable[[Path], AnySink]) -> SinkWorld:
    """Readers see a file some time after it came."""

    def visible() -> list[dict[str, Any]]:
        seen_until = time.time() - LAG_S
        files = [path for path in folder.glob("*.parquet") if path.stat().st_ctime <= seen_until]
        return [row for path in files for row in pq.read_table(path).to_pylist()]

    return replace(file_world(folder, sink), visible=visible, settle_s=LAG_S + 0.1)


class DoublesAgain(FileSink):
    """A commit that is repeated copies the rows."""

    def commit(self, committable: Committable) -> None:
        visible = self._visible_path(committable.branch_id)
        if visible.exists():
            shutil.copyfile(visible, visible.with_name(f"{uuid.uuid4()}.parquet"))
        super().commit(committable)


class ShowsEarly(FileSink):
    """Its preCommit shows the rows."""

    def preCommit(self, handle: FileHandle) -> Committable:
        committable = super().preCommit(handle)
        super().commit(committable)
        return committable


@pytest.mark.parametrize(
    ("sink", "test"),
    [
        (DoublesAgain, SinkContract.test_commit_twice),
        (ShowsEarly, SinkContract.test_rows_become_visible_by_commit_and_not_before),
    ],
)
def test_readers_lag(
    tmp_path: Path, sink: type[FileSink], test: Callable[[SinkContract, Stage, AnySink], None]
) -> None:
    """What readers get later than they should, or too early, comes while nobody looks."""
    caught(
        lagging_world(tmp_path, sink), lambda contract, stage: test(contract, stage, stage.sink())
    )


class CommittedWhereAway(SqliteSink):
    """Takes every error for a commit that was made before."""

    def commit(self, committable: Committable) -> None:
        with suppress(sqlite3.Error):
            super().commit(committable)


class LostWhereAway(SqliteSink):
    """Takes every error for a loss."""

    def commit(self, committable: Committable) -> None:
        try:
            super().commit(committable)
        except sqlite3.Error as error:
            raise PreparedBranchLostError("gone", committable.branch_id) from error


class PreparedWhereAway(SqliteSink):
    """Prepares less than it was given, and does not notice."""

    def beginTransaction(self, branch_id: BranchId) -> Staging:
        return Staging(branch_id)

    def vote(
        self, branch_id: BranchId, committables: Sequence[Committable]
    ) -> Sequence[Committable]:
        return committables

    def write_rows(self, handle: Staging, rows: Sequence[Mapping[str, Any]]) -> None:
        with suppress(sqlite3.Error):
            super().write_rows(handle, rows)


class ListsNothingWhereAway(SqliteSink):
    """Takes every error for an empty list."""

    def find_branches(self, owner: Owner) -> Iterable[Committable]:
        try:
            return list(super().find_branches(owner))
        except (sqlite3.Error, SparkOnceError):
            return []


class AbortsNothingWhereAway(SqliteSink):
    """Takes every error for a branch that is gone."""

    def abort(self, branch: BranchId | Committable) -> None:
        with suppress(sqlite3.Error, SparkOnceError):
            super().abort(branch)


AWAY = [
    CommittedWhereAway,
    LostWhereAway,
    PreparedWhereAway,
    ListsNothingWhereAway,
    AbortsNothingWhereAway,
]


@pytest.mark.parametrize("sink", AWAY)
def test_target_is_away(tmp_path: Path, sink: type[SqliteSink]) -> None:
    def while_away(contract: SinkContract, stage: Stage) -> None:
        contract.test_unreachable_target(stage, stage.sink(), "away")

    caught(sqlite_world(tmp_path / "shop.db", SCHEMA, sink), while_away)


def test_proxy_that_no_request_passes(tmp_path: Path) -> None:
    """The sink connects to the server itself, so nothing can be lost."""

    def cut(contract: SinkContract, stage: Stage) -> None:
        contract.test_network_fails_in_commit(stage, "request lost", is_repeated=False)

    with Proxy(1) as proxy:
        caught(replace(file_world(tmp_path), proxy=proxy), cut)


class TrustsSilence(HttpSink):
    """Takes a request without an answer for one that was carried out."""

    def put(self, branch_id: BranchId, rows: Iterator[pa.RecordBatch]) -> None:
        with suppress(OSError, HTTPException):
            super().put(branch_id, rows)


def test_request_is_lost(tmp_path: Path) -> None:
    """Nobody has the rows, and commit returned."""

    def cut(contract: SinkContract, stage: Stage) -> None:
        contract.test_network_fails_in_commit(stage, "request lost", is_repeated=False)

    with http_world(tmp_path, TrustsSilence) as world:
        caught(world, cut)


class IgnoresTheStatus(HttpSink):
    """Takes any answer for a success, as clients do that raise nothing by themselves."""

    def put(self, branch_id: BranchId, rows: Iterator[pa.RecordBatch]) -> None:
        with suppress(HTTPError):
            super().put(branch_id, rows)


def test_server_answers_with_an_error(tmp_path: Path) -> None:
    """A proxy, which ends connections, does not show it."""

    def refuse(contract: SinkContract, stage: Stage) -> None:
        contract.test_unreachable_target(stage, stage.sink(), "away")

    with http_world(tmp_path, IgnoresTheStatus) as world:
        caught(world, refuse, says="commit returned None while the target was unreachable")


SECRET = "s3cr3t"


class ShowsInTarget(FileSink):
    @property
    def target(self) -> str:
        return f"files://user:{SECRET}@{self._folder}"


class ShowsInRepr(FileSink):
    def __repr__(self) -> str:
        return f"ShowsInRepr(password={SECRET!r})"


class ShowsInCommittable(FileSink):
    def preCommit(self, handle: FileHandle) -> Committable:
        return replace(super().preCommit(handle), text=f"by user:{SECRET}")


class ShowsInErrors(FileSink):
    """Chains the error of its client, which quotes the address."""

    def commit(self, committable: Committable) -> None:
        if not self._folder.exists():
            client = ConnectionError(f"files://user:{SECRET}@host is unreachable")
            raise CommitUnresolvedError("unreachable", committable.branch_id) from client
        super().commit(committable)


@pytest.mark.parametrize(
    ("sink", "where"),
    [
        (ShowsInTarget, "repr, str, target, an error of find_branches"),
        (ShowsInRepr, "repr, str"),
        (ShowsInCommittable, "committable 0"),
        (ShowsInErrors, "an error of commit while the target is unreachable"),
    ],
)
def test_secret_shows(tmp_path: Path, sink: type[FileSink], where: str) -> None:
    """A password in an address reaches logs and the transaction log."""
    world = replace(file_world(tmp_path, sink), secrets=[SECRET])
    says = f"a secret of the world shows in: {where}"
    caught(world, lambda c, stage: c.test_no_secret_shows(stage, stage.sink()), says=says)


class DropsZone(FileSink):
    """Keeps the clock's time of an instant, as if it were UTC's."""

    def write(self, handle: FileHandle, batch: pa.RecordBatch) -> None:
        columns = {
            field.name: pc.assume_timezone(pc.local_timestamp(column), "UTC")
            if pa.types.is_timestamp(field.type) and field.type.tz
            else column
            for field, column in zip(batch.schema, batch.columns, strict=True)
        }
        super().write(handle, pa.record_batch(columns))


def test_zone_of_an_instant_is_dropped(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="missing"):
        SinkContract().test_rows_of_type(
            lambda schema: file_world(tmp_path, DropsZone), "timestamp of a zone"
        )


class RefusesNan(FileSink):
    """Has no NaN, as MariaDB."""

    def write(self, handle: FileHandle, batch: pa.RecordBatch) -> None:
        value = batch["value"]
        if pa.types.is_floating(value.type) and pc.any(pc.is_nan(value)).as_py():
            raise PrepareRejectedError("out of range: nan", handle.branch_id)
        super().write(handle, batch)


class RoundsFloats(RefusesNan):
    def write(self, handle: FileHandle, batch: pa.RecordBatch) -> None:
        value = pc.round(batch["value"])
        super().write(handle, pa.record_batch({"id": batch["id"], "value": value}))


class RefusesByAnother(FileSink):
    """Lets the client's error pass."""

    def write(self, handle: FileHandle, batch: pa.RecordBatch) -> None:
        raise sqlite3.DataError("out of range: nan")


@pytest.mark.parametrize(
    ("sink", "says"),
    [
        (RoundsFloats, "refused other values of the type, and not these; .* get 6 rows and get 6"),
        (RefusesByAnother, "write or preCommit must raise PrepareRejectedError"),
    ],
)
def test_value_is_refused_and_another_is_rounded(
    tmp_path: Path, sink: type[FileSink], says: str
) -> None:
    """One value that the target cannot hold hides no other one that is wrong."""
    with pytest.raises(AssertionError, match=says):
        SinkContract().test_rows_of_type(lambda schema: file_world(tmp_path, sink), "double")


def test_value_is_refused_by_itself(tmp_path: Path) -> None:
    """The reason of the skip names it, and only it."""
    with pytest.raises(pytest.skip.Exception, match=r"refuses \[nan\], the others reach readers"):
        SinkContract().test_rows_of_type(lambda schema: file_world(tmp_path, RefusesNan), "double")


class ListsItsFiles(FileSink):
    """Describes a branch by several lines."""

    def preCommit(self, handle: FileHandle) -> Committable:
        committable = super().preCommit(handle)
        return replace(committable, text=f"{committable.text}\nno other file")


def test_text_for_people_has_several_lines(tmp_path: Path) -> None:
    def described(contract: SinkContract, stage: Stage) -> None:
        contract.test_text_for_people_is_one_line(stage, stage.sink())

    caught(file_world(tmp_path, ListsItsFiles), described)


class PublishesOnce(FileSink, Publishes):
    def publish(self, batch: CommittedBatch) -> None:
        (self._folder / f"_batch-{batch.batch_id}-of-{batch.owner.digest}").touch(exist_ok=False)


class PublishesRows(FileSink, Publishes):
    def publish(self, batch: CommittedBatch) -> None:
        first = batch.committables[0].branch_id
        (self._folder / f"_batch-{first.batch_id}").touch()


class IdlesWithRows(FileSink):
    """Counts on rows before it has to wait for some."""

    def idle(self, handle: FileHandle) -> None:
        if handle.writer is None:
            self.discard(handle)
            raise ValueError("no writer")


@pytest.mark.parametrize(
    ("sink", "test"),
    [
        (PublishesOnce, SinkContract.test_nothing_is_left_after_a_commit),
        (PublishesRows, SinkContract.test_batch_without_rows),
        (IdlesWithRows, SinkContract.test_nothing_is_left_after_a_commit),
    ],
)
def test_optional_verb_fails(
    tmp_path: Path, sink: type[FileSink], test: Callable[[SinkContract, Stage, AnySink], None]
) -> None:
    world = file_world(tmp_path, sink)
    errors = FileExistsError, IndexError, ValueError
    caught(world, lambda contract, stage: test(contract, stage, stage.sink()), *errors)


class DropsProof(SqliteSink):
    """Its abort takes all that it has of the branch."""

    def abort(self, branch: BranchId | Committable) -> None:
        super().abort(branch)
        branch_id = branch.branch_id if isinstance(branch, Committable) else branch
        with self._transaction() as db:
            if self._is_staged(db):
                db.execute("DELETE FROM sparkonce_commits WHERE branch = ?", [str(branch_id)])


@pytest.mark.parametrize(
    "test",
    [
        SinkContract.test_abort_never_undoes_a_commit,
        SinkContract.test_abort_by_the_branch_id_never_undoes_a_commit,
    ],
)
def test_abort_drops_the_proof(
    tmp_path: Path, test: Callable[[SinkContract, Stage, AnySink], None]
) -> None:
    """A commit that was made is called lost: written again, its rows would come twice."""
    world = sqlite_world(tmp_path / "shop.db", SCHEMA, DropsProof)
    caught(world, lambda contract, stage: test(contract, stage, stage.sink()))


class DropsTails(SqliteSink):
    """Sends full chunks once there is one."""

    def write_rows(self, handle: Staging, rows: Sequence[Mapping[str, Any]]) -> None:
        tail = len(rows) % 500 if len(rows) > 500 else 0
        super().write_rows(handle, rows[: len(rows) - tail])


class IdlesAnew(SqliteSink):
    """What was written goes with the connection that it renews."""

    def idle(self, handle: Staging) -> None:
        self.abort(handle.branch_id)
        handle.rows = 0


class KeepsLastProof(SqliteSink):
    def commit(self, committable: Committable) -> None:
        super().commit(committable)
        with self._transaction() as db:
            last = [str(committable.branch_id)]
            db.execute("DELETE FROM sparkonce_commits WHERE branch <> ?", last)


class ProvesByTheFirst(SqliteSink, CommitsMany):
    """Takes the proof of a batch's first branch for that of all."""

    def commit_many(self, committables: Sequence[Committable]) -> Sequence[SparkOnceError | None]:
        first = [str(c.branch_id) for c in committables[:1]]
        with self._transaction() as db:
            proof = "SELECT 1 FROM sparkonce_commits WHERE branch = ?"
            if first and db.execute(proof, first).fetchone():
                return [None] * len(committables)
        return commit_each(self, committables)


class ReadsOthersText(SqliteSink):
    """Keeps text in a format that has its own idea of it."""

    def write_rows(self, handle: Staging, rows: Sequence[Mapping[str, Any]]) -> None:
        super().write_rows(
            handle,
            [{**row, "name": None if row["name"] == "NULL" else row["name"]} for row in rows],
        )


class TakesColumnsByPlace(SqliteSink):
    def write_rows(self, handle: Staging, rows: Sequence[Mapping[str, Any]]) -> None:
        super().write_rows(
            handle, [dict(zip(SCHEMA.names, row.values(), strict=True)) for row in rows]
        )


class KeepsClient(SqliteSink):
    """Its first commit opens what does not pickle."""

    def commit(self, committable: Committable) -> None:
        super().commit(committable)
        self._client = threading.Lock()


@pytest.mark.parametrize(
    ("sink", "test"),
    [
        (DropsTails, SinkContract.test_uneven_record_batches),
        (IdlesAnew, SinkContract.test_rows_come_slowly),
        (KeepsLastProof, SinkContract.test_commits_are_repeated_in_another_order),
        (ProvesByTheFirst, SinkContract.test_amended_batch),
        (ReadsOthersText, SinkContract.test_text_that_looks_like_something_else),
        (KeepsClient, SinkContract.test_sink_travels_after_a_commit),
    ],
)
def test_rows_or_proofs_go_astray(
    tmp_path: Path, sink: type[SqliteSink], test: Callable[[SinkContract, Stage, AnySink], None]
) -> None:
    world = sqlite_world(tmp_path / "shop.db", SCHEMA, sink)
    caught(world, lambda contract, stage: test(contract, stage, stage.sink()))


def test_columns_are_taken_by_their_place(tmp_path: Path) -> None:
    world = sqlite_world(tmp_path / "shop.db", SCHEMA, TakesColumnsByPlace)
    with pytest.raises(AssertionError, match="missing"):
        SinkContract().test_columns_in_another_order(lambda schema: world)


class ShowsWithoutSink(FileSink):
    def _visible_path(self, branch_id: BranchId) -> Path:
        return super()._visible_path(replace(branch_id, sink="any"))


class HidesWithoutLog(FileSink):
    def _hidden_path(self, branch_id: BranchId) -> Path:
        owner = Owner("0" * 16, branch_id.owner.query_id)
        return super()._hidden_path(replace(branch_id, owner=owner))


class CutsNames(FileSink):
    def _visible_path(self, branch_id: BranchId) -> Path:
        path = super()._visible_path(branch_id)
        return path.with_name(f"{path.stem[:100]}.parquet")


@pytest.mark.parametrize(("sink", "part"), [(ShowsWithoutSink, "sink"), (HidesWithoutLog, "log")])
def test_names_meet(tmp_path: Path, sink: type[FileSink], part: str) -> None:
    """Those of two branches that are prepared side by side."""

    def beside(contract: SinkContract, stage: Stage) -> None:
        contract.test_branches_side_by_side(stage, part)

    says = f"two branches that differ only in their {part} got in each"
    caught(file_world(tmp_path, sink), beside, says=says if part == "log" else None)


class LosesItsCommit(FileSink):
    """Does not look for the proof."""

    def commit(self, committable: Committable) -> None:
        if not self._hidden_path(committable.branch_id).exists():
            raise PreparedBranchLostError("gone", committable.branch_id)
        super().commit(committable)


class AbortUndoes(FileSink):
    def abort(self, branch: BranchId | Committable) -> None:
        branch_id = branch.branch_id if isinstance(branch, Committable) else branch
        super().abort(branch)
        self._visible_path(branch_id).unlink(missing_ok=True)


class KeepsFromAbort(FileSink):
    def abort(self, branch: BranchId | Committable) -> None:
        """Returns, and leaves the branch."""


@pytest.mark.parametrize(
    ("sink", "test", "says"),
    [
        (LosesItsCommit, SinkContract.test_commit_by_another_object, "is committed already"),
        (ShowsEarly, SinkContract.test_rows_become_visible_by_commit_and_not_before, "preCommit; "),
        (AbortUndoes, SinkContract.test_abort_never_undoes_a_commit, "abort of a committed branch"),
        (KeepsFromAbort, SinkContract.test_abort_of_a_prepared_task, "returned, but something"),
    ],
)
def test_message_says_what_the_sink_did(
    tmp_path: Path,
    sink: type[FileSink],
    test: Callable[[SinkContract, Stage, AnySink], None],
    says: str,
) -> None:
    """And names the section of the guide that says what it must do."""
    with closing(Stage(file_world(tmp_path, sink))) as stage:
        with pytest.raises((AssertionError, SparkOnceError)) as said:
            test(SinkContract(), stage, stage.sink())
    message = "\n".join([str(said.value), *getattr(said.value, "__notes__", ())])
    assert says in message
    assert "docs/howto/proving-a-sink.md#checklist" in message


def test_names_are_cut(tmp_path: Path) -> None:
    caught(file_world(tmp_path, CutsNames), SinkContract.test_long_names)


class RewritesTable(FileSink):
    """All rows are in one file, with the proofs: a commit reads it, and replaces it."""

    def commit(self, committable: Committable) -> None:
        hidden = self._hidden_path(committable.branch_id)
        whole, proof = self._folder / "all.parquet", str(committable.branch_id).encode()
        tables = [pq.read_table(path) for path in (whole, hidden) if path.exists()]
        proofs = dict.fromkeys(tables[0].schema.metadata or {}, b"") if whole.exists() else {}
        if proof not in proofs:
            rows = pa.concat_tables([table.replace_schema_metadata() for table in tables])
            aside = self._hidden / f"{uuid.uuid4()}"
            pq.write_table(rows.replace_schema_metadata({**proofs, proof: b""}), aside)
            aside.replace(whole)
        hidden.unlink(missing_ok=True)


def test_table_is_read_and_replaced(tmp_path: Path) -> None:
    """A commit that stood still in between takes the next batch away."""

    def behind_another(contract: SinkContract, stage: Stage) -> None:
        contract.test_commit_that_resumes_after_another_one(stage, stage.sink())

    caught(file_world(tmp_path, RewritesTable), behind_another)


class ForgetsAll(SqliteSink):
    """Old and new ones, of every query."""

    def forget_proofs(self, owner: Owner, below: int) -> None:
        with self._transaction() as db:
            db.execute("DELETE FROM sparkonce_commits")


class ForgetsTheWholeQuery(SqliteSink):
    def forget_proofs(self, owner: Owner, below: int) -> None:
        super().forget_proofs(owner, 1 << 62)


@pytest.mark.parametrize("kind", [ForgetsAll, ForgetsTheWholeQuery])
def test_too_many_proofs_are_forgotten(tmp_path: Path, kind: type[SqliteSink]) -> None:
    """A commit that is repeated is called lost, and written again."""
    world = sqlite_world(tmp_path / "shop.db", SCHEMA, kind)
    caught(world, lambda c, stage: c.test_old_proofs_are_forgotten(stage, stage.sink()))


class ListsCommitted(FileSink):
    lists_uncommitted_only = True

    def find_branches(self, owner: Owner) -> Iterable[Committable]:
        return branches_in(self._folder, owner, "parquet")


def test_claims_are_false(tmp_path: Path) -> None:
    """With them fewer tests run, or a sweep commits again."""
    world = replace(file_world(tmp_path), one_branch_a_batch=True, reads_in_order=True)
    for claim in (
        SinkContract.test_one_branch_a_batch_is_true,
        SinkContract.test_reads_in_order_is_true,
    ):
        caught(world, lambda contract, stage, claim=claim: claim(contract, stage, stage.sink()))
    listing = file_world(tmp_path, ListsCommitted)
    caught(listing, lambda c, s: c.test_lists_uncommitted_only_is_true(s, s.sink()))
