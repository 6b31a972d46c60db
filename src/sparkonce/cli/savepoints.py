"""`savepoint`: keep a query's checkpoint at a complete batch; `restoring` has what uses it.

create                           reads a checkpoint, of a query that may be running
list show verify export delete   need no JOB and no log
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator

import click
from rich.console import Console
from rich.progress import Progress

from sparkonce import facts
from sparkonce.cli.looking import FOUND, json_option
from sparkonce.cli.restoring import fork, restore, rewind
from sparkonce.cli.screen import Screen
from sparkonce.cli.targets import checkpoint_option, open_job, place_of_savepoints
from sparkonce.facts import Facts
from sparkonce.protocol.operating import head_here
from sparkonce.spark_hooks import savepoints as making
from sparkonce.spark_hooks.checkpoint import open_checkpoint
from sparkonce.words import counted, when


@click.group()
def savepoint() -> None:
    """Copies of a checkpoint at a complete batch: to restore, to rewind to, or to fork.

    ROOT is a folder for savepoints: a path, or a URL that Spark's Hadoop knows.
    """


for _command in (restore, rewind, fork):
    savepoint.add_command(_command)


@savepoint.command()
@click.argument("job")
@click.argument("root")
@checkpoint_option
@click.option("--name", help="Of the savepoint; default: pipeline, batch and time.")
@click.option("--batch", type=int, help="The last batch to hold; default: the newest complete one.")
@json_option
def create(
    *,
    job: str,
    root: str,
    checkpoint: str | None,
    name: str | None,
    batch: int | None,
    as_json: bool,
) -> int:
    """Make a savepoint of JOB's query, which may be running."""
    with open_job(job, checkpoint) as pipeline:
        head = head_here(pipeline.log, pipeline.name)
        files = open_checkpoint(checkpoint or head.checkpoint, None, start_jvm=True)
        with _shown_progress() as progress:
            made = making.create(
                place_of_savepoints(root, create=True),
                pipeline.log,
                pipeline.name,
                files,
                name=name,
                batch=batch,
                progress=progress,
            )
    found = facts.savepoint(made)
    screen = Screen(as_json=as_json)
    if as_json:
        screen.json(found)
    else:
        screen.line(f"{made.name}: batch {made.batch} of {made.head.pipeline}, {_size(found)}")
    return 0


@savepoint.command(name="list")
@click.argument("root")
@json_option
def list_(root: str, *, as_json: bool) -> int:
    """The savepoints of ROOT, by name."""
    place = place_of_savepoints(root)
    found = [facts.savepoint(place.read(name)) for name in place.names()]
    screen = Screen(as_json=as_json)
    if as_json:
        screen.json(found)
    elif not found:
        screen.say(f"{place.address} has no savepoint")
    else:
        screen.table(
            ["savepoint", "pipeline", "batch", "made", "bytes"],
            [
                (f["name"], f["pipeline"], f["batch"], when(f["made_at"]), f"{f['bytes']:,}")
                for f in found
            ],
        )
    return 0


@savepoint.command()
@click.argument("root")
@click.argument("name")
@json_option
def show(root: str, name: str, *, as_json: bool) -> int:
    """What one savepoint holds."""
    manifest = place_of_savepoints(root).read(name)
    found = facts.savepoint(manifest)
    screen = Screen(as_json=as_json)
    if as_json:
        files = {name: list(file) for name, file in manifest.files.items()}
        screen.json({**found, "files": files, "settings": dict(manifest.settings)})
        return 0
    screen.title(manifest.name, "")
    screen.pairs(
        [
            ("pipeline", found["pipeline"]),
            ("last batch", found["batch"]),
            ("made", f"{when(found['made_at'])}, with Spark {manifest.spark}"),
            ("query", found["query_id"]),
            ("checkpoint", found["checkpoint"]),
            ("log", found["log"]),
            *((f"sink {name}", target) for name, target in found["sinks"].items()),
            ("holds", _size(found)),
        ]
    )
    return 0


@savepoint.command()
@click.argument("root")
@click.argument("name")
@json_option
def verify(root: str, name: str, *, as_json: bool) -> int:
    """Read every file and compare its checksum. Exits with 3 when one is damaged."""
    place = place_of_savepoints(root)
    manifest = place.read(name)
    damaged = dict(place.verify(manifest))
    screen = Screen(as_json=as_json)
    if as_json:
        screen.json({"name": name, "files": len(manifest.files), "damaged": damaged})
    else:
        for file, what in damaged.items():
            screen.line(f"{file} {what}", "red")
        if not damaged:
            screen.say(f"{name} is whole: {_size(facts.savepoint(manifest))}")
    return FOUND if damaged else 0


@savepoint.command()
@click.argument("root")
@click.argument("name")
@click.argument("to")
@json_option
def export(root: str, name: str, to: str, *, as_json: bool) -> int:
    """Copy a savepoint to TO, another folder for savepoints.

    After an interruption, run it again.
    """
    place, other = place_of_savepoints(root), place_of_savepoints(to, create=True)
    manifest = place.read(name)
    with _shown_progress() as progress:
        place.export(manifest, other, progress)
    screen = Screen(as_json=as_json)
    if as_json:
        screen.json(facts.savepoint(manifest))
    else:
        screen.say(f"{name} is in {other.address}: {_size(facts.savepoint(manifest))}")
    return 0


@savepoint.command()
@click.argument("root")
@click.argument("name")
@json_option
def delete(root: str, name: str, *, as_json: bool) -> int:
    """Delete a savepoint, and the files that no other one of ROOT needs.

    After an interruption, run it again.
    """
    gone = place_of_savepoints(root).delete(name)
    screen = Screen(as_json=as_json)
    if as_json:
        screen.json({"name": name, "deleted_files": gone})
    else:
        screen.say(f"{name} is deleted, with {counted(gone, 'file')} that only it had")
    return 0


@contextlib.contextmanager
def _shown_progress() -> Iterator[Callable[[int, int], None]]:
    """A bar on a terminal, for copies that take long."""
    with Progress(console=Console(stderr=True), disable=not sys.stderr.isatty()) as bar:
        task = bar.add_task("copying")
        yield lambda kept, number: bar.update(task, completed=kept, total=number)


def _size(found: Facts) -> str:
    return f"{counted(found['files'], 'file')}, {found['bytes']:,} bytes"
