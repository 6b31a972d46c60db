"""What a command is about: the pipeline of a JOB, or the pipelines of a log."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from sparkonce.cli.jobs import load_job
from sparkonce.errors import ConfigurationError
from sparkonce.spark_hooks.recovery import head_of
from sparkonce.txn_log import TransactionLog, open_log
from sparkonce.txn_log.record import Head

if TYPE_CHECKING:
    from sparkonce.spark_hooks.exactly_once import ExactlyOnce

_SQLITE = "sqlite:///"


@dataclass(frozen=True, slots=True)
class Target:
    """What a command looks at.

    Attributes:
        log: the transaction log.
        names: of the pipelines.
        job: where one was given.
    """

    log: TransactionLog
    names: Sequence[str]
    job: ExactlyOnce | None = None

    def one(self) -> Head:
        """The only pipeline.

        Raises:
            ConfigurationError: there are several, or none.
        """
        if len(self.names) == 1:
            return head_of(self.log, self.names[0])
        known = ", ".join(map(repr, self.names)) or "none"
        raise ConfigurationError(
            f"{self.log.address} has the pipelines {known}: say which with --pipeline"
        )


def log_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """The options in place of a JOB."""
    for option in (
        click.option("--pipeline", metavar="NAME", help="Which pipeline of the log."),
        click.option("--log", "url", metavar="URL", help="The transaction log, in place of a JOB."),
    ):
        command = option(command)
    return command


@contextlib.contextmanager
def open_job(text: str) -> Iterator[ExactlyOnce]:
    """The pipeline, closed at the end."""
    job = load_job(text)
    try:
        yield job
    finally:
        job.close()


@contextlib.contextmanager
def open_target(job: str | None, url: str | None, pipeline: str | None) -> Iterator[Target]:
    """The log of a JOB, or of `--log`.

    Raises:
        click.UsageError: neither or both are given.
    """
    if (job is None) == (url is None):
        raise click.UsageError("give either a JOB (module:attribute) or --log URL")
    if job is not None:
        if pipeline is not None:
            raise click.UsageError("a JOB is one pipeline: --pipeline goes with --log")
        with open_job(job) as found:
            yield Target(found.log, [found.name], found)
        return
    assert url is not None  # noqa: S101 - for mypy
    if url.startswith(_SQLITE):
        path = Path(url.removeprefix(_SQLITE)).expanduser()
        if not path.exists():  # opening it would make it
            raise ConfigurationError(f"--log {url}: there is no file {path.absolute()}")
    log = open_log(url)
    try:
        yield Target(log, log.pipelines() if pipeline is None else [pipeline])
    finally:
        log.close()
