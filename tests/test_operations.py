"""The runbook knows every error, and every command that it names is there."""

from __future__ import annotations

import re
from pathlib import Path

import click
import pytest

from sparkonce import errors
from sparkonce.cli.main import cli
from sparkonce.txn_log.settlement import Ruling

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "docs" / "operations.md").read_text()


def section(name: str) -> str:
    found = re.search(rf"^### `{name}`\n(.*?)(?=^##)", TEXT, re.MULTILINE | re.DOTALL)
    assert found, f"docs/operations.md has no section on {name}"
    return " ".join(found[1].split())


@pytest.mark.parametrize("name", errors.__all__)
def test_error_is_in_the_runbook(name: str) -> None:
    """With the command that shows more, or settles it."""
    assert issubclass(getattr(errors, name), errors.SparkOnceError)
    assert re.search(r"`sparkonce (status|log|recover|orphans|settle|doctor)\b", section(name))


def test_runbook_names_no_error_that_is_gone() -> None:
    assert set(re.findall(r"^### `(\w+)`$", TEXT, re.MULTILINE)) == set(errors.__all__)


def test_copy_of_a_log_is_compared_with_what_spark_runs_next() -> None:
    """Its commits never have the batch that was in flight, which may be delivered."""
    assert "folder `offsets`" in section("LogCorruptError")


def commands() -> dict[str, click.Command]:
    """By what is typed: "log show"."""
    found: dict[str, click.Command] = {}
    for name, command in cli.commands.items():
        if isinstance(command, click.Group):
            found |= {f"{name} {sub}": one for sub, one in command.commands.items()}
        else:
            found[name] = command
    return found


def test_every_command_is_in_the_runbook_and_no_other() -> None:
    named = set(re.findall(r"sparkonce (log \w+|[a-z]+)", " ".join(TEXT.split())))
    assert commands().keys() <= named
    prose = {"refuses", "wrote"}
    assert named - commands().keys() - prose == set()


def test_every_option_in_the_runbook_is_there() -> None:
    known = {
        option
        for command in commands().values()
        for parameter in command.params
        for option in parameter.opts
    }
    assert set(re.findall(r"`?(--[a-z]+)", TEXT)) <= known


@pytest.mark.parametrize("ruling", list(Ruling))
def test_every_ruling_is_explained(ruling: Ruling) -> None:
    assert re.search(rf"^\| `{ruling.value}` \|", TEXT, re.MULTILINE)


def test_errors_name_a_command_that_can_be_typed() -> None:
    """What an error says to type is taken by the command line."""
    from sparkonce.model import BranchId, Owner

    branch_id = BranchId(Owner("0" * 16, "q"), 7, 3, "kafka", 0, 5)
    said = errors.settle_command(branch_id).strip("`")
    program, name, *arguments = said.replace("committed|aborted|redo", "redo").split()
    assert program == "sparkonce"
    context = commands()[name].make_context(name, arguments)
    assert context.params["branches"] == (branch_id.short,)
