"""OpenTelemetry's environment variables, as far as we read them; imports nothing of it."""

from __future__ import annotations

import os
from typing import Literal, TypeAlias

Signal: TypeAlias = Literal["TRACES", "METRICS"]


def is_exported(signal: Signal) -> bool:
    """Whether the environment names a receiver of OTLP for this signal."""
    if os.environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return False
    exporters = os.environ.get(f"OTEL_{signal}_EXPORTER", "otlp").replace(" ", "").split(",")
    endpoints = (f"OTEL_EXPORTER_OTLP_{signal}_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
    return "otlp" in exporters and any(os.environ.get(name) for name in endpoints)
