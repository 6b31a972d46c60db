"""The one error of this package."""

from __future__ import annotations


class ServiceError(RuntimeError):
    """A server cannot be started or used: one sentence with the reason and what helps."""
