"""The one error of this package."""

from __future__ import annotations


class ServiceError(RuntimeError):
    """A server cannot be had: one sentence that says why, and what helps."""
