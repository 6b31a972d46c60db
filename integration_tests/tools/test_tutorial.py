"""The tutorial runs as its pages show it: one shell, every file, every command, real kills.

    page ─► ```python with "# NAME.py" ─► a file        ```sh ─► run, in order, in one shell
            ```text after it ─► each of its lines is in what the command printed, but for numbers

A block below a comment "not run by the test" is left out.
"""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import psycopg
import pytest
from confluent_kafka.admin import AdminClient

from integration_tests.support.pages import blocks, plain
from sparkonce.testing.quick_spark import submit_args
from sparkonce.testing.services import KafkaServer, PostgresServer
from sparkonce.testing.services.process import Command, Guard

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / "docs" / "tutorial" / f"{name}.md"
    for name in ("first-job", "kill-it", "three-stores", "recover")
]
MARK = "@@ block"
PATIENCE_S = 900


def script() -> str:
    lines = []
    for number, (language, text) in enumerate(blocks(PAGES)):
        lines.append(f"echo '{MARK} {number}'")
        if language == "python":
            name = re.match(r"# (\w+\.py)\n", text)
            assert name, f"a Python block without the name of its file: {text[:60]}"
            lines.append(f"cat > {name[1]} <<'END OF FILE'\n{text}END OF FILE")
        elif language == "sh":
            lines.append(text)
    return "\n".join(lines)


def run_tutorial(folder: Path, env: Mapping[str, str]) -> str:
    """Run all blocks in one shell; return what they printed, with a mark before each.

    The guard ends what the shell has started and a page has not stopped.
    """
    pages, printed = folder / "tutorial.sh", folder / "printed"
    pages.write_text(f"cd {folder}\n{script()}")
    deadline = time.monotonic() + PATIENCE_S

    def look() -> None:
        """Fail as soon as a program shows a traceback: a page may wait for it."""
        said = [path.read_text(errors="replace") for path in (printed, *folder.glob("*/*.log"))]
        failed = "Traceback (most recent call last)" in "".join(said)
        if failed or time.monotonic() > deadline:
            pytest.fail("the tutorial fails\n" + "\n".join(text[-3000:] for text in said))

    guard = Guard()
    try:
        guard.run(Command(["bash", str(pages)], printed, {**os.environ, **env}), tick=look)
    finally:
        guard.close()
    return printed.read_text()


def counts(printed: str) -> Iterator[tuple[str, list[int]]]:
    """Lines "STORE ROWS DIFFERENT NEXT"."""
    for store, *numbers in re.findall(r"^(\S+) (\d+) (\d+) (\d+)$", printed, re.MULTILINE):
        yield store, [int(number) for number in numbers]


@pytest.fixture
def env(kafka: KafkaServer, postgres: PostgresServer) -> Iterator[Mapping[str, str]]:
    yield {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT / "src"),
        "PYSPARK_PYTHON": sys.executable,
        "PYSPARK_SUBMIT_ARGS": submit_args(),
        "COLUMNS": "80",
        "KAFKA": kafka.bootstrap_servers,
        "POSTGRES": postgres.dsn,
    }
    admin = AdminClient({"bootstrap.servers": kafka.bootstrap_servers})
    admin.delete_topics(["stores"])["stores"].result(30)
    with psycopg.connect(postgres.dsn, autocommit=True) as connection:
        connection.execute("DROP TABLE IF EXISTS stores")


def test_tutorial(tmp_path: Path, env: Mapping[str, str]) -> None:
    """Every command gives what its page shows, and no row is missing or doubled."""
    printed = run_tutorial(tmp_path, env)
    print(printed)
    parts = dict(
        re.findall(rf"^{MARK} (\d+)\n(.*?)(?=^{MARK}|\Z)", printed, re.DOTALL | re.MULTILINE)
    )
    shown: list[tuple[str, list[int]]] = []
    for number, (language, text) in enumerate(blocks(PAGES)):
        if language != "text":
            continue
        got = parts[str(number - 1)]
        rest = plain(got)
        for line in map(plain, text.splitlines()):
            if line not in {"", "…"}:
                _, found, rest = rest.partition(line)
                assert found, f"{line!r} is not, or not there, in what was printed:\n{got}"
        wanted = list(counts(text))
        seen = list(counts(got))
        assert [relation(numbers) for _, numbers in seen] == [relation(n) for _, n in wanted], got
        if "naive" not in text:  # the stores of naive.py are wherever the kill left them
            assert agree(seen) == agree(wanted), got
        shown += seen
    assert len(shown) > 15
    equal = [numbers for store, numbers in shown if relation(numbers) == (True, True)]
    assert len(equal) == len(shown) - 1  # the folder of naive.py alone has rows twice


def agree(stores: list[tuple[str, list[int]]]) -> list[bool]:
    """Whether each store has the rows of the first one."""
    return [numbers == stores[0][1] for _, numbers in stores]


def relation(numbers: list[int]) -> tuple[bool, bool]:
    """Whether no row is doubled, and whether none is missing."""
    rows, different, following = numbers
    return rows == different, different == following
