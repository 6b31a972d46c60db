"""The fast append: a task's staging table becomes a partition of the target; no row moves twice.

    COPY ─► staging table, made LIKE the target, load = n      (executor)
    ATTACH PARTITION … FOR VALUES IN (n); RENAME; marker row   (driver, one transaction)

The target is partitioned by LIST of one bigint column; the number n stands for one task's load for
ever. Loads of few rows are inserted into the partition of 0, so that the number of partitions is
bounded by that of the rows.

In the transaction that attaches it the table gets another name: nothing that looks for staging
tables sees it again, so neither a sweep nor a late abort can drop rows that are committed.

Staging rows are frozen (COPY … FREEZE). That is needed here: partitions of one batch are filled in
several transactions, and a snapshot taken between these would else show a part of the batch.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from psycopg import sql
from psycopg.rows import namedtuple_row

from sparkonce.errors import ConfigurationError
from sparkonce.sinks.postgres.sql import MAX_NAME_BYTES, qualified, script

if TYPE_CHECKING:
    from sparkonce.model import BranchId, Committable
    from sparkonce.sinks.postgres.catalog import Target
    from sparkonce.sinks.postgres.connections import PgConnection
    from sparkonce.sinks.postgres.merge import Merge

logger = logging.getLogger("sparkonce")

_ROW: Any = namedtuple_row

_TARGET = """
    SELECT pg_has_role(c.relowner, 'USAGE') AS is_owner, p.partstrat = 'l' AND p.partnatts = 1
            AND p.partattrs[0] = a.attnum AS is_key, p.partdefid <> 0 AS has_default_partition,
        a.atttypid = 'bigint'::regtype AS is_bigint, a.attnotnull AS not_null,
        pg_get_expr(d.adbin, d.adrelid) AS default_value,
        EXISTS (SELECT FROM pg_catalog.pg_inherits h
            JOIN pg_catalog.pg_class k ON k.oid = h.inhrelid
            WHERE h.inhparent = c.oid AND pg_get_expr(k.relpartbound, k.oid) ~ '[(, ]''0''[,)]'
        ) AS has_partition_of_0
    FROM pg_catalog.pg_class c
    LEFT JOIN pg_catalog.pg_partitioned_table p ON p.partrelid = c.oid
    LEFT JOIN pg_catalog.pg_attribute a ON a.attrelid = c.oid AND a.attname = %(column)s
    LEFT JOIN pg_catalog.pg_attrdef d ON d.adrelid = c.oid AND d.adnum = a.attnum
    WHERE c.oid = %(table)s::regclass
"""

_WATCHED = """
    SELECT (SELECT min(tgname) FROM pg_catalog.pg_trigger
            WHERE tgrelid = c.oid AND NOT tgisinternal AND tgtype & 4 <> 0) AS insert_trigger,
        (SELECT min(attname) FROM pg_catalog.pg_attribute WHERE attrelid = c.oid
            AND attidentity <> '' AND attname <> ALL (%(columns)s)) AS identity,
        c.relrowsecurity AS has_row_security,
        (SELECT min(t.pubname) FROM pg_catalog.pg_publication_tables t
            JOIN pg_catalog.pg_namespace n ON n.nspname = t.schemaname
            JOIN pg_catalog.pg_class k ON k.relnamespace = n.oid AND k.relname = t.tablename
            -- One of a root that publishes as itself shows the root alone.
            WHERE k.oid IN (SELECT relid FROM pg_partition_tree(c.oid)
                UNION SELECT relid FROM pg_partition_ancestors(c.oid))) AS publication
    FROM pg_catalog.pg_class c WHERE c.oid = %(table)s::regclass
"""

_SLOTS = """
    SELECT slot_name, plugin FROM pg_catalog.pg_replication_slots
    WHERE slot_type = 'logical' AND database = current_database() AND plugin <> 'pgoutput'
    ORDER BY 1
"""


@dataclass(frozen=True, slots=True)
class Attach:
    """How loads become partitions.

    Attributes:
        column: the target's partition key.
        rows: loads of a batch that have fewer, on average, are inserted instead.
    """

    column: str
    rows: int


def load_number(staging: str) -> int:
    """The partition key of a staging table's rows: never 0, and the same in every process.

    Two loads that meet in one of 2^63 numbers are refused by the server, before the decision.
    """
    digest = hashlib.sha256(staging.encode()).digest()
    return int.from_bytes(digest[:8]) >> 1 or 1


def create_attachable(
    target: Target, attach: Attach, name: str, branch_id: BranchId
) -> sql.Composed:
    """A staging table that `ATTACH PARTITION` takes without reading it."""
    table, column = qualified(target.schema, name), sql.Identifier(attach.column)
    number = sql.Literal(load_number(name))
    return script(
        # Indexes are made at once from all rows when it is attached, which is cheaper.
        sql.SQL(
            "CREATE TABLE {} (LIKE {} INCLUDING ALL EXCLUDING INDEXES EXCLUDING IDENTITY "
            "EXCLUDING STATISTICS EXCLUDING COMMENTS, CHECK ({} = {})) "
            "WITH (autovacuum_enabled = false)"
        ).format(table, qualified(target.schema, target.table), column, number),
        sql.SQL("ALTER TABLE {} ALTER {} SET DEFAULT {}").format(table, column, number),
        sql.SQL("COMMENT ON TABLE {} IS {}").format(table, sql.Literal(str(branch_id))),
    )


def with_attached(merge: Merge, attach: Attach | None, staged: Sequence[Committable]) -> Merge:
    """The merge in which these staging tables are attached, where their mean is large enough.

    All or none: every snapshot sees the rows of a partition, and an older one not those that are
    inserted beside it.
    """
    if attach is None or merge.rows < attach.rows * len(staged):
        return merge
    return replace(merge, attached=tuple(sorted(str(c.payload["staging"]) for c in staged)))


def attach_partitions(
    schema: str, table: str, names: Sequence[str], branch_id: BranchId
) -> Iterator[sql.Composable]:
    """From the end of this transaction on they are the user's, under names of their own."""
    for name in names:
        number = load_number(name)
        staging = qualified(schema, name)
        yield sql.SQL("ALTER TABLE {} ATTACH PARTITION {} FOR VALUES IN ({})").format(
            qualified(schema, table), staging, sql.Literal(number)
        )
        yield sql.SQL("ALTER TABLE {} RESET (autovacuum_enabled)").format(staging)
        yield sql.SQL("COMMENT ON TABLE {} IS {}").format(
            staging, sql.Literal(f"loaded by {branch_id}")
        )
        yield sql.SQL("ALTER TABLE {} RENAME TO {}").format(
            staging, sql.Identifier(partition_name(table, number))
        )


def partition_name(table: str, number: int) -> str:
    end = f"_load_{number}"
    start = table.encode()[: MAX_NAME_BYTES - len(end)].decode(errors="ignore")
    return start + end


def check(connection: PgConnection, target: Target, attach: Attach) -> None:
    """See that a load can become a partition, and that nothing else had to happen to its rows.

    Raises:
        ConfigurationError: naming what is at fault, and the fix.
    """
    values = {"table": target.shown, "column": attach.column}
    with connection.cursor(row_factory=_ROW) as cursor:
        found = cursor.execute(_TARGET, values).fetchone()
    if found is None:
        reason: str | None = "the table was dropped meanwhile"
    elif attach.column in target.names:
        reason = "the sink fills this column itself; leave it out of the batch with select="
    else:
        reason = _unfit(found, target.shown) or unseen(connection, target.shown, target.names)
    if reason is not None:
        raise ConfigurationError(
            f"PostgresSink: table {target.shown}: attach={attach.column!r}: {reason}"
        )


def _unfit(found: Any, shown: str) -> str | None:
    """Why loads cannot be attached, if so."""
    if not (found.is_key and found.is_bigint and found.not_null):
        return (
            "the table must be partitioned by LIST of this column alone, a bigint NOT NULL DEFAULT "
            "0: nothing else tells the rows of one load from all others"
        )
    if found.default_value not in {"0", "'0'::bigint"} or not found.has_partition_of_0:
        return (
            "small loads go where it is 0: let the column be DEFAULT 0, and CREATE TABLE … "
            f"PARTITION OF {shown} FOR VALUES IN (0)"
        )
    if found.has_default_partition:
        return "the table has a DEFAULT partition, which each load would lock and read; DETACH it"
    if not found.is_owner:
        return "only the table's owner may attach partitions; connect as a member of that role"
    return None


def unseen(connection: PgConnection, shown: str, columns: Sequence[str]) -> str | None:
    """What would happen to rows that are inserted, and not to those that are attached.

    Behind an ATTACH it stays the answer: its lock keeps triggers, row security and publications
    of the table waiting.
    """
    with connection.cursor(row_factory=_ROW) as cursor:
        values = {"table": shown, "columns": list(columns)}
        found: Any = cursor.execute(_WATCHED, values).fetchone()
    for what in (
        found.insert_trigger and f"the trigger {found.insert_trigger!r} would not see the rows",
        found.identity and f"the identity column {found.identity!r} would get no numbers",
        found.has_row_security and "row security would not see the rows",
        found.publication and f"the publication {found.publication!r} would not carry the rows",
    ):
        if what:
            return f"{what}; leave attach= out"
    return None


def warn_of_slots(connection: PgConnection, where: str) -> None:
    """Warn of readers of the write-ahead log that need no publication.

    No refusal: which tables such a one cares for, the server does not know.
    """
    for slot, plugin in connection.execute(_SLOTS).fetchall():
        logger.warning(
            "%s: the replication slot %r (%s) decodes without a publication: whoever reads it gets "
            "the rows of large loads as ones of tables sparkonce_…, those of aborted batches too, "
            "and never as ones of the target. If it needs the target's rows, leave attach= out",
            *(where, slot, plugin),
        )
