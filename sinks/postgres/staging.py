"""One Spark task's rows on their way into a staging table.

    BEGIN; CREATE TABLE; COMMENT; COPY … rows … ; COMMIT
    └────────────── nothing of it stands ─────────┘ └─ prepared

Creation and rows are one transaction: a task that is killed leaves nothing at all, and a table that
stands is whole.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Sequence
from typing import NoReturn

import psycopg
import pyarrow as pa
from psycopg import sql

from sparkonce.errors import PrepareRejectedError
from sparkonce.model import BranchId
from sparkonce.sinks.postgres.advice import next_step
from sparkonce.sinks.postgres.attaching import Attach, create_attachable
from sparkonce.sinks.postgres.catalog import Target
from sparkonce.sinks.postgres.connections import Address, pool_of
from sparkonce.sinks.postgres.sql import (
    COMMIT,
    TO_WRITE,
    Timeouts,
    copy_into,
    create_staging,
    script,
    settings,
    staging_name,
)
from sparkonce.sinks.postgres.values import (
    ValueDoesNotFitError,
    binary_encoder,
    convert,
    python_values,
)

SLICE_BYTES = 32 * 1024 * 1024


class StagingWriter:
    """An open COPY into a table that nobody else sees yet."""

    def __init__(
        self,
        address: Address,
        target: Target,
        branch_id: BranchId,
        timeouts: Timeouts,
        attach: Attach | None = None,
    ) -> None:
        self.branch_id = branch_id
        self.schema = target.schema
        self.name = staging_name(branch_id)
        self.rows = 0
        self._address = address
        self._target = target
        self._timeouts = timeouts
        self._copying = contextlib.ExitStack()
        self._attach = attach
        self._pool = pool_of(address)
        # The PREPARE TRANSACTION of the merge flushes all that was written before it, staging too;
        # a crash of the server before that aborts the batch. A merge that is held open does not.
        rules = settings(timeouts, self.name, is_flushed=not target.can_prepare)
        begin = script(TO_WRITE, rules, *self._opening())
        with self._errors():
            self._connection, _ = self._pool.lend(lambda connection: connection.execute(begin))
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

    def _opening(self) -> Sequence[sql.Composable]:
        """What comes before the COPY, in its transaction."""
        if self._attach is not None:
            return [create_attachable(self._target, self._attach, self.name, self.branch_id)]
        types = {column.name: column.type.ddl for column in self._target.columns}
        return [create_staging(self.schema, self.name, types, self.branch_id)]

    def _copy_statement(self) -> sql.Composed:
        names, is_binary = self._target.names, self._target.is_binary
        return copy_into(self.schema, self.name, names, binary=is_binary)

    @property
    def _copied(self) -> str:
        """The table that the COPY goes into, as the server names it."""
        return self.name

    def _closing(self) -> None:
        """Make what was copied lasting."""
        self._connection.execute(COMMIT)

    def write(self, batch: pa.RecordBatch) -> None:
        if batch.schema.names != list(self._target.names):
            raise PrepareRejectedError(
                f"batch {self.branch_id.batch_id}, table {self._target.shown}: the rows have the "
                f"columns {batch.schema.names}, and {list(self._target.names)} were checked",
                self.branch_id,
            )
        for part in slices(batch):
            try:
                arrays = [
                    convert(array, column)
                    for array, column in zip(part.columns, self._target.columns, strict=True)
                ]
            except ValueDoesNotFitError as error:
                self._reject(str(error), None)
            with self._errors():
                if self._target.is_binary:
                    schema = pa.schema([column.field for column in self._target.columns])
                    encoded = pa.RecordBatch.from_arrays(arrays, schema=schema)
                    self._copy.write(self._encoder.write_batch(encoded))
                else:
                    values = map(python_values, arrays, self._target.columns)
                    for row in zip(*values, strict=True):
                        self._copy.write_row(row)
        self.rows += batch.num_rows

    def finish(self) -> None:
        """Make all rows lasting, and close the connection."""
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

    def discard(self) -> None:
        """Close the connection: the server then forgets the table. Never raises."""
        self._connection.close()
        given_up = psycopg.OperationalError("the task failed")
        with contextlib.suppress(psycopg.Error):
            self._copying.__exit__(type(given_up), given_up, None)

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except psycopg.Error as error:
            self._reject(self._address.said(error) + next_step(error, self._timeouts), error)

    def _reject(self, text: str, error: psycopg.Error | None) -> NoReturn:
        column = self._column(error.diag.context) if error is not None else None
        where = "" if column is None else f", column {column!r}"
        raise PrepareRejectedError(
            f"batch {self.branch_id.batch_id}, table {self._target.shown}{where}: {text}",
            self.branch_id,
        ) from (None if error is None else self._address.cause(error))

    def _column(self, context: str | None) -> str | None:
        """The column that the server was at; it names it in its context, maybe with the value."""
        place = re.compile(rf"^COPY {re.escape(self._copied)}, line \d+, column ", re.MULTILINE)
        rest = place.split(context or "")[-1] if place.search(context or "") else None
        names = [n for n in self._target.names if rest is not None and rest.startswith(n)]
        return max(names, key=len, default=None)


def slices(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """Parts that are encoded one by one, to bound the memory that they take; or single rows."""
    if batch.nbytes <= SLICE_BYTES or batch.num_rows <= 1:
        yield batch
        return
    half = batch.num_rows // 2
    yield from slices(batch.slice(0, half))
    yield from slices(batch.slice(half))
