"""`ui`: the page, in the reader's browser. It changes nothing and fences nobody."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

import click

from sparkonce.cli.doctor import look, look_at_log
from sparkonce.cli.targets import Target, log_options, open_target, place_of_savepoints
from sparkonce.facts import Facts


@click.command()
@click.argument("job", required=False)
@log_options
@click.option("--savepoints", metavar="ROOT", help="Show the savepoints of this folder, too.")
@click.option(
    "--conf",
    "conf_file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Spark's settings, for doctor: a spark-defaults.conf.",
)
@click.option("--host", default="localhost", show_default=True, help="Where to listen.")
@click.option("--port", default=4059, show_default=True, help="0 for a free one.")
def ui(
    *,
    job: str | None,
    url: str | None,
    pipeline: str | None,
    checkpoint: str | None,
    savepoints: str | None,
    conf_file: Path | None,
    host: str,
    port: int,
) -> int:
    """Every transaction in a browser: read-only, on this machine.

    With another --host the page needs an access token: SPARKONCE_UI_TOKEN, or one that is made and
    printed. Ends by Ctrl-C or SIGTERM.
    """
    try:
        from sparkonce.page.serving import TOKEN_VARIABLE, serve  # noqa: PLC0415 - an extra
        from sparkonce.page.source import Source  # noqa: PLC0415
    except ModuleNotFoundError as error:
        raise click.ClickException(
            f"the page needs {error.name!r}: pip install 'sparkonce[ui]'"
        ) from error
    with open_target(job, url, pipeline, checkpoint) as target:
        is_of_log = job is None and pipeline is None
        source = Source(
            target.log,
            target.log.pipelines if is_of_log else lambda: target.names,
            _in_commands(job, checkpoint),
            lambda: _findings(target, checkpoint, conf_file),
            None if savepoints is None else place_of_savepoints(savepoints),
            has_sinks=job is not None,
        )
        given = os.environ.get(TOKEN_VARIABLE)
        serve(source, host, port, given, lambda address: click.echo(f"The page is at {address}"))
    return 0


def _findings(target: Target, checkpoint: str | None, conf_file: Path | None) -> list[Facts]:
    if target.job is None:
        return look_at_log(target.log)
    return look(target.job, checkpoint, conf_file)


def _in_commands(job: str | None, checkpoint: str | None) -> str:
    """The JOB as the reader types it; the word JOB for a log, or for JSON on the command line."""
    words = ["JOB"] if job is None or job.startswith("{") else [job]
    words += [] if checkpoint is None else ["--checkpoint", checkpoint]
    return shlex.join(words)
