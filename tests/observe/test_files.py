"""The alert rules, the dashboard and the pages name only what exists, and all of it."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from sparkonce.cli.main import cli
from sparkonce.observe import names

DOCS: Final = Path(__file__).parents[2] / "docs"
ALERTS: Final = DOCS / "assets" / "sparkonce-alerts.yml"
DASHBOARD: Final = DOCS / "assets" / "sparkonce-dashboard.json"
HOW_TO: Final = (DOCS / "howto" / "telemetry.md").read_text()
REFERENCE: Final = (DOCS / "reference" / "metrics.md").read_text()

_NAME: Final = re.compile(r"\b(?:sparkonce|error)_\w+")
_FROM_PROMETHEUS: Final = {"instance", "le"}


def series() -> dict[str, names.Metric]:
    """Every series that Prometheus may have, by its name."""
    found = {}
    for name, metric in names.METRICS.items():
        suffixes = ("_bucket", "_sum", "_count") if metric.kind == "histogram" else ("",)
        found |= {names.prometheus_name(name) + suffix: metric for suffix in suffixes}
    return found


def labels() -> set[str]:
    attributes = {a for metric in names.METRICS.values() for a in metric.attributes}
    return {attribute.replace(".", "_") for attribute in attributes}


def rules() -> list[dict[str, Any]]:
    (group,) = yaml.safe_load(ALERTS.read_text())["groups"]
    found: list[dict[str, Any]] = group["rules"]
    return found


def panels() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(DASHBOARD.read_text())["panels"]
    return found


def expressions() -> Iterator[tuple[str, str]]:
    """Where it is, and the PromQL."""
    for rule in rules():
        yield rule["alert"], rule["expr"]
    for panel in panels():
        for target in panel["targets"]:
            yield panel["title"], target["expr"]


def selectors(expression: str) -> Iterator[tuple[str, set[str]]]:
    """Each series of an expression, with the labels that select from it."""
    known = labels()
    for match in re.finditer(r"\b(sparkonce_\w+)(?:\{([^}]*)\})?", expression):
        if match[1] not in known:
            yield match[1], set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", match[2] or ""))


def grouped(expression: str) -> set[str]:
    """The labels by which an expression groups."""
    lists = re.findall(r"\bby \(([^)]*)\)", expression)
    return {label.strip() for some in lists for label in some.split(",")}


@pytest.mark.parametrize(("where", "expression"), list(expressions()))
def test_series_and_labels_exist(where: str, expression: str) -> None:
    """Each series is in the list of metrics, and has the labels that it is asked for."""
    found = list(selectors(expression))
    assert found, where
    for name, selected in found:
        metric = series().get(name)
        assert metric is not None, f"{where}: there is no {name}"
        has = {attribute.replace(".", "_") for attribute in metric.attributes} | _FROM_PROMETHEUS
        assert selected | grouped(expression) <= has, f"{where}: {name}"
    assert expression.count("(") == expression.count(")")
    assert expression.count("{") == expression.count("}")


def test_labels_in_texts_exist() -> None:
    """Those that Prometheus and Grafana put into summaries and legends."""
    text = ALERTS.read_text() + DASHBOARD.read_text()
    used = set(re.findall(r"\{\{ ?(?:\$labels\.)?(\w+) ?\}\}", text))
    assert used
    assert used - {"else", "end"} <= labels() | _FROM_PROMETHEUS


def test_rules_are_whole() -> None:
    for rule in rules():
        assert rule.keys() <= {"alert", "expr", "for", "labels", "annotations"}
        assert rule["labels"]["severity"] in {"critical", "warning"}
        for label in re.findall(r"\$labels\.(\w+)", rule["annotations"]["summary"]):
            assert label in grouped(rule["expr"]), rule["alert"]
    alerts = [rule["alert"] for rule in rules()]
    assert len(set(alerts)) == len(alerts)


def test_how_to_explains_every_alert_with_its_command() -> None:
    explained = dict(re.findall(r"^\| `(Sparkonce\w+)` \| (.*) \|$", HOW_TO, re.MULTILINE))
    assert set(explained) == {rule["alert"] for rule in rules()}
    for rule in rules():
        command = rule["annotations"]["command"]
        assert command.split()[1] in cli.commands, command
        assert f"`{command}`" in explained[rule["alert"]]


def test_dashboard_shows_every_metric() -> None:
    shown = {
        name for panel in panels() for t in panel["targets"] for name in _NAME.findall(t["expr"])
    }
    for name, metric in names.METRICS.items():
        suffix = "_bucket" if metric.kind == "histogram" else ""
        assert names.prometheus_name(name) + suffix in shown
    for panel in panels():
        assert {*panel["gridPos"]} == {"x", "y", "w", "h"}
    assert len({panel["id"] for panel in panels()}) == len(panels())


def test_reference_has_every_metric() -> None:
    """Each row is what the code has: name, name in Prometheus, type, unit, attributes, meaning."""
    table = REFERENCE.partition("## Spans")[0]
    rows = re.findall(r"^\| `(sparkonce\.[\w.]+)` \| `(\w+)` \| (.*) \|$", table, re.MULTILINE)
    written = {name: (prometheus, *rest.split(" | ")) for name, prometheus, rest in rows}
    expected = {
        name: (
            names.prometheus_name(name),
            metric.kind,
            metric.unit.strip("{}"),
            ", ".join(f"`{a}`" for a in metric.attributes if a != names.PIPELINE),
            metric.description,
        )
        for name, metric in names.METRICS.items()
    }
    assert written == expected
    for attribute in {a for metric in names.METRICS.values() for a in metric.attributes}:
        assert f"| `{attribute}` |" in REFERENCE


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
def test_promtool_accepts_the_rules_and_each_fires_in_its_situation() -> None:
    """`alerts_promtool.yml` has a series for each alert, and one with which none fires."""
    cases = Path(__file__).with_name("alerts_promtool.yml")
    for command in (["check", "rules", str(ALERTS)], ["test", "rules", str(cases)]):
        done = subprocess.run(  # noqa: PLW1510 - its output explains it
            ["promtool", *command],  # noqa: S607
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stdout + done.stderr


def test_cases_for_promtool_have_every_alert() -> None:
    cases = yaml.safe_load(Path(__file__).with_name("alerts_promtool.yml").read_text())["tests"]
    fires = {t["alertname"] for c in cases for t in c["alert_rule_test"] if t.get("exp_alerts")}
    quiet = {t["alertname"] for c in cases for t in c["alert_rule_test"] if not t.get("exp_alerts")}
    assert fires == quiet == {rule["alert"] for rule in rules()}
