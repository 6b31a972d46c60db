"""Engines for a test of the benchmark: they copy a topic into files of a folder.

right     continues where the newest file ends, since its name says so
doubles   continues a second before that
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from urllib.parse import urlsplit

from confluent_kafka import Consumer, KafkaException, TopicPartition

_BEHIND_S = 1.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("servers", "input", "output", "state", "guarantee"):
        parser.add_argument(f"--{name}", required=True)
    given = parser.parse_args()
    folder = Path(urlsplit(given.output).path)
    source = Consumer({"bootstrap.servers": given.servers, "group.id": "none"})  # of no group
    count, places = continued(folder, behind_s=_BEHIND_S if given.guarantee == "doubles" else 0.0)
    source.assign([TopicPartition(given.input, n, place) for n, place in enumerate(places)])
    while True:
        messages = source.consume(1000, 0.1)
        if not messages:
            continue
        for message in messages:
            if message.error():
                raise KafkaException(message.error())
            places[message.partition()] = message.offset() + 1
        hidden = folder / ".hidden"
        hidden.write_bytes(b"".join(message.value() + b"\n" for message in messages))
        hidden.rename(folder / f"{count:08}-{places[0]}-{places[1]}")
        count += 1


def continued(folder: Path, *, behind_s: float) -> tuple[int, list[int]]:
    """The number of the next file, and the offsets from which to read."""
    files = sorted(path for path in folder.iterdir() if not path.name.startswith("."))
    until_s = time.time() - behind_s
    old = [path for path in files if path.stat().st_mtime <= until_s]
    places = old[-1].name.split("-")[1:] if old else ["0", "0"]
    return len(files), [int(place) for place in places]


if __name__ == "__main__":
    main()
