"""The SQL statements of a log in Postgres, and its tables."""

from __future__ import annotations

from typing import Final

MIGRATIONS: Final = (
    """
    CREATE TABLE {schema}.heads (
        pipeline text PRIMARY KEY, version bigint NOT NULL, token bigint NOT NULL,
        body text NOT NULL
    );
    CREATE TABLE {schema}.records (
        pipeline text NOT NULL, query_id text NOT NULL, batch_id bigint NOT NULL,
        state text NOT NULL, body text NOT NULL,
        PRIMARY KEY (pipeline, query_id, batch_id)
    );
    CREATE INDEX records_unfinished ON {schema}.records (pipeline, batch_id)
        WHERE state IN ('prepared', 'decided');
    CREATE INDEX records_newest ON {schema}.records (pipeline, batch_id DESC);
    """,
)
"""Migration n, counted from 1, takes the schema from version n-1 to n. Only append to them."""

SWAP = """
WITH head AS ({head}),
put AS (
    INSERT INTO {schema}.records
    SELECT new.* FROM head, unnest(
        %(pipelines)s::text[], %(queries)s::text[], %(batches)s::bigint[], %(states)s::text[],
        %(bodies)s::text[]
    ) AS new
    ON CONFLICT (pipeline, query_id, batch_id)
    DO UPDATE SET state = excluded.state, body = excluded.body
),
gone AS (
    DELETE FROM {schema}.records AS old
    USING head, unnest(%(old_queries)s::text[], %(below)s::bigint[]) AS asked (query_id, below)
    WHERE old.pipeline = %(pipeline)s AND old.query_id = asked.query_id
        AND old.batch_id < asked.below AND old.state = 'complete'
)
SELECT {found}, set_config('synchronous_commit',
    CASE current_setting('synchronous_commit') WHEN 'remote_apply' THEN 'remote_apply'
    ELSE 'on' END, true)
"""
"""The setting holds for this transaction: a decision is on disk before the server answers."""

UNHIDDEN = "SELECT set_config('row_security', 'off', true);"
"""A prefix of a statement. Both are one message, and so one transaction, also through a pooler. Row
security then makes the statement fail instead of hiding records."""

HIDDEN = "check_enable_rls"
"""The server's function that reports that error; its text depends on the server's language."""

COUNTED = "(SELECT count(*) FROM head)"
REQUIRED = """
    CASE (SELECT count(*) FROM head)
    WHEN 0 THEN concat('another driver has written the log')::int END
"""
"""Makes the transaction fail where the head was not changed. The planner would cast a constant at
once and always fail; `concat` delays the cast."""

PLACE = """
    SELECT system_identifier, oid, extract(epoch FROM pg_postmaster_start_time())::numeric
    FROM pg_catalog.pg_control_system(), pg_catalog.pg_database WHERE datname = current_database()
"""
"""One database of one running server. A copy has the same identifiers, but another start time."""

FIRST_HEAD = """
    INSERT INTO {schema}.heads VALUES (%(pipeline)s, 1, %(token)s, %(body)s)
    ON CONFLICT DO NOTHING RETURNING 1
"""
NEXT_HEAD = """
    UPDATE {schema}.heads SET version = version + 1, token = %(token)s, body = %(body)s
    WHERE pipeline = %(pipeline)s AND version = %(version)s RETURNING 1
"""
SAME_HEAD = """
    UPDATE {schema}.heads SET version = version
    WHERE pipeline = %(pipeline)s AND version = %(version)s RETURNING 1
"""
"""A write without changes. Once the standbys confirm it, they also have everything that was seen;
before, that may have been committed without them."""
