"""`sparkonce torture`, as the guide prints it."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from integration_tests.support.command import COMMAND, ERROR, FINE, FOUND

GUIDE = Path(__file__).parents[2] / "docs/howto/torture.md"


@pytest.fixture
def torture(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """A function that runs the command in a folder with the job of the guide."""
    blocks = re.findall(r"```python\n(.+?)```", GUIDE.read_text(), re.DOTALL)
    (tmp_path / "staging.py").write_text("\n".join(blocks))
    (tmp_path / "lake").mkdir()

    def run(*arguments: str, check: int = FINE) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [COMMAND, "torture", *arguments, "--folder", "out"],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=1200,
            check=False,
        )
        assert done.returncode == check, done.stdout + done.stderr
        return done

    return run


def events(folder: Path) -> Sequence[dict[str, str]]:
    return [json.loads(line) for line in (folder / "out/events.jsonl").read_text().splitlines()]


def test_job_of_the_guide_is_clean_and_commands_run(
    torture: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    # With this seed the first fault is the command.
    said = torture(
        *("staging:pipeline", "--hours", "0.0001", "--seed", "2"),
        *("--fault", "server=echo restarted >> restarts.txt"),
    ).stdout
    assert "server: echo restarted" in said
    assert (tmp_path / "restarts.txt").read_text() == "restarted\n"
    assert re.search("^clean; report: .*/out/report.html$", said, re.MULTILINE)
    assert "clean" in (tmp_path / "out/report.html").read_text()
    assert {event["kind"] for event in events(tmp_path)} == {"seed", "start", "command", "look"}


def test_function_of_the_guide_doubles_rows(
    torture: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    with (tmp_path / "staging.py").open("a") as module:
        module.write('\nreaders = {"file": files}\n')
    said = torture("staging:naive", "--seed", "1", check=FOUND).stdout
    assert "doubled in file" in said
    assert "doubled" in (tmp_path / "out/report.html").read_text()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--proxy", "15432"], "expected PORT:HOST:PORT, such as 15432:db.test:5432"),
        (["--readers", "staging.files"], "torture needs `readers`, a dictionary"),
        (["--readers", "nowhere"], "there is no module 'nowhere'"),
        (["--fault", "docker"], "expected NAME=COMMAND, such as 'broker=docker restart broker'"),
    ],
)
def test_mistake_is_named_before_anything_starts(
    torture: Callable[..., subprocess.CompletedProcess[str]],
    tmp_path: Path,
    arguments: Sequence[str],
    said: str,
) -> None:
    assert said in torture("staging:pipeline", *arguments, check=ERROR).stderr
    assert not (tmp_path / "out/checkpoint").exists()


def test_target_that_has_rows_is_refused(
    torture: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    with (tmp_path / "staging.py").open("a") as module:
        module.write('\nreaders["file"] = lambda: [{"id": 3}]\n')
    assert "readers of file get 1 row already" in torture("staging:pipeline", check=ERROR).stderr


def test_reader_of_a_folder_that_does_not_exist(
    torture: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    (tmp_path / "lake").rmdir()
    said = torture("staging:pipeline", check=ERROR).stderr
    assert "the reader of file failed before the first driver (FileNotFoundError" in said


def test_sink_without_a_reader_is_refused(
    torture: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    with (tmp_path / "staging.py").open("a") as module:
        module.write('\nreaders = {"files": files, "sqlite": sqlite}\n')
    said = "readers are of files, sqlite, and the pipeline's sinks are file, sqlite"
    assert said in torture("staging:pipeline", check=ERROR).stderr
