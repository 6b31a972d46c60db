"""The examples run as they are, and hold what they say."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import psycopg
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, NewTopic

from integration_tests.support.postgres import roll_back_all
from sparkonce.testing import checks
from sparkonce.testing.crash import DriverProcess, Failpoints
from sparkonce.testing.quick_spark import submit_args
from sparkonce.testing.services import KafkaServer, Services, spark_kafka_jars
from sparkonce.testing.services.process import Command, Guard
from sparkonce.txn_log import open_log

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_orders_killed_and_started_again(services: Services, tmp_path: Path) -> None:
    """examples/orders.py is killed in the middle, and all three sinks go on with equal rows."""
    s3 = next(iter(services.s3.values()))
    env = {
        **os.environ,
        "KAFKA": services.kafka.bootstrap_servers,
        "POSTGRES": services.postgres.dsn,
        "S3": s3.endpoint_url,
        "S3_ACCESS_KEY": s3.access_key,
        "S3_SECRET_KEY": s3.secret_key,
        "STATE": str(tmp_path / "state"),
        "PYSPARK_SUBMIT_ARGS": submit_args(),
    }
    command = Command([sys.executable, str(EXAMPLES / "orders.py")], tmp_path / "log", env=env)
    guard = Guard()

    def rows_in_postgres() -> int:
        with psycopg.connect(services.postgres.dsn) as connection:
            if connection.execute("SELECT to_regclass('orders')").fetchone() == (None,):
                return 0
            (count,) = connection.execute("SELECT count(*) FROM orders").fetchone() or (0,)
            return int(count)

    def until(reached: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 180
        while not reached():
            assert guard.status() is None, command.log.read_text()[-2000:]
            assert time.monotonic() < deadline, command.log.read_text()[-2000:]
            time.sleep(0.1)

    try:
        guard.start(command)
        until(lambda: rows_in_postgres() > 0)
        guard.end()
        before = rows_in_postgres()
        guard.start(command)
        until(lambda: rows_in_postgres() > before)
    finally:
        guard.close()
        roll_back_all(services.postgres.dsn)
    in_postgres = Counter(row[0] for row in checks.read_postgres(services.postgres.dsn, "orders"))
    with checks.CommittedReader(services.kafka.bootstrap_servers, "orders") as reader:
        in_kafka = Counter(json.loads(m.value or b"")["id"] for m in reader.read_visible())
    in_s3 = Counter(row["id"] for row in checks.read_s3_parquet(s3, "lake", "orders"))
    assert set(in_postgres.values()) == {1}
    # The last kill may have come between the commits of two sinks: what one shows beyond the
    # others is the decided batch, and nowhere is a row twice or missing below.
    for seen in (in_kafka, in_s3):
        assert set(seen.values()) == {1}
        assert set(range(before)) <= set(seen)


KEYS, PAYMENTS, KAFKA_BATCH = 24, 2_400, 400
KILLS = ("write.after", "decide.after", "commit.after")


def test_kafka_to_kafka_through_kills(kafka: KafkaServer, tmp_path: Path) -> None:
    """examples/kafka_to_kafka.py: each payment once, and those of a key in their order."""
    admin = AdminClient({"bootstrap.servers": kafka.bootstrap_servers})
    for made in admin.create_topics([NewTopic("payments", num_partitions=3)]).values():
        made.result(30)
    # A new topic may refuse a request once; without idempotence, the next one overtakes it.
    producer = Producer({"bootstrap.servers": kafka.bootstrap_servers, "enable.idempotence": True})
    for number in range(PAYMENTS):
        producer.produce("payments", str(number // KEYS), key=f"key {number % KEYS}")
    producer.flush()
    failpoints = Failpoints(tmp_path / "failpoints")
    program = [str(EXAMPLES / "kafka_to_kafka.py"), "--once", "--batch", str(KAFKA_BATCH)]
    jars = ",".join(map(str, spark_kafka_jars()))
    driver = DriverProcess(
        [sys.executable, *program],
        failpoints,
        log=tmp_path / "log",
        env={
            "KAFKA": kafka.bootstrap_servers,
            "STATE": str(tmp_path / "state"),
            "PYSPARK_SUBMIT_ARGS": f"--jars {jars} --conf spark.ui.enabled=false {submit_args()}",
        },
    )
    try:
        for batch, point in enumerate(KILLS):
            arm = failpoints.arm(point, batch=batch)
            driver.start()
            driver.wait_for(arm)
            driver.kill()
            failpoints.disarm()
        driver.start()
        assert driver.wait() == 0, driver.log.read_text()[-3000:]
    finally:
        driver.close()
    seen: dict[bytes | None, list[int]] = {}
    with checks.CommittedReader(kafka.bootstrap_servers, "payments-checked") as reader:
        for message in reader.read_all():
            value = json.loads(message.value or b"")
            assert value["is_checked"]
            seen.setdefault(message.key, []).append(int(value["payment"]))
    in_order = list(range(PAYMENTS // KEYS))
    assert seen == {f"key {n}".encode(): in_order for n in range(KEYS)}
    with contextlib.closing(open_log(f"sqlite:///{tmp_path}/state/txn.db")) as log:
        assert checks.kafka_leaks(kafka.bootstrap_servers, f"sparkonce.{log.log_id}.") == []
