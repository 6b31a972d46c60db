"""The error of a closure that Spark has overtaken."""

from __future__ import annotations


class FileGoneError(Exception):
    """Spark has purged a file that the batch needs: a newer batch may still have all of its own."""
