"""The table of starts around savepoints: what a user does, and what comes of it.

Each row ends with a start or a command that is admitted, or refused with a sentence. Whatever is
admitted runs on, and every target shows every number once.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from sparkonce.errors import ConfigurationError, FencedError, SavepointError
from tests.support.savepoint_starts import SIZE, User, killed

Row = Callable[[User], object]
OTHER = SIZE + 1
"""The size of a batch that has other offsets."""

NEVER_AGAIN = (ConfigurationError, "never runs again: .* goes on after batch 2 of it")


@pytest.fixture(autouse=True)
def no_fsync(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many files are written, and no power is lost here."""
    monkeypatch.setattr(os, "fsync", lambda _: None)


def user_of(folder: Path, *, is_inside: bool = False) -> User:
    """A user whose query has three batches, and a savepoint after the third one."""
    user = User(folder, is_inside=is_inside)
    user.start().run(2)
    user.savepoint()
    return user


# -- restore, with a log elsewhere -----------------------------------------------------------------


def restored(user: User) -> None:
    user.restore("new")
    user.start("new").run(2)


def restored_once_the_old_checkpoint_is_lost(user: User) -> None:
    user.lose("old")
    restored(user)


def old_one_before_the_restored_one(user: User) -> None:
    user.restore("new")
    user.start("old")


def old_one_after_the_restored_one(user: User) -> None:
    restored(user)
    user.start("old")


def old_one_that_runs_meanwhile(user: User) -> None:
    run = user.start("old")
    user.savepoint(called="later")
    user.restore("new", called="later")
    user.start("new")
    run.run(2)


def old_one_that_was_paused_before_its_token(user: User) -> None:
    user.restore("new")
    user.start("new")
    user.start("old", seen_run="run 1")


def plain_copy_of_the_restored_one(user: User) -> None:
    user.restore("new")
    user.copy("new", "copy")
    user.start("new").run()
    user.start("copy").run(3)


def plain_copy_that_is_stale(user: User) -> None:
    user.restore("new")
    user.copy("new", "copy")
    user.start("new").run()
    user.start("copy", size=OTHER)


def plain_copy_under_another_name(user: User) -> None:
    user.restore("new")
    user.copy("new", "copy")
    user.start("copy", "other", target="other")


def plain_copy_without_our_files(user: User) -> None:
    user.restore("new")
    user.copy("new", "copy")
    for path in (user.folder / "copy").glob("sparkonce*.json"):
        path.unlink()
    user.start("copy", "other", target="other")


def another_log(user: User) -> None:
    user.restore("new")
    user.start("new", log=f"sqlite:///{user.folder}/other.db")


def start_after_an_interruption(user: User) -> None:
    killed(lambda: user.restore("new", is_killed=True))
    user.start("new")


def restored_again_after_an_interruption(user: User) -> None:
    killed(lambda: user.restore("new", is_killed=True))
    restored(user)


def old_one_during_an_interruption(user: User) -> None:
    killed(lambda: user.restore("new", is_killed=True))
    user.start("old")


def two_restored_ones(user: User) -> None:
    user.restore("new")
    user.restore("second")
    user.start("second").run()
    user.start("new")


def restored_again_while_the_first_ran_on(user: User) -> None:
    restored(user)
    user.restore("second")


def restored_again_into_the_same_folder(user: User) -> None:
    user.restore("new")
    user.lose("new")
    restored(user)


def restored_over_a_checkpoint(user: User) -> None:
    user.restore("new")
    user.restore("new")


def savepoint_of_the_restored_one(user: User) -> None:
    restored(user)
    user.savepoint("new", called="later")
    user.fork(called="later")
    user.start("fork", "fork", target="fork-out").run(2)


# -- forks -----------------------------------------------------------------------------------------


def forked(user: User) -> None:
    user.fork()
    user.start("fork", "fork", target="fork-out").run(2, OTHER)
    user.start("old").run()
    user.start("fork", "fork", target="fork-out")


def forked_with_a_log_of_its_own(user: User) -> None:
    log = f"sqlite:///{user.folder}/own.db"
    user.fork(log=log)
    user.start("fork", "fork", target="fork-out", log=log).run(2, OTHER)
    user.start("old").run()


def forked_and_restored(user: User) -> None:
    user.fork()
    user.start("fork", "fork", target="fork-out").run(2, OTHER)
    restored(user)


def forked_twice(user: User) -> None:
    for name in ("fork", "third"):
        user.fork(name, name, target=f"{name}-out")
        user.start(name, name, target=f"{name}-out", size=OTHER).run()


def fork_that_is_started_twice(user: User) -> None:
    user.fork()
    first = user.start("fork", "fork", target="fork-out")
    user.start("fork", "fork", target="fork-out")
    first.run(2)


def fork_with_the_parents_name(user: User) -> None:
    user.fork("fork", "orders")


def fork_with_the_name_of_a_third_pipeline(user: User) -> None:
    user.fork("third", "third", target="third-out")
    user.fork("fork", "third")


def fork_into_the_parents_target(user: User) -> None:
    user.fork(target="out")


def parent_with_the_forks_checkpoint(user: User) -> None:
    user.fork()
    user.start("fork", "orders")


def fork_with_the_parents_checkpoint(user: User) -> None:
    user.fork()
    user.start("old", "fork", target="fork-out")


def fork_whose_checkpoint_is_lost(user: User) -> None:
    user.fork()
    user.lose("fork")
    user.fork()


def fork_with_a_fresh_checkpoint(user: User) -> None:
    user.fork()
    user.copy("old", "fresh")
    for path in (user.folder / "fresh").glob("sparkonce*.json"):
        path.unlink()
    (user.folder / "fresh" / "metadata").write_text('{"id": "fresh"}')
    user.start("fresh", "fork", target="fork-out")


def fork_whose_log_is_lost(user: User) -> None:
    log = f"sqlite:///{user.folder}/own.db"
    user.fork(log=log)
    user.lose("own.db")
    user.start("fork", "fork", target="fork-out", log=log)


def fork_with_the_wrong_log(user: User) -> None:
    user.fork(log=f"sqlite:///{user.folder}/own.db")
    user.start("fork", "fork", target="fork-out")


def fork_that_ran_without_us(user: User) -> None:
    user.fork()
    for kind in ("offsets", "commits"):
        folder = user.folder / "fork" / kind
        (folder / "3").write_text((user.folder / "old" / kind / "2").read_text())
    user.start("fork", "fork", target="fork-out")


def plain_copy_of_a_fork(user: User) -> None:
    user.fork()
    user.copy("fork", "copy")
    user.start("fork", "fork", target="fork-out")
    user.start("copy", "fork", target="fork-out", size=OTHER)


def plain_copy_of_a_fork_that_was_never_started(user: User) -> None:
    user.fork()
    user.copy("fork", "copy")
    user.start("copy", "fork", target="fork-out", size=OTHER)


def plain_copy_of_a_fork_under_another_name(user: User) -> None:
    user.fork()
    user.copy("fork", "copy")
    user.start("copy", "third", target="third-out")


def plain_copy_of_a_fork_without_our_files(user: User) -> None:
    user.fork()
    user.copy("fork", "copy")
    for path in (user.folder / "copy").glob("sparkonce*.json"):
        path.unlink()
    user.start("copy", "third", target="third-out")


def start_of_a_fork_after_an_interruption(user: User) -> None:
    killed(lambda: user.fork(is_killed=True))
    user.start("fork", "fork", target="fork-out")


def forked_again_after_an_interruption(user: User) -> None:
    killed(lambda: user.fork(is_killed=True))
    forked(user)


def forked_elsewhere_after_an_interruption(user: User) -> None:
    killed(lambda: user.fork(is_killed=True))
    user.fork("elsewhere")


def fork_of_a_fork(user: User) -> None:
    user.fork()
    user.start("fork", "fork", target="fork-out", size=OTHER)
    user.savepoint("fork", "fork", "of-the-fork")
    user.fork("third", "third", target="third-out", called="of-the-fork")
    user.start("third", "third", target="third-out").run()
    user.start("fork", "fork", target="fork-out").run()


# -- a log inside the checkpoint -------------------------------------------------------------------


def old_one_whose_log_has_moved(user: User) -> None:
    restored(user)
    user.start("old")


def old_one_whose_log_is_moving(user: User) -> None:
    killed(lambda: user.restore("new", is_killed=True))
    user.start("old")


def copy_of_the_old_one_from_before(user: User) -> None:
    user.copy("old", "copy")
    restored(user)
    user.start("copy")


def copy_of_the_restored_one(user: User) -> None:
    user.restore("new")
    user.copy("new", "copy")
    user.start("copy")


def copy_of_a_fork(user: User) -> None:
    user.fork()
    user.copy("fork", "copy")
    user.start("copy", "fork", target="fork-out")


def restored_into_the_place_that_was_lost(user: User) -> None:
    """It had later batches: the log of the old place does not know them."""
    restored(user)
    user.lose("new")
    user.restore("new")


def restored_although_the_old_one_is_lost(user: User) -> None:
    user.lose("old")
    user.restore("new", parent=None)
    user.start("new").run()


def lost_one_that_is_restored_again_after_an_interruption(user: User) -> None:
    user.lose("old")
    killed(lambda: user.restore("new", parent=None, is_killed=True))
    user.restore("new", parent=None)
    user.start("new").run()


def fork_whose_place_is_lost(user: User) -> None:
    """Its log is gone with it, and nothing was delivered: it may begin again."""
    user.fork()
    user.lose("fork")
    user.fork()
    user.start("fork", "fork", target="fork-out").run()


ELSEWHERE: dict[Row, tuple[type[Exception], str] | None] = {
    restored: None,
    restored_once_the_old_checkpoint_is_lost: None,
    old_one_before_the_restored_one: NEVER_AGAIN,
    old_one_after_the_restored_one: NEVER_AGAIN,
    old_one_that_runs_meanwhile: (FencedError, "This driver writes nothing more"),
    old_one_that_was_paused_before_its_token: (FencedError, "is the older one"),
    plain_copy_of_the_restored_one: None,
    plain_copy_that_is_stale: (ConfigurationError, "made with source offsets"),
    plain_copy_under_another_name: (ConfigurationError, "belongs to the pipeline 'orders'"),
    plain_copy_without_our_files: (ConfigurationError, "is a copy of that pipeline's checkpoint"),
    another_log: (ConfigurationError, "belongs to the transaction log with id"),
    start_after_an_interruption: (ConfigurationError, "a savepoint is being restored"),
    restored_again_after_an_interruption: None,
    old_one_during_an_interruption: NEVER_AGAIN,
    two_restored_ones: NEVER_AGAIN,
    restored_again_while_the_first_ran_on: (SavepointError, "every batch up to 5"),
    restored_again_into_the_same_folder: None,
    restored_over_a_checkpoint: (SavepointError, "is a checkpoint of 'orders' already"),
    savepoint_of_the_restored_one: None,
    forked: None,
    forked_with_a_log_of_its_own: None,
    forked_and_restored: None,
    forked_twice: None,
    fork_that_is_started_twice: (FencedError, "This driver writes nothing more"),
    fork_with_the_parents_name: (SavepointError, "must have a name of its own"),
    fork_with_the_name_of_a_third_pipeline: (SavepointError, "give the fork another name"),
    fork_into_the_parents_target: (SavepointError, "--share out"),
    parent_with_the_forks_checkpoint: (ConfigurationError, "belongs to the pipeline 'fork'"),
    fork_with_the_parents_checkpoint: (ConfigurationError, "belongs to the pipeline 'orders'"),
    fork_whose_checkpoint_is_lost: (SavepointError, "give the fork another name"),
    fork_with_a_fresh_checkpoint: (ConfigurationError, "is bound to the checkpoint of query"),
    fork_whose_log_is_lost: (ConfigurationError, "belongs to the transaction log with id"),
    fork_with_the_wrong_log: (ConfigurationError, "belongs to the transaction log with id"),
    fork_that_ran_without_us: (ConfigurationError, "the batches between ran without it"),
    plain_copy_of_a_fork: (ConfigurationError, "made with source offsets"),
    plain_copy_of_a_fork_that_was_never_started: None,
    plain_copy_of_a_fork_under_another_name: (ConfigurationError, "to the pipeline 'fork'"),
    plain_copy_of_a_fork_without_our_files: (ConfigurationError, "is a copy of that pipeline's"),
    start_of_a_fork_after_an_interruption: (ConfigurationError, "a savepoint is being restored"),
    forked_again_after_an_interruption: None,
    forked_elsewhere_after_an_interruption: (SavepointError, "give the fork another name"),
    fork_of_a_fork: None,
}

INSIDE: dict[Row, tuple[type[Exception], str] | None] = {
    restored: None,
    old_one_whose_log_has_moved: (ConfigurationError, "was moved to the transaction log"),
    old_one_whose_log_is_moving: (ConfigurationError, "was moved to the transaction log"),
    copy_of_the_old_one_from_before: (ConfigurationError, "is a copy, or was moved"),
    copy_of_the_restored_one: (ConfigurationError, "is a copy, or was moved"),
    copy_of_a_fork: (ConfigurationError, "is a copy, or was moved"),
    start_after_an_interruption: (ConfigurationError, "a savepoint is being restored"),
    restored_again_after_an_interruption: None,
    restored_again_while_the_first_ran_on: (ConfigurationError, "copy it from there"),
    restored_into_the_place_that_was_lost: (SavepointError, "its log is lost there"),
    restored_although_the_old_one_is_lost: None,
    lost_one_that_is_restored_again_after_an_interruption: None,
    forked: None,
    forked_again_after_an_interruption: None,
    fork_of_a_fork: None,
    fork_whose_place_is_lost: None,
    savepoint_of_the_restored_one: None,
}


def outcome(user: User, row: Row, refusal: tuple[type[Exception], str] | None) -> None:
    if refusal is None:
        row(user)
    else:
        kind, sentence = refusal
        with pytest.raises(kind, match=sentence):
            row(user)
    user.check()


@pytest.mark.parametrize("row", ELSEWHERE, ids=lambda row: row.__name__)
def test_log_elsewhere(tmp_path: Path, row: Row) -> None:
    outcome(user_of(tmp_path), row, ELSEWHERE[row])


@pytest.mark.parametrize("row", INSIDE, ids=lambda row: row.__name__)
def test_log_inside_the_checkpoint(tmp_path: Path, row: Row) -> None:
    outcome(user_of(tmp_path, is_inside=True), row, INSIDE[row])
