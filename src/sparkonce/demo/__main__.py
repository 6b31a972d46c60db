"""`python -m sparkonce.demo`: what `make demo` runs."""

from __future__ import annotations

import argparse
import random
import signal
import sys
from collections.abc import Sequence

from sparkonce.demo.kills import PLANS
from sparkonce.demo.lakes import LAKES
from sparkonce.demo.show import Options, play
from sparkonce.testing.checks import StuckError
from sparkonce.testing.services import ServiceError

ROWS = 300_000
FEWEST_ROWS = 1_200
"""So that every batch has rows for every task."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demo; the exit code is 0 only if nothing was lost, duplicated or left over."""
    parser = argparse.ArgumentParser(
        prog="python -m sparkonce.demo",
        description="Orders from Kafka into Kafka, Postgres and S3, by a driver that is killed "
        "again and again; then every sink is compared with the source.",
    )
    parser.add_argument(
        "--writer",
        choices=list(PLANS),
        default="exactly-once",
        help="naive: Spark's own sinks in foreachBatch, for contrast",
    )
    parser.add_argument(
        "--lake",
        choices=list(LAKES),
        default="files",
        help="what is written to S3: Parquet files, or a table; default: files",
    )
    parser.add_argument("--rows", type=int, default=ROWS, help=f"orders; default {ROWS}")
    parser.add_argument("--seed", type=int, help="seed of the orders; default: a new one")
    parser.add_argument(
        "--keep", action="store_true", help="keep the driver's log, checkpoint and transaction log"
    )
    options = parser.parse_args(arguments)
    if options.rows < FEWEST_ROWS:
        parser.error(f"--rows: at least {FEWEST_ROWS}")
    if options.writer == "naive" and options.lake != "files":
        parser.error("--writer naive writes files only")
    seed = random.SystemRandom().randrange(1 << 32) if options.seed is None else options.seed
    # `kill` ends us as Ctrl-C does.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        return play(Options(options.writer, options.lake, options.rows, seed, options.keep))
    except KeyboardInterrupt:
        print("sparkonce: interrupted; everything it started is stopped and removed.")  # noqa: T201
        return 130
    except (ServiceError, StuckError, AssertionError) as error:
        print(f"sparkonce: {error}", file=sys.stderr)  # noqa: T201
        return 1


if __name__ == "__main__":
    sys.exit(main())
