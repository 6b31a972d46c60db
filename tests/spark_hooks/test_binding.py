"""Which log a checkpoint belongs to: of racing drivers, one alone writes it."""

from __future__ import annotations

from pathlib import Path

import pytest

from sparkonce.errors import ConfigurationError, DecisionUnknownError, LogUnavailableError
from sparkonce.spark_hooks.binding import (
    Binding,
    bind,
    enter,
    is_newest_entry,
    last_entry,
    read_binding,
)
from sparkonce.spark_hooks.checkpoint import checkpoint_folder
from sparkonce.storage import LocalFolder
from tests.support.binding_cases import assert_bound_once


def test_checkpoint_is_bound_once(tmp_path: Path) -> None:
    assert_bound_once(LocalFolder(tmp_path))


def test_drivers_with_one_log_both_bind(tmp_path: Path) -> None:
    """The log keeps those apart, by their tokens."""
    folder = LocalFolder(tmp_path)
    for _ in range(2):
        bind(folder, None, "log-a", "orders")
    bind(folder, read_binding(folder), "log-a", "orders")
    assert read_binding(folder) == Binding("log-a", "orders")


def test_driver_that_looked_before_another_one_entered(tmp_path: Path) -> None:
    """However many have entered since, whose files are gone: it is not let in behind them."""
    folder = LocalFolder(tmp_path)
    entries = [enter(folder, None, "host:1", "run-1")]
    for _ in range(40):
        entries.append(enter(folder, entries[-1], "host:2", "run-2"))
    assert None not in entries
    for seen in [None, *entries[:-1]]:
        assert enter(folder, seen, "host:1", "run-1", "run-0") is None
        assert last_entry(folder) == entries[-1]
    assert enter(folder, entries[-1], "host:2", "run-2") is not None
    assert len(list((tmp_path / "sparkonce-drivers").iterdir())) < 20


class Lossy(LocalFolder):
    """Its answers are lost, or what was written, at some calls of `create`."""

    def __init__(self, root: Path, *faults: str) -> None:
        super().__init__(root)
        self.faults = list(faults)

    def create(self, name: str, text: str) -> bool:
        fault = self.faults.pop(0) if self.faults else None
        if fault == "write":
            raise DecisionUnknownError("it failed")
        done = super().create(name, text)
        if fault == "answer":
            raise DecisionUnknownError("no answer")
        return done and fault != "retried"


@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize(
    "faults", [["write"], ["answer"], ["retried"], ["write", "answer"], ["write", "retried"]]
)
def test_entry_whose_answer_is_lost(tmp_path: Path, faults: list[str], is_first: bool) -> None:
    """It stands or it does not: nobody else has entered, and the driver goes on."""
    seen = None if is_first else enter(LocalFolder(tmp_path), None, "host:0", "run-0")
    folder = Lossy(tmp_path, *faults)
    entry = enter(folder, seen, "host:1", "run-1")
    assert entry is not None
    assert folder.faults == []
    assert is_newest_entry(folder, entry)


def test_entry_that_cannot_be_written(tmp_path: Path) -> None:
    """An outage is no other driver: whoever asked tries again."""
    with pytest.raises(DecisionUnknownError, match="start the query again"):
        enter(Lossy(tmp_path, *["write"] * 9), None, "host:1", "run-1")


@pytest.mark.parametrize("run_id", ["run-0", "run-2"])
def test_driver_whose_token_is_replaced_enters_first(tmp_path: Path, run_id: str) -> None:
    """Both looked before; the one with the newer token goes on behind it. So does its own run."""
    folder = LocalFolder(tmp_path)
    assert enter(folder, None, "host:1", run_id) is not None
    entry = enter(folder, None, "host:2", "run-2", "run-0")
    assert entry is not None
    assert is_newest_entry(folder, entry)


def test_run_that_another_has_followed_does_not_enter_again(tmp_path: Path) -> None:
    """However late it looks: the entries that are kept tell that it was there before."""
    folder = LocalFolder(tmp_path)
    first = enter(folder, None, "host:1", "run-1")
    again = enter(folder, first, "host:1", "run-1")
    assert again is not None, "nobody has followed it yet"
    for number in range(2, 5):
        assert enter(folder, last_entry(folder), f"host:{number}", f"run-{number}") is not None
        newest = last_entry(folder)
        assert enter(folder, newest, "host:1", "run-1") is None
        assert last_entry(folder) == newest


def test_damaged_entry_is_named(tmp_path: Path) -> None:
    assert enter(LocalFolder(tmp_path), None, "host:1", "run-1") is not None
    (file,) = (tmp_path / "sparkonce-drivers").iterdir()
    file.write_text("{")
    with pytest.raises(ConfigurationError, match="sparkonce-drivers/ in .* is damaged"):
        last_entry(LocalFolder(tmp_path))


def test_checkpoint_is_taken_over_again_and_back(tmp_path: Path) -> None:
    """Each takeover is seen as one, though an earlier log comes back."""
    folder = LocalFolder(tmp_path)
    for number, log_id in enumerate(["log-a", "log-b", "log-a", "log-c"]):
        bind(folder, read_binding(folder), log_id, "orders")
        assert read_binding(folder) == Binding(log_id, "orders", number)


def test_bound_as_before_the_takeovers_had_numbers(tmp_path: Path) -> None:
    (tmp_path / "sparkonce.json").write_text('{"log_id": "log-a", "pipeline": "orders"}')
    assert read_binding(LocalFolder(tmp_path)) == Binding("log-a", "orders")


def test_damaged_file_is_named(tmp_path: Path) -> None:
    folder = checkpoint_folder(f"file:{tmp_path}")
    bind(folder, None, "log-a", "orders")
    bind(folder, read_binding(folder), "log-b", "orders")
    (tmp_path / "sparkonce.1.json").write_text("{")
    with pytest.raises(ConfigurationError, match=rf"sparkonce\.1\.json in checkpoint:{tmp_path} "):
        read_binding(folder)


def test_who_may_read_sparks_files_may_read_it(tmp_path: Path) -> None:
    """The doctor is run by an operator, not by the driver's user."""
    bind(checkpoint_folder(str(tmp_path)), None, "log-a", "orders")
    (tmp_path / "metadata").write_text("Spark's")
    modes = {path.stat().st_mode for path in tmp_path.iterdir()}
    assert len(modes) == 1


def test_checkpoint_that_is_away_is_named(tmp_path: Path) -> None:
    away = tmp_path / "ckpt"
    away.write_text("")
    with pytest.raises(LogUnavailableError, match=f"checkpoint:{away} cannot be used now"):
        read_binding(checkpoint_folder(str(away)))
