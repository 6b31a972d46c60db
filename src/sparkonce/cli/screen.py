"""Facts as text, which fits 80 columns, and reads the same in a file and without colours.

Only names of places, targets and files may be longer: an operator copies them.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from textwrap import wrap
from typing import Any

from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from sparkonce.facts import Facts
from sparkonce.txn_log.places import how_to_follow
from sparkonce.txn_log.settlement import Ruling
from sparkonce.words import age, counted, has_passed, until, when

_STYLES = {
    "fine": "green",
    "complete": "green",
    "settled": "yellow",
    "in doubt": "bold red",
    "prepared": "bold red",
    "unfinished": "bold yellow",
    "decided": "bold yellow",
    "abandoned": "bold yellow",
    "moved": "yellow",
    "rewinding": "red",
    "rewound": "yellow",
    "error": "bold red",
    "warning": "yellow",
    "ok": "green",
}
_STARTS = "with operators' commands that took a token"


class Screen:
    """Text on standard output, or one JSON value."""

    def __init__(self, *, as_json: bool) -> None:
        self.as_json = as_json
        self._console = Console(highlight=False, markup=False, emoji=False)

    def json(self, value: object) -> None:
        sys.stdout.write(json.dumps(value, ensure_ascii=False) + "\n")
        sys.stdout.flush()

    def say(self, text: str = "", style: str = "", *, indent: int = 0) -> None:
        self._print(Padding(Text(text, style=style, overflow="fold"), (0, 0, 0, indent)))

    def line(self, text: str, style: str = "", *, indent: int = 0) -> None:
        """One line of any length: a path that is broken in two cannot be copied."""
        self._print(Text(" " * indent + text, style=style), soft_wrap=True)

    def title(self, name: str, state: str) -> None:
        self._print(Text.assemble((name, "bold"), "  ", (state, _STYLES.get(state, ""))))

    def labelled(self, label: str, text: str, style: str = "") -> None:
        """A label and, to its right, the text, wrapped between words only."""
        width = max(self._console.width - len(label), 1)
        for part in wrap(text, width, break_long_words=False, break_on_hyphens=False) or [""]:
            self._print(Text.assemble((label, style), part), soft_wrap=True)
            label = " " * len(label)

    def pairs(self, pairs: Iterable[tuple[str, object]]) -> None:
        """Names and values, one below the other."""
        shown = list(pairs)
        width = max(len(name) for name, _ in shown)
        for name, value in shown:
            self.labelled(f"  {name:<{width}}  ", str(value), "dim")

    def table(self, heads: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
        for head in heads:
            right = head in {"batch", "rows", "branches", "bytes", "files", "token"}
            table.add_column(head, overflow="fold", justify="right" if right else "left")
        for row in rows:
            cells = ["-" if cell is None else str(cell) for cell in row]
            table.add_row(*(Text(cell, style=_STYLES.get(cell, "")) for cell in cells))
        self._print(table)

    def _print(self, shown: RenderableType, *, soft_wrap: bool = False) -> None:
        if self._console.is_terminal:
            self._console.print(shown, soft_wrap=soft_wrap)
            return
        with self._console.capture() as capture:  # a file needs no blanks at the ends of lines
            self._console.print(shown, soft_wrap=soft_wrap)
        sys.stdout.writelines(f"{line.rstrip()}\n" for line in capture.get().splitlines())
        sys.stdout.flush()


def show_pipeline(screen: Screen, found: Facts) -> None:
    screen.title(found["name"], found["state"])
    if found["moved_to"]:
        moved_to = found["moved_to"]
        screen.pairs([("moved to", f"{moved_to} ({how_to_follow(moved_to)})")])
        return
    last, starts = found["last_complete"], found["starts_since_last_batch"]
    going_to = found["rewinding_to"]
    again = f"savepoint {going_to}: run the same `sparkonce savepoint rewind` command again"
    screen.pairs(
        [
            *([("rewinding to", again)] if going_to else []),
            ("query", found["query_id"]),
            ("checkpoint", found["checkpoint"] or _no_checkpoint(found)),
            ("token", holder_line(found["holder"])),
            ("last write", age(found["holder"]["last_write"])),
            ("last complete", "none" if last is None else _finished_line(last)),
            *([("starts since then", f"{starts} ({_STARTS})")] if starts else []),
        ]
    )
    if found["abandoned"] is not None:
        screen.say()
        said = (
            "abandoned: Spark replays it, unless its checkpoint is lost; `sparkonce doctor` shows "
            "whether Spark has passed it"
        )
        screen.say(f"batch {found['abandoned']} {said}", indent=2)
    if found["unfinished"]:
        screen.say()
        rows = [row for batch in found["unfinished"] for row in _sink_rows(batch)]
        screen.table(("batch", "state", "since", "sink", "rows", "branches", "kept until"), rows)
        for note in (note for batch in found["unfinished"] for note in _notes(batch)):
            screen.say(note, indent=2)


def _no_checkpoint(found: Facts) -> str:
    return "none (batch jobs)" if found["is_of_batch_jobs"] else "(recorded from the next start on)"


def _finished_line(last: Facts) -> str:
    key = "" if last["key"] is None else f"key {last['key']}, "
    return f"batch {last['batch']}, {key}{last['state']} {age(last['times'].get(last['state']))}"


def holder_line(holder: Facts) -> str:
    runs = {True: "is running", False: "is not running", None: "may be running elsewhere"}
    name = holder["driver"].partition("@")[0]  # what follows is for programs, not people
    by = f"{name}, which {runs[holder['is_running']]}"
    if holder["by"] == "operator":
        by = (
            f"an operator's command on {name.rpartition(':')[0]}; whether the driver before it "
            "still runs is not known"
        )
    return f"{holder['token']}, taken {age(holder['since'])} by {by}"


def _notes(batch: Facts) -> Iterable[str]:
    """What an operator has ruled, and which branches may be lost."""
    for branch in (branch for sink in batch["sinks"] for branch in sink["branches"]):
        name = f"batch {batch['batch']}, {branch['branch']}"
        if branch["ruling"]:
            is_redo = branch["ruling"] == Ruling.REDO.value
            then = "commits or rewrites it" if is_redo else "or `recover` ends it"
            yield f"{name}: settled as {branch['ruling']}; the next start {then}"
        elif has_passed(branch["safe_until"]):
            yield f"{name}: its server may have dropped it. Start the query, which can rewrite it"


def _sink_rows(batch: Facts) -> Iterable[Sequence[object]]:
    first = batch["batch"], batch["state"], age(batch["times"].get(batch["state"]))
    for sink in batch["sinks"] or [{"name": "(no rows)", "rows": 0, "branches": []}]:
        kept = [b["safe_until"] for b in sink["branches"] if b["safe_until"] is not None]
        expiry = until(min(kept)) if kept else None
        yield (*first, sink["name"], sink["rows"], len(sink["branches"]), expiry)
        first = "", "", ""


def show_list(screen: Screen, records: Sequence[Facts], query_id: str) -> None:
    """Batches; those of another query than the given one are marked."""

    def row(found: Facts) -> Sequence[object]:
        counts = [sink["rows"] for sink in found["sinks"]]
        begun, ended = min(found["times"].values()), found["times"].get(found["state"])
        branches = sum(len(sink["branches"]) for sink in found["sinks"])
        size = sum(sink["bytes"] for sink in found["sinks"])
        notes = [f"{len(found['lost'])} rewritten"] if found["lost"] else []
        notes += ["earlier query"] if found["query_id"] != query_id else []
        since = begun if ended is None else ended
        rows = "/".join(map(str, counts if len(set(counts)) > 1 else counts[:1])) or "0"
        key = [found["key"]] if has_keys else []
        which = [found["batch"], *key, found["state"]]
        return *which, when(since), rows, branches, size, ", ".join(notes)

    has_keys = any(found["key"] is not None for found in records)
    key_head = ["key"] if has_keys else []
    heads = ("batch", *key_head, "state", "since", "rows", "branches", "bytes", "")
    screen.table(heads, map(row, records))


def show_record(screen: Screen, found: Facts) -> None:
    """One batch, from its source to what its branches are in the targets."""
    screen.title(f"batch {found['batch']} of {found['pipeline']}", found["state"])
    screen.pairs(
        [
            ("query", found["query_id"]),
            ("token", found["token"]),
            *_sources(found),
            *((state, when(at)) for state, at in found["times"].items()),
            *(("rewritten", branch) for branch in found["lost"]),
        ]
    )
    for sink in found["sinks"]:
        screen.say()
        size = counted(sink["rows"], "row"), counted(sink["bytes"], "byte")
        screen.line(f"{sink['name']} -> {sink['target']}", "bold", indent=2)
        screen.say(", ".join((*size, counted(len(sink["branches"]), "branch"))), indent=2)
        for branch in sink["branches"]:
            ruled = f", settled as {branch['ruling']}" if branch["ruling"] else ""
            kept = f", kept until {until(branch['safe_until'])}" if branch["safe_until"] else ""
            held = counted(branch["rows"], "row")
            screen.say(f"{branch['branch']}  {held}{kept}{ruled}", indent=4)
            for what in branch["stands_for"]:
                screen.line(what, indent=6)
    if found["settled"]:
        screen.say()
        screen.say("settled by operators", "bold", indent=2)
    for ruling in found["settled"]:
        screen.line(ruling["branch"], indent=4)
        screen.say(f"as {ruling['ruling']} by {ruling['who']} at {when(ruling['at'])}", indent=6)
        screen.say(f"because: {ruling['why']}", indent=6)


def _sources(found: Facts) -> Iterable[tuple[str, str]]:
    if found["key"] is not None:
        return [("key", found["key"])]
    return [(f"source {n}", offset) for n, offset in enumerate(found["offsets"])]


def show_event(screen: Screen, event: Facts) -> None:
    sinks = ", ".join(f"{name} {rows}" for name, rows in event["rows"].items())
    screen.say(f"{when(event['at'])}  batch {event['batch']} {event['state']:9} {sinks}".rstrip())


def show_orphans(screen: Screen, orphans: Sequence[Facts]) -> None:
    def row(found: Facts) -> Sequence[Any]:
        note = "may still be written" if found["may_be_written"] else "orphan"
        if found["is_committed"]:
            note = "of a complete batch: its server went back in time; --abort commits it again"
        return found["sink"], found["branch"], found["batch"], note

    screen.table(("sink", "branch", "batch", ""), map(row, orphans))


def show_findings(screen: Screen, findings: Sequence[Facts]) -> None:
    for found in findings:
        level = found["level"]
        screen.labelled(f"{level:9}", f"{found['about']}: {found['what']}", _STYLES[level])
        if found["fix"]:
            screen.labelled(" " * 9, f"-> {found['fix']}")


def show_removals(screen: Screen, removals: Sequence[Facts], *, is_done: bool) -> None:
    """What a rewind does to each sink, or would do."""

    def row(found: Facts) -> Sequence[object]:
        first, last = found["batches"][0], found["batches"][-1]
        batches = str(first) if first == last else f"{first} to {last}"
        what = "kept" if found["kept"] else "refused" if found["refusal"] else "removed"
        return found["sink"], batches, f"{found['rows']:,}", len(found["files"]) or None, what

    last = "" if is_done else "would be"
    screen.table(["sink", "batches", "rows", "files", last], map(row, removals))
    for found in removals:
        if found["refusal"]:
            screen.line(f"{found['sink']}: {found['refusal']}", "red")
