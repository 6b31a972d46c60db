"""Copies a topic with Spark and sparkonce, into a topic or a folder."""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from spark import arguments, rows_of, run

from sparkonce import ExactlyOnce
from sparkonce.sinks import FileSink, KafkaSink

if TYPE_CHECKING:
    from sparkonce.sinks import TwoPhaseCommitSink


def sink_for(servers: str, output: str) -> TwoPhaseCommitSink:
    if output.startswith("file:"):
        return FileSink(urlsplit(output).path)
    return KafkaSink(output, bootstrap_servers=servers)


def main() -> None:
    given = arguments(__doc__)
    pipeline = ExactlyOnce(
        "benchmark",
        sinks=[sink_for(given.servers, given.output)],
        log=f"sqlite:///{given.state}/log.db",
        commit="after_checkpoint" if given.guarantee == "after-checkpoint" else "immediate",
    )
    run(rows_of(given).writeStream.foreachBatch(pipeline), given)


if __name__ == "__main__":
    main()
