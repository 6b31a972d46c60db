"""A declarative pipeline that writes orders to files and to SQLite, exactly once and together.

mkdir -p /tmp/orders/in /tmp/orders/out
echo '{"id": 1, "customer": "Ada", "amount": 9.5}' > /tmp/orders/in/1.json
cd examples/declarative_pipeline
export PYTHONPATH=$PWD
spark-pipelines run                # again for new files; after a kill, too
sparkonce status jobs:pipeline
"""

from __future__ import annotations

from jobs import FOLDER, SINKS
from pyspark import pipelines as dp
from pyspark.sql import DataFrame, SparkSession

from sparkonce import shaped

spark = SparkSession.active()
orders = spark.readStream.schema("id long, customer string, amount double").json(f"{FOLDER}/in")
rows = shaped(orders, SINKS)  # here: Spark analyzes nothing inside a flow

dp.create_sink("orders_out", "sparkonce", {"pipeline": "jobs:pipeline"})


@dp.append_flow(target="orders_out")
def orders_flow() -> DataFrame:
    return rows
