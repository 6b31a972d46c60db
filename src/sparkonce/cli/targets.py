"""What a command is about: the pipeline of a JOB, or the pipelines of a log."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from sparkonce.errors import ConfigurationError
from sparkonce.protocol.operating import head_of
from sparkonce.spark_hooks.jobs import load_job
from sparkonce.spark_hooks.savepoints import Savepoints
from sparkonce.storage import local_path
from sparkonce.txn_log import TransactionLog, open_log
from sparkonce.txn_log.record import Head

if TYPE_CHECKING:
    from sparkonce.spark_hooks.exactly_once import ExactlyOnce


@dataclass(frozen=True, slots=True)
class Target:
    """The log that a command looks at, the names of its pipelines, and the JOB if one was given."""

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
        if not self.names:
            raise ConfigurationError(f"{self.log.address} has no pipeline yet")
        known = ", ".join(map(repr, self.names))
        raise ConfigurationError(
            f"{self.log.address} has the pipelines {known}: say which with --pipeline"
        )


checkpoint_option = click.option(
    "--checkpoint",
    metavar="LOCATION",
    help="The query's, if it has moved, is on no local disk, or has the log in it.",
)


def log_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Options that name the log: that of the JOB, or one in place of a JOB."""
    for option in (
        click.option("--checkpoint", metavar="LOCATION", help="The query's, if it has the log."),
        click.option("--pipeline", metavar="NAME", help="Which pipeline of the log."),
        click.option("--log", "url", metavar="URL", help="The transaction log, in place of a JOB."),
    ):
        command = option(command)
    return command


@contextlib.contextmanager
def open_job(
    text: str, checkpoint: str | None = None, *, create: bool = False
) -> Iterator[ExactlyOnce]:
    """The pipeline, closed at the end.

    Args:
        text: the JOB.
        checkpoint: where it is, if the log is in it.
        create: whether the job's log may be made when it is not there, as by its first start.

    Raises:
        ConfigurationError: its log is in a checkpoint whose location is not given, or which does
            not exist.
    """
    job = load_job(text, create=create)
    try:
        if job.settings.is_log_in_checkpoint:
            if checkpoint is None:
                raise ConfigurationError(
                    f"the transaction log of {job.name!r} is in its query's checkpoint: give its "
                    "location with --checkpoint"
                )
            _check_there(checkpoint)
            job.open_log_in(checkpoint)
        yield job
    finally:
        job.close()


@contextlib.contextmanager
def open_target(
    job: str | None, url: str | None, pipeline: str | None, checkpoint: str | None = None
) -> Iterator[Target]:
    """The log of a JOB, or of `--log`.

    Raises:
        click.UsageError: neither or both are given.
    """
    if (job is None) == (url is None):
        raise click.UsageError("give either a JOB (module:attribute or FILE.json) or --log URL")
    if job is not None:
        if pipeline is not None:
            raise click.UsageError("a JOB is one pipeline: --pipeline goes with --log")
        with open_job(job, checkpoint) as found:
            yield Target(found.log, [found.name], found)
        return
    assert url is not None  # noqa: S101 - for mypy
    log = open_log(url, create=False)
    try:
        yield Target(log, log.pipelines() if pipeline is None else [pipeline])
    finally:
        log.close()


def _check_there(checkpoint: str) -> None:
    path = local_path(checkpoint)
    if path is not None and not path.is_dir():
        raise ConfigurationError(
            f"{checkpoint}: there is no folder {path.absolute()}: check --checkpoint; a query's "
            "first start makes it, and the log in it"
        )


def place_of_savepoints(root: str, *, create: bool = False) -> Savepoints:
    """The savepoints below a ROOT.

    Raises:
        ConfigurationError: the location cannot be used, or there is no such local folder.
    """
    path = local_path(root)
    if path is not None and not create and not path.is_dir():
        raise ConfigurationError(f"there is no folder {root}: savepoints are made by `create`")
    return Savepoints.at(root, create=create, by_boto3=True)
