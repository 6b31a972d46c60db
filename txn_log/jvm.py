"""Finds the JVM through which Hadoop's file systems are reached."""

from __future__ import annotations

from functools import cache
from typing import Any

from pyspark import SparkContext
from pyspark.java_gateway import launch_gateway

from sparkonce.txn_log.hadoop import HadoopFolder


def hadoop_folder(root: str, address: str, conf: Any = None) -> HadoopFolder:
    """A folder, through the running Spark; without one, a JVM is started (takes some seconds)."""
    gateway = SparkContext._gateway or _own_gateway()  # noqa: SLF001 - py4j is the only way
    if conf is None:
        # With what spark-defaults.conf says of Hadoop.
        conf = gateway.jvm.org.apache.spark.deploy.SparkHadoopUtil.get().conf()
    return HadoopFolder(root, gateway, conf, address)


@cache
def _own_gateway() -> Any:
    """One JVM for all folders of a process that has no Spark; it ends with the process."""
    return launch_gateway()
