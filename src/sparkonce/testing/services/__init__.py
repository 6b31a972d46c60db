"""Real servers for tests, the demo and `make services`: Kafka, Postgres and two S3 servers.

with start_services(["kafka", "postgres", "s3mock"]) as services:
    services.kafka.bootstrap_servers      # 127.0.0.1:21345
    services.postgres.dsn                 # postgresql://postgres@127.0.0.1:18433/postgres
    services.s3["s3mock"].endpoint_url    # http://127.0.0.1:29876
    services.kafka.kill()                 # SIGKILL; the data stays
    services.kafka.start()                # again, on the same port

They run as containers if a Docker engine responds, else as local processes.
"""

from sparkonce.testing.services.cluster import KafkaCluster, start_kafka_cluster
from sparkonce.testing.services.errors import ServiceError
from sparkonce.testing.services.hdfs import Hdfs, start_hdfs
from sparkonce.testing.services.network import Host, Network, why_no_network
from sparkonce.testing.services.postgres import postgres_versions
from sparkonce.testing.services.server import (
    KafkaServer,
    KafkaSettings,
    PostgresServer,
    PostgresSettings,
    S3Server,
    S3Settings,
    Server,
)
from sparkonce.testing.services.services import (
    KINDS,
    ServiceKind,
    Services,
    s3a_committer_jars,
    s3a_jars,
    spark_jdbc_jars,
    spark_kafka_jars,
    start_services,
    unavailable,
)
from sparkonce.testing.services.spark_cluster import (
    SparkCluster,
    SparkWorker,
    start_spark_cluster,
)
from sparkonce.testing.services.spark_connect import SparkConnectServer, start_spark_connect
from sparkonce.testing.services.yarn import Yarn, YarnNode, start_yarn

__all__ = [
    "KINDS",
    "Hdfs",
    "Host",
    "KafkaCluster",
    "KafkaServer",
    "KafkaSettings",
    "Network",
    "PostgresServer",
    "PostgresSettings",
    "S3Server",
    "S3Settings",
    "Server",
    "ServiceError",
    "ServiceKind",
    "Services",
    "SparkCluster",
    "SparkConnectServer",
    "SparkWorker",
    "Yarn",
    "YarnNode",
    "postgres_versions",
    "s3a_committer_jars",
    "s3a_jars",
    "spark_jdbc_jars",
    "spark_kafka_jars",
    "start_hdfs",
    "start_kafka_cluster",
    "start_services",
    "start_spark_cluster",
    "start_spark_connect",
    "start_yarn",
    "unavailable",
    "why_no_network",
]
