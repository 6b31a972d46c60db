"""How many tasks may ask a server for connections."""

from __future__ import annotations

import pytest

from sparkonce.spark_hooks.probing import most_tasks


@pytest.mark.parametrize(
    ("conf", "tasks"),
    [
        ({}, None),
        ({"spark.executor.instances": "3"}, 3),
        ({"spark.executor.instances": "3", "spark.executor.cores": "4"}, 12),
        ({"spark.executor.instances": "3", "spark.executor.cores": "4", "spark.task.cpus": "2"}, 6),
        ({"spark.dynamicAllocation.enabled": "true", "spark.executor.instances": "3"}, None),
        (
            {
                "spark.dynamicAllocation.enabled": "true",
                "spark.dynamicAllocation.maxExecutors": "10",
                "spark.executor.cores": "4",
            },
            40,
        ),
        ({"spark.executor.instances": "many"}, None),
    ],
)
def test_tasks_at_a_time(conf: dict[str, str], tasks: int | None) -> None:
    assert most_tasks(conf) == tasks
