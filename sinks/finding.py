"""What a sink's `diagnose` yields; see `sparkonce.finding`."""

from __future__ import annotations

from sparkonce.finding import Finding, Level

__all__ = ["Finding", "Level"]
