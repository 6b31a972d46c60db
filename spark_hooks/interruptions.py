"""Whether a failed write of a batch lies with lost executors, so that another write may succeed.

Spark computes again what an executor lost, and sparkonce needs nothing for that. A few losses end
the whole job instead:

| Spark says | because |
|---|---|
| `CHECKPOINT_RDD_BLOCK_ID_NOT_FOUND` | a snapshot of the batch is kept on the executors only |
| `ExecutorLostFailure` | one task lost its executor `spark.task.maxFailures` times |
| `FetchFailed`, maximum allowable number of times | parts of a shuffle were lost again and again |
| indeterminate output … cannot rollback | a shuffle of random values was lost in part |
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Final

from sparkonce.errors import BatchInterruptedError

_SIGNS: Final[Mapping[str, str]] = {
    "CHECKPOINT_RDD_BLOCK_ID_NOT_FOUND": "a snapshot of its rows was lost with an executor",
    "indeterminate output": "a shuffle with random values was lost in part with an executor",
    "failed the maximum allowable number of times": "parts of a shuffle were lost repeatedly",
    "ExecutorLostFailure": "a task lost its executor repeatedly",
}


def interruption(error: BaseException) -> str | None:
    """Which loss of executors the error of a Spark job shows; None where it shows another cause."""
    text = str(error)
    return next((what for sign, what in _SIGNS.items() if sign in text), None)


@contextmanager
def noticed(batch_id: int) -> Iterator[None]:
    """Around Spark's jobs for a batch: raise `BatchInterruptedError` where executors were lost."""
    try:
        yield
    except Exception as error:
        if what := interruption(error):
            raise BatchInterruptedError(f"batch {batch_id} was interrupted: {what}") from error
        raise
