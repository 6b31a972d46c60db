"""The options of ``format("sparkonce")`` ─► the JOB that its processes on the driver load.

    pipeline                              module:attribute, a file of JSON, or JSON
    name, log, sinks, …                   parameters of `ExactlyOnce`; sinks as JSON
    name, log, …, sink.type, sink.table   the same, with the parameters of one sink

Spark's options are texts, whose names have no upper case letters.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from sparkonce.errors import ConfigurationError
from sparkonce.spark_hooks.described import Parameter, parameters_of, sink_class, value_of
from sparkonce.spark_hooks.exactly_once import ExactlyOnce
from sparkonce.spark_hooks.references import is_reference

_OF_ONE_SINK: Final = "sink."
_SPARKS: Final = {name.lower(): name for name in ("checkpointLocation", "key", "queryName")}
"""Options that say nothing about the pipeline; `writeStream.queryName` gives the last one."""


def job_of(options: Mapping[str, str]) -> str:
    """The JOB; see `sparkonce.spark_hooks.jobs.load_job`.

    Raises:
        ConfigurationError: no pipeline is given, or two; or an option is unknown.
    """
    given = {name.lower(): value for name, value in options.items()}
    takes = parameters_of(ExactlyOnce)
    settings = [n for n in given if n in takes or n.startswith(_OF_ONE_SINK)]
    if job := given.get("pipeline"):
        if settings:
            raise ConfigurationError(
                f'the option "pipeline" is a whole pipeline, and {_listed(settings)} would be '
                "another one: give one of them"
            )
        if unknown := sorted(given.keys() - {"pipeline"} - _SPARKS.keys()):
            raise ConfigurationError(
                f'format("sparkonce") has no option {_listed(unknown)}: next to "pipeline" it '
                f"takes {_listed(_SPARKS.values())}"
            )
        return job
    if not settings:
        raise ConfigurationError(
            'format("sparkonce") needs .option("pipeline", "module:attribute"), the pipeline to '
            'write with; or its settings as the options "name", "log" and "sinks"'
        )
    if unknown := sorted(given.keys() - settings - _SPARKS.keys()):
        raise ConfigurationError(
            f'format("sparkonce") has no option {_listed(unknown)}: the pipeline\'s are '
            f"{_listed(takes)}; those of one sink begin with {_OF_ONE_SINK!r}"
        )
    described = {name: _value(name, given[name], takes) for name in settings if name in takes}
    if one := _one_sink(given):
        if "sinks" in described:
            raise ConfigurationError(
                f'give the option "sinks", or those of one sink, which begin with {_OF_ONE_SINK!r}'
            )
        described["sinks"] = [one]
    # Sorted: the processes on the driver share a pipeline whose text is the same.
    return json.dumps(described, sort_keys=True)


def _one_sink(given: Mapping[str, str]) -> dict[str, Any]:
    """The sink whose parameters are options."""
    found = {
        name.removeprefix(_OF_ONE_SINK): text
        for name, text in given.items()
        if name.startswith(_OF_ONE_SINK)
    }
    if not found:
        return {}
    kind = found.pop("type", None)
    takes = parameters_of(sink_class(kind, "the sink of the options"))
    hints = {name: takes[name].hint if name in takes else object for name in found}
    return {"type": kind, **{name: _json_of(found[name], hints[name]) for name in found}}


def _value(name: str, text: str, takes: Mapping[str, Parameter]) -> Any:
    if name not in {"sinks", "removed"}:
        return _json_of(text, takes[name].hint)
    try:
        return json.loads(text)
    except ValueError as error:
        raise ConfigurationError(
            f'the option "{name}" is no JSON ({error}): give a list of objects, such as '
            '[{"type": "file", "folder": "/lake/orders"}]'
        ) from None


def _json_of(text: str, hint: Any) -> Any:
    try:
        parsed = json.loads(text)
    except ValueError:
        return text
    return parsed if is_reference(parsed) else value_of(text, hint)


def _listed(names: Any) -> str:
    return ", ".join(f'"{name}"' for name in names)
