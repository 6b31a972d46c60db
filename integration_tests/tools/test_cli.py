"""The command `sparkonce`, as installed, on pipelines whose driver was killed with work in flight.

What it prints is read without a terminal; what it does is looked at from outside.
"""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from integration_tests.crash.scenario import PIPELINE, Scenario, shown
from integration_tests.crash.targets import real_targets
from integration_tests.support.command import (
    COMMAND,
    ERROR,
    FINE,
    FOUND,
    JOB,
    USAGE,
    Operator,
    Said,
)
from sparkonce.errors import ConfigurationError
from sparkonce.spark_hooks import checkpoint
from sparkonce.storage import opening
from sparkonce.testing import checks
from sparkonce.testing.services import Services
from sparkonce.txn_log.record import State


@pytest.fixture
def scenario(tmp_path: Path, services: Services, fresh_name: Callable[[], str]) -> Scenario:
    return Scenario(tmp_path, real_targets(services, fresh_name), 3, is_tagged=False)


@pytest.fixture
def sparkonce(scenario: Scenario) -> Operator:
    return Operator(scenario)


def token(scenario: Scenario) -> int:
    with scenario.log() as log:
        head = log.head(PIPELINE)
    assert head is not None
    return head.token


def branches_of(scenario: Scenario, batch: int, sink: str) -> Sequence[str]:
    return [c.branch_id.short for c in scenario.record(batch).shares[sink].committables]


def test_driver_killed_between_decision_and_commit(scenario: Scenario, sparkonce: Operator) -> None:
    """Every look shows the decided batch; recover commits it, and the query goes on after it."""
    with scenario:
        scenario.kill_at("decide.after", 1)
        names = {target.name for target in scenario.targets}

        by_job, by_log = (
            sparkonce("status", *target, "--json")
            for target in ([JOB], ["--log", scenario.log_address])
        )
        assert by_job.code == by_log.code == FOUND
        assert by_job.value == by_log.value
        (found,) = by_job.value["pipelines"]
        assert (found["name"], found["state"]) == (PIPELINE, "unfinished")
        assert found["holder"]["is_running"] is False
        assert found["checkpoint"].endswith("/ckpt")
        assert found["last_complete"]["batch"] == 0
        (batch,) = found["unfinished"]
        assert (batch["batch"], batch["state"]) == (1, "decided")
        assert {sink["name"] for sink in batch["sinks"]} == names
        text = sparkonce("status", JOB)
        assert text.code == FOUND
        assert "is not running" in text.out

        listed = sparkonce("log", "list", JOB, "--json").value
        assert [(r["batch"], r["state"]) for r in listed] == [(1, "decided"), (0, "complete")]
        assert sparkonce("log", "list", "--log", scenario.log_address).code == FINE
        one = sparkonce("log", "show", JOB, "1")
        assert re.search(r"transaction\s+sparkonce\.", one.out)
        assert re.search(r"objects?:?\s+s3://", one.out)
        assert "table public." in one.out
        tail = sparkonce("log", "tail", JOB)
        states = re.findall(r"batch (\d) (\w+)", tail.out)
        assert states == [("0", "decided"), ("0", "complete"), ("1", "decided")]
        assert sparkonce("log", "show", JOB, "7").code == ERROR
        assert sparkonce("orphans", JOB).code == FINE, "what is decided is no orphan"
        assert shown(scenario.visible_of(1)) == "none", "looking changes nothing"

        recovered = sparkonce("recover", JOB, "--json")
        assert recovered.code == FINE
        assert (recovered.value["finished"], recovered.value["unfinished"]) == ([1], [])
        assert shown(scenario.visible_of(1)) == "all"
        assert sparkonce("status", JOB).code == FINE
        before = token(scenario)
        again = sparkonce("recover", JOB)
        assert (again.code, again.out) == (FINE, "nothing to recover\n")
        assert token(scenario) == before, "nobody is fenced for nothing"
        scenario.finish()


@pytest.mark.slow
def test_driver_killed_before_the_decision(scenario: Scenario, sparkonce: Operator) -> None:
    """Orphans are shown and left alone; with --abort they are gone, and Spark writes the batch."""
    with scenario:
        scenario.kill_at("decide.before", 1)
        assert sparkonce("status", JOB).code == FINE, "the log knows nothing of it"
        before = set(scenario.leaks())
        assert before
        found = sparkonce("orphans", JOB, "--json")
        assert found.code == FOUND
        assert {o["sink"] for o in found.value["orphans"]} == {t.name for t in scenario.targets}
        assert sparkonce("orphans", JOB).code == FOUND
        assert set(scenario.leaks()) == before
        aborted = sparkonce("orphans", JOB, "--abort")
        assert (aborted.code, aborted.out) == (FINE, "no orphans left\n")
        assert scenario.leaks() == []
        scenario.finish()


@pytest.mark.slow
def test_driver_that_runs_is_fenced_only_by_a_yes(scenario: Scenario, sparkonce: Operator) -> None:
    """Nobody can be asked, so nothing happens; with --yes the driver fails as fenced."""
    with scenario:
        arm = scenario.driver.arm("decide.after", batch=1)
        scenario.driver.start(arm)
        before = token(scenario)
        for command in (["recover", JOB], ["orphans", JOB, "--abort"]):
            refused = sparkonce(*command)
            if command[0] == "recover":
                assert refused.code == ERROR
                assert "is running" in refused.err
                assert "--yes" in refused.err
            assert token(scenario) == before
        assert sparkonce("recover", JOB, "--yes").code == FINE
        assert shown(scenario.visible_of(1)) == "all"
        scenario.driver.let_go(arm)
        status, said = scenario.driver.ends()
        assert status != 0
        assert "FencedError" in said
        scenario.finish()


@pytest.mark.slow
def test_branches_are_settled(scenario: Scenario, sparkonce: Operator) -> None:
    """Given up, or taken for committed: the batch ends as settled; redone: it is written again."""
    reason = ["--reason", "the broker lost its disk", "--yes"]
    with scenario:
        scenario.kill_at("decide.after", 0)
        scenario.target("kafka").lose(scenario.record(0).shares["kafka"].committables[0])
        left = sparkonce("recover", JOB)
        assert left.code == FOUND
        assert "replay" in left.err
        branch = branches_of(scenario, 0, "kafka")[0]
        settle = ["settle", JOB, "0", "--branch", branch, "--as", "aborted"]
        assert sparkonce("settle", JOB, "0", "--branch", "t9.x", "--as", "redo").code == USAGE
        assert sparkonce(*settle).code == ERROR, "nobody can be asked"
        assert sparkonce(*settle, "--yes").code == USAGE, "no reason"
        settled = sparkonce(*settle, *reason, "--json")
        assert settled.code == FINE
        (word,) = settled.value["settled"]
        assert (word["ruling"], word["why"]) == ("aborted", reason[1])
        assert [end["how"] for end in settled.value["ended"]] == ["ended"]
        assert sparkonce("recover", JOB).code == FINE
        assert scenario.record(0).state is State.SETTLED
        shown = sparkonce("log", "show", JOB, "0").out
        assert "settled by operators" in shown
        assert word["branch"] in shown, "it can be copied"
        assert sparkonce(*settle, *reason).code == ERROR, "it is finished"
        assert [t.name for t in scenario.targets if len(list(t.read())) < 100] == ["kafka"]

        scenario.kill_at("decide.after", 1)
        (branch,) = branches_of(scenario, 1, "postgres")
        redo = ["settle", "--log", scenario.log_address, "1", "--branch", branch, "--as", "redo"]
        scenario.target("postgres").lose(scenario.record(1).shares["postgres"].committables[0])
        assert sparkonce(*redo, *reason).code == FINE
        driver = scenario.driver
        driver.start()
        status, said = driver.ends()
        assert status == 0, said[-3000:]
        assert scenario.record(1).state is State.SETTLED
        assert [c.branch_id.write_pass for c in scenario.record(1).lost] == [0]
        assert sparkonce("status", JOB).code == FINE
        rows = {t.name: len(list(t.read())) for t in scenario.targets}
        assert all(n == 300 for name, n in rows.items() if name != "kafka"), rows
        assert rows["kafka"] < 300
        assert scenario.leaks() == []


@pytest.mark.slow
def test_word_ends_what_stands_and_tells_what_is_visible(
    scenario: Scenario, sparkonce: Operator
) -> None:
    """In every sink: a driver that stood before its commits shows nothing of what was ruled on."""

    def settle(batch: int, ruling: str) -> Said:
        names = [b for t in scenario.targets for b in branches_of(scenario, batch, t.name)]
        chosen = [option for name in names for option in ("--branch", name)]
        word = ["--as", ruling, "--reason", "put in by hand", "--yes", "--json"]
        said = sparkonce("settle", JOB, str(batch), *chosen, *word)
        assert [end["branch"] for end in said.value["ended"]] == names
        return said

    with scenario:
        arm = scenario.driver.arm("decide.after", batch=0)
        scenario.driver.start(arm)
        assert scenario.leaks()
        said = settle(0, "committed")
        assert (said.code, {end["how"] for end in said.value["ended"]}) == (FINE, {"ended"})
        assert "enter them now" in said.err
        assert scenario.leaks() == []
        scenario.driver.let_go(arm)
        status, log = scenario.driver.ends()
        assert status != 0
        assert "FencedError" in log
        assert shown(scenario.visible_of(0)) == "none"

        scenario.kill_at("complete.before", 1)
        assert scenario.record(0).state is State.SETTLED
        said = settle(1, "aborted")
        assert (said.code, {end["how"] for end in said.value["ended"]}) == (FOUND, {"visible"})
        assert said.err.count("IS COMMITTED") == len(said.value["ended"])
        assert sparkonce("recover", JOB).code == FINE
        assert {len(list(target.read())) for target in scenario.targets} == {100}, "batch 1 alone"
        assert scenario.leaks() == []


@pytest.mark.slow
def test_prepared_batch_is_decided_by_sparks_commit_log(
    tmp_path: Path, services: Services, fresh_name: Callable[[], str]
) -> None:
    """Reached: it is committed; not reached: abandoned; not readable: left, and said so."""
    targets = real_targets(services, fresh_name)
    with Scenario(tmp_path, targets, 3, commit="after_checkpoint", is_tagged=False) as scenario:
        sparkonce = Operator(scenario)
        scenario.kill_at("hold.after", 0)
        found = sparkonce("status", JOB, "--json")
        assert (found.code, found.value["pipelines"][0]["state"]) == (FOUND, "in doubt")
        branches = len(list(scenario.record(0).committables()))
        recovered = sparkonce("recover", JOB, "--json")
        assert recovered.code == FINE
        told = recovered.value
        assert (told["finished"], told["abandoned"], told["aborted"]) == ([], [0], branches)
        assert scenario.record(0).state is State.ABANDONED
        assert "batch 0 abandoned" in sparkonce("status", JOB).out
        assert scenario.leaks() == []

        scenario.kill_at("decide.before", 0)
        elsewhere = scenario.folder / "moved"
        shutil.move(scenario.checkpoint, elsewhere)
        left = sparkonce("recover", JOB)
        assert left.code == FOUND
        assert "--checkpoint" in left.err
        assert scenario.record(0).state is State.PREPARED
        assert sparkonce("recover", JOB, "--checkpoint", str(elsewhere)).code == FINE
        assert scenario.record(0).state is State.COMPLETE
        assert shown(scenario.visible_of(0)) == "all"
        shutil.move(elsewhere, scenario.checkpoint)
        branch = branches_of(scenario, 0, "kafka")[0]
        assert sparkonce("settle", JOB, "0", "--branch", branch, "--as", "redo").code == ERROR
        scenario.finish()


def objects(services: Services) -> list[str]:
    """Keys in all buckets, and uploads that are open."""
    found: list[str] = []
    for server in services.s3.values():
        with contextlib.closing(checks.s3_client(server)) as client:
            for bucket in client.list_buckets()["Buckets"]:
                name = bucket["Name"]
                keys = client.list_objects_v2(Bucket=name).get("Contents", ())
                uploads = client.list_multipart_uploads(Bucket=name).get("Uploads", ())
                found += [f"{name}/{key['Key']}" for key in keys]
                found += [f"{name}/{one['Key']} {one['UploadId']}" for one in uploads]
    return sorted(found)


def test_doctor_asks_every_server(
    scenario: Scenario, sparkonce: Operator, services: Services
) -> None:
    """Every finding that is not fine comes with a fix; servers that are away are told of."""
    conf = scenario.folder / "spark-defaults.conf"
    conf.write_text(
        "# defaults\nspark.speculation   true\n"
        "spark.executor.instances=50\nspark.executor.cores 8\n"
    )
    with scenario:
        scenario.kill_at("decide.after", 0)
        before = objects(services)
        found = sparkonce("doctor", JOB, "--conf", str(conf), "--json")
        assert found.code == FOUND
        names = {target.name for target in scenario.targets}
        assert {one["about"] for one in found.value} == {"log", "checkpoint", "spark", *names}
        assert all(one["fix"] for one in found.value if one["level"] != "ok")
        said = {one["what"].partition("=")[0] for one in found.value}
        assert {"transaction.max.timeout.ms", "max_prepared_transactions"} <= said
        assert "spark.speculation" in said
        (cores,) = [one for one in found.value if "400 may run" in one["what"]]
        assert "writers=" in cores["fix"]
        assert not [one for one in found.value if one["level"] == "error"]
        assert sparkonce("doctor", JOB).code == FOUND
        assert objects(services) == before, "nothing is left of the questions"
        (unfinished,) = [
            one for one in found.value if "not finished: batch 0 (decided)" in one["what"]
        ]
        assert unfinished["about"] == "log"
        assert unfinished["fix"] == "start the query, or run sparkonce recover JOB"
        (behind,) = [one for one in found.value if "newest is 0 (decided)" in one["what"]]
        assert behind["about"] == "checkpoint"

        config = json.loads(scenario.config.read_text())
        by_name = {sink["settings"]["name"]: sink for sink in config["sinks"]}
        by_name["postgres"]["settings"]["table"] = "nowhere"
        by_name["kafka"]["target"] = ["nowhere"]
        (scenario.folder / "config.json").write_text(json.dumps(config))
        broken = sparkonce("doctor", JOB, "--json").value
        assert {one["about"] for one in broken if one["level"] == "error"} == {"postgres", "kafka"}


def test_checkpoint_is_read_by_a_jvm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on HDFS: through Hadoop's file systems, without a Spark session."""
    (tmp_path / "metadata").write_text('{"id": "q"}')
    (tmp_path / "commits").mkdir()
    for name in ("9", "10", ".11.crc"):
        (tmp_path / "commits" / name).touch()
    for module in (checkpoint, opening):
        monkeypatch.setattr(module, "local_path", lambda location: None)
    with pytest.raises(ConfigurationError, match="read by a JVM"):
        checkpoint.open_checkpoint(f"file:{tmp_path}", "q")
    found = checkpoint.open_checkpoint(f"file:{tmp_path}", "q", start_jvm=True)
    assert found.committed() == 10
    assert not found.has_offsets(11)
    (tmp_path / "metadata").unlink()
    assert found.committed() is None


@pytest.mark.slow
def test_tail_follows_a_driver(scenario: Scenario, sparkonce: Operator) -> None:
    """One line for each state of each batch, in order, as they come."""
    with scenario:
        scenario.kill_at("decide.after", 0)
        with sparkonce.start("log", "tail", JOB, "--follow", "--json") as follower:
            assert follower.stdout is not None
            seen = [json.loads(follower.stdout.readline())]
            scenario.finish()
            while (seen[-1]["batch"], seen[-1]["state"]) != (2, "complete"):
                seen.append(json.loads(follower.stdout.readline()))
            follower.terminate()
        states = [(event["batch"], event["state"]) for event in seen]
        assert states == [(n, state) for n in range(3) for state in ("decided", "complete")]


@pytest.mark.usefixtures("services")
@pytest.mark.slow
def test_demo_from_the_command(tmp_path: Path) -> None:
    """The same as `make demo`, with its options."""
    done = subprocess.run(
        [COMMAND, "demo", "--rows", "1"], check=False, capture_output=True, text=True
    )
    assert (done.returncode, "--rows: at least" in done.stderr) == (USAGE, True)
