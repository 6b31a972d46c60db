"""The merge of one batch: a value that survives its process, and the statements it is made of.

    staging tables ─► the last row of each key ─► DELETE from the target ─► INSERT … ON CONFLICT

Not MERGE: it looks for a key first and then inserts, so a key that another session inserts in
between fails it; ON CONFLICT waits for that session and then updates. (Where all keys are new, or
all are there, there is a faster way: see `shortcuts`.) The two statements touch different keys, and
the deletions go first since they may free what another row's unique column takes.

With a dead letter table the statements run in a block that, where a row-level constraint is
violated, goes through the rows in ranges: a range that fails is halved, until one row is left.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Self, cast

from psycopg import sql

from sparkonce.errors import ProtocolError
from sparkonce.model import BranchId, Committable, JsonValue
from sparkonce.sinks.committables import check_version
from sparkonce.sinks.postgres.attaching import attach_partitions
from sparkonce.sinks.postgres.catalog import Target
from sparkonce.sinks.postgres.resolving import DELETED, has_null, last_of_each_key
from sparkonce.sinks.postgres.shape import Shape
from sparkonce.sinks.postgres.shortcuts import WORTH_A_LOOK, with_shortcuts
from sparkonce.sinks.postgres.sql import SORT_IN_MEMORY, columns_of, qualified, script, staging_name
from sparkonce.sinks.postgres.writing import Write, Writing

PAYLOAD_VERSION = 5
"""4 was given away once. Older ones have no shape."""

REJECTED = "sparkonce.rejected"
"""A setting of the transaction: how many rows the dead letter table takes."""


@dataclass(frozen=True, slots=True)
class Merge:
    """All that any process needs to merge one batch.

    Attributes:
        schema: of the target, of the staging tables and of the marker table.
        table: the target.
        columns: which the batch fills.
        key: columns that identify a row; None to append.
        staging: names of the staging tables.
        rows: how many rows they hold together.
        system: the server's own identifier; empty where it may not be read.
        database: the database's name.
        prepared: left as a prepared transaction, whose gid is the full branch id; else as an open
            one in the process that made it.
        mode: what becomes of a row whose key is in the table.
        update: columns that an update sets.
        order_by: the greatest of these is the last row of its key.
        delete: SQL that says whether a row is a deletion.
        helpers: columns of the staging tables that serve `order_by` and `delete` only.
        dead_letter: schema and name of the table that takes rows which the target refuses.
        attached: those of the staging tables that become partitions of the target.
        leading: the key's column to look for a gap by (see `shortcuts`); None where it cannot be.
        shape: of the target's columns, for which the staged rows were encoded.
    """

    schema: str
    table: str
    columns: tuple[str, ...]
    key: tuple[str, ...] | None
    staging: tuple[str, ...]
    rows: int
    system: str
    database: str
    prepared: bool
    mode: Write
    update: tuple[str, ...] = ()
    order_by: tuple[str, ...] = ()
    delete: str | None = None
    helpers: tuple[str, ...] = ()
    dead_letter: tuple[str, str] | None = None
    attached: tuple[str, ...] = ()
    leading: str | None = None
    shape: Shape = field(default=Shape(()))

    @classmethod
    def of(cls, target: Target, writing: Writing, staging: Iterable[str], rows: int) -> Self:
        return cls(
            target.schema,
            target.table,
            target.filled,
            writing.key,
            tuple(sorted(staging)),
            rows,
            target.system,
            target.database,
            target.can_prepare,
            writing.mode,
            target.updated,
            writing.order_by,
            target.delete,
            target.helpers,
            target.dead_letter,
            leading=target.leading,
            shape=target.shape,
        )

    @classmethod
    def read(cls, committable: Committable) -> Self:
        """From a committable of this version or an older one.

        Raises:
            ConfigurationError: a newer sparkonce wrote it.
            ProtocolError: it is no merge.
        """
        check_version(committable, PAYLOAD_VERSION)
        payload: dict[str, Any] = dict(committable.payload)
        if "columns" not in payload:
            raise ProtocolError(f"{committable.branch_id}: not a merge of a Postgres sink")
        if committable.version == 1:
            key = payload["key"]
            payload["mode"] = "append" if key is None else "upsert"
            payload["update"] = [name for name in payload["columns"] if name not in (key or ())]
        lasting: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in payload.items()
        }
        lasting["shape"] = Shape(tuple(map(tuple, payload.get("shape", ()))))
        return cls(**lasting)

    def to_payload(self) -> dict[str, JsonValue]:
        fields = {**asdict(self), "shape": [list(column) for column in self.shape.columns]}
        return {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in fields.items()
        }

    @property
    def shown(self) -> str:
        return f"{self.database}.{self.schema}.{self.table}"

    @property
    def is_checked_for_duplicates(self) -> bool:
        """Whether a key that comes twice has to be looked for; DO UPDATE finds it by itself.

        Only within one statement, though, which a dead letter table may take apart.
        """
        if self.key is None:
            return False
        return self.mode != "upsert" or not self.update or self.dead_letter is not None


def count_rows(merge: Merge) -> sql.Composed:
    """How many rows the staging tables hold together."""
    counts = (
        sql.SQL("(SELECT count(*) FROM {})").format(qualified(merge.schema, name))
        for name in merge.staging
    )
    return sql.SQL("SELECT {}").format(sql.SQL(" + ").join(counts))


def statements(merge: Merge, branch_id: BranchId) -> Iterator[sql.Composable]:
    """What brings the rows from the staging tables into the target."""
    if merge.key is not None:
        yield SORT_IN_MEMORY
    if merge.is_checked_for_duplicates:
        # A subquery that gives two rows: the error that ON CONFLICT DO UPDATE raises as well.
        yield sql.SQL("SELECT (SELECT generate_series(1, 2)) FROM ({}) AS found").format(
            duplicate_key(merge)
        )
    if merge.dead_letter is None:
        inserted = tuple(name for name in merge.staging if name not in merge.attached)
        if inserted:
            copied = replace(merge, staging=inserted)
            if merge.delete is not None:  # what refers to a deleted row may move in this batch
                yield sql.SQL("SET CONSTRAINTS ALL DEFERRED")
            yield from _moves(copied, _resolved(copied))
        yield from attach_partitions(merge.schema, merge.table, merge.attached, branch_id)
    else:
        yield _with_dead_letter(merge, merge.dead_letter, branch_id)
        yield sql.SQL("SELECT current_setting({}, true) AS {}").format(
            sql.Literal(REJECTED), sql.Identifier(REJECTED)
        )


def duplicate_key(merge: Merge) -> sql.Composed:
    """One key of which the batch has two last rows, as text."""
    key = cast("tuple[str, ...]", merge.key)
    shown = sql.SQL(", ").join(
        sql.SQL("left({}::text, 100)").format(sql.Identifier(column)) for column in key
    )
    return sql.SQL(
        "SELECT {} FROM ({}) AS staged WHERE NOT ({}) GROUP BY {} HAVING count(*) > 1 LIMIT 1"
    ).format(shown, _resolved(merge), has_null(key), columns_of(key))


def duplicate_told(merge: Merge, row: Sequence[object]) -> str:
    """What to tell of a row of `duplicate_key`."""
    key = list(merge.key or ())
    values = (repr(str(value))[1:-1] for value in row)  # on one line, as it goes into logs
    example = ", ".join(f"{name} = {value}" for name, value in zip(key, values, strict=True))
    if merge.order_by:
        return (
            f"two rows are the last of their key={key} by order_by={list(merge.order_by)}, for "
            f"example those of {example}; add a column that tells them apart"
        )
    return (
        f"key={key} comes more than once in the batch, for example {example}; "
        f"write={merge.mode!r} needs one row for each key: let order_by= choose the last one, or "
        "aggregate with transform="
    )


def _resolved(merge: Merge) -> sql.Composed:
    names = (*merge.columns, *merge.helpers)
    staged = sql.SQL(" UNION ALL ").join(_tasks(merge, names))
    return last_of_each_key(staged, names, merge.key, merge.order_by, merge.delete)


def _tasks(merge: Merge, names: Sequence[str]) -> list[sql.Composed]:
    """For each task, a query that gives its rows."""
    return [
        sql.SQL("SELECT {} FROM {}").format(columns_of(names), qualified(merge.schema, name))
        for name in sorted(merge.staging)
    ]


def _moves(merge: Merge, rows: sql.Composable) -> Iterator[sql.Composed]:
    """Each at most one statement, so that Postgres itself finds a key that comes twice."""
    table, key = qualified(merge.schema, merge.table), merge.key or ()
    if merge.delete is not None:
        same = sql.SQL(" AND ").join(
            sql.SQL("target.{0} = staged.{0}").format(sql.Identifier(column)) for column in key
        )
        yield sql.SQL(
            "DELETE FROM {} AS target USING ({}) AS staged WHERE staged.{} AND {}"
        ).format(table, rows, DELETED, same)
    filled = columns_of(merge.columns)
    insert = sql.SQL("INSERT INTO {} ({}) SELECT {} FROM ({}) AS staged").format(
        table, filled, filled, rows
    )
    if merge.delete is not None:
        insert += sql.SQL(" WHERE NOT {}").format(DELETED)
    if not key:
        yield insert
        return
    assignments = sql.SQL(", ").join(
        sql.SQL("{0} = EXCLUDED.{0}").format(sql.Identifier(column)) for column in merge.update
    )
    action = sql.SQL("UPDATE SET ") + assignments if merge.update else sql.SQL("NOTHING")
    # Rows are locked in the order of their keys, by everybody alike: no deadlock between
    # pipelines. (Deletions are locked as they come; a deadlock is tried again.)
    insert += sql.SQL(" ORDER BY {}").format(columns_of(key))
    on_conflict = sql.SQL("ON CONFLICT ({}) DO {}").format(columns_of(key), action)
    if merge.leading is None or merge.dead_letter is not None or merge.rows < WORTH_A_LOOK:
        yield sql.SQL("{} {}").format(insert, on_conflict)
    else:
        yield with_shortcuts(
            insert,
            on_conflict,
            table=table,
            leading=merge.leading,
            key=key,
            tasks=_tasks(merge, merge.columns),
            updates=merge.update if _updates_whole(merge) else (),
            count=merge.rows,
        )


def _updates_whole(merge: Merge) -> bool:
    """Whether each staged row counts, and updates all that it has but the key."""
    key = merge.key or ()
    return (
        merge.mode == "upsert" and not merge.order_by and {*key, *merge.update} == {*merge.columns}
    )


def _with_dead_letter(
    merge: Merge, dead_letter: tuple[str, str], branch_id: BranchId
) -> sql.Composed:
    # It is made and dropped in the same transaction, so that no crash leaves it behind. (Not a
    # temporary one: a transaction that has touched such a table cannot be prepared.)
    work = qualified(merge.schema, staging_name(branch_id))
    in_range = sql.SQL(
        "SELECT * FROM {} WHERE sparkonce_row >= sparkonce.low "
        "AND sparkonce_row < sparkonce.low + sparkonce.width AND sparkonce_round = sparkonce.round"
    ).format(work)
    parts: Mapping[str, sql.Composable] = {
        "whole": script(*_moves(merge, _resolved(merge))),
        "part": script(*_moves(merge, in_range)),
        "rows": _resolved(merge),
        "work": work,
        "dead_letter": qualified(*dead_letter),
        "branch": sql.Literal(str(branch_id)),
        "batch": sql.Literal(branch_id.batch_id),
        "setting": sql.Literal(REJECTED),
    }
    return sql.SQL("DO {}").format(sql.Literal(_BLOCK.format(**parts).as_string()))


# Rounds go on while they place rows: a row that refers to another one may come before it.
_BLOCK = sql.SQL(
    """
#variable_conflict use_column
<<sparkonce>>
DECLARE
    low bigint;
    width bigint;
    total bigint;
    waiting bigint;
    refused bigint;
    round integer := 0;
    said text;
    state text;
    broken text;
BEGIN
    BEGIN
        SET CONSTRAINTS ALL DEFERRED;
        {whole};
        SET CONSTRAINTS ALL IMMEDIATE;
        RETURN;
    EXCEPTION WHEN integrity_constraint_violation OR data_exception THEN
        NULL;
    END;
    SET CONSTRAINTS ALL IMMEDIATE;
    CREATE TABLE {work} AS
        SELECT row_number() OVER () AS sparkonce_row, 0 AS sparkonce_round,
            NULL::text AS sparkonce_reason, NULL::text AS sparkonce_state,
            NULL::text AS sparkonce_constraint, staged.*
        FROM ({rows}) AS staged;
    GET DIAGNOSTICS total = ROW_COUNT;
    CREATE INDEX ON {work} (sparkonce_row);
    -- Where a publication has every table, one without it may not be updated.
    ALTER TABLE {work} REPLICA IDENTITY FULL;
    waiting := total;
    LOOP
        low := 1;
        width := greatest(total / 2, 1);
        refused := 0;
        WHILE low <= total LOOP
            BEGIN
                {part};
                low := low + width;
                width := width * 2;
            EXCEPTION WHEN integrity_constraint_violation OR data_exception THEN
                IF width > 1 THEN
                    width := width / 2;
                ELSE
                    GET STACKED DIAGNOSTICS said = MESSAGE_TEXT, state = RETURNED_SQLSTATE,
                        broken = CONSTRAINT_NAME;
                    UPDATE {work} SET sparkonce_round = sparkonce.round + 1,
                        sparkonce_reason = sparkonce.said, sparkonce_state = sparkonce.state,
                        sparkonce_constraint = nullif(sparkonce.broken, '')
                    WHERE sparkonce_row = sparkonce.low;
                    refused := refused + 1;
                    low := low + 1;
                END IF;
            END;
        END LOOP;
        round := round + 1;
        EXIT WHEN refused = 0 OR refused = waiting;
        waiting := refused;
    END LOOP;
    INSERT INTO {dead_letter} (branch, batch_id, reason, sqlstate, constraint_name, record)
        SELECT {branch}, {batch}, sparkonce_reason, sparkonce_state, sparkonce_constraint,
            to_jsonb(work.*) - ARRAY['sparkonce_row', 'sparkonce_round', 'sparkonce_reason',
                'sparkonce_state', 'sparkonce_constraint', 'sparkonce_deleted']
        FROM {work} AS work WHERE sparkonce_round = sparkonce.round;
    DROP TABLE {work};
    IF refused > 0 THEN
        PERFORM set_config({setting}, refused::text, true);
    END IF;
END
"""
)
