"""Checks whether rows of a schema may go into the table: rights, keys, and the sink's own tables.

Each check refuses with a text that names what is at fault and the fix.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from sparkonce.sinks.postgres.server.connections import PgConnection
from sparkonce.sinks.postgres.server.sql import (
    MARKER_COLUMNS,
    MARKER_TABLE,
    columns_of,
    qualified,
)
from sparkonce.sinks.postgres.target.catalog import NO_NAME, marker_table
from sparkonce.sinks.postgres.target.creating import (
    check_dead_letter,
    create_dead_letter,
    create_table,
    name_parts,
)
from sparkonce.sinks.postgres.target.fitness import unfit
from sparkonce.sinks.postgres.target.types import holds_strings

if TYPE_CHECKING:
    import pyarrow as pa

    from sparkonce.sinks.postgres.target.writing import Writing

_SCHEMA_AND_TABLE = 2


def check_table(
    connection: PgConnection,
    found: Any,
    writing: Writing,
    refuse: Callable[[str], NoReturn],
    *,
    copies: bool,
) -> None:
    """Check the table's kind, and the role's rights on it as a whole."""
    reason = unfit(connection, found.shown, writing.mode, must_see=copies)
    if reason is not None:
        refuse(reason)
    if not found.may_create:
        refuse(
            f"the role {found.role} may not create staging tables in its schema; "
            f"GRANT CREATE ON SCHEMA {found.schema} TO {found.role}"
        )
    if writing.mode == "merge" and not found.may_delete:
        refuse("the role may not delete rows; GRANT DELETE on the table")


def check_rights(
    columns: Sequence[Any],
    names: Sequence[str],
    writing: Writing,
    updated: Sequence[str],
    refuse: Callable[[str], NoReturn],
) -> None:
    """Check the role's rights on each column, and refuse required columns without a value."""
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


def check_key(
    key: Sequence[str], unique: Sequence[Any], shown: str, refuse: Callable[[str], NoReturn]
) -> None:
    """Require a unique index over exactly the key, with the collation of its columns."""
    fitting = [index for index in unique if set(index.columns) == set(key)]
    if not fitting:
        quoted = columns_of(key).as_string()
        refuse(
            f"no unique index covers exactly key={list(key)!r} (a partial or deferrable one cannot "
            f"be used); CREATE UNIQUE INDEX ON {shown} ({quoted})"
        )
    for index in fitting:
        if index.has_other_collation:  # ON CONFLICT uses the index's, the batch the column's
            refuse(
                f"the unique index {index.name!r} on key={list(key)!r} has another collation than "
                "its column, so they differ in which keys are equal; give them the same one"
            )


def check_nulls(
    key: Sequence[str],
    columns: Sequence[Any],
    unique: Sequence[Any],
    refuse: Callable[[str], NoReturn],
) -> None:
    """Refuse an index in which NULLs are equal: the sink's own search treats them as different."""
    has_equal_nulls = any(
        set(index.columns) == set(key) and index.has_equal_nulls for index in unique
    )
    if has_equal_nulls and not all(c.not_null for c in columns if c.name in key):
        refuse(
            f"the unique index on key={list(key)!r} is NULLS NOT DISTINCT, which only an upsert "
            "without order_by= and dead_letter= supports; make the key's columns NOT NULL"
        )


def check_spellings(
    key: Sequence[str], columns: Sequence[Any], schema: pa.Schema, refuse: Callable[[str], NoReturn]
) -> None:
    """Refuse keys whose equal values may differ in bytes, by which Spark deals rows to tasks."""
    for column in columns:
        if column.name not in key or not holds_strings(schema.field(column.name).type):
            continue
        has_one = column.is_enum or column.type_name in {"text", "varchar"}
        if column.is_folded or not has_one:
            refuse(
                f"key column {column.name!r} ({column.declared}) treats different texts as equal. "
                "They can reach two tasks: the deletion in one task would leave the row of the "
                'other; with delete=, use load="staged" or writers=1'
            )


def check_marker(connection: PgConnection, schema: str, refuse: Callable[[str], NoReturn]) -> None:
    """Create the marker table if it is missing, and check that the sink can use it."""
    name = qualified(schema, MARKER_TABLE).as_string()
    marker = marker_table(connection, schema)
    if marker is None:
        create_table(connection, (schema, MARKER_TABLE), MARKER_COLUMNS)
        marker = marker_table(connection, schema)
    if marker is None or not marker.is_unique or set(MARKER_COLUMNS) - set(marker.columns):
        refuse(f"{name} is not the table of this name that sparkonce creates; rename yours")
    if not marker.may_use:
        refuse(f"the role may not use {name}; GRANT SELECT, INSERT on it")
    reason = unfit(connection, name, must_see=True)
    if reason is not None:
        refuse(f"{name}: {reason}")


def resolve_dead_letter(
    connection: PgConnection, found: Any, dead_letter: str | None, refuse: Callable[[str], NoReturn]
) -> tuple[str, str] | None:
    """Schema and name of the table for rejected rows, which is created if it is missing."""
    if dead_letter is None:
        return None
    try:
        parts = name_parts(connection, dead_letter, refuse)
    except NO_NAME:
        refuse(f"dead_letter={dead_letter!r} is not a name as SQL writes it")
    if len(parts) > _SCHEMA_AND_TABLE:
        refuse(f"dead_letter={dead_letter!r} must have a schema and a table, or a table only")
    schema, name = (found.schema, *parts)[-_SCHEMA_AND_TABLE:]
    if (schema, name) == (found.schema, found.name):
        refuse("dead_letter= must be another table")
    create_dead_letter(connection, (schema, name))
    check_dead_letter(connection, (schema, name), refuse)
    shown = qualified(schema, name).as_string()
    if reason := unfit(connection, shown):
        refuse(f"dead_letter={shown}: {reason}")
    return schema, name
