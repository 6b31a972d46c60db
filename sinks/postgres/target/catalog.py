"""What the server's catalog says about the target table: its columns, unique keys and markers.

Everything is read at the start. The result travels to the executors with the pickled sink, so no
task reads the catalog again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import psycopg
from psycopg.rows import namedtuple_row

from sparkonce.sinks.postgres.server.connections import PgConnection, roll_back
from sparkonce.sinks.postgres.server.sql import MARKER_TABLE
from sparkonce.sinks.postgres.target.creating import name_parts

_ROW: Any = namedtuple_row

_TABLE = """
    SELECT c.oid::bigint AS oid, n.nspname AS schema, c.relname AS name,
        has_schema_privilege(n.oid, 'CREATE') AS may_create,
        has_table_privilege(c.oid, 'DELETE') AS may_delete,
        current_setting('max_prepared_transactions')::int > 0 AS can_prepare,
        current_database() AS database, current_user AS role,
        quote_ident(n.nspname) || '.' || quote_ident(c.relname) AS shown
    FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
    WHERE c.oid = to_regclass(%s)
"""

_SIMILAR = """
    SELECT quote_ident(n.nspname) || '.' || quote_ident(c.relname)
    FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
    WHERE c.relkind IN ('r', 'p') AND NOT n.nspname LIKE 'pg\\_%%'
        AND lower(c.relname) = lower((SELECT n[cardinality(n)] FROM parse_ident(%s, false) AS n))
    ORDER BY 1 LIMIT 1
"""

# Domains, also those of an array's elements, are resolved to their base types: the merge checks the
# domain, the staging table need not. The collation is kept, so that keys are equal in a batch
# exactly when they are equal in the table.
_COLUMNS = """
    WITH RECURSIVE under AS (
        SELECT a.attnum, a.atttypid AS typid, a.atttypmod AS typmod, a.attnotnull AS not_null,
            a.atthasdef AS has_default, 0 AS depth
        FROM pg_catalog.pg_attribute a
        WHERE a.attrelid = %(oid)s AND a.attnum > 0 AND NOT a.attisdropped
      UNION ALL
        SELECT u.attnum, t.typbasetype, t.typtypmod, u.not_null OR t.typnotnull,
            u.has_default OR t.typdefault IS NOT NULL, u.depth + 1
        FROM under u JOIN pg_catalog.pg_type t ON t.oid = u.typid WHERE t.typtype = 'd'
    ), base AS (
        SELECT DISTINCT ON (attnum) * FROM under ORDER BY attnum, depth DESC
    ), element AS (
        SELECT b.attnum, t.typelem AS typid, b.typmod, 0 AS depth
        FROM base b JOIN pg_catalog.pg_type t ON t.oid = b.typid
        WHERE t.typcategory = 'A' AND t.typelem <> 0
      UNION ALL
        SELECT m.attnum, t.typbasetype, t.typtypmod, m.depth + 1
        FROM element m JOIN pg_catalog.pg_type t ON t.oid = m.typid WHERE t.typtype = 'd'
    )
    SELECT a.attname AS name, u.not_null, u.has_default, a.attgenerated <> '' AS is_generated,
        a.attidentity AS identity, a.atttypid::text AS declared_type,
        a.atttypmod AS declared_modifier, format_type(a.atttypid, a.atttypmod) AS declared,
        CASE WHEN m.depth > 0 THEN format_type(e.typarray, m.typmod)
            ELSE format_type(u.typid, u.typmod) END AS ddl,
        coalesce(m.typmod, u.typmod) AS modifier,
        CASE WHEN a.attcollation <> e.typcollation
            THEN format(' COLLATE %%I.%%I', s.nspname, k.collname) ELSE '' END AS collation,
        NOT coalesce(k.collisdeterministic, true) AS is_folded,
        m.attnum IS NOT NULL AS is_array, e.typtype = 'e' AS is_enum,
        m.depth > 0 AS is_of_domains, m.depth > 0 AND e.typcategory = 'A' AS is_of_arrays,
        CASE e.typnamespace WHEN 'pg_catalog'::regnamespace THEN e.typname ELSE '' END AS type_name,
        e.typtype = 'c' AS is_composite,
        (
            SELECT min(q.oid::regclass::text) FROM pg_catalog.pg_attrdef f
            JOIN pg_catalog.pg_depend d
                ON d.classid = 'pg_catalog.pg_attrdef'::regclass AND d.objid = f.oid
            JOIN pg_catalog.pg_class q
                ON d.refclassid = 'pg_catalog.pg_class'::regclass AND q.oid = d.refobjid
            WHERE f.adrelid = a.attrelid AND f.adnum = a.attnum
                AND CASE q.relkind WHEN 'S' THEN NOT has_sequence_privilege(q.oid, 'USAGE, UPDATE')
                    ELSE false END
        ) AS refused_sequence,
        has_column_privilege(%(oid)s::oid, a.attnum, 'INSERT') AS may_insert,
        has_column_privilege(%(oid)s::oid, a.attnum, 'UPDATE') AS may_update,
        has_column_privilege(%(oid)s::oid, a.attnum, 'SELECT') AS may_select
    FROM base u
    JOIN pg_catalog.pg_attribute a ON a.attrelid = %(oid)s AND a.attnum = u.attnum
    LEFT JOIN (SELECT DISTINCT ON (attnum) * FROM element ORDER BY attnum, depth DESC) m
        ON m.attnum = u.attnum
    LEFT JOIN pg_catalog.pg_collation k ON k.oid = a.attcollation
    LEFT JOIN pg_catalog.pg_namespace s ON s.oid = k.collnamespace
    JOIN pg_catalog.pg_type e ON e.oid = coalesce(m.typid, u.typid)
    ORDER BY a.attnum
"""

# Only such an index can arbitrate ON CONFLICT (columns).
_UNIQUE_KEYS = """
    SELECT ARRAY(
        SELECT a.attname::text FROM pg_catalog.pg_attribute a
        WHERE a.attrelid = i.indrelid AND a.attnum = ANY (i.indkey[0 : i.indnkeyatts - 1])
    ) AS columns,
    coalesce((to_jsonb(i) ->> 'indnullsnotdistinct')::boolean, false) AS has_equal_nulls,
    EXISTS (
        SELECT FROM generate_series(0, i.indnkeyatts - 1) AS n
        JOIN pg_catalog.pg_attribute a ON a.attrelid = i.indrelid AND a.attnum = i.indkey[n]
        JOIN pg_catalog.pg_collation k ON k.oid IN (i.indcollation[n], a.attcollation)
        WHERE i.indcollation[n] <> a.attcollation AND NOT k.collisdeterministic
    ) AS has_other_collation,
    (SELECT relname FROM pg_catalog.pg_class WHERE oid = i.indexrelid) AS name
    FROM pg_catalog.pg_index i
    WHERE i.indrelid = %s AND i.indisunique AND i.indisvalid AND i.indimmediate
        AND i.indpred IS NULL AND i.indexprs IS NULL AND NOT i.indisexclusion
"""

_MARKER = """
    SELECT has_table_privilege(c.oid, 'SELECT') AND has_table_privilege(c.oid, 'INSERT') AS may_use,
        ARRAY(SELECT attname::text FROM pg_catalog.pg_attribute
              WHERE attrelid = c.oid AND attnum > 0 AND NOT attisdropped) AS columns,
        EXISTS (SELECT FROM pg_catalog.pg_index i JOIN pg_catalog.pg_attribute a
                ON a.attrelid = c.oid AND a.attnum = i.indkey[0] AND a.attname = 'branch'
                WHERE i.indrelid = c.oid AND i.indisunique AND i.indimmediate
                    AND i.indnkeyatts = 1 AND i.indpred IS NULL) AS is_unique
    FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
    WHERE n.nspname = %s AND c.relname = %s
"""

_MAY_BE_CUT = 60
"""Bytes. Postgres truncates a longer name at its 63rd byte, or before the character across it."""

NO_NAME = (
    psycopg.errors.InvalidName,
    psycopg.errors.InvalidParameterValue,
    psycopg.errors.SyntaxError,
)
"""Errors of `parse_ident` and `to_regclass` for text that is not a name in SQL."""


def find_table(connection: PgConnection, table: str, refuse: Callable[[str], NoReturn]) -> Any:
    """The table of this name, as written in SQL; None if there is none."""
    with connection.cursor(row_factory=_ROW) as cursor:
        try:
            found = cursor.execute(_TABLE, (table,)).fetchone()
            names = () if found is None else (found.schema, found.name)
            if not names or max(len(name.encode()) for name in names) >= _MAY_BE_CUT:
                name_parts(connection, table, refuse)  # stricter about what a name is
        except NO_NAME:
            refuse('it is not a name as SQL writes it; quote its parts, as in \'"my schema"."T"\'')
        except psycopg.errors.FeatureNotSupported:
            refuse("a name has a schema and a table; conninfo= names the database")
    return found


def similar_table(connection: PgConnection, table: str) -> str | None:
    """A table whose name differs only in case or schema."""
    row = connection.execute(_SIMILAR, (table,)).fetchone()
    return None if row is None else str(row[0])


def table_columns(connection: PgConnection, oid: int) -> Sequence[Any]:
    """The table's columns, in order, with their types and the role's rights."""
    with connection.cursor(row_factory=_ROW) as cursor:
        # This search_path shows types of other schemas with their schema, for CREATE TABLE. In a
        # transaction, since behind a pooler others use the session too.
        cursor.execute("BEGIN; SET LOCAL search_path = pg_catalog")
        try:
            return cursor.execute(_COLUMNS, {"oid": oid}).fetchall()
        finally:
            roll_back(connection)


def unique_keys(connection: PgConnection, oid: int) -> Sequence[Any]:
    """The table's unique indexes that ON CONFLICT can use."""
    with connection.cursor(row_factory=_ROW) as cursor:
        return cursor.execute(_UNIQUE_KEYS, (oid,)).fetchall()


def marker_table(connection: PgConnection, schema: str) -> Any:
    """The marker table of the schema; None if there is none."""
    with connection.cursor(row_factory=_ROW) as cursor:
        return cursor.execute(_MARKER, (schema, MARKER_TABLE)).fetchone()
