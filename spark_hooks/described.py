"""A pipeline that JSON describes, in a file or in the options of ``format("sparkonce")``.

    {"name": "orders", "log": {"env": "ORDERS_LOG"},
     "sinks": [{"type": "postgres", "conninfo": {"env": "ORDERS_DSN"}, "table": "orders"}]}

    JSON ─► no secret is plain text ─► names and types, against the constructor's signature
         ─► references are read ─► the sinks ─► `ExactlyOnce`, as a module would make it

The keys are the keyword arguments of `ExactlyOnce`, and those of the sink's class. No message shows
a value.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import os
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import is_dataclass
from pathlib import Path
from typing import (
    Any,
    Final,
    Literal,
    NamedTuple,
    Union,
    cast,
    get_args,
    get_origin,
    get_type_hints,
)

from sparkonce import sinks as sinks_room
from sparkonce.errors import ConfigurationError, SparkOnceError
from sparkonce.sinks.base import AnySink, TwoPhaseCommitSink
from sparkonce.spark_hooks.exactly_once import ExactlyOnce
from sparkonce.spark_hooks.references import (
    Reveal,
    at,
    is_reference,
    masked,
    refuse_plain_secrets,
    reveal,
)

TYPES: Final[Mapping[str, str]] = {
    "delta": "DeltaSink",
    "file": "FileSink",
    "iceberg": "IcebergSink",
    "kafka": "KafkaSink",
    "postgres": "PostgresSink",
    "s3": "S3Sink",
    "sqlite": "SqliteSink",
}
"""The sinks that JSON can describe; each type is the `kind` of its class."""

_MODULE: Final = (
    'put the pipeline into a module, and give it as .option("pipeline", "module:attribute")'
)

_HINTS: Final[Mapping[str, Any]] = {
    "AnySink": TwoPhaseCommitSink,
    "ClientFactory": Callable,
    "Transform": Callable,
}
"""Names in the annotations that mean something at type checks only."""


class Parameter(NamedTuple):
    """Of a constructor.

    Attributes:
        hint: its type.
        is_required: whether it has no default.
    """

    hint: Any
    is_required: bool


def is_described(job: str) -> bool:
    """Whether the JOB is JSON, or a file of JSON, and not ``module:attribute``."""
    return job.lstrip().startswith("{") or job.endswith(".json")


def load_described(job: str) -> ExactlyOnce:
    """The pipeline of a JOB that is JSON, or the path of a file of JSON.

    Raises:
        ConfigurationError: it is no such JSON, a name or a type is wrong, a secret is plain text,
            or a reference leads nowhere.
    """
    where, value = _read(job)
    reader, described = _Reader(reveal), _as_list(value, where)
    refuse_plain_secrets(described, where)
    with reader.hiding():
        return cast("ExactlyOnce", reader.made(ExactlyOnce, described, where))


def sinks_for_columns(text: str) -> Sequence[AnySink]:
    """The sinks, to ask them for their columns only: a secret that is not here is not needed.

    Args:
        text: what the option "sinks" has, or a JOB that is JSON.

    Raises:
        ConfigurationError: as `load_described`.
    """
    where, value = _read(text)
    if isinstance(value, dict) and "sinks" in value:
        value = value["sinks"]
    described = _as_list({"sinks": value}, where)["sinks"]
    refuse_plain_secrets(described, at(where, "sinks"))
    reader, hint = _Reader(_reveal_or_not), Sequence[TwoPhaseCommitSink[Any]]
    with reader.hiding():
        return cast("Sequence[AnySink]", reader.value(described, hint, at(where, "sinks")))


def parameters_of(cls: type) -> dict[str, Parameter]:
    """The parameters of a constructor, by name."""
    hints = get_type_hints(cls.__init__, localns=dict(_HINTS))  # type: ignore[misc]
    return {
        name: Parameter(hints[name], parameter.default is inspect.Parameter.empty)
        for name, parameter in inspect.signature(cls).parameters.items()
    }


def sink_class(kind: object, where: str) -> type:
    """The class of sinks of this type.

    Raises:
        ConfigurationError: there is none, or its client library is not installed.
    """
    if not isinstance(kind, str) or kind not in TYPES:
        told = "has no type" if kind is None else f"has the type {kind!r}, which is unknown"
        raise ConfigurationError(
            f"{where} {told}: the types are {', '.join(TYPES)}; for a sink of your own {_MODULE}"
        )
    try:
        found: type = getattr(sinks_room, TYPES[kind])
    except ModuleNotFoundError as error:
        raise ConfigurationError(f"{where}: {error}") from error
    return found


def value_of(text: str, hint: Any) -> Any:
    """The JSON value that a text means where only a text can be given, as in a variable."""
    if hint in {object, Any}:
        return text
    try:
        parsed = json.loads(text)
    except ValueError:
        return text  # which is refused later if it is of another type than it should be
    is_text = _fits(text, hint) and not isinstance(parsed, dict | list)
    return text if is_text or not _fits(parsed, hint) else parsed


class _Reader:
    """Makes objects from JSON; remembers the values that it revealed, so that no error has them."""

    def __init__(self, reveal: Reveal) -> None:
        self._reveal = reveal
        self._revealed: list[str] = []

    @contextlib.contextmanager
    def hiding(self) -> Iterator[None]:
        """Inside the block, no error shows a value that was revealed."""
        try:
            yield
        except SparkOnceError as error:
            shown = masked(str(error), self._revealed)
            if shown == str(error):
                raise
            raise ConfigurationError(shown) from None

    def made(self, cls: type, given: Mapping[str, Any], where: str) -> object:
        """An object of the class, with these arguments."""
        takes = parameters_of(cls)
        _check_names(given, takes, f"{where} {cls.__name__}")
        arguments = {
            name: self.value(value, takes[name].hint, at(where, name))
            for name, value in given.items()
            if not self._may_leave_out(value, takes[name])
        }
        try:
            return cls(**arguments)
        except SparkOnceError:
            raise
        except ModuleNotFoundError as error:
            raise ConfigurationError(f"{where}: {error}") from error
        except Exception as error:  # noqa: BLE001 - from a client that reads the setting
            shown = masked(f"{type(error).__name__}: {error}", self._revealed)
            raise ConfigurationError(f"{where} {cls.__name__}: {shown}") from None

    def value(self, value: Any, hint: Any, where: str) -> Any:
        """The value as this type, with its references replaced by what they name.

        Raises:
            ConfigurationError: it is of another type.
        """
        if is_reference(value):
            ((kind, name),) = value.items()
            if not isinstance(name, str):
                raise ConfigurationError(f'{where}: write {{"{kind}": "NAME"}}, with a text')
            text = self._reveal(kind, name, where)
            self._revealed.append(text)
            value = value_of(text, hint)
        for option in _options(hint):
            if not _is_of(value, option):
                continue
            if option is TwoPhaseCommitSink or get_origin(option) is TwoPhaseCommitSink:
                return self._sink(value, where)
            if is_dataclass(option):
                assert isinstance(option, type)  # noqa: S101 - for mypy
                return self.made(option, value, where)
            of_items = get_args(option)[-1] if _holds_others(option) else object
            if isinstance(value, list):
                return [self.value(v, of_items, f"{where}[{n}]") for n, v in enumerate(value)]
            if isinstance(value, dict):
                return {k: self.value(v, of_items, at(where, k)) for k, v in value.items()}
            return value
        raise ConfigurationError(f"{where}: expected {_expected(hint)}, not {_shown(value)}")

    def _may_leave_out(self, value: Any, parameter: Parameter) -> bool:
        """Whether it is all the same: no text could stand in for what is missing here."""
        stands_in = parameter.is_required or _fits("", parameter.hint)
        return self._reveal is _reveal_or_not and is_reference(value) and not stands_in

    def _sink(self, given: Mapping[str, Any], where: str) -> object:
        cls = sink_class(given.get("type"), where)
        arguments = {name: value for name, value in given.items() if name != "type"}
        return self.made(cls, arguments, where)


def _read(text: str) -> tuple[str, Any]:
    """Where the JSON is, for messages, and what it holds."""
    where = "the pipeline's JSON:"
    if text.endswith(".json"):
        path = Path(os.path.expanduser(text)).absolute()  # noqa: PTH111 - a missing home raises there
        where = f"{path}:"
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or "it is no text in UTF-8"
            raise ConfigurationError(
                f"{path} cannot be read ({reason}): check the path; for a query it is one on the "
                "machine of Spark's driver"
            ) from None
    try:
        return where, json.loads(text)
    except ValueError as error:
        raise ConfigurationError(f"{where} it is no JSON: {error}") from None


def _as_list(value: Any, where: str) -> dict[str, Any]:
    """With a list of sinks, where one sink may be given by itself."""
    if not isinstance(value, dict):
        raise ConfigurationError(
            f'{where} expected an object with the settings, such as {{"name": "orders", '
            '"log": "postgresql://…", "sinks": […]}'
        )
    lists = {n: [v] for n, v in value.items() if n in {"sinks", "removed"} and isinstance(v, dict)}
    return {**value, **lists}


def _check_names(given: Mapping[str, Any], takes: Mapping[str, Parameter], where: str) -> None:
    known = [name for name, parameter in takes.items() if not _is_for_python(parameter.hint)]
    for name in given:
        if name in takes and name not in known:
            if name == "telemetry":
                raise ConfigurationError(f"{where}: telemetry= needs foreachBatch: remove it here")
            raise ConfigurationError(
                f"{where}: {name}= takes a function, which JSON cannot hold: {_MODULE}"
            )
        if name not in takes:
            raise ConfigurationError(
                f"{where}: there is no parameter {name!r}: use some of {', '.join(known)}"
            )
    for name, parameter in takes.items():
        if parameter.is_required and name not in given:
            raise ConfigurationError(
                f"{where}: the parameter {name!r} is missing: add it. All are {', '.join(known)}"
            )


def _reveal_or_not(kind: str, name: str, where: str) -> str:
    try:
        return reveal(kind, name, where)
    except ConfigurationError:
        return "postgresql://"  # which every constructor takes for an address, a key or a password


# -- types -----------------------------------------------------------------------------------------

_NAMES_OF_TYPES: Final[Mapping[Any, str]] = {
    str: "a text",
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    types.NoneType: "null",
    list: "a list",
    dict: "an object",
}


def _options(hint: Any) -> tuple[Any, ...]:
    """The types of a union."""
    return get_args(hint) if get_origin(hint) in {Union, types.UnionType} else (hint,)


def _fits(value: Any, hint: Any) -> bool:
    return any(_is_of(value, option) for option in _options(hint))


def _is_of(value: Any, option: Any) -> bool:
    """Whether a JSON value is of this type, without a look at what it holds."""
    if option in {object, Any}:
        return True
    if get_origin(option) is Literal:
        return any(value == known and type(value) is type(known) for known in get_args(option))
    return type(value) in _json_types(option)


def _json_types(option: Any) -> tuple[type, ...]:
    """The types of JSON values that mean a value of this type."""
    kind = get_origin(option) or option
    if kind is float:
        return (int, float)
    if kind in _NAMES_OF_TYPES:
        return (kind,)
    if kind is os.PathLike:
        return (str,)
    if kind is Sequence or kind is tuple:
        return (list,)
    if kind is Mapping or kind is TwoPhaseCommitSink or is_dataclass(kind):
        return (dict,)
    return ()  # a function, or an object that only Python can make


def _holds_others(option: Any) -> bool:
    return get_origin(option) in {Sequence, Mapping, tuple, list, dict}


def _is_for_python(hint: Any) -> bool:
    return any(
        get_origin(o) is Callable or o is Callable or getattr(o, "_is_protocol", False)
        for o in _options(hint)
    )


def _expected(hint: Any) -> str:
    """The types, in JSON's words."""
    told: list[str] = []
    for option in _options(hint):
        if get_origin(option) is Literal:
            told += [json.dumps(known) for known in get_args(option)]
        else:
            told += [_NAMES_OF_TYPES[kind] for kind in _json_types(option)[-1:]]
    return " or ".join(dict.fromkeys(told))


def _shown(value: Any) -> str:
    return _NAMES_OF_TYPES[type(value)]
