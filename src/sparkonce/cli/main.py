"""The command line: commands, errors, exit codes.

0  fine                         2  the command line is wrong
1  an error, see stderr         3  something is in doubt, unfinished, abandoned, or was found
"""

from __future__ import annotations

import importlib.util
import logging
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

import click

from sparkonce.cli.acting import orphans, recover
from sparkonce.cli.doctor import doctor
from sparkonce.cli.looking import log, status
from sparkonce.cli.savepoints import savepoint
from sparkonce.cli.settling import settle
from sparkonce.cli.torture import torture
from sparkonce.cli.ui import ui
from sparkonce.errors import SparkOnceError

ERROR = 1
INTERRUPTED = 130


@click.group(
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 80},
    epilog="JOB is module:attribute of an ExactlyOnce, or of a function that returns one, with the "
    "working directory on the path; or a file of JSON, such as orders.json. Exit codes: 0 fine, "
    "1 error, 2 usage, 3 something is in doubt, unfinished, abandoned, or was found. The runbook "
    "is docs/howto/in-doubt.md.",
)
@click.version_option(package_name="sparkonce", message="sparkonce %(version)s")
def cli() -> None:
    """See and resolve what a pipeline has in flight."""
    logging.basicConfig(stream=sys.stderr, level=logging.CRITICAL)
    progress = logging.getLogger("sparkonce")
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(message)s"))
    progress.addHandler(handler)
    progress.setLevel(logging.INFO)
    progress.propagate = False


cli.add_command(status)
cli.add_command(log)
cli.add_command(recover)
cli.add_command(orphans)
cli.add_command(settle)
cli.add_command(doctor)
cli.add_command(savepoint)
cli.add_command(ui)
cli.add_command(torture)


@cli.command(context_settings={"ignore_unknown_options": True, "help_option_names": []})
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def demo(arguments: Sequence[str]) -> int:
    """Kafka, Postgres and S3 on this machine, and a driver killed four times."""
    needed = ("confluent_kafka", "psycopg", "boto3", "psutil")
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    if missing:
        raise click.ClickException(
            f"the demo starts real servers and needs {', '.join(missing)}: "
            "pip install 'sparkonce[services]'"
        )
    from sparkonce.demo.__main__ import main as play  # noqa: PLC0415 - needs the extra

    return play(arguments)


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command and end the process with its exit code."""
    sys.exit(run(arguments))


def run(arguments: Sequence[str] | None = None) -> int:
    """Run the command; its exit code."""
    try:
        code: Any = cli.main(arguments, prog_name="sparkonce", standalone_mode=False)
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except (click.Abort, KeyboardInterrupt):
        click.echo("interrupted", err=True)
        return INTERRUPTED
    except SparkOnceError as error:
        click.echo(f"sparkonce: {type(error).__name__}: {error}", err=True)
        return ERROR
    return int(code or 0)
