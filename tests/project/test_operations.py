"""The pages for operators know every error, and every command that they name is there."""

from __future__ import annotations

import re
from pathlib import Path

import click
import pytest

from sparkonce import errors
from sparkonce.cli.main import cli
from sparkonce.txn_log.settlement import Ruling

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
GUIDES = ("monitoring", "in-doubt", "stuck-query", "adopting", "moving", "leaving", "upgrades")


def text_of(*pages: Path) -> str:
    return "\n".join(page.read_text() for page in pages)


ERRORS = text_of(DOCS / "reference" / "errors.md", *DOCS.glob("reference/errors/*.md"))
COMMANDS = text_of(DOCS / "reference" / "commands.md", *DOCS.glob("reference/commands/*.md"))
TEXT = "\n".join((ERRORS, COMMANDS, text_of(*(DOCS / "howto" / f"{name}.md" for name in GUIDES))))
SOURCES = tuple(
    path
    for folder in ("src/sparkonce", "sinks", "txn_log", "protocol", "spark_hooks")
    for path in (ROOT / folder).rglob("*.py")
)


def section(name: str) -> str:
    found = re.search(rf"^### `{name}`\n(.*?)(?=^#|\Z)", ERRORS, re.MULTILINE | re.DOTALL)
    assert found, f"docs/reference/errors has no section on {name}"
    return " ".join(found[1].split())


@pytest.mark.parametrize("name", errors.__all__)
def test_error_is_in_the_runbook(name: str) -> None:
    """With the command that shows more, or settles it."""
    assert issubclass(getattr(errors, name), errors.SparkOnceError)
    assert re.search(r"`sparkonce (status|log|recover|orphans|settle|doctor)\b", section(name))


def test_runbook_names_no_error_that_is_gone() -> None:
    assert set(re.findall(r"^### `(\w+)`$", ERRORS, re.MULTILINE)) == set(errors.__all__)


def test_every_error_is_in_the_index() -> None:
    """With a link to its section."""
    index = (DOCS / "reference" / "errors.md").read_text()
    for name in set(errors.__all__) - {"SparkOnceError", "SinkError", "LogError"}:
        found = re.search(rf"^\| \[`{name}`\]\((.*?)#{name.lower()}\)", index, re.MULTILINE)
        assert found, name
        assert f"### `{name}`" in (DOCS / "reference" / found[1]).read_text()


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
    code = re.findall(r"```.*?```|`[^`]+`", TEXT, re.DOTALL)
    named = set(
        re.findall(r"\bsparkonce ((?:log|savepoint) \w+|[a-z]+)", " ".join(" ".join(code).split()))
    )
    assert named == commands().keys()


def test_every_option_in_the_runbook_is_there() -> None:
    known = {
        option
        for command in (cli, *commands().values())
        for parameter in command.params
        for option in parameter.opts
    }
    assert set(re.findall(r"`?(--[a-z]+(?:-[a-z]+)*)", TEXT)) <= known | demo_options()


def demo_options() -> set[str]:
    """`demo` hands them on, so that the command line knows them without its extra."""
    source = (ROOT / "src" / "sparkonce" / "demo" / "__main__.py").read_text()
    return set(re.findall(r'"(--[a-z]+)"', source))


@pytest.mark.parametrize("name", commands())
def test_every_option_of_a_command_is_in_its_section(name: str) -> None:
    found = re.search(rf"^## {name}\n(.*?)(?=^## |\Z)", COMMANDS, re.MULTILINE | re.DOTALL)
    assert found, f"docs/reference/commands has no section on {name}"
    parameters = commands()[name].params
    options = {max(p.opts, key=len) for p in parameters if isinstance(p, click.Option)}
    options = demo_options() if name == "demo" else options
    assert options <= set(re.findall(r"--[a-z]+(?:-[a-z]+)*", found[1]))


def test_pages_and_headings_in_messages_are_there() -> None:
    """A message names a page, or a page and one of its headings."""
    named = set()
    for path in SOURCES:
        text = re.sub(r'"\s*\n\s*f?[\'"]', "", path.read_text())
        named |= set(re.findall(r"docs/((?:howto|reference)/[\w/-]+\.md)(?:, ([\w ]+)\))?", text))
    assert ("howto/in-doubt.md", "Settle a branch") in named
    for page, heading in named:
        assert (DOCS / page).is_file(), page
        text = (DOCS / page).read_text()
        assert not heading or re.search(rf"^#+ `?{heading}`?$", text, re.MULTILINE), heading


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
