"""JOB: ``module:attribute`` of an `ExactlyOnce`, or of a function that returns one; or JSON.

JSON is a text that begins with ``{``, or the path of a file ``….json``: see `described`.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn

from sparkonce.errors import ConfigurationError, SparkOnceError
from sparkonce.txn_log import without_making

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from sparkonce.spark_hooks.exactly_once import ExactlyOnce


_TO_FIND_IT: Final = "run sparkonce in the folder of the job, or set PYTHONPATH"


def load_job(text: str, *, create: bool = False, to_find_it: str = _TO_FIND_IT) -> ExactlyOnce:
    """Import the pipeline, or make it from JSON.

    The working directory comes first on the path of modules, as for uvicorn.

    Args:
        text: the JOB.
        create: whether its log may be made when it is not there.
        to_find_it: what the user can do when there is no such module.

    Raises:
        ConfigurationError: it cannot be imported or read, is something else, starts a query, or
            has no log yet.
    """
    from sparkonce.spark_hooks import described  # noqa: PLC0415 - imports PySpark

    with contextlib.nullcontext() if create else without_making():
        if described.is_described(text):
            return described.load_described(text)
        return _pipeline(load_attribute(text, to_find_it), text)


def load_writer(text: str) -> Callable[[DataFrame, int], object]:
    """Import what a query passes to foreachBatch: a pipeline, or any function of two parameters.

    The pipeline's log is made when it is not there, as by the query's first start.

    Raises:
        ConfigurationError: as `load_job`.
    """
    from sparkonce.spark_hooks import described  # noqa: PLC0415 - imports PySpark

    if described.is_described(text):
        return described.load_described(text)
    found = load_attribute(text)
    return found if _takes_a_batch(found) else _pipeline(found, text)


def load_attribute(text: str, to_find_it: str = _TO_FIND_IT) -> Any:
    """Import ``module:attribute``, with the working directory on the path.

    Raises:
        ConfigurationError: it cannot be imported, or starts a query.
    """
    module_name, colon, attribute = text.partition(":")
    if not colon or not module_name or not attribute:
        raise ConfigurationError(
            f"{text!r}: expected module:attribute, such as jobs.orders:pipeline, or a file of "
            "JSON, such as orders.json"
        )
    if module_name.endswith(".py"):
        name = module_name.removesuffix(".py").lstrip("./").replace("/", ".")
        raise ConfigurationError(f"{text!r}: write {name}:{attribute}, without .py")
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    with _quietly(text):
        return _attribute(_import(module_name, to_find_it), module_name, attribute)


def _pipeline(found: object, text: str) -> ExactlyOnce:
    """The pipeline, or what the function returns."""
    from sparkonce.spark_hooks.exactly_once import ExactlyOnce  # noqa: PLC0415 - imports PySpark

    if not isinstance(found, ExactlyOnce) and callable(found):
        try:
            with _quietly(text):
                found = found()
        except SparkOnceError:
            raise
        except Exception as error:
            attribute = text.partition(":")[2]
            raise ConfigurationError(
                f"{text!r}: {attribute}() raised {type(error).__name__}: {error}"
            ) from error
    if not isinstance(found, ExactlyOnce):
        raise ConfigurationError(
            f"{text!r} is of type {type(found).__name__}: expected an ExactlyOnce, or a function "
            "without arguments that returns one"
        )
    return found


def _takes_a_batch(found: object) -> bool:
    """Whether it is a pipeline, or a function of a DataFrame and the number of its batch.

    One that can be called without arguments is a factory.
    """
    return callable(found) and _can_be_called(found, None, 0) and not _can_be_called(found)


def _can_be_called(found: Callable[..., object], *arguments: object) -> bool:
    try:
        inspect.signature(found).bind(*arguments)
    except (TypeError, ValueError):
        return False
    return True


@contextlib.contextmanager
def _quietly(text: str) -> Iterator[None]:
    """Nothing that the module prints gets into our output, and no query starts."""
    with contextlib.redirect_stdout(sys.stderr), _no_query_starts(text):
        yield


def _attribute(module: object, module_name: str, attribute: str) -> object:
    found, path = module, ""
    for name in attribute.split("."):
        if not hasattr(found, name):
            names = _pipelines_in(found, module_name)
            known = ", ".join(f"`{path}{name}`" for name in names)
            raise ConfigurationError(
                f"{module_name} has no attribute {attribute!r}"
                + (f": it has {known}" if known else ", and no pipeline")
            )
        found, path = getattr(found, name), f"{path}{name}."
    return found


def _pipelines_in(place: object, module_name: str) -> list[str]:
    """Names of its pipelines, and of its own functions that may return one."""
    from sparkonce.spark_hooks.exactly_once import ExactlyOnce  # noqa: PLC0415 - imports PySpark

    public = {
        name: found
        for name, found in getattr(place, "__dict__", {}).items()
        if not name.startswith("_")
    }
    functions = [
        name
        for name, found in public.items()
        if inspect.isfunction(found)
        and found.__module__ == module_name
        and not inspect.signature(found).parameters
    ]
    return [name for name, found in public.items() if isinstance(found, ExactlyOnce)] + functions


def _import(module_name: str, to_find_it: str) -> object:
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is not None and (f"{module_name}.").startswith(f"{error.name}."):
            raise ConfigurationError(
                f"there is no module {error.name!r} in {Path.cwd()} nor on the path: {to_find_it}"
            ) from error
        raise ConfigurationError(f"{module_name} cannot be imported: {error}") from error
    except SparkOnceError:
        raise
    except SystemExit as error:
        raise ConfigurationError(
            f"importing {module_name} ended the program: put what it runs under "
            'if __name__ == "__main__":'
        ) from error
    except Exception as error:
        raise ConfigurationError(
            f"importing {module_name} raised {type(error).__name__}: {error}"
        ) from error


@contextlib.contextmanager
def _no_query_starts(text: str) -> Iterator[None]:
    """Refuse to start a query: it would fence the one that the command looks at."""
    from pyspark.sql.streaming import DataStreamWriter  # noqa: PLC0415 - takes a second

    def refuse(*_: object, **__: object) -> NoReturn:
        raise ConfigurationError(
            f"{text!r} starts a streaming query when it is imported, which would fence the one "
            'that runs: start it under if __name__ == "__main__":, and keep the ExactlyOnce in a '
            "name of the module, or in a function"
        )

    starts = {name: getattr(DataStreamWriter, name) for name in ("start", "toTable")}
    try:
        for name in starts:
            setattr(DataStreamWriter, name, refuse)
        yield
    finally:
        for name, method in starts.items():
            setattr(DataStreamWriter, name, method)
