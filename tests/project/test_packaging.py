"""What is installed: every module, once, in wheel, sdist and the wheel made from the sdist.

And that what is not installed, the benchmarks, finds what it needs there.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tarfile
import zipfile
from collections import Counter
from pathlib import Path

import pytest

from tests.project import release_check

ROOT = Path(__file__).parents[2]
LINKED = ("sinks", "txn_log", "protocol", "spark_hooks")
SHIPPED = {".py", ".typed", ".xml", ".yml", ".html", ".css"}


def source_modules() -> set[str]:
    """Every file of the package, as git has it: the real folders under their import name."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", *LINKED, "src"],  # noqa: S607
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout.split()
    files = {path for path in listed if Path(path).suffix in SHIPPED and (ROOT / path).exists()}
    return {
        path.removeprefix("src/") if path.startswith("src/") else f"sparkonce/{path}"
        for path in files
    }


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built as a release is: the sdist first, and the wheel from the sdist."""
    folder = tmp_path_factory.mktemp("dist")
    subprocess.run(
        [sys.executable, "-m", "build", "--outdir", str(folder), str(ROOT)],
        check=True,
        capture_output=True,
    )
    return folder


def test_wheel_from_the_sdist_carries_every_module(dist: Path) -> None:
    (wheel,) = dist.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        shipped = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert shipped == source_modules()


def test_sdist_holds_real_files_behind_the_links(dist: Path) -> None:
    (sdist,) = dist.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {member.name.partition("/")[2]: member for member in archive.getmembers()}
    for module in source_modules():
        assert names[f"src/{module}"].isfile(), module


@pytest.mark.parametrize("name", LINKED)
def test_links_lead_to_the_root_folders(name: str) -> None:
    assert (ROOT / "src" / "sparkonce" / name).resolve() == ROOT / name


def test_importing_a_sink_imports_neither_spark_nor_another_sinks_client() -> None:
    """A Postgres user needs no Kafka client, and an executor not the driver's side."""
    program = (
        "import sys; from sparkonce.sinks import FileSink, TwoPhaseCommitSink; import sparkonce;"
        "bad = {'pyspark', 'confluent_kafka', 'kafka', 'psycopg', 'boto3'};"
        "bad |= {'pyiceberg', 'deltalake'};"
        "bad &= set(sys.modules);"
        "print(*sorted(bad)); sys.exit(bool(bad))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)  # noqa: PLW1510
    assert done.returncode == 0, done.stdout + done.stderr


BENCHMARKS = sorted((ROOT / "benchmarks").glob("*.py"))
MEASURING = [path for path in BENCHMARKS if path.stem not in {"harness", "log", "plot"}]
FEW = {"scale": ["--tasks", "20", "--batches", "100"]}
FEW_ROWS = ["--rows", "2000", "--rounds", "1", "--small-batches", "6"]


@pytest.mark.parametrize("program", BENCHMARKS, ids=lambda path: path.stem)
def test_benchmark_begins(program: Path) -> None:
    """Every name that it imports is there."""
    subprocess.run([sys.executable, program, "--help"], check=True, stdout=subprocess.DEVNULL)


@pytest.mark.slow
@pytest.mark.parametrize("program", MEASURING, ids=lambda path: path.stem)
def test_benchmark_runs(program: Path) -> None:
    """To its last line, over a few rows: a measurement is rare, and should not find it broken."""
    few = FEW.get(program.stem, FEW_ROWS)
    done = subprocess.run(
        [sys.executable, program, *few], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout.splitlines()[-1])
    assert figures
    assert all(value > 0 for value in figures.values() if isinstance(value, int | float))


def test_release_check_runs_the_job_of_the_readme() -> None:
    """It finds the job's module and targets; `make release-check` itself takes minutes."""
    job = release_check.Job.of((ROOT / "README.md").read_text(encoding="utf-8"))
    assert job.module.isidentifier()
    assert "if __name__ ==" in job.source
    compile(job.source, "README.md", "exec")


@pytest.mark.parametrize(
    ("files", "problem"),
    [([0, 1, 2, 2], "doubled [2], missing []"), ([0, 2], "doubled [], missing [1]")],
)
def test_release_check_names_wrong_rows(files: list[int], problem: str) -> None:
    right = Counter([0, 1, 2])
    assert release_check.wrong({"FileSink": right, "SqliteSink": right}) == []
    found = release_check.wrong({"FileSink": Counter(files), "SqliteSink": right})
    assert found == [f"FileSink: {problem}"]
