"""`torture`: kill a staging pipeline for hours, and compare its sinks with its source."""

from __future__ import annotations

import importlib.util
import random
import re
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from sparkonce.cli.spark_settings import read_settings
from sparkonce.errors import ConfigurationError
from sparkonce.spark_hooks.jobs import load_attribute, load_writer

if TYPE_CHECKING:
    from sparkonce.testing.torture.faults import Fault

FOUND = 3


@click.command()
@click.argument("job")
@click.option("--hours", default=1.0, show_default=True, help="How long.")
@click.option("--seed", type=int, help="Of all choices; default: a new one, which is printed.")
@click.option("--readers", metavar="MODULE", help="Has `readers`; default: the JOB's module.")
@click.option(
    "--rows",
    metavar="SQL",
    default="id, run, payload",
    show_default=True,
    help="What the pipeline gets, selected from these columns.",
)
@click.option(
    "--batch-rows",
    type=click.IntRange(min=1),
    default=20,
    show_default=True,
    help="Rows of a batch.",
)
@click.option(
    "--proxy",
    "proxies",
    metavar="PORT:HOST:PORT",
    multiple=True,
    help="Listen on the first PORT of localhost, forward to HOST:PORT, and disturb what passes.",
)
@click.option(
    "--fault",
    "commands",
    metavar="NAME=COMMAND",
    multiple=True,
    help="A command of your own, such as one that restarts a server.",
)
@click.option("--master", default="local[2,4]", show_default=True, help="Spark's.")
@click.option(
    "--conf",
    "conf_file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Spark's settings: a spark-defaults.conf.",
)
@click.option("--folder", type=click.Path(path_type=Path), help="New; for logs and the report.")
def torture(
    *,
    job: str,
    hours: float,
    seed: int | None,
    folder: Path | None,
    readers: str | None,
    proxies: Sequence[str],
    commands: Sequence[str],
    conf_file: Path | None,
    **order: Any,
) -> int:
    """Kill a staging pipeline again and again, and compare its sinks.

    JOB is a pipeline with empty sinks and a log of its own, or any function for foreachBatch. Its
    module, or that of --readers, has `readers`: by sink name, a function that returns what readers
    get. It ends at the first anomaly, with exit code 3 and a report.
    """
    _check_installed()
    from sparkonce.testing.torture.query import Order  # noqa: PLC0415 - an extra
    from sparkonce.testing.torture.report import write_report  # noqa: PLC0415
    from sparkonce.testing.torture.running import Torture  # noqa: PLC0415

    seed = random.SystemRandom().randrange(10**6) if seed is None else seed
    folder = (folder or Path(f"torture-{seed}")).absolute()
    if folder.exists() and any(folder.iterdir()):
        raise ConfigurationError(f"--folder {folder} is not empty: give a new one")
    order |= {"job": job, "cwd": str(Path.cwd()), "checkpoint": f"{folder}/checkpoint"}
    with ExitStack() as stack:
        faults = list(_faults(stack, proxies, commands))
        one = Torture(
            load_writer(job),
            Order(**order, conf=_settings(conf_file)),
            _of_module(job, readers, "readers"),
            folder,
            seed=seed,
            more=faults,
            unfinished=_of_module(job, readers, "unfinished", is_needed=False),
            progress=click.echo,
        )
        outcome = one.run(hours * 3600)
    write_report(folder / "report.html", job, outcome)
    click.echo(f"{outcome.verdict}; report: {folder / 'report.html'}")
    if outcome.failure is not None:
        raise outcome.failure
    return FOUND if outcome.anomalies else 0


def _settings(conf_file: Path | None) -> dict[str, str]:
    return {} if conf_file is None else read_settings(conf_file) or {}


def _check_installed() -> None:
    for name in ("psutil", "jinja2"):
        if importlib.util.find_spec(name) is None:
            raise click.ClickException(f"torture needs {name!r}: pip install 'sparkonce[testing]'")


def _faults(stack: ExitStack, proxies: Sequence[str], commands: Sequence[str]) -> Iterator[Fault]:
    from sparkonce.testing.proxy import Proxy  # noqa: PLC0415 - an extra
    from sparkonce.testing.torture.faults import Command, Network  # noqa: PLC0415

    for text in proxies:
        found = re.fullmatch(r"(\d+):(.+):(\d+)", text)
        if found is None:
            raise ConfigurationError(
                f"--proxy {text!r}: expected PORT:HOST:PORT, such as 15432:db.test:5432"
            )
        listen, host, port = int(found[1]), found[2], int(found[3])
        try:
            proxy = stack.enter_context(Proxy(port, host, listen=listen))
        except OSError as error:
            raise ConfigurationError(f"--proxy {text}: port {listen}: {error}") from error
        yield Network(f"{host}:{port}", proxy)
    for text in commands:
        name, is_given, command = text.partition("=")
        if not is_given:
            raise ConfigurationError(
                f"--fault {text!r}: expected NAME=COMMAND, such as 'broker=docker restart broker'"
            )
        yield Command(name, command)


def _of_module(job: str, module: str | None, name: str, *, is_needed: bool = True) -> Any:
    """A dictionary of functions by sink name, or what a function of that name returns."""
    if module is None and job.endswith(".json"):
        raise ConfigurationError(f"{job}: say with --readers which module has `readers`")
    module = module or job.partition(":")[0]
    try:
        found = load_attribute(f"{module}:{name}")
    except ConfigurationError as error:
        if not is_needed:
            return {}
        raise ConfigurationError(
            f"{error}; torture needs `{name}`, a dictionary: by sink name, a function that returns "
            "all rows that readers get"
        ) from error
    return found() if callable(found) else found
