"""Lineage of a pipeline, by OpenLineage; an extra: `pip install 'sparkonce[openlineage]'`."""

from sparkonce.observe.lineage.front import OpenLineage

__all__ = ["OpenLineage"]
