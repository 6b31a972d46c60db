"""A clock that is further off than S3 allows: a quarter of an hour. S3Mock does not check it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing

import pytest
from tests.support.s3_sinks import s3_sink

from integration_tests.support.clock import HOUR_S, ShiftedClock
from integration_tests.support.s3 import ROWS, World, branch, prepare
from sparkonce.errors import CommitUnresolvedError, ConfigurationError, PrepareRejectedError
from sparkonce.testing import checks
from sparkonce.testing.services import ServiceKind, Services


@pytest.mark.parametrize("ahead_s", [HOUR_S, -HOUR_S])
def test_server_refuses_a_clock_that_is_an_hour_off(
    start_kind: Callable[[ServiceKind], Services],
    fresh_name: Callable[[], str],
    fresh_clock: Callable[[], ShiftedClock],
    ahead_s: float,
) -> None:
    """At a start, in a task and in a commit, and the error names the clock: nothing is called lost.

    boto3 does not correct it. Once the clock is right, the same process goes on.
    """
    server, clock, bucket = start_kind("versitygw").s3["versitygw"], fresh_clock(), fresh_name()
    server.start()
    sink = s3_sink(f"s3://{bucket}/lake", **server.boto3_settings)
    with closing(checks.s3_client(server)) as client, clock.process() as driver:
        client.create_bucket(Bucket=bucket)
        world = World(client, bucket)
        decided = driver.submit(prepare, sink, branch(1)).result()
        clock.set_ahead(ahead_s)
        with pytest.raises(ConfigurationError, match="refuses .* clock") as refused:
            driver.submit(sink.validate, ROWS.schema).result()
        assert "grant" not in str(refused.value)
        with pytest.raises(PrepareRejectedError, match=r"RequestTimeTooSkewed.*correct the clock"):
            driver.submit(prepare, sink, branch(2)).result()
        with pytest.raises(CommitUnresolvedError, match=r"RequestTimeTooSkewed.*correct the clock"):
            driver.submit(sink.commit, decided).result()
        assert world.counts() == (1, 0)
        clock.set_ahead(0)
        driver.submit(sink.commit, decided).result()
        assert world.counts() == (0, 1)
