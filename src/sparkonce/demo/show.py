"""The demo from its first server to its last line.

servers ─► orders ─► driver ─► (kill ─► look from outside ─► start again ─► look)* ─► verdict
"""

from __future__ import annotations

import contextlib
import re
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psycopg
from confluent_kafka.admin import AdminClient, NewTopic
from psycopg import sql

from sparkonce.demo.kills import PLANS, SINKS, Kill
from sparkonce.demo.orders import TABLE_COLUMNS, Feed
from sparkonce.demo.outside import Outside, Seen, in_words
from sparkonce.demo.screen import Screen, View
from sparkonce.demo.settings import PIPELINE, Job
from sparkonce.demo.verdict import Verdict, complaints, judge
from sparkonce.testing.checks import s3_client
from sparkonce.testing.crash import DriverProcess, Failpoints
from sparkonce.testing.quick_spark import jvm_options
from sparkonce.testing.services import (
    S3Server,
    ServiceKind,
    Services,
    s3a_jars,
    spark_jdbc_jars,
    spark_kafka_jars,
    start_services,
    unavailable,
)
from sparkonce.testing.services.process import Guard
from sparkonce.txn_log import TransactionLog, open_log
from sparkonce.txn_log.record import State, TransactionRecord

BATCHES = 12
PARTITIONS = 4
TICK_S = 1.0
STATE_TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True)
class Options:
    writer: str
    lake: str
    rows: int
    seed: int
    keep: bool


@dataclass
class Show:
    """Everything that the acts of the demo share."""

    options: Options
    job: Job
    s3: S3Server
    screen: Screen
    view: View
    outside: Outside
    feed: Feed
    points: Failpoints
    driver: DriverProcess
    log: TransactionLog
    problems: list[str] = field(default_factory=list)

    @property
    def keeps_log(self) -> bool:
        return self.options.writer == "exactly-once"

    # -- acts --------------------------------------------------------------------------------------

    def run(self) -> Verdict:
        before: tuple[Kill, Seen] | None = None
        for kill in PLANS[self.options.writer]:
            arms = [self.points.arm(p, batch=kill.batch, **where) for p, where in kill.points]
            self._start(before)
            self._doing(f"running; to be killed at batch {kill.batch}, {kill.when}")
            self.driver.wait_for(*arms, timeout_s=STATE_TIMEOUT_S)
            seen = self._look()
            self.driver.kill()
            self.points.disarm(*arms)
            self.view.kills += 1
            self._report_kill(kill, seen)
            before = kill, seen
        self._start(before)
        self._doing("running to the end")
        status = self.driver.wait(timeout_s=STATE_TIMEOUT_S + self.options.rows / 500)
        self._look()
        if status != 0:
            self._problem(f"the last driver ended with {status}, see {self.driver.log}")
        if self.feed.error:
            self._problem(self.feed.error)
        self._doing("comparing every sink with the source")
        self.screen.say("the query has read every order; comparing every sink with the source")
        return judge(self.job, self.s3)

    def _start(self, before: tuple[Kill, Seen] | None) -> None:
        """Start a driver, and show what it does with what the previous driver left."""
        if before is None or not self.keeps_log:
            if before:
                self.screen.say(f"Spark writes batch {before[0].batch} again, into all three sinks")
            self._doing("starting the driver")
            self.driver.start()
            return
        kill, seen = before
        self._doing("starting the driver again: it recovers first")
        log_size = self.driver.log.stat().st_size
        # It stops when recovery is over: when the batch is written again, or has been skipped.
        rewrite = self.points.arm(
            "open.after", batch=kill.batch, action="note" if kill.decided else "stop"
        )
        returned = self.points.arm("deliver.after", batch=kill.batch)
        self.driver.start()
        self.driver.wait_for(returned if kill.decided else rewrite, timeout_s=STATE_TIMEOUT_S)
        now = self._look()
        rewritten = bool(self.points.hits(rewrite))
        self._report_recovery(kill, seen, now, rewritten=rewritten)
        for line in _driver_lines(self.driver.log, log_size):
            self.screen.say(f"    driver: {line}", "dim")
        self.points.disarm(rewrite, returned)

    # -- reports -----------------------------------------------------------------------------------

    def _report_kill(self, kill: Kill, seen: Seen) -> None:
        self.screen.say(
            f"kill {self.view.kills}, batch {kill.batch}, {kill.when}: SIGKILL to Python, JVM "
            "and workers",
            "bold red",
        )
        visible = ", ".join(f"{sink} {seen.rows[sink]:,}" for sink in SINKS)
        left = in_words(seen.everything_standing)
        self.screen.say(f"    readers see: {visible}; open, prepared or staged: {left}")
        if not self.keeps_log:
            return
        record = self._record(kill.batch)
        if (record is not None) != kill.decided:
            self._problem(f"kill {self.view.kills}: batch {kill.batch} was decided: {record}")
        before = min(seen.rows.values())
        ahead = {sink for sink in SINKS if seen.rows[sink] != before}
        if ahead != set(kill.visible):
            self._problem(f"kill {self.view.kills}: unlike the plan, readers see {seen.rows}")

    def _report_recovery(self, kill: Kill, before: Seen, now: Seen, *, rewritten: bool) -> None:
        left = set(before.everything_standing) & set(now.everything_standing)
        if left:
            self._problem(f"not ended by recovery: {', '.join(map(str, left))}")
        if not kill.decided:
            self.screen.say(
                f"recovery: batch {kill.batch} was not decided: aborted "
                f"{in_words(before.everything_standing)}; the batch is written again",
                "green",
            )
            if now.rows != before.rows:
                self._problem(f"recovery changed what readers see: {before.rows}, {now.rows}")
            return
        record = self._record(kill.batch)
        branches = len(list(record.committables())) if record else 0
        self.screen.say(
            f"recovery: batch {kill.batch} was decided: all of its {branches} branches are "
            f"committed now, {'some' if rewritten else 'no'} rows were written again; readers see "
            f"{', '.join(f'{sink} {now.rows[sink]:,}' for sink in SINKS)}",
            "green",
        )
        if rewritten or len(set(now.rows.values())) != 1:
            self._problem(f"batch {kill.batch} after recovery: {now.rows}, written again")

    def _record(self, batch: int) -> TransactionRecord | None:
        records = self.log.history(PIPELINE)
        return next((record for record in records if record.id.batch_id == batch), None)

    def _problem(self, text: str) -> None:
        self.problems.append(text)
        self.screen.say(f"PROBLEM: {text}", "bold red")

    def _doing(self, text: str) -> None:
        self.view.doing = text
        self.screen.tick()

    # -- the view ----------------------------------------------------------------------------------

    def _look(self) -> Seen:
        self.view.seen = seen = self.outside.look()
        return seen

    def tick(self) -> None:
        """Refresh the view."""
        self.view.sent = self.feed.sent
        commits = Path(self.job.checkpoint) / "commits"
        done = [int(p.name) for p in commits.glob("*") if p.name.isdigit()]
        self.view.batches = max(done, default=-1) + 1
        newest = self.log.history(PIPELINE, 1) if self.keeps_log else []
        if newest:
            state = "committing" if newest[0].state is State.DECIDED else "complete"
            self.view.newest = f" (batch {newest[0].id.batch_id} {state})"
        self._look()
        self.screen.tick()


# -- the stage -------------------------------------------------------------------------------------


@contextlib.contextmanager
def stage(options: Options) -> Iterator[Show]:
    """Servers, topics, table, bucket, orders that are being sent, and a driver not yet started."""
    view = View(options.writer, options.rows, len(PLANS[options.writer]))
    screen = Screen(view)
    with contextlib.ExitStack() as stack:
        folder = Path(tempfile.mkdtemp(prefix="sparkonce-demo-")) / "job"
        # Removes the folder, and its parent once empty, even when this process is killed.
        guard = Guard(remove=[] if options.keep else [folder])
        stack.callback(guard.close)
        folder.mkdir()
        Path(f"{folder}/scratch").mkdir()
        jvm_options()  # makes what the driver's later starts need
        jars = [*spark_kafka_jars()]
        if options.writer == "naive":
            jars += [*spark_jdbc_jars(), *s3a_jars()]
        s3_kind: ServiceKind = "s3mock" if "versitygw" in unavailable() else "versitygw"
        screen.say(f"starting Kafka, Postgres and {s3_kind} (seed {options.seed})")
        services = stack.enter_context(start_services(["kafka", "postgres", s3_kind]))
        job = _make_places(options, services, services.s3[s3_kind], folder, jars)
        config = folder / "job.json"
        job.save(config)
        feed = Feed(
            job.kafka,
            job.source_topic,
            partitions=PARTITIONS,
            seed=options.seed,
            count=options.rows,
        )
        points = Failpoints(folder / "failpoints")
        driver = DriverProcess(
            [sys.executable, "-m", "sparkonce.demo.job", str(config)],
            points,
            log=folder / "driver.log",
            env={"TMPDIR": job.scratch},
        )
        stack.callback(driver.close)
        outside = stack.enter_context(Outside(job, services.s3[s3_kind]))
        log = open_log(job.log)
        stack.callback(log.close)
        show = Show(
            options, job, services.s3[s3_kind], screen, view, outside, feed, points, driver, log
        )
        stack.enter_context(screen)
        stack.enter_context(_ticking(show.tick, screen))
        screen.say(f"{options.rows:,} orders are on their way to topic {job.source_topic}")
        stack.callback(feed.close)
        feed.start()
        yield show


def _make_places(
    options: Options, services: Services, s3: S3Server, folder: Path, jars: Sequence[Path]
) -> Job:
    job = Job(
        writer=options.writer,
        lake=options.lake,
        rows=options.rows,
        rows_per_batch=-(-options.rows // BATCHES) + PARTITIONS,  # Spark rounds down in each
        folder=str(folder),
        jars=tuple(map(str, jars)),
        kafka=services.kafka.bootstrap_servers,
        source_topic="orders-in",
        topic="orders",
        postgres=services.postgres.dsn,
        table="orders",
        s3_endpoint=s3.endpoint_url,
        s3_access_key=s3.access_key,
        s3_secret_key=s3.secret_key,
        s3_region=s3.region,
        bucket="lake",
        prefix="orders",
    )
    admin = AdminClient({"bootstrap.servers": job.kafka})
    topics = [NewTopic(name, PARTITIONS, 1) for name in (job.source_topic, job.topic)]
    for made in admin.create_topics(topics).values():
        made.result(timeout=30)
    with psycopg.connect(job.postgres) as connection:
        columns = sql.SQL(TABLE_COLUMNS)
        connection.execute(
            sql.SQL("CREATE TABLE {} ({})").format(sql.Identifier(job.table), columns)
        )
    with contextlib.closing(s3_client(s3)) as client:
        client.create_bucket(Bucket=job.bucket)
    return job


@contextlib.contextmanager
def _ticking(tick: Callable[[], None], screen: Screen) -> Iterator[None]:
    """Call `tick` again and again in a thread."""
    over = threading.Event()

    def run() -> None:
        while not over.wait(TICK_S):
            try:
                tick()
            except Exception as error:  # noqa: BLE001  # the display is no part of the verdict
                screen.say(f"(no look from outside: {type(error).__name__}: {error})", "dim")

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _driver_lines(log: Path, start: int) -> Iterator[str]:
    """The lines in which the driver logged its recovery."""
    with log.open(errors="replace") as file:
        file.seek(start)
        for line in file:
            found = re.search(r"INFO (batch \d+) of pipeline \S+ \(query \S+\) (.*)", line)
            if found:
                yield f"{found[1]} {found[2]}"


def play(options: Options) -> int:
    """Run the demo; the exit code."""
    began = time.monotonic()
    with stage(options) as show:
        verdict = show.run()
        show.screen.stop()
        screen = show.screen
        screen.console.print(verdict.table())
        for name, sink in verdict.sinks.items():
            if sink.example and options.writer != "naive":
                screen.print(f"{name}, for example: {sink.example}")
        for leak in verdict.leaks:
            screen.print(f"leaked: {leak}")
        if options.keep:
            screen.print(f"kept: {show.job.folder}")
        kills = show.view.kills, show.view.kills_planned
        problems = [*show.problems, *complaints(options.writer, options.rows, kills, verdict)]
        for problem in problems:
            screen.print(f"problem: {problem}")
        if not problems:
            screen.print(_meaning(options.writer))
        screen.print(f"{time.monotonic() - began:.0f} s, seed {options.seed}")
        screen.print(verdict.last_line(show.view.kills))
    return 1 if problems else 0


def _meaning(writer: str) -> str:
    if writer == "naive":
        return (
            "Spark's own sinks in foreachBatch: each kill made Spark write its batch again, so "
            "rows are duplicated. `make demo` shows the same kills with sparkonce."
        )
    return "Every order is in every sink once, and nothing is left over."
