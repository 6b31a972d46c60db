"""A merge that puts the rows that the target refuses into a separate table.

    the whole batch ──ok──► done
          │ a row violates a constraint
          ▼
    ranges of rows: one that fails is halved, one that succeeds doubles the next ─► refused rows

All of it is one block of code that the server runs, and so one transaction.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from psycopg import sql

from sparkonce.model import BranchId
from sparkonce.sinks.postgres.server.sql import qualified, staging_name

REJECTED = "sparkonce.rejected"
"""A setting of the transaction: the number of rows that went into the dead letter table."""


def with_dead_letter(
    branch_id: BranchId,
    schema: str,
    dead_letter: tuple[str, str],
    *,
    rows: sql.Composable,
    moves: Callable[[sql.Composable], sql.Composable],
) -> sql.Composed:
    """The block of code that moves `rows`.

    Args:
        branch_id: of the merge.
        schema: of the target.
        dead_letter: schema and name of the table for rejected rows.
        rows: a query for the rows of the batch.
        moves: the statements that move the rows of a query into the target.
    """
    # This transaction creates and drops the work table, so a crash leaves nothing. A temporary
    # table would not work: a transaction that uses one cannot be prepared.
    work = qualified(schema, staging_name(branch_id))
    in_range = sql.SQL(
        "SELECT * FROM {} WHERE sparkonce_row >= sparkonce.low "
        "AND sparkonce_row < sparkonce.low + sparkonce.width AND sparkonce_round = sparkonce.round"
    ).format(work)
    parts: Mapping[str, sql.Composable] = {
        "whole": moves(rows),
        "part": moves(in_range),
        "rows": rows,
        "work": work,
        "dead_letter": qualified(*dead_letter),
        "branch": sql.Literal(str(branch_id)),
        "batch": sql.Literal(branch_id.batch_id),
        "setting": sql.Literal(REJECTED),
    }
    return sql.SQL("DO {}").format(sql.Literal(_BLOCK.format(**parts).as_string()))


# Rounds repeat while they place rows: a row may come before the row that it refers to.
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
    -- In a publication of all tables, a table without it cannot be updated.
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
