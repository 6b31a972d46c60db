"""The samples of the command pages are what the commands print.

page ─► ```              ─► each command, in the state that the page describes
        $ sparkonce …       its output has the lines below it, in their order, but for numbers,
        lines               names and places; a line "…" stands for lines that are left out
"""

from __future__ import annotations

import re
from pathlib import Path

from integration_tests.crash.scenario import PIPELINE, Scenario
from integration_tests.crash.targets import file_target
from integration_tests.support.command import JOB, Operator
from integration_tests.support.pages import blocks, plain

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "docs" / "reference" / name for name in ("commands.md", "commands/acting.md")]
JOB_OF_THE_PAGES = "jobs.orders:pipeline"


def samples() -> list[tuple[list[str], str]]:
    """Arguments and output of each command, in the order of the pages."""
    text = "".join(block for language, block in blocks(PAGES) if not language)
    _, *parts = re.split(r"^\$ sparkonce ", text, flags=re.MULTILINE)
    split = [part.partition("\n") for part in parts]
    return [(re.findall(r'"[^"]*"|\S+', command), shown) for command, _, shown in split]


class Reader:
    """Tries the samples; each of them once."""

    def __init__(self, scenario: Scenario) -> None:
        self.sparkonce = Operator(scenario)
        self.left = samples()

    def tries(self, *command: str, **replaced: str) -> None:
        """The next sample of a command, with some of its arguments replaced."""
        sample = next(s for s in self.left if s[0][: len(command)] == list(command))
        self.left.remove(sample)
        arguments, shown = sample
        given = {JOB_OF_THE_PAGES: JOB, **replaced}
        printed = self.sparkonce.printed(*(given.get(w, w).strip('"') for w in arguments))
        rest = same(printed.replace(PIPELINE, "orders"))
        for part in filter(None, map(same, re.split(r"^…$", shown, flags=re.MULTILINE))):
            _, found, rest = rest.partition(part)
            assert found, f"`{' '.join(arguments)}` prints\n{printed}\nand the page shows\n{shown}"


def same(text: str) -> str:
    """As `plain`; sinks are swept at the same time, so any may be the first to say it."""
    return re.sub(r"<FileSink '\w+'", "<FileSink", plain(text))


def test_samples_of_the_command_pages(tmp_path: Path) -> None:
    targets = [file_target(tmp_path / name, name) for name in ("files", "archive")]
    with Scenario(tmp_path, targets, 6, is_tagged=False) as scenario:
        reader = Reader(scenario)
        scenario.kill_at("vote.after", 3)
        reader.tries("log", "list")
        reader.tries("log", "show")
        reader.tries("log", "tail")
        reader.tries("doctor")
        reader.tries("orphans")
        reader.tries("orphans")
        scenario.kill_at("decide.after", 3)
        reader.tries("status")
        reader.tries("recover")
        scenario.kill_at("decide.after", 4)
        (branch, *_) = scenario.record(4).shares["files"].committables
        (of_the_page,) = [c[4] for c, _ in reader.left if c[0] == "settle"]
        reader.tries("settle", **{of_the_page: branch.branch_id.short, "3": "4"})
        reader.tries("log", "show", **{"3": "4"})
        scenario.commit = "after_checkpoint"
        scenario.write_config("config", scenario.checkpoint)
        scenario.kill_at("hold.after", 5)
        reader.tries("recover")
        address = f"sqlite:///{tmp_path}/new.db"
        old, new = next(c[2:4] for c, _ in reader.left if c[:2] == ["log", "copy"])
        reader.tries("log", "copy", **{old: scenario.log_address, new: address})
        assert reader.left == [], "samples that nobody tries"
        assert f"moved to {address}" in " ".join(
            reader.sparkonce.printed("status", "--log", scenario.log_address).split()
        )
