"""One Spark task's rows on their way into a staging table.

    BEGIN; CREATE TABLE; COMMENT; COPY … rows … ; COMMIT
    └────── a killed task leaves nothing ───────┘ └─ prepared

One transaction creates and fills the table, so a table that exists is complete.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Sequence
from typing import NoReturn

import psycopg
import pyarrow as pa
from psycopg import errors as pg
from psycopg import sql

from sparkonce.errors import PrepareRejectedError
from sparkonce.model import BranchId, Committable
from sparkonce.once import once
from sparkonce.sinks.postgres.loading.values import (
    ValueDoesNotFitError,
    binary_encoder,
    convert,
    python_values,
)
from sparkonce.sinks.postgres.merging.merge import PAYLOAD_VERSION
from sparkonce.sinks.postgres.server.advice import next_step
from sparkonce.sinks.postgres.server.blockers import blocked_by
from sparkonce.sinks.postgres.server.connections import Address, Pool
from sparkonce.sinks.postgres.server.sql import (
    COMMIT,
    TO_WRITE,
    Timeouts,
    copy_into,
    create_staging,
    script,
    settings,
    staging_name,
)
from sparkonce.sinks.postgres.target.table import Target

SLICE_BYTES = 32 * 1024 * 1024


class StagingWriter:
    """An open COPY into a table that no other session sees yet."""

    def __init__(
        self, address: Address, target: Target, branch_id: BranchId, timeouts: Timeouts
    ) -> None:
        self.branch_id = branch_id
        self.schema = target.schema
        self.name = staging_name(branch_id)
        self.rows = 0
        self._address = address
        self._target = target
        self._timeouts = Timeouts(timeouts.lock, 0)  # COPY lasts as long as the task feeds it
        self._copying = contextlib.ExitStack()
        self._pool = once(Pool, address)
        # The merge's PREPARE TRANSACTION flushes everything that was written before it, including
        # staging; a crash of the server before that aborts the batch. A merge that stays open
        # flushes nothing before its COMMIT.
        rules = settings(self._timeouts, self.name, is_flushed=not target.can_prepare)
        begin = script(TO_WRITE, rules, *self._opening())
        with self._errors():
            self._connection, _ = self._pool.lend_in_time(lambda c: c.execute(begin))
        try:
            with self._errors():
                self._copy = self._copying.enter_context(
                    self._connection.cursor().copy(self._copy_statement())
                )
                if target.is_binary:
                    self._encoder = binary_encoder(target.columns)
                    self._copy.write(self._encoder.write_header())
        except BaseException:
            self.discard()
            raise

    def write(self, batch: pa.RecordBatch) -> None:
        if batch.schema.names != list(self._target.names):
            raise PrepareRejectedError(
                f"batch {self.branch_id.batch_id}, table {self._target.shown}: the rows have the "
                f"columns {batch.schema.names}, but {list(self._target.names)} were checked",
                self.branch_id,
            )
        is_binary = self._target.is_binary
        for part in slices(batch):
            try:
                arrays = [
                    convert(array, column)
                    for array, column in zip(part.columns, self._target.columns, strict=True)
                ]
                texts = [] if is_binary else list(map(python_values, arrays, self._target.columns))
            except ValueDoesNotFitError as error:
                self._reject(str(error), None)
            with self._errors():
                if is_binary:
                    schema = pa.schema([column.field for column in self._target.columns])
                    encoded = pa.RecordBatch.from_arrays(arrays, schema=schema)
                    self._copy.write(self._encoder.write_batch(encoded))
                else:
                    for row in zip(*texts, strict=True):
                        self._copy.write_row(row)
        self.rows += batch.num_rows

    def finish(self) -> Committable:
        """Make all rows durable, and return the connection to the pool."""
        try:
            with self._errors():
                if self._target.is_binary:
                    self._copy.write(self._encoder.finish())
                self._copying.close()
                self._closing()
        except BaseException:
            self.discard()
            raise
        self._pool.give(self._connection)
        return self.committable()

    def committable(self) -> Committable:
        return Committable(
            self.branch_id,
            {"schema": self.schema, "staging": self.name, "rows": self.rows},
            PAYLOAD_VERSION,
            text=f"staging table {self.schema}.{self.name}",
        )

    def discard(self) -> None:
        """Close the connection, so that the server forgets the table. Never raises."""
        self._connection.close()
        failure = psycopg.OperationalError("the task failed")
        with contextlib.suppress(psycopg.Error):
            self._copying.__exit__(type(failure), failure, None)

    # -- overridden by a direct load -----------------------------------------------------------

    def _opening(self) -> Sequence[sql.Composable]:
        """Statements before COPY, in its transaction."""
        types = {column.name: column.type.ddl for column in self._target.columns}
        return [create_staging(self.schema, self.name, types, self.branch_id)]

    def _copy_statement(self) -> sql.Composed:
        names, is_binary = self._target.names, self._target.is_binary
        return copy_into(self.schema, self.name, names, binary=is_binary)

    @property
    def _copied(self) -> str:
        """The server's name of the table that COPY fills."""
        return self.name

    def _closing(self) -> None:
        """Make the copied rows durable."""
        self._connection.execute(COMMIT)

    # -- errors --------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except psycopg.Error as error:
            advice = next_step(error, self._timeouts)
            if isinstance(error, pg.LockNotAvailable):
                with contextlib.suppress(psycopg.Error):
                    blocked = blocked_by(
                        self._pool, self._target.shown, self.branch_id, self._timeouts
                    )
                    advice = f" ({blocked})" if blocked else advice
            self._reject(self._address.said(error) + advice, error)

    def _reject(self, text: str, error: psycopg.Error | None) -> NoReturn:
        column = self._column(error.diag.context) if error is not None else None
        where = "" if column is None else f", column {column!r}"
        raise PrepareRejectedError(
            f"batch {self.branch_id.batch_id}, table {self._target.shown}{where}: {text}",
            self.branch_id,
        ) from (None if error is None else self._address.cause(error))

    def _column(self, context: str | None) -> str | None:
        """The column at fault; the server's context names it, perhaps followed by the value."""
        place = re.compile(rf"^COPY {re.escape(self._copied)}, line \d+, column ", re.MULTILINE)
        rest = place.split(context or "")[-1] if place.search(context or "") else None
        names = [n for n in self._target.names if rest is not None and rest.startswith(n)]
        return max(names, key=len, default=None)


def slices(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """Parts to encode one at a time, to bound memory; a single row is not split."""
    if batch.nbytes <= SLICE_BYTES or batch.num_rows <= 1:
        yield batch
        return
    half = batch.num_rows // 2
    yield from slices(batch.slice(0, half))
    yield from slices(batch.slice(half))
