"""`make services`: the servers of docker-compose.yml, on the same ports, until Ctrl-C."""

from __future__ import annotations

import argparse
import signal
import sys
import threading
from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.table import Table

from sparkonce.testing.services import (
    KINDS,
    ServiceError,
    ServiceKind,
    Services,
    start_services,
    unavailable,
)
from sparkonce.testing.services.process import is_port_taken
from sparkonce.testing.services.services import check_kind

KAFKA_PORT, POSTGRES_PORT, S3_PORT, SECOND_S3_PORT = 9092, 5432, 9000, 9090
"""The first three are those of docker-compose.yml and of the examples."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the servers until Ctrl-C; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m sparkonce.testing.services",
        description="Start Kafka, Postgres and S3 on this machine, until Ctrl-C.",
    )
    parser.add_argument(
        "kinds", nargs="*", metavar="KIND", help=f"any of {', '.join(KINDS)}; default: all"
    )
    parser.add_argument(
        "--free-ports", action="store_true", help="take free ports instead of the usual ones"
    )
    options = parser.parse_args(arguments)
    console = Console()
    # `kill` ends us as Ctrl-C does.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        kinds = _available_kinds(options.kinds, console)
        ports = {} if options.free_ports else usual_ports(kinds)
        with start_services(kinds, ports=ports) as services:
            console.print(_table(kinds, services))
            for server in list(services.s3.values())[:1]:
                keys = f"access key {server.access_key}, secret key {server.secret_key}"
                console.print(f"S3: {keys}, region {server.region}")
            console.print("Ctrl-C stops them and removes their data.")
            threading.Event().wait()
    except ServiceError as error:
        print(f"sparkonce: {error}", file=sys.stderr)  # noqa: T201
        return 1
    except KeyboardInterrupt:
        console.print("Stopped.")
    return 0


def usual_ports(kinds: Sequence[ServiceKind]) -> Mapping[str, int]:
    """The ports of docker-compose.yml; a second S3 server gets `SECOND_S3_PORT`.

    Raises:
        ServiceError: one of them is taken.
    """
    s3_kinds = [kind for kind in ("versitygw", "s3mock") if kind in kinds]
    usual: dict[str, int] = {"kafka": KAFKA_PORT, "postgres": POSTGRES_PORT}
    usual.update(zip(s3_kinds, (S3_PORT, SECOND_S3_PORT), strict=False))
    ports = {kind: port for kind, port in usual.items() if kind in kinds}
    for kind, port in ports.items():
        if is_port_taken(port):
            raise ServiceError(
                f"Port {port} on 127.0.0.1, for {kind}, is taken; stop the program that listens "
                "there, or run this with --free-ports."
            )
    return ports


def _available_kinds(wanted: Sequence[str], console: Console) -> Sequence[ServiceKind]:
    for kind in wanted:
        check_kind(kind)
    missing = unavailable()
    kinds = [kind for kind in KINDS if kind in wanted or not wanted]
    for kind in kinds:
        if kind in missing:
            console.print(f"Not starting {kind}: {missing[kind]}")
    available = [kind for kind in kinds if kind not in missing]
    if not available:
        raise ServiceError("None of the servers can run here, for the reasons above.")
    return available


def _table(kinds: Sequence[ServiceKind], services: Services) -> Table:
    table = Table("Service", "Address")
    for kind in kinds:
        if kind == "kafka":
            table.add_row(kind, services.kafka.bootstrap_servers)
        elif kind == "postgres":
            table.add_row(kind, services.postgres.dsn)
        else:
            table.add_row(kind, services.s3[kind].endpoint_url)
    return table


if __name__ == "__main__":
    sys.exit(main())
