"""What an executor's interpreter answers; how many tasks may ask a server for connections."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from sparkonce.spark_hooks.probing import complaint, most_tasks, question


@pytest.mark.parametrize(
    ("conf", "tasks"),
    [
        ({}, None),
        ({"spark.executor.instances": "3"}, 3),
        ({"spark.executor.instances": "3", "spark.executor.cores": "4"}, 12),
        ({"spark.executor.instances": "3", "spark.executor.cores": "4", "spark.task.cpus": "2"}, 6),
        ({"spark.dynamicAllocation.enabled": "true", "spark.executor.instances": "3"}, None),
        (
            {
                "spark.dynamicAllocation.enabled": "true",
                "spark.dynamicAllocation.maxExecutors": "10",
                "spark.executor.cores": "4",
            },
            40,
        ),
        ({"spark.executor.instances": "many"}, None),
    ],
)
def test_tasks_at_a_time(conf: dict[str, str], tasks: int | None) -> None:
    assert most_tasks(conf) == tasks


def answer_of(interpreter: str) -> str:
    ran = subprocess.run(
        question(interpreter), input="7\n", capture_output=True, text=True, check=True
    )
    return ran.stdout.rstrip("\n")


def test_interpreter_with_the_driver_s_version() -> None:
    assert complaint(answer_of(sys.executable), sys.executable) is None


@pytest.mark.parametrize(
    ("prints", "what"),
    [
        ("3.9.16 /usr/bin/pypy3", r"\S+ \(/usr/bin/pypy3\) has Python 3\.9, the driver 3\.\d+"),
        ("no such luck", r"\S+ \(\S+/python\) cannot run Python: no such luck"),
    ],
)
def test_interpreter_that_no_task_can_use(tmp_path: Path, prints: str, what: str) -> None:
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\necho {prints}\n")
    python.chmod(0o755)
    found = complaint(answer_of(str(python)), str(python))
    assert found is not None
    assert re.fullmatch(what, found), found


def test_interpreter_that_is_not_there() -> None:
    found = complaint(answer_of("/none/python"), "/none/python")
    assert found is not None
    assert "(/none/python) cannot run Python: " in found
    assert "not found" in found


def test_answer_that_nobody_expects() -> None:
    assert complaint("", "python") is None
