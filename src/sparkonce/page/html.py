"""How HTML is made, here and in the reports of the test kit: rules of the templates, and style."""

from __future__ import annotations

from importlib.resources import files

from jinja2 import BaseLoader, Environment, StrictUndefined


def templates(loader: BaseLoader) -> Environment:
    """Templates that escape what they show, and refuse a name that is not there."""
    return Environment(
        loader=loader,
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def style() -> str:
    """The style sheet."""
    return files("sparkonce.page").joinpath("style.css").read_text(encoding="utf-8")
