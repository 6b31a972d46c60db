"""The datasets that a batch reads, from the offsets of its sources.

offsets of a use                        source, as Spark describes it         dataset
{"orders":{"0":120},"returns":{…}}      KafkaV2[Subscribe[orders,returns]]    each topic
{"logOffset":3,"files":"5d0c…"}         FileStreamSource[file:/data/orders]   its folder
17                                      RateStreamV2[rowsPerSecond=5, …]      its description
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from typing import Any, Final, NamedTuple

from sparkonce.datasets import Dataset, without_secrets
from sparkonce.observing import Source

_DESCRIPTION: Final = re.compile(r"(?P<kind>\w+)\[(?P<what>.*)\]", re.DOTALL)
_HASH: Final = re.compile(r"@[0-9a-f]+$")
"""What Java adds to an object without a description; it differs in each process."""

_FOLDERS: Final = frozenset({"FileStreamSource", "DeltaSource"})
_LONGEST_NAME: Final = 200


class Read(NamedTuple):
    """One dataset that a batch reads.

    Attributes:
        dataset: which one.
        start: its offset before the batch, as Spark's checkpoint has it; None where not known.
        end: its offset after the batch.
    """

    dataset: Dataset
    start: str | None
    end: str


def reads(
    offsets: Sequence[str], before: Sequence[str] | None, sources: Sequence[Source]
) -> list[Read]:
    """The datasets of a batch, each once.

    Args:
        offsets: of the batch, one for each use of a source; ``NAME:OFFSET`` where sources are
            named.
        before: of the batch before; None where not known.
        sources: what is known of them, in the same order.
    """
    found: dict[tuple[str, str], Read] = {}
    earlier = before if before is not None and len(before) == len(offsets) else ()
    is_known = len(sources) == len(offsets)
    for offset, start, source in zip_longest(offsets, earlier, sources if is_known else ()):
        name, text = _name_and_offset(offset)
        known = None if name else source  # Spark lists named sources in another order
        old = None if start is None else _name_and_offset(start)[1]
        for read in _reads_of_use(name, text, old, known):
            found.setdefault((read.dataset.namespace, read.dataset.name), read)
    return list(found.values())


def _reads_of_use(name: str, end: str, start: str | None, source: Source | None) -> Iterator[Read]:
    topics = _topics(end)
    if topics is not None:
        old = (_topics(start) if start is not None else None) or {}
        for topic, partitions in topics.items():
            begun = json.dumps(old[topic]) if topic in old else None
            servers = None if source is None else source.servers
            yield Read(_topic(topic, servers), begun, json.dumps(partitions))
        return
    yield Read(_described(source, name), start, end)


def _topic(topic: str, servers: str | None) -> Dataset:
    return Dataset("kafka", topic) if servers is None else Dataset.of_topic(servers, topic)


def _described(source: Source | None, name: str) -> Dataset:
    if source is None:
        return Dataset("sparkonce", f"source {name}" if name else "source")
    match = _DESCRIPTION.fullmatch(source.text)
    if match is not None and match["kind"] in _FOLDERS:
        return Dataset.at(without_secrets(match["what"]))
    text = _HASH.sub("", without_secrets(source.text))
    return Dataset("sparkonce", text[:_LONGEST_NAME] or "source")


def _name_and_offset(offset: str) -> tuple[str, str]:
    """The source's name, empty where it has none, and its offset."""
    match = re.match(r"([A-Za-z_]\w*):", offset)
    return (match[1], offset[match.end() :]) if match else ("", offset)


def _topics(offset: str) -> dict[str, dict[str, int]] | None:
    """Kafka's offsets, by topic and partition; None for those of another source."""
    try:
        value: Any = json.loads(offset)
    except ValueError:
        return None
    if not isinstance(value, dict) or not value:
        return None
    for partitions in value.values():
        if not isinstance(partitions, dict) or not all(
            key.isdigit() and isinstance(number, int) for key, number in partitions.items()
        ):
            return None
    return value
