"""A Spark task's rows on their way to the server, by COPY."""
