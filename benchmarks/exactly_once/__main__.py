"""Compare engines: throughput, latency, and what is lost or doubled when they are killed.

    python -m benchmarks.exactly_once [--engines sparkonce,spark] [--kills 5] [--report report.html]

With PyFlink: `python -m venv flink; flink/bin/pip install apache-flink==2.3.*`, and then
`PYFLINK=flink/bin/python python -m benchmarks.exactly_once`. The last line of output is one JSON
object. `benchmarks/exactly_once/engines.py` says how another engine joins.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

from benchmarks.exactly_once.engines import engines
from benchmarks.exactly_once.report import median_of, write_report
from benchmarks.exactly_once.running import Load, Result, run

from sparkonce.testing.services import start_services


def main() -> None:
    here = engines()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--engines", default=",".join(here), help=f"any of {', '.join(here)}")
    parser.add_argument("--records", type=int, default=1_000_000)
    parser.add_argument("--rate", type=int, default=1_000)
    parser.add_argument("--seconds", type=int, default=30)
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--report", type=Path, default=Path("build/exactly-once.html"))
    given = parser.parse_args()
    chosen = given.engines.split(",")
    if unknown := set(chosen) - set(here):
        parser.error(f"--engines: {', '.join(sorted(unknown))}: here are {', '.join(here)}")
    load = Load(given.records, given.rate, given.seconds, given.kills, given.seed)
    results: dict[str, Result] = {}
    with (
        tempfile.TemporaryDirectory() as name,
        start_services(["kafka"], quick_start=False) as services,
    ):
        for short in chosen:
            print(f"{here[short].name} …", file=sys.stderr, flush=True)
            result = run(here[short], services.kafka.bootstrap_servers, Path(name), load)
            results[short] = result
            print(
                f"{here[short].name}: {result.rows_per_s:,.0f} rows/s, visible after "
                f"{result.latency.p50:,.0f} ms (99 of 100: {result.latency.p99:,.0f} ms), recovery "
                f"{median_of(result):.1f} s, {result.lost} lost and {result.duplicated} duplicated "
                f"of {result.sent:,}",
                flush=True,
            )
    given.report.parent.mkdir(parents=True, exist_ok=True)
    write_report(given.report, load, results, here)
    print(f"report: {given.report}", file=sys.stderr)
    print(json.dumps({short: asdict(result) for short, result in results.items()}))


if __name__ == "__main__":
    main()
