"""The pages of settings have every parameter of the public classes, with its real default."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from pathlib import Path
from typing import Any, Final

import pytest

from sparkonce import ExactlyOnce
from sparkonce.observe import OpenLineage, OpenTelemetry
from sparkonce.sinks import (
    DeltaSink,
    FileSink,
    IcebergSink,
    IdempotentSink,
    KafkaSink,
    PostgresSink,
    S3Connection,
    S3Objects,
    S3Sink,
    SqliteSink,
    TwoPhaseCommitSink,
)

REFERENCE: Final = Path(__file__).parents[2] / "docs" / "reference"
TEXT: Final = "".join(
    (REFERENCE / page).read_text() for page in ("settings.md", "settings-servers.md")
)

CLASSES: Final[tuple[type, ...]] = (
    ExactlyOnce,
    DeltaSink,
    FileSink,
    IcebergSink,
    IdempotentSink,
    KafkaSink,
    OpenLineage,
    OpenTelemetry,
    PostgresSink,
    S3Connection,
    S3Objects,
    S3Sink,
    SqliteSink,
)
"""Add a public class with parameters here, and a section with its name to the page."""

EVERY_SINK: Final = "Every sink"
REQUIRED: Final = "required"
HEAD: Final = "| name | type | default | unit | meaning |"
COLUMNS: Final = 5

_CODE = re.compile(r"`([^`]+)`")


def section(title: str) -> str:
    found = re.search(rf"^## {re.escape(title)}\n(.*?)(?=^## |\Z)", TEXT, re.MULTILINE | re.DOTALL)
    assert found, f"no page of settings has a section {title!r}"
    return found[1]


def table(title: str) -> dict[str, str]:
    """The default of each parameter, by name, as the section's table shows it."""
    lines = section(title).splitlines()
    found: dict[str, str] = {}
    for line in lines[lines.index(HEAD) + 2 :]:
        if not line.startswith("|"):
            break
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        assert len(cells) == COLUMNS, f"{title}: {line}"
        name, default = _CODE.fullmatch(cells[0]), cells[2]
        assert name, f"{title}: {line}"
        assert cells[1], f"{title}: {name[1]} has no type"
        assert name[1] not in found, f"{title}: {name[1]} is there twice"
        found[name[1]] = REQUIRED if default == REQUIRED else literal(title, default)
    return found


def literal(title: str, cell: str) -> str:
    code = _CODE.fullmatch(cell)
    assert code, f"{title}: the default {cell!r} is no literal in backticks, nor {REQUIRED!r}"
    return repr(ast.literal_eval(code[1]))


def parameters(cls: type) -> dict[str, str]:
    """The default of each parameter of the constructor, by name, as Python writes it."""
    made = {field.name: field for field in fields(cls)} if is_dataclass(cls) else {}
    return {
        name: default_of(parameter, made.get(name))
        for name, parameter in inspect.signature(cls).parameters.items()
    }


def default_of(parameter: inspect.Parameter, field: Field[Any] | None) -> str:
    if field is not None and field.default_factory is not MISSING:
        return repr(field.default_factory())
    if parameter.default is inspect.Parameter.empty:
        return REQUIRED
    default: object = parameter.default
    return repr(dict(default) if isinstance(default, Mapping) else default)


def shared(cls: type) -> dict[str, str]:
    """The parameters that every sink has, which have a table of their own."""
    return table(EVERY_SINK) if issubclass(cls, TwoPhaseCommitSink) else {}


@pytest.mark.parametrize("cls", CLASSES)
def test_page_has_every_parameter_with_its_default(cls: type) -> None:
    """None is missing, none is too many, and no default differs."""
    assert {**shared(cls), **table(cls.__name__)} == parameters(cls)


def test_every_sink_has_what_the_base_class_has() -> None:
    assert table(EVERY_SINK) == parameters(TwoPhaseCommitSink)


def test_page_has_no_section_of_a_class_that_is_gone() -> None:
    titles = re.findall(r"^## (\w+)$", TEXT, re.MULTILINE)
    assert set(titles) == {cls.__name__ for cls in CLASSES}
