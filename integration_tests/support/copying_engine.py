"""Engines for a test of the benchmark: they copy a topic with Kafka's own client.

right     input offsets and records in one transaction
doubles   offsets are committed a second after the records
loses     offsets are committed before the records

Into a folder:

right     continues where the newest file ends, since its name says so
doubles   continues a second before that
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from urllib.parse import urlsplit

from confluent_kafka import Consumer, KafkaException, Message, Producer, TopicPartition

_BEHIND_S = 1.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("servers", "input", "output", "state", "guarantee"):
        parser.add_argument(f"--{name}", required=True)
    given = parser.parse_args()
    source = Consumer(
        {
            "bootstrap.servers": given.servers,
            "group.id": f"copy-{given.input}",
            "auto.offset.reset": "earliest",
            "enable.auto.commit": False,
        }
    )
    if given.output.startswith("file:"):
        copy_into_files(given, source)
    source.assign([TopicPartition(given.input, n) for n in range(2)])  # nobody waits for a group
    if given.guarantee == "right":
        copy_in_transactions(given, source)
    copy(given, source)


def copy_in_transactions(given: argparse.Namespace, source: Consumer) -> None:
    producer = Producer({"bootstrap.servers": given.servers, "transactional.id": given.output})
    producer.init_transactions(30)
    while True:
        messages = source.consume(1000, 0.1)
        if not messages:
            continue
        producer.begin_transaction()
        copied(given.output, messages, producer)
        offsets = source.position(source.assignment())
        producer.send_offsets_to_transaction(offsets, source.consumer_group_metadata(), 30)
        producer.commit_transaction(30)


def copied(topic: str, messages: list[Message], producer: Producer) -> None:
    for message in messages:
        if message.error():
            raise KafkaException(message.error())
        producer.produce(topic, message.value())


def copy_into_files(given: argparse.Namespace, source: Consumer) -> None:
    folder = Path(urlsplit(given.output).path)
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


def copy(given: argparse.Namespace, source: Consumer) -> None:
    producer = Producer({"bootstrap.servers": given.servers})
    waits, committed_s = given.guarantee == "doubles", time.monotonic()
    while True:
        messages = source.consume(1000, 0.1)
        if messages and not waits:
            source.commit(asynchronous=False)
            time.sleep(_BEHIND_S)
        copied(given.output, messages, producer)
        producer.flush(30)
        read = [place for place in source.position(source.assignment()) if place.offset >= 0]
        if waits and read and time.monotonic() > committed_s + _BEHIND_S:
            source.commit(offsets=read, asynchronous=False)
            committed_s = time.monotonic()


if __name__ == "__main__":
    main()
