"""One branch: its files in a committable, and how to commit or abort all of them.

    files ─► committable_of ─► (transaction log) ─► BranchOutcome.of ─► commit | abort

Several files of a branch are finished at a time. If only some files of a branch are lost, it can
neither be committed nor written again: an operator decides.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Self

from sparkonce.errors import (
    CommitRejectedError,
    CommitUnresolvedError,
    PreparedBranchLostError,
    ProtocolError,
    TakeBackRefusedError,
    settle_command,
)
from sparkonce.model import BranchId, Committable, JsonValue
from sparkonce.parallel import at_once
from sparkonce.sinks.capabilities import Visible
from sparkonce.sinks.committables import check_all_there, check_version
from sparkonce.sinks.s3.connecting.answers import S3_ERRORS, describe
from sparkonce.sinks.s3.connecting.client import Clients, server_at
from sparkonce.sinks.s3.connecting.place import Place
from sparkonce.sinks.s3.finishing.outcome import Completed, FileOutcome
from sparkonce.sinks.s3.writing.staged import StagedFile

_PAYLOAD_VERSION: Final = 2
"""Version 1 may lack checksums and Amazon's partition."""

_PARALLEL_FILES: Final = 8
_NAMED_FILES: Final = 3


def committable_of(
    clients: Clients,
    place: Place,
    branch_id: BranchId,
    files: Sequence[StagedFile],
) -> Committable:
    """The committable of a branch with these files."""
    payload: dict[str, JsonValue] = {
        "bucket": place.bucket,
        "endpoint": clients.other_server,
        "partition": clients.partition,
        "files": [file.to_json() for file in files],
    }
    text = _text(place.bucket, [file.key for file in files])
    return Committable(branch_id, payload, _PAYLOAD_VERSION, text=text)


def _text(bucket: str, keys: Sequence[str]) -> str:
    names = ", ".join(f"s3://{bucket}/{key}" for key in keys[:_NAMED_FILES])
    if len(keys) > _NAMED_FILES:
        return f"{len(keys)} objects: {names} and {len(keys) - _NAMED_FILES} more"
    if not keys:
        return "no objects"
    return f"object {names}" if len(keys) == 1 else f"{len(keys)} objects: {names}"


@dataclass(frozen=True, slots=True)
class BranchOutcome:
    """Commits and aborts all files of a branch."""

    outcome: FileOutcome
    files: tuple[StagedFile, ...]

    @classmethod
    def of(cls, committable: Committable, clients: Clients) -> Self:
        """The branch of a committable, at the server that is configured now.

        Raises:
            ConfigurationError: a newer version of this library wrote the committable.
        """
        check_version(committable, _PAYLOAD_VERSION)
        payload: Any = committable.payload
        same_server = (
            server_at(payload["endpoint"]) == clients.other_server
            # Older records do not name the partition.
            and payload.get("partition") in {None, clients.partition}
        )
        return cls(
            FileOutcome(clients, payload["bucket"], committable.branch_id, same_server),
            tuple(StagedFile.from_json(value) for value in payload["files"]),
        )

    def commit(self, completed: Mapping[str, Completed] | None = None) -> None:
        """Commit every file. Idempotent.

        Args:
            completed: what is known of files that were completed together with others, by key.

        Raises:
            CommitUnresolvedError: call it again.
            CommitRejectedError: some files are lost while others are visible.
            PreparedBranchLostError: all files are proven to be lost.
        """
        branch_id = self.outcome.branch_id
        if not all(file.parts for file in self.files):
            raise ProtocolError(
                f"{branch_id} was found by the names of its uploads: it can only be aborted"
            )
        known = completed or {}
        errors = self._for_each(lambda file: self.outcome.commit(file, known.get(file.key)))
        lost = [error for error in errors if isinstance(error, PreparedBranchLostError)]
        others = [error for error in errors if not isinstance(error, PreparedBranchLostError)]
        if others:
            raise others[0]
        if lost and len(lost) < len(self.files):
            # Writing the branch again would show the rows of the other files twice (I4).
            raise CommitRejectedError(
                f"{len(lost)} of the {len(self.files)} files of a branch are lost while the others "
                f"are visible, so the branch cannot be rewritten as it is. The first: {lost[0]}. "
                f"Delete the others, and run {settle_command(branch_id, 'redo')}; or write the "
                "rows of the lost files manually, and run "
                f"{settle_command(branch_id, 'committed')}",
                branch_id,
            )
        if lost:
            raise lost[0]

    def abort(self) -> None:
        """Abort the uploads; committed objects stay. Idempotent.

        Raises:
            CommitUnresolvedError: the server did not confirm it; call it again.
        """
        for error in self._for_each(self.outcome.abort):
            if isinstance(error, S3_ERRORS):
                raise CommitUnresolvedError(
                    f"S3: an upload of {self.outcome.branch_id} is not aborted ({describe(error)})",
                    self.outcome.branch_id,
                ) from error
            raise error

    def check_invisible(self) -> None:
        """Refuse to write the branch again while some of its objects exist.

        Raises:
            CommitRejectedError: naming the objects.
        """
        visible: list[StagedFile] = []

        def look(file: StagedFile) -> None:
            if self.outcome.is_visible(file):
                visible.append(file)

        if errors := self._for_each(look):
            raise errors[0]
        if visible:
            branch_id = self.outcome.branch_id
            names = ", ".join(sorted(map(self.outcome.name, visible)))
            raise CommitRejectedError(
                f"{len(visible)} of the {len(self.files)} files of {branch_id} exist, so that a "
                f"rewrite would show their rows twice: {names}. Delete these, and start again; or "
                "keep them, write the rows of the other files manually, and run "
                f"{settle_command(branch_id, 'committed')}",
                branch_id,
            )

    def find(self) -> Visible:
        """What readers see of the branch.

        Raises:
            TakeBackRefusedError: one of its objects was changed.
            CommitUnresolvedError: the server does not show it now.
        """
        found: dict[str, int] = {}

        def look(file: StagedFile) -> None:
            if rows := self.outcome.visible_rows(file):
                found[self.outcome.name(file)] = rows

        if errors := self._for_each(look):
            raise errors[0]
        return Visible(sum(found.values()), tuple(sorted(found)))

    def remove(self, rows: int) -> None:
        """Delete the objects that are left of a branch with this number of rows. Idempotent.

        Raises:
            TakeBackRefusedError: the branch never had these rows, or the server keeps an object.
        """
        branch_id, staged = self.outcome.branch_id, sum(file.rows for file in self.files)
        check_all_there(f"s3://{self.outcome.bucket}", branch_id, staged, rows)
        self.find()
        for error in self._for_each(self.outcome.remove):
            raise TakeBackRefusedError(
                f"S3: an object of {branch_id} could not be deleted ({describe(error)})", branch_id
            ) from error

    def _for_each(self, action: Callable[[StagedFile], None]) -> list[Exception]:
        """Run the action on every file, several at a time; return the errors."""

        def run(file: StagedFile) -> Exception | None:
            try:
                action(file)
            except Exception as error:  # noqa: BLE001  # the caller raises it
                return error
            return None

        return [e for e in at_once(run, self.files, _PARALLEL_FILES) if e is not None]
