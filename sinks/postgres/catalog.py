"""What the server says of the target table, and whether rows of a schema can go there.

Everything is read at the start; the result travels to the executors with the
pickled sink, so that no task asks the catalog again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

import psycopg
from psycopg.rows import namedtuple_row

from sparkonce.errors import ConfigurationError
from sparkonce.sinks.postgres.columns import match
from sparkonce.sinks.postgres.connections import PgConnection, roll_back
from sparkonce.sinks.postgres.creating import (
    check_dead_letter,
    create_dead_letter,
    create_table,
    create_target,
    name_parts,
)
from sparkonce.sinks.postgres.fitness import unfit
from sparkonce.sinks.postgres.shape import Shape
from sparkonce.sinks.postgres.sql import (
    MARKER_COLUMNS,
    MARKER_TABLE,
    columns_of,
    qualified,
)
from sparkonce.sinks.postgres.types import ColumnPlan, holds_strings

if TYPE_CHECKING:
    import pyarrow as pa

    from sparkonce.sinks.postgres.writing import Writing

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

# A domain is followed to the type under it: the merge checks it, the staging table need not. The
# same for the elements of an array.
# The collation goes with it, so that keys are equal in a batch when they are in the table.
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

# Only such an index can arbitrate ON CONFLICT (columns). `leading` is its first column, where a
# block of code can go through the index in the order of that column: not of every partition, each
# of which it would lock.
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
    (SELECT relname FROM pg_catalog.pg_class WHERE oid = i.indexrelid) AS name,
    (
        SELECT a.attname::text FROM pg_catalog.pg_attribute a
        JOIN pg_catalog.pg_type t ON t.oid = a.atttypid
        JOIN pg_catalog.pg_opclass o ON o.oid = i.indclass[0]
        JOIN pg_catalog.pg_am m ON m.oid = o.opcmethod
        JOIN pg_catalog.pg_class c ON c.oid = i.indrelid
        JOIN pg_catalog.pg_language l ON l.lanname = 'plpgsql'
        WHERE a.attrelid = i.indrelid AND a.attnum = i.indkey[0]
            AND t.typnamespace = 'pg_catalog'::regnamespace
            AND m.amname = 'btree' AND o.opcdefault AND i.indcollation[0] = a.attcollation
            AND i.indoption[0] IN (0, 3)  -- NULLs stand behind the greatest, as in ORDER BY
            AND c.relkind = 'r' AND NOT c.relhassubclass AND NOT c.relrowsecurity
            AND has_language_privilege(l.oid, 'USAGE')
    ) AS leading
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


_SCHEMA_AND_TABLE = 2

_MAY_BE_CUT = 60
"""Bytes: a longer name ends at the 63rd, or before the letter that would pass it."""

_NO_NAME = (
    psycopg.errors.InvalidName,
    psycopg.errors.InvalidParameterValue,
    psycopg.errors.SyntaxError,
)


@dataclass(frozen=True, slots=True)
class Target:
    """The table and the columns that a batch fills.

    Attributes:
        schema: without quotes, as all names here.
        table: its name.
        shown: both, quoted as in SQL.
        columns: those of the batch, in its order; so those of a staging table.
        shape: of the table's columns that these go into, from the same look.
        database: the connection's.
        system: the server's own identifier; empty where the role may not read it.
        why_open: why a merge waits in an open transaction; None where it is prepared.
        helpers: columns of the batch that the table does not have, for order_by= and delete=.
        updated: columns that an update sets.
        delete: SQL that says whether a row of the batch is a deletion.
        dead_letter: schema and name of the table that takes rows which the target refuses.
        leading: the first column of the key's index, if it can be gone through in its order.
    """

    schema: str
    table: str
    shown: str
    columns: tuple[ColumnPlan, ...]
    shape: Shape
    database: str
    system: str
    why_open: str | None
    helpers: tuple[str, ...] = ()
    updated: tuple[str, ...] = ()
    delete: str | None = None
    dead_letter: tuple[str, str] | None = None
    leading: str | None = None

    @property
    def can_prepare(self) -> bool:
        return self.why_open is None

    @property
    def filled(self) -> tuple[str, ...]:
        """The columns of the batch that the table has."""
        return tuple(name for name in self.names if name not in self.helpers)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(column.name for column in self.columns)

    @property
    def is_binary(self) -> bool:
        return all(column.binary for column in self.columns)


def system_identifier(connection: PgConnection) -> str:
    """The cluster's identity: kept by its replicas, another one on any other server."""
    try:
        row = connection.execute(
            "SELECT system_identifier::text FROM pg_catalog.pg_control_system()"
        ).fetchone()
    except psycopg.errors.InsufficientPrivilege:
        return ""
    return "" if row is None else str(row[0])


def resolve(
    connection: PgConnection,
    table: str,
    writing: Writing,
    schema: pa.Schema,
    *,
    creates: bool = False,
    dead_letter: str | None = None,
    copies: bool = False,
    is_dealt: bool = False,
) -> Target:
    """Check that rows of `schema` can go into `table`, and see how.

    Args:
        connection: to the server.
        table: as written in SQL.
        writing: what becomes of a row whose key is there.
        schema: of the batch.
        creates: whether to create the table where it is missing.
        dead_letter: a table for rejected rows, as written in SQL; created where it is missing.
        copies: whether rows are copied into the table itself.
        is_dealt: whether several tasks write at a time, each the rows of its keys.

    Raises:
        ConfigurationError: naming what is at fault, and the fix.
    """
    refuse = _refusing(table)
    found = standing(connection, table, writing, creates=creates, copies=copies)
    if found is None:
        create_target(connection, name_parts(connection, table, refuse), writing, schema, refuse)
        found = standing(connection, table, writing, copies=copies)
    with connection.cursor(row_factory=_ROW) as cursor:
        columns = _columns(cursor, found)
        batch = match(connection, columns, writing, schema, refuse, is_lax=dead_letter is not None)
        _check_rights(columns, schema.names, writing, batch.updated, refuse)
        leading = None
        if writing.key is not None:
            unique = cursor.execute(_UNIQUE_KEYS, (found.oid,)).fetchall()
            leading = _check_key(writing.key, unique, found.shown, refuse)
            if writing.mode != "upsert" or writing.order_by or dead_letter is not None:
                _check_nulls(writing.key, columns, unique, refuse)
            if is_dealt and writing.delete is not None:
                _check_spellings(writing.key, columns, schema, refuse)
        _check_marker(connection, found.schema, refuse)
        rejects = None
        if dead_letter is not None:
            rejects = _dead_letter(connection, found, dead_letter, refuse)
            shown = qualified(*rejects).as_string()
            told = unfit(connection, shown)
            if told is not None:
                refuse(f"dead_letter={shown}: {told}")
        why_open: str | None = "max_prepared_transactions is 0"
        if found.can_prepare:
            why_open = unfit(connection, found.shown, writing.mode, prepares=True)
    return Target(
        found.schema,
        found.name,
        found.shown,
        batch.plans,
        _shape(columns, schema.names),
        found.database,
        system_identifier(connection),
        why_open,
        batch.helpers,
        batch.updated,
        batch.delete,
        rejects,
        leading,
    )


def standing(
    connection: PgConnection,
    table: str,
    writing: Writing,
    *,
    creates: bool = False,
    copies: bool = False,
) -> Any:
    """The table, after a look at its kind and rights; None where the start is to create it.

    Raises:
        ConfigurationError: see `resolve`, which has the arguments, too.
    """
    refuse = _refusing(table)
    with connection.cursor(row_factory=_ROW) as cursor:
        found = _find(cursor, table, refuse)
        if found is not None:
            _check_table(connection, found, writing, refuse, copies=copies)
        elif not creates:
            _refuse_missing(cursor, table, refuse)
    return found


def _refusing(table: str) -> Callable[[str], NoReturn]:
    def refuse(text: str) -> NoReturn:
        raise ConfigurationError(f"PostgresSink: table {table}: {text}")

    return refuse


def _find(cursor: psycopg.Cursor[Any], table: str, refuse: Callable[[str], NoReturn]) -> Any:
    """What the server has by this name; None for nothing."""
    try:
        found = cursor.execute(_TABLE, (table,)).fetchone()
        names = () if found is None else (found.schema, found.name)
        if not names or max(len(name.encode()) for name in names) >= _MAY_BE_CUT:
            name_parts(cursor.connection, table, refuse)  # is stricter about what a name is
    except _NO_NAME:
        refuse('this is no name as SQL writes it; quote its parts, as in \'"my schema"."T"\'')
    except psycopg.errors.FeatureNotSupported:
        refuse("a name has a schema and a table; the database stands in conninfo=")
    return found


def _refuse_missing(
    cursor: psycopg.Cursor[Any], table: str, refuse: Callable[[str], NoReturn]
) -> NoReturn:
    similar = cursor.execute(_SIMILAR, (table,)).fetchone()
    hint = f" (there is {similar[0]}, to be written like this)" if similar else ""
    refuse(
        f"it does not exist{hint}; correct table=, which is read as SQL, or create it, also with "
        'create="if_missing"'
    )


def _columns(cursor: psycopg.Cursor[Any], found: Any) -> Sequence[Any]:
    # So that a type from elsewhere is shown with its schema, for CREATE TABLE. In a transaction:
    # behind a pooler, the session is others' too.
    cursor.execute("BEGIN; SET LOCAL search_path = pg_catalog")
    try:
        return cursor.execute(_COLUMNS, {"oid": found.oid}).fetchall()
    finally:
        roll_back(cursor.connection)


def _shape(columns: Sequence[Any], names: Sequence[str]) -> Shape:
    return Shape(
        tuple(
            (column.name, column.declared_type, column.declared_modifier, column.declared)
            for column in columns
            if column.name in names
        )
    )


def _dead_letter(
    connection: PgConnection, found: Any, dead_letter: str, refuse: Callable[[str], NoReturn]
) -> tuple[str, str]:
    try:
        parts = name_parts(connection, dead_letter, refuse)
    except _NO_NAME:
        refuse(f"dead_letter={dead_letter!r} is no name as SQL writes it")
    if len(parts) > _SCHEMA_AND_TABLE:
        refuse(f"dead_letter={dead_letter!r} must have a schema and a table, or a table only")
    schema, name = (found.schema, *parts)[-_SCHEMA_AND_TABLE:]
    if (schema, name) == (found.schema, found.name):
        refuse("dead_letter= must be another table")
    create_dead_letter(connection, (schema, name))
    check_dead_letter(connection, (schema, name), refuse)
    return schema, name


def _check_table(
    connection: PgConnection,
    found: Any,
    writing: Writing,
    refuse: Callable[[str], NoReturn],
    *,
    copies: bool,
) -> None:
    told = unfit(connection, found.shown, writing.mode, must_see=copies)
    if told is not None:
        refuse(told)
    if not found.may_create:
        refuse(
            f"the role {found.role} may not create staging tables beside it; "
            f"GRANT CREATE ON SCHEMA {found.schema} TO {found.role}"
        )
    if writing.mode == "merge" and not found.may_delete:
        refuse("the role may not delete rows; GRANT DELETE on the table")


def _check_rights(
    columns: Sequence[Any],
    names: Sequence[str],
    writing: Writing,
    updated: Sequence[str],
    refuse: Callable[[str], NoReturn],
) -> None:
    key = writing.key or ()
    for column in columns:
        given = column.name in names
        is_filled = column.has_default or column.is_generated or column.identity
        if not given and column.not_null and not is_filled:
            refuse(
                f"column {column.name!r} is NOT NULL and has no default, and the batch has no such "
                "column; add it with select=, or give it a default"
            )
        if not given and column.refused_sequence is not None:
            refuse(
                f"the role may not use the sequence {column.refused_sequence}, which numbers "
                f"column {column.name!r}; GRANT USAGE ON SEQUENCE {column.refused_sequence}"
            )
        if given and not column.may_insert:
            refuse(f"the role may not write column {column.name!r}; GRANT INSERT on the table")
        is_read = column.name in key or column.name in updated  # EXCLUDED counts as reading
        if is_read and not column.may_select:
            refuse(
                f"the role may not read column {column.name!r}, as write={writing.mode!r} does; "
                "GRANT SELECT on the table"
            )
        if column.name in updated and not column.may_update:
            refuse(f"the role may not update column {column.name!r}; GRANT UPDATE on the table")


def _check_key(
    key: Sequence[str], unique: Sequence[Any], shown: str, refuse: Callable[[str], NoReturn]
) -> str | None:
    """The first column of the key's index, if it can be gone through in its order."""
    fitting = [index for index in unique if set(index.columns) == set(key)]
    if not fitting:
        quoted = columns_of(key).as_string()
        refuse(
            f"no unique index covers exactly key={list(key)!r} (a partial or deferrable one does "
            f"not serve); CREATE UNIQUE INDEX ON {shown} ({quoted})"
        )
    for index in fitting:
        if index.has_other_collation:  # ON CONFLICT goes by each, and the batch by the column's
            refuse(
                f"the unique index {index.name!r} on key={list(key)!r} has another collation than "
                "its column, so that they differ in which keys are equal; give them the same one"
            )
    return next((index.leading for index in fitting if index.leading is not None), None)


def _check_nulls(
    key: Sequence[str],
    columns: Sequence[Any],
    unique: Sequence[Any],
    refuse: Callable[[str], NoReturn],
) -> None:
    """What looks for rows of one key by itself, takes keys with a NULL for different ones."""
    has_equal_nulls = any(
        set(index.columns) == set(key) and index.has_equal_nulls for index in unique
    )
    if has_equal_nulls and not all(c.not_null for c in columns if c.name in key):
        refuse(
            f"the unique index on key={list(key)!r} is NULLS NOT DISTINCT, which only an upsert "
            "without order_by= and dead_letter= can follow; make the key's columns NOT NULL"
        )


def _check_spellings(
    key: Sequence[str], columns: Sequence[Any], schema: pa.Schema, refuse: Callable[[str], NoReturn]
) -> None:
    """Spark deals keys out by their bytes, and a task's deletion sees no row of another task."""
    for column in columns:
        if column.name not in key or not holds_strings(schema.field(column.name).type):
            continue
        has_one = column.is_enum or column.type_name in {"text", "varchar"}
        if column.is_folded or not has_one:
            refuse(
                f"key column {column.name!r} ({column.declared}) holds texts with other characters "
                "for equal, which can reach two tasks: the deletion of the one would leave the row "
                'of the other; with delete=, use mode="staged" or writers=1'
            )


def _check_marker(connection: PgConnection, schema: str, refuse: Callable[[str], NoReturn]) -> None:
    """Make the marker table if need be, and see that it is the one we know."""
    name = qualified(schema, MARKER_TABLE).as_string()
    with connection.cursor(row_factory=_ROW) as cursor:
        marker = cursor.execute(_MARKER, (schema, MARKER_TABLE)).fetchone()
        if marker is None:
            create_table(connection, (schema, MARKER_TABLE), MARKER_COLUMNS)
            marker = cursor.execute(_MARKER, (schema, MARKER_TABLE)).fetchone()
    if marker is None or not marker.is_unique or set(MARKER_COLUMNS) - set(marker.columns):
        refuse(f"{name} is not the table of this name that sparkonce makes; rename yours")
    if not marker.may_use:
        refuse(f"the role may not use {name}; GRANT SELECT, INSERT on it")
    told = unfit(connection, name, must_see=True)
    if told is not None:
        refuse(f"{name}: {told}")
