"""Which errors of Spark lie with lost executors: texts as Spark 4.3 raised them."""

from __future__ import annotations

import pytest

from sparkonce.errors import BatchInterruptedError
from sparkonce.spark_hooks.interruptions import noticed

STAGE = "Job aborted due to stage failure: "


@pytest.mark.parametrize(
    ("text", "what"),
    [
        (
            (
                f"{STAGE}Task 0 in stage 2.0 failed 4 times, most recent failure: Lost task 0.3 in "
                "stage 2.0 (TID 9) (192.0.2.2 executor 0): org.apache.spark.SparkException: "
                "[CHECKPOINT_RDD_BLOCK_ID_NOT_FOUND] Checkpoint block rdd_7_1 not found!"
            ),
            "a snapshot of its rows was lost",
        ),
        (
            (
                f"{STAGE}A shuffle map stage with indeterminate output was failed and retried. "
                "However, Spark cannot rollback the ResultStage 2 to re-process the input data"
            ),
            "a shuffle with random values was lost",
        ),
        (
            (
                f"{STAGE}Task 0 in stage 2.0 failed 4 times, most recent failure: Lost task 0.3 in "
                "stage 2.0 (TID 3) (10.0.0.3 executor 4): ExecutorLostFailure (executor 4 exited "
                "caused by one of the running tasks) Reason: Command exited with code 137"
            ),
            "a task lost its executor",
        ),
        (
            (
                f"{STAGE}ResultStage 3 (toArrow at …) has failed the maximum allowable number of "
                "times: 4. Most recent failure reason: org.apache.spark.shuffle.FetchFailed…"
            ),
            "parts of a shuffle were lost",
        ),
    ],
)
def test_lost_executors_are_noticed(text: str, what: str) -> None:
    with pytest.raises(BatchInterruptedError, match=f"batch 7 was interrupted: {what}"):
        with noticed(7):
            raise RuntimeError(text)


def test_other_errors_stay_as_they_are() -> None:
    with pytest.raises(ValueError, match="no number"), noticed(7):
        raise ValueError("no number")
