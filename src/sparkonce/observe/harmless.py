"""Telemetry stops no batch: what it raises is logged."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import ParamSpec, TypeVar

logger = logging.getLogger("sparkonce")

Arguments = ParamSpec("Arguments")
ResultT = TypeVar("ResultT")


def harmless(
    method: Callable[Arguments, ResultT],
) -> Callable[Arguments, ResultT | None]:
    """Log what the method raises, and return None."""

    @functools.wraps(method)
    def call(*args: Arguments.args, **kwargs: Arguments.kwargs) -> ResultT | None:
        try:
            return method(*args, **kwargs)
        except Exception:
            logger.warning("telemetry failed; the pipeline goes on", exc_info=True)
            return None

    return call
