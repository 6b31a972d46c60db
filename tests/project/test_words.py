"""The documents are in plain words, short, linked and in the site's navigation.

    docs/**/*.md, *.md ─► words, length, links, lists, navigation ─► findings: none
    comments, docstrings of the package ─► the clear-cut words ─► findings: none

`make lint` runs it without pytest: ``python -m tests.project.test_words``.
docs/contributing/writing.md has the vocabulary, and why this is a test.
"""

from __future__ import annotations

import ast
import io
import os
import re
import sys
import tokenize
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final, NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
HISTORY = (DOCS / "adr", DOCS / "archive")
"""Records of their time: they may be long, and keep their words."""

MOST_WORDS: Final = 1_500
MOST_WORDS_IN_README: Final = 600


class Word(NamedTuple):
    """A word to avoid.

    Attributes:
        pattern: finds it, in any case.
        better: what to write.
        is_clear: it has no other meaning, so comments and docstrings are searched for it too.
        unless: not where the 80 characters before it end like this.
    """

    pattern: str
    better: str
    is_clear: bool = True
    unless: str = "(?!)"


_PROCESS = r"(?:process|driver|executor|task|server|broker|sink|query|session)"
_MOMENT = r"(?:decision|commit|checkpoint|crash|kill|start|abort|failure|restart)"

VOCABULARY: Final[Sequence[Word]] = (
    Word(rf"\bbehind (?:the |its |a )?{_MOMENT}\b", "after"),
    Word(r"\b(?:is|are|was|were|be|been) (?:said|told)\b", "is logged, reported, shown"),
    Word(r"\btells\b", "logs, reports, shows", is_clear=False),
    Word(r"\b(?:is|are|was|were|be|been) away\b(?! from)", "is unreachable"),
    Word(r"\b(?:does|do|did|has|have) not answer(?:ed)?\b", "does not respond"),
    Word(r"(?<!long-)\blasting\b", "permanent, durable"),
    Word(r"\boperator's word\b|\bword of (?:an|the) operator\b", "ruling"),
    Word(
        r"(?<!stand-)\balone\b",
        "only",
        is_clear=False,
        unless=r"\b(?:leav(?:e|es|ing)|left|let)\b[^.;:]*$",
    ),
    Word(
        r"\bstands\b(?! (?:in )?for\b)",
        "exists, is recorded, holds; of a process: is paused",
        is_clear=False,
        unless=r"(?:two|three|four|five|six|all|many|of|the|\d) $",
    ),
    Word(rf"\b{_PROCESS}(?:e?s)? who\b", "the process that, the driver that"),
    Word(r"\bwhoever\b", "the process that, the driver that; of people: anybody who"),
    Word(r"\b(?:comes?|came|coming) to an end\b", "finishes, ends"),
    Word(r"\bso many\b", "the number", is_clear=False),
    Word(r"\b(?:is|are|was|were) to be\b", "must", is_clear=False),
    Word(r"\b(?:is|are|was|were) due\b(?! to\b)", "must, is expected"),
    Word(r"\bbeside\b", "alongside, next to, compared with", is_clear=False),
    Word(r"\bby hand\b", "manually"),
    Word(r"\bas (?:it was|they were)(?=[.,;:)])|\bas ever\b", "unchanged, as before"),
    Word(r"\b(?:gives?|gave|given|giving) up\b", "abandons"),
    Word(r"\banew\b", "recreated, again"),
    Word(r"\b(?:below|under) (?:its|their) feet\b", "while it was paused"),
    Word(
        rf"\b(?:it|which|machine|{_PROCESS}) (?:wakes|woke) up\b", "while it was paused, continues"
    ),
    Word(r"(?-i:(?:^|(?<=[.!?] ))That which\b)", "a subject, a verb, an object"),
    Word(
        r"(?-i:(?:^|(?<=[.!?] ))Of (?:the|a|an|these|those|what)\b)", "a subject, a verb, an object"
    ),
)
"""The left column of the vocabulary, as far as a pattern can tell a word's meaning."""


def compiled(pattern: str) -> re.Pattern[str]:
    """A space of the pattern may also be the end of a line."""
    return re.compile(pattern.replace(" ", r"\s"), re.IGNORECASE | re.MULTILINE)


_ANY_CLEAR = compiled("|".join(word.pattern for word in VOCABULARY if word.is_clear))
_MAYBE_SAID = re.compile(r'"""(?s:.*?)"""|#.*')
"""Comments, docstrings, and some code that looks like them: quick to find."""


@dataclass(frozen=True)
class Finding:
    path: Path
    line: int
    what: str

    def __str__(self) -> str:
        return f"{self.path.relative_to(ROOT)}:{self.line}: {self.what}"


def unindented(text: str) -> str:
    """Without what begins a line of a list, a quotation or a comment."""
    return re.sub(r"^[ >#*|-]+", "", text, flags=re.MULTILINE)


def avoided(text: str, *, only_clear: bool = False) -> Iterator[tuple[int, str]]:
    """The line, counted from 1, and the advice for each word of the text to avoid."""
    text = unindented(text)
    for word in VOCABULARY:
        if only_clear and not word.is_clear:
            continue
        for match in compiled(word.pattern).finditer(text):
            before = text[max(0, match.start() - 80) : match.start()]
            if re.search(word.unless, before, re.IGNORECASE):
                continue
            line = text.count("\n", 0, match.start()) + 1
            shown = " ".join(match[0].split())
            yield line, f'"{shown}": write {word.better} (docs/contributing/writing.md)'


# -- pages -----------------------------------------------------------------------------------------

_FENCE = re.compile(
    r"^(?P<in> *)(?P<fence>```+|~~~+).*?^(?P=in)(?P=fence) *$", re.MULTILINE | re.DOTALL
)
_CODE = re.compile(r"(`+)(?!`)[^\n]*?(?:\n[^\n]+?)?(?<!`)\1(?!`)")
_COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)
_LINK = re.compile(r"(?<=\])\((?P<target>[^()\s]*)(?: \"[^\"]*\")?\)(?:\{[^}]*\})?")
_DEFINITION = re.compile(r"^ {0,3}\[[^\]^]+\]: +<?(?P<target>[^\s>]+)", re.MULTILINE)
_HEADING = re.compile(r"^(?P<marks>#{1,6}) +(?P<text>.+?)(?: +#+)? *$", re.MULTILINE)
_EXPLICIT_ID = re.compile(r"\{[^}\n]*#(?P<id>[\w.-]+)[^}\n]*\}|\b(?:id|name)=\"(?P<html>[^\"]+)\"")
_API = re.compile(r"^::: (?P<name>[\w.]+)", re.MULTILINE)
_ITEM = re.compile(r"(?:[*+-]|\d+[.)]) ")


@cache
def text_of(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def blank(match: re.Match[str]) -> str:
    """As many lines, and nothing in them."""
    return "\n" * match[0].count("\n")


def prose(text: str) -> str:
    """The page without code and addresses, line by line."""
    text = _COMMENT.sub(blank, _FENCE.sub(blank, text))
    text = _CODE.sub(lambda code: "`" + blank(code) + "`", text)
    return _LINK.sub("", _DEFINITION.sub("", text))


@cache
def pages() -> tuple[Path, ...]:
    return tuple(sorted(DOCS.rglob("*.md")))


def documents() -> tuple[Path, ...]:
    return (*sorted(ROOT.glob("*.md")), *pages())


def is_history(path: Path) -> bool:
    return any(folder in path.parents for folder in HISTORY)


def words_of_pages() -> Iterator[Finding]:
    for path in documents():
        if not is_history(path):
            for line, what in avoided(prose(text_of(path))):
                yield Finding(path, line, what)


def long_pages() -> Iterator[Finding]:
    limits = {path: MOST_WORDS for path in pages() if not is_history(path)}
    for path, most in (*limits.items(), (ROOT / "README.md", MOST_WORDS_IN_README)):
        words = len(text_of(path).split())
        if words > most:
            yield Finding(path, 1, f"{words} words; at most {most}: make it two pages")


def broken_lists() -> Iterator[Finding]:
    """What GitHub shows as a list or a table, and the site as a paragraph."""
    for path in pages():
        for line, what in broken_blocks(text_of(path)):
            yield Finding(path, line, what)


def broken_blocks(text: str) -> Iterator[tuple[int, str]]:
    first = ""  # the first line of the block
    was_item = False
    for number, line in enumerate(_COMMENT.sub(blank, _FENCE.sub(blank, text)).split("\n"), 1):
        bare = line.strip()
        if not bare or bare.startswith("#"):
            first, was_item = "", was_item and not bare
            continue
        is_item = _ITEM.match(bare) is not None
        if is_item and was_item and 0 < len(line) - len(line.lstrip()) < 4:
            yield number, "a nested list: indent it by 4 spaces"
        if first and not line.startswith("    "):
            if is_item and _ITEM.match(first) is None:
                yield number, "a list needs an empty line before it"
                first = bare
            elif bare.startswith("|") and not first.startswith("|"):
                yield number, "a table needs an empty line before it"
                first = bare
        first = first or bare
        was_item = is_item or (was_item and line.startswith(" "))


# -- links -----------------------------------------------------------------------------------------


def broken_links() -> Iterator[Finding]:
    for path in documents():
        text = _COMMENT.sub(blank, _FENCE.sub(blank, text_of(path)))
        text = _CODE.sub(lambda code: "`" + blank(code) + "`", text)
        for link in (*_LINK.finditer(text), *_DEFINITION.finditer(text)):
            what = wrong_with(path, link["target"])
            if what:
                line = text.count("\n", 0, link.start()) + 1
                yield Finding(path, line, f"the link {link['target']} {what}")


def wrong_with(page: Path, target: str) -> str | None:
    """What is wrong with the link; None if it leads somewhere, or to another site."""
    if re.match(r"[a-z][a-z0-9+.-]*:", target):
        return None
    name, _, anchor = target.partition("#")
    path = Path(os.path.normpath(page.parent / name)) if name else page
    is_on_site = DOCS in page.parents
    wrong = {
        "is absolute: make it relative": name.startswith("/"),
        "leaves docs/, and so the site: write the path in backticks": (
            is_on_site and DOCS not in path.parents
        ),
        "leads to no file": not path.exists(),
        "leads to a folder: name a page in it": is_on_site and path.is_dir(),
    }
    for what, is_so in wrong.items():
        if is_so:
            return what
    if anchor and path.suffix == ".md" and not has_anchor(path, anchor):
        return f"leads to no heading of {path.relative_to(ROOT)}"
    return None


def has_anchor(path: Path, anchor: str) -> bool:
    api = _API.findall(text_of(path))
    return anchor in anchors(path) or any(f"{anchor}.".startswith(f"{name}.") for name in api)


@cache
def anchors(path: Path) -> frozenset[str]:
    """The ids of a page: as the site makes them in docs/, as GitHub makes them elsewhere."""
    on_site = DOCS in path.parents
    slug, joint = (slug_of_site, "_") if on_site else (slug_of_github, "-")
    found: set[str] = set()
    text = _FENCE.sub(blank, text_of(path))
    for heading in _HEADING.finditer(text):
        bare = re.sub(r" *\{[^}]*\}$", "", heading["text"]) if on_site else heading["text"]
        first = slug(re.sub(r"!?\[([^\]]*)\](?:\([^)]*\)|\[[^\]]*\])", r"\1", bare))
        own, number = first, 0
        while own in found:
            number += 1
            own = f"{first}{joint}{number}"
        found.add(own)
    found.update(match["id"] or match["html"] for match in _EXPLICIT_ID.finditer(text))
    return frozenset(found)


def slug_of_site(heading: str) -> str:
    """As Python-Markdown's `toc` does it."""
    text = re.sub(r"[`*]|(?<!\w)_|_(?!\w)", "", heading)
    ascii_only = unicodedata.normalize("NFKD", text).encode("ascii", "ignore").decode()
    return re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", ascii_only).strip().lower())


def slug_of_github(heading: str) -> str:
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


# -- navigation ------------------------------------------------------------------------------------


def astray() -> Iterator[Finding]:
    """Pages that the navigation lacks, and entries without a page."""
    settings = ROOT / "mkdocs.yml"
    before, _, nav = settings.read_text(encoding="utf-8").partition("\nnav:\n")
    lines = {}
    for number, line in enumerate(nav.splitlines(), before.count("\n") + 3):
        entry = re.search(r"[\w./-]+\.md$", line.strip())
        if entry:
            lines[DOCS / entry[0]] = number
    for path in pages():
        if path not in lines:
            yield Finding(path, 1, "the page is not in the nav of mkdocs.yml")
    for path, number in lines.items():
        if not path.exists():
            yield Finding(settings, number, f"there is no {path.relative_to(ROOT)}")


# -- the package -----------------------------------------------------------------------------------


def sources() -> Iterator[Path]:
    """Every module, once: of the package, and of the folders that it links to."""
    package = ROOT / "src" / "sparkonce"
    for folder in (package, *(path.resolve() for path in package.iterdir() if path.is_symlink())):
        for parent, _, names in os.walk(folder):
            yield from (Path(parent) / name for name in names if name.endswith(".py"))


def words_of_sources() -> Iterator[Finding]:
    for path in sources():
        text = path.read_text(encoding="utf-8")
        if _ANY_CLEAR.search(unindented("\n".join(_MAYBE_SAID.findall(text)))) is None:
            continue  # reading its tokens takes longer
        for start, said in comments_and_docstrings(text):
            for line, what in avoided(said, only_clear=True):
                yield Finding(path, start + line - 1, what)


def comments_and_docstrings(text: str) -> Iterator[tuple[int, str]]:
    """Each with the number of its first line. Comments in lines that follow are one."""
    block: list[str] = []
    start = last = 0
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            line = token.start[0]
            if block and line != last + 1:
                yield start, "\n".join(block)
                block = []
            if not block:
                start = line
            block.append(token.string.lstrip("#").strip())
            last = line
    if block:
        yield start, "\n".join(block)
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            value = node.value.value
            if isinstance(value, str):
                yield node.lineno, without_code(value)


def without_code(docstring: str) -> str:
    return re.sub(r"(`+)[^`]+\1", lambda code: "`" + blank(code) + "`", docstring)


# -- the tests -------------------------------------------------------------------------------------

CHECKS: Final[Sequence[Callable[[], Iterator[Finding]]]] = (
    words_of_pages,
    words_of_sources,
    long_pages,
    broken_lists,
    broken_links,
    astray,
)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_documents(check: Callable[[], Iterator[Finding]]) -> None:
    """Each finding names file, line and what to write."""
    found = list(check())
    assert not found, "\n" + "\n".join(map(str, found))


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("The broker is away.", "is away"),
        ("A server that does not\nanswer is asked again.", "does not answer"),
        ("* An operator does it by\n  hand.", "by hand"),
        ("The file is made anew.", "anew"),
        ("A driver who died", "driver who"),
        ("It wakes up late.", "It wakes up"),
        ("Rows come behind the decision.", "behind the decision"),
        ("That is said in the log.", "is said"),
        ("| Of the rows none is lost. |", "Of the"),
        ("It ends. That which is lost", "That which"),
        ("The log alone decides.", "alone"),
    ],
)
def test_word_is_found(text: str, word: str) -> None:
    (found,) = avoided(text)
    assert found[1].startswith(f'"{word}": write ')


@pytest.mark.parametrize(
    "text",
    [
        "A reader stands for any tool behind a proxy, or stands in for two stands of a test.",
        "The branch, left alone, keeps its `by hand` and its lock; leave its rows alone.",
        "S3 stands for Simple Storage Service; due to a pause, a long-lasting one.",
        "Each of the rows; the list of the batches.",
        "An operator who is woken up. Readers who know Flink.",
    ],
)
def test_other_meaning_is_not_found(text: str) -> None:
    assert not list(avoided(prose(text)))


def test_code_is_no_prose() -> None:
    """And the lines after it keep their numbers."""
    page = "One\n\n```python\nby_hand = 'by hand'\n```\n\n`by hand` [x](by-hand.md)\nby hand\n"
    assert [line for line, _ in avoided(prose(page))] == [8]


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("Two:\n* one\n* two\n", [2]),
        ("Two:\n\n* one\n  goes on\n* two\n", []),
        ("* one\n  * nested\n\n* two\n    * nested\n", [2]),
        ("A table:\n| a | b |\n|---|---|\n", [2]),
        ("## A table\n| a | b |\n|---|---|\n", []),
        ("* one\n\n  goes on\n", []),
    ],
)
def test_list_or_table_that_the_site_shows_as_text(text: str, lines: list[int]) -> None:
    assert [line for line, _ in broken_blocks(text)] == lines


@pytest.mark.parametrize(
    ("heading", "site", "github"),
    [
        ("What a `KafkaSink` needs", "what-a-kafkasink-needs", "what-a-kafkasink-needs"),
        ("Rows & keys: two", "rows-keys-two", "rows--keys-two"),
        ('`load="direct"`, `max_rows`', "loaddirect-max_rows", "loaddirect-max_rows"),
    ],
)
def test_anchors(heading: str, site: str, github: str) -> None:
    assert (slug_of_site(heading), slug_of_github(heading)) == (site, github)


def test_comments_and_docstrings_are_searched() -> None:
    """With the line, and never the code."""
    source = '"""Doc,\nby hand."""\nby_hand = "by hand"  # x\n# a file is\n# made anew\n'
    found = [
        start + line - 1
        for start, said in comments_and_docstrings(source)
        for line, _ in avoided(said, only_clear=True)
    ]
    assert sorted(found) == [2, 5]


if __name__ == "__main__":
    FOUND = [finding for check in CHECKS for finding in check()]
    print(*FOUND, sep="\n", end="\n" * bool(FOUND))
    sys.exit(bool(FOUND))
