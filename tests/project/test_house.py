"""The machine check of the house: sizes of modules, classes and functions, and shared state.

    src/sparkonce, and the root folders that it links to ─► ast ─► offenders ─► compared with LIMITS

How lines are counted:

* a module: all lines of the file;
* a class: from `class` to its last line, its docstring and its methods included;
* a function: from `def` to its last line, without decorators and without the docstring, since an
  explanation must never be cut to pass this check. A function inside another one counts for both.

Shared state is what changes after the import and is the same object for everybody in the process:

* a name of a module or a class that holds an empty container, a container that the module
  changes, a lock, a queue, a pool, a counter, a weak container, or an instance of a class of ours
  that is not frozen;
* a name that a function rebinds with `global`, or that another module assigns (`module.name = …`);
* the result of a function without arguments under `functools.cache`.

A table that is filled where it is defined, and that the module never changes, is a constant. A
context variable is not shared: each thread has its own value.
"""

from __future__ import annotations

import ast
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

LIMITS: Mapping[str, int] = {"module": 400, "class": 250, "function": 40}

LONGER: Mapping[str, str] = {
    "src/sparkonce/cli/settling.py::settle": "one command: what it asks, in the order it asks",
    "src/sparkonce/demo/show.py::stage": "the demo's set-up, read from top to bottom",
    "src/sparkonce/testing/services/cluster.py::start_kafka_cluster": "the servers' properties",
    "src/sparkonce/testing/services/kafka.py::local_kafka": "the server's properties",
    "src/sparkonce/testing/services/postgres.py::local_postgres": "the server's set-up in order",
    "src/sparkonce/testing/services/services.py::start_services": "each kind of server once",
}
"""Modules, classes and functions that may be longer, each with the reason, as
``"txn_log/sqlite.py::SqliteLog.put": "one statement of SQL"``. The first line of such a function
says the same."""

SHARED: Mapping[str, str] = {
    "src/sparkonce/once.py::_slots": "what a process has once: pools, clients, listeners, a JVM",
    "src/sparkonce/steps.py::_hooks": "the observers of the process's steps",
    "src/sparkonce/failpoints.py::handler": "the fail points of the process, for tests",
}
"""Shared state that has to be, each with the reason. What a process needs once goes to `once`."""

MOST_LONGER = 10
MOST_SHARED = 3

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "sparkonce"

STATEFUL = """
    list dict set bytearray defaultdict OrderedDict Counter deque ChainMap count cycle local
    WeakSet WeakKeyDictionary WeakValueDictionary Lock RLock Condition Event Semaphore
    BoundedSemaphore Barrier Queue LifoQueue PriorityQueue SimpleQueue ThreadPoolExecutor
    ProcessPoolExecutor Thread Random
"""
CHANGES = """
    append extend insert remove pop popitem clear update setdefault add discard appendleft popleft
"""
DISPLAYS = (ast.List, ast.Dict, ast.Set, ast.ListComp, ast.DictComp, ast.SetComp)


@dataclass(frozen=True)
class Offender:
    """Something of the code that is too long, or shared.

    Attributes:
        place: file and name, as `LONGER` and `SHARED` name it.
        kind: a key of `LIMITS`, or "state".
        what: what was found, for the message.
        lines: how long it is; 0 for state.
    """

    place: str
    kind: str
    what: str
    lines: int = 0

    def __str__(self) -> str:
        return f"  {self.place}: {self.what}"


@dataclass(frozen=True)
class Module:
    """One source file."""

    place: str
    text: str

    @property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)


def modules() -> list[Module]:
    """Every source file, once: the package, and the real folders behind its links."""
    rooms = [path.resolve() for path in PACKAGE.iterdir() if path.is_symlink()]
    found = []
    for folder in (PACKAGE, *rooms):
        for parent, _, names in os.walk(folder):
            paths = (Path(parent) / name for name in names if name.endswith(".py"))
            found += [Module(str(path.relative_to(ROOT)), path.read_text()) for path in paths]
    return sorted(found, key=lambda module: module.place)


# -- sizes -----------------------------------------------------------------------------------------

AnyFunction = ast.FunctionDef | ast.AsyncFunctionDef


def too_long(module: Module) -> Iterator[Offender]:
    lines = len(module.text.splitlines())
    if lines > LIMITS["module"]:
        what = f"a module of {lines} lines; at most {LIMITS['module']}"
        yield Offender(module.place, "module", what, lines)
    for name, node in named(module.tree):
        kind = "class" if isinstance(node, ast.ClassDef) else "function"
        lines = lines_of(node)
        if lines > LIMITS[kind]:
            what = f"a {kind} of {lines} lines; at most {LIMITS[kind]}"
            yield Offender(f"{module.place}::{name}", kind, what, lines)


def named(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, AnyFunction | ast.ClassDef]]:
    """Every class and function, at any depth, with its qualified name."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, AnyFunction | ast.ClassDef):
            yield prefix + node.name, node
            yield from named(node, f"{prefix}{node.name}.")
        else:
            yield from named(node, prefix)


def lines_of(node: AnyFunction | ast.ClassDef) -> int:
    lines = (node.end_lineno or 0) - node.lineno + 1
    first = node.body[0]
    if isinstance(node, ast.ClassDef) or ast.get_docstring(node, clean=False) is None:
        return lines
    return lines - ((first.end_lineno or 0) - first.lineno + 1)


# -- shared state ----------------------------------------------------------------------------------


def shared_state(found: list[Module]) -> list[Offender]:
    """What the modules share."""
    ours = changing_classes(found)
    state: dict[str, Offender] = {}
    for offender in (*(o for m in found for o in _shared(m, ours)), *_assigned_elsewhere(found)):
        state.setdefault(offender.place, offender)
    return list(state.values())


def _assigned_elsewhere(found: list[Module]) -> Iterator[Offender]:
    """Names of a module that another module assigns, as in `failpoints.handler = …`."""
    places = {Path(module.place).stem: module.place for module in found}
    for module in found:
        for node in ast.walk(module.tree):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                place = places.get(last_name(node.value)) if is_name(node.value) else None
                if place is not None and imports(module.tree, Path(place).stem):
                    what = f"assigned in {module.place}, line {node.lineno}"
                    yield Offender(f"{place}::{node.attr}", "state", what)


def _shared(module: Module, ours: frozenset[str]) -> Iterator[Offender]:
    tree, changed = module.tree, changed_names(module.tree)
    scopes: list[tuple[str, ast.Module | ast.ClassDef]] = [("", tree)]
    scopes += [(f"{n}.", node) for n, node in named(tree) if isinstance(node, ast.ClassDef)]
    for prefix, scope in scopes:
        for name, value in assigned(scope.body):
            is_changed = f".{name}" in changed if prefix else name in changed
            what = why_state(value, ours, is_changed=is_changed)
            if what is not None and name not in {"__all__", "__slots__"}:
                yield Offender(f"{module.place}::{prefix}{name}", "state", what)
    for name, node in named(tree):
        if isinstance(node, ast.ClassDef):
            continue
        if takes_nothing(node) and any(map(is_cache, node.decorator_list)):
            what = "functools.cache on a function without arguments"
            yield Offender(f"{module.place}::{name}", "state", what)
    for node in ast.walk(tree):
        if isinstance(node, ast.Global):
            for name in node.names:
                what = f"rebound with `global` in line {node.lineno}"
                yield Offender(f"{module.place}::{name}", "state", what)


def assigned(body: list[ast.stmt]) -> Iterator[tuple[str, ast.expr]]:
    """Names that the statements assign, also under `if` and `try`, with their values."""
    for node in body:
        if isinstance(node, ast.Assign):
            yield from ((t.id, node.value) for t in node.targets if isinstance(t, ast.Name))
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            if node.value is not None:
                yield node.target.id, node.value
        elif isinstance(node, ast.If | ast.Try | ast.With):
            yield from assigned(node.body)
            yield from assigned(getattr(node, "orelse", []))


def why_state(value: ast.expr, ours: frozenset[str], *, is_changed: bool) -> str | None:
    """Why the value is state; None when it is a constant."""
    changed = "a container that the module changes" if is_changed else None
    if isinstance(value, DISPLAYS):
        is_empty = not getattr(value, "elts", getattr(value, "keys", True))
        return "an empty container, which only changes can fill" if is_empty else changed
    if not isinstance(value, ast.Call):
        return None
    called = last_name(value.func)
    if called in {"list", "dict", "set"} and value.args:
        return changed
    if called in ours:
        return f"an instance of {called}, which is not frozen"
    return f"{called}(…)" if called in STATEFUL.split() else None


def changed_names(tree: ast.Module) -> frozenset[str]:
    """Names whose objects the module changes: by item, by `del`, by a method, by `|=`.

    A name of a class or an object has a dot before it.
    """
    found = set()
    for node in ast.walk(tree):
        target: ast.expr | None = None
        if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store | ast.Del):
            target = node.value
        elif isinstance(node, ast.AugAssign):
            target = node.target
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            target = node.func.value if node.func.attr in CHANGES.split() else None
        if isinstance(target, ast.Name):
            found.add(target.id)
        elif isinstance(target, ast.Attribute):
            found.add(f".{target.attr}")
    return frozenset(found)


def changing_classes(found: list[Module]) -> frozenset[str]:
    """The project's classes whose instances can change: all but frozen ones, tuples and enums."""
    names = set()
    for module in found:
        for name, node in named(module.tree):
            if isinstance(node, ast.ClassDef) and not is_frozen(node):
                names.add(name.rpartition(".")[2])
    return frozenset(names)


def is_frozen(node: ast.ClassDef) -> bool:
    bases = {last_name(base) for base in node.bases}
    frozen = any(
        isinstance(d, ast.Call)
        and last_name(d.func) == "dataclass"
        and any(k.arg == "frozen" and getattr(k.value, "value", False) for k in d.keywords)
        for d in node.decorator_list
    )
    return frozen or bool(bases & {"NamedTuple", "Enum", "StrEnum", "IntEnum"})


def takes_nothing(node: AnyFunction) -> bool:
    a = node.args
    return not (a.posonlyargs or a.args or a.kwonlyargs or a.vararg or a.kwarg)


def is_name(node: ast.expr) -> bool:
    return isinstance(node, ast.Name)


def imports(tree: ast.Module, name: str) -> bool:
    """Whether the module imports a module under this name."""
    return any(
        (alias.asname or alias.name) == name
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    )


def is_cache(decorator: ast.expr) -> bool:
    called = decorator.func if isinstance(decorator, ast.Call) else decorator
    return last_name(called) in {"cache", "lru_cache"}


def last_name(node: ast.expr) -> str:
    """`Lock` of `threading.Lock`, of `Lock` and of `WeakSet[Guard]`."""
    if isinstance(node, ast.Subscript):
        return last_name(node.value)
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


# -- the house -------------------------------------------------------------------------------------


def told(offenders: list[Offender], next_step: str) -> str:
    lines = sorted(offenders, key=lambda o: (-o.lines, o.place))
    return "\n".join([f"{len(offenders)} found. {next_step}", *map(str, lines)])


@pytest.mark.parametrize("kind", LIMITS)
def test_nothing_is_too_long(kind: str) -> None:
    found = [o for module in modules() for o in too_long(module) if o.kind == kind]
    left = [offender for offender in found if offender.place not in LONGER]
    assert not left, told(left, "Cut it by what it does; or, if it must be, add it to LONGER.")


def test_no_state_is_shared() -> None:
    state = shared_state(modules())
    left = [offender for offender in state if offender.place not in SHARED]
    assert not left, told(left, "Give it to an object that its users hold; or add it to SHARED.")


def test_exceptions_are_few_and_still_needed() -> None:
    found = modules()
    long = {offender.place for module in found for offender in too_long(module)}
    state = {offender.place for offender in shared_state(found)}
    assert LONGER.keys() <= long, f"no longer too long: {sorted(LONGER.keys() - long)}"
    assert SHARED.keys() <= state, f"no longer shared: {sorted(SHARED.keys() - state)}"
    assert len(LONGER) <= MOST_LONGER
    assert len(SHARED) <= MOST_SHARED
    assert all({**LONGER, **SHARED}.values()), "each exception needs its reason"


def test_every_room_is_looked_at() -> None:
    places = {module.place.partition("/")[0] for module in modules()}
    assert places >= {"src", "sinks", "txn_log", "spark_hooks", "protocol"}
    assert len({module.place for module in modules()}) == len(modules())


# -- the check itself ------------------------------------------------------------------------------


OURS = Module("ours.py", "class Ours: ...\n@dataclass(frozen=True)\nclass Frozen: ...")


def body(lines: int) -> str:
    return "".join(f"    x = {n}\n" for n in range(lines))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("x = 1\n" * 400, []),
        ("x = 1\n" * 401, [("module", 401)]),
        ("def f():\n" + body(39), []),
        ("def f():\n" + body(40), [("function", 41)]),
        ('@a\n@b\ndef f():\n    """One.\n\n    Two.\n    """\n' + body(39), []),
        ("async def f():\n" + body(40), [("function", 41)]),
        ("class A:\n" + body(249), []),
        ("class A:\n" + body(250), [("class", 251)]),
        (
            "class A:\n    def f(self):\n" + body(40).replace("    x", " " * 8 + "x"),
            [("function", 41)],
        ),
        ("if True:\n    def f():\n" + body(40).replace("    x", " " * 8 + "x"), [("function", 41)]),
    ],
)
def test_sizes(text: str, expected: list[tuple[str, int]]) -> None:
    assert [(o.kind, o.lines) for o in too_long(Module("a.py", text))] == expected


@pytest.mark.parametrize(
    "text",
    [
        "x = {}",
        "x: dict[str, int] = {}",
        "x = set()",
        "x = {1: 2}\ndef f(): x[3] = 4",
        "x = [1]\ndef f(): x.append(2)",
        "x = [1]\nx += [2]",
        "x = list((1, 2))\nx.extend([3])",
        "x = threading.Lock()",
        "x: weakref.WeakSet[int] = weakref.WeakSet()",
        "x = weakref.WeakValueDictionary[int, str]()",
        "x = Ours()",
        "x = 0\ndef f():\n    global x\n    x = 1",
        "x = Lock()\ndef f():\n    global x\n    x = Lock()",
        "@functools.cache\ndef x(): return 1",
        "@lru_cache(maxsize=1)\ndef x(): return 1",
        "try:\n    x = {}\nexcept ImportError: pass",
    ],
)
def test_shared_state_is_found(text: str) -> None:
    (found,) = shared_state([Module("a.py", text), OURS])
    assert (found.place, found.kind) == ("a.py::x", "state")


@pytest.mark.parametrize(
    "text", ["class A:\n    x = {}", "class A:\n    x = {1: 2}\n    def f(self): self.x[3] = 4"]
)
def test_shared_state_of_a_class_is_found(text: str) -> None:
    (found,) = shared_state([Module("a.py", text)])
    assert found.place == "a.py::A.x"


def test_name_that_another_module_assigns_is_found() -> None:
    setting = Module("room/setting.py", "x = None")
    other = Module("b.py", "from room import setting\ndef f(): setting.x = 1")
    unrelated = Module("c.py", "def f(setting): setting.x = 1")
    assert [o.place for o in shared_state([setting, other])] == ["room/setting.py::x"]
    assert shared_state([setting, unrelated]) == []


@pytest.mark.parametrize(
    "text",
    [
        "__all__ = []",
        "x = {1: 2}\ny = x[1]",
        "x = frozenset({1})",
        "x = re.compile('a')",
        "def f():\n    x = {}\n    x[1] = 2",
        "x = {1: 2}\ndef f(y): y.x[3] = 4",
        "x = ContextVar('x')",
        "@functools.cache\ndef f(x): return x",
        "x = Frozen()",
        "class A:\n    def __init__(self): self.x = {}",
    ],
)
def test_what_is_no_shared_state(text: str) -> None:
    assert shared_state([Module("a.py", text), OURS]) == []


def test_frozen_classes_are_no_state() -> None:
    text = """
@dataclass(frozen=True)
class Frozen: ...
class Pair(NamedTuple): ...
class Kind(StrEnum): ...
@dataclass
class Open: ...
class Plain: ...
"""
    assert changing_classes([Module("a.py", text)]) == {"Open", "Plain"}
