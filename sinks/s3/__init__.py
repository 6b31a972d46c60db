"""Parquet files in S3 that appear whole, and only when their batch is decided."""

from sparkonce.sinks.s3.sink import S3Sink

__all__ = ["S3Sink"]
