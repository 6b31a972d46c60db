"""What metrics and traces cost: small batches with telemetry and without it, in turn.

    python benchmarks/observe.py [--rows 100] [--rounds 5] [--small-batches 20]

Both sides write batches of `rows` rows into `FileSink` and `SqliteSink`, which need no server, so
that little else hides the cost. With telemetry everything is on: spans of the driver and the
executors and metrics, to a collector in a process of its own, and the endpoint for Prometheus. The
batches are written by the driver after the third one, or all by the executors.

The first rounds are left out: until the JVM has compiled what a batch needs, each run is faster
than the one before. The ratios are of the lower quartile and the median of all batches.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import timeit
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING

from harness import Run, arguments, finish, in_turn, make_source, report, run_query, scratch
from harness import spark_session as session

from sparkonce import ExactlyOnce
from sparkonce.observe import OpenTelemetry
from sparkonce.sinks import FileSink, SqliteSink
from sparkonce.steps import step

if TYPE_CHECKING:
    from pathlib import Path

_ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"
_PORT = 19464
_WARM_UP = 2


class Collector(BaseHTTPRequestHandler):
    """Receives and forgets."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *args: object) -> None:
        pass


def collect() -> None:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Collector)
    print(server.server_port, flush=True)
    server.serve_forever()


@contextmanager
def collector() -> Iterator[str]:
    process = subprocess.Popen(
        [sys.executable, __file__, "--collect"], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        yield f"http://127.0.0.1:{int(process.stdout.readline())}"
    finally:
        process.terminate()
        process.wait()


def pipeline(folder: Path, *, driver_rows: int, is_on: bool) -> ExactlyOnce:
    place = folder / uuid.uuid4().hex
    place.mkdir()
    return ExactlyOnce(
        "observed",
        sinks=[FileSink(place), SqliteSink(place / "rows.db", table="rows")],
        log=f"sqlite:///{place}/txn.db",
        driver_rows=driver_rows,
        telemetry=OpenTelemetry(prometheus_port=_PORT) if is_on else None,
    )


def step_us() -> float:
    """Microseconds for one step that nobody follows."""

    def enter() -> None:
        with step("decide", batch=1, pipeline="observed"):
            pass

    return min(timeit.repeat(enter, number=10_000, repeat=5)) * 100


def main(*, rows: int, rounds: int, small_batches: int) -> None:
    nobody_us = step_us()
    with scratch() as folder, collector() as url:
        os.environ[_ENDPOINT] = url  # before the JVM starts, so that the executors have it
        spark = session(None)
        source = make_source(spark, folder, rows=rows * small_batches, batches=small_batches)

        def run(made: ExactlyOnce) -> Run:
            done = run_query(spark, source, made, folder)
            telemetry = made.settings.telemetry
            if isinstance(telemetry, OpenTelemetry):
                telemetry.end()  # else it would follow the next run, which has none
            return done

        contenders: dict[str, Callable[[], ExactlyOnce]] = {
            "driver, off": lambda: pipeline(folder, driver_rows=1000, is_on=False),
            "driver, on": lambda: pipeline(folder, driver_rows=1000, is_on=True),
            "executors, off": lambda: pipeline(folder, driver_rows=0, is_on=False),
            "executors, on": lambda: pipeline(folder, driver_rows=0, is_on=True),
        }
        runs = in_turn(contenders, run, rounds=_WARM_UP + rounds)
        spark.stop()
    figures = {name: {"batch, ms": batches_ms(of[_WARM_UP:])} for name, of in runs.items()}
    report(f"batches of {rows} rows into FileSink and SqliteSink", figures)
    # Of the quartile too: a machine that does other work delays batches, and never speeds them up.
    quartiles = {name: statistics.quantiles(of["batch, ms"], n=4) for name, of in figures.items()}
    finish(
        **{
            f"ratio_{where}_{what}": quartiles[f"{where}, on"][n] / quartiles[f"{where}, off"][n]
            for where in ("driver", "executors")
            for n, what in enumerate(("quartile", "median"))
        },
        step_off_us=nobody_us,
    )


def batches_ms(runs: Sequence[Run]) -> list[float]:
    """Milliseconds of each batch after the first three of its run."""
    return [1000 * seconds for run in runs for seconds in run.batch_s[3:]]


if __name__ == "__main__":
    if sys.argv[1:] == ["--collect"]:
        collect()
    else:
        main(**arguments(__doc__, rows=100))
