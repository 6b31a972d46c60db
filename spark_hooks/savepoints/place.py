"""Where savepoints are kept, and who may delete which file.

    ROOT/NAME.json             the manifest; without it there is no savepoint
        /NAME.deleting.json    the same while the savepoint is being deleted
        /files/<sha256>        contents, shared by all savepoints of this root

A savepoint that repeats what an earlier one has shares its files. So a deletion must not take a
file that a savepoint in the making counts on. There is no lock; both leave a trace first, and look
for the other's trace after it:

    make    files ─► manifest ─► is a deletion under way? ─► are all files there?
    delete  trace ─► is a manifest there that needs the file? ─► delete it

If the deletion missed the manifest, its trace is older than the manifest: either the maker sees the
trace, or the deletion has ended and the maker sees which files are gone.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, Final

from sparkonce.errors import SavepointError
from sparkonce.spark_hooks.savepoints.gone import FileGoneError
from sparkonce.spark_hooks.savepoints.manifest import Manifest, Stored
from sparkonce.storage import FileSystemFolder, open_folder

NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,99}")

Progress = Callable[[int, int], None]
"""Called with the number of files that are kept and of all files."""

_MANIFEST: Final = ".json"
_DELETING: Final = ".deleting.json"
_FILES: Final = "files"


class Savepoints:
    """The savepoints below one root. All methods may raise `LogUnavailableError`."""

    def __init__(self, folder: FileSystemFolder) -> None:
        self._folder = folder

    @classmethod
    def at(
        cls,
        location: str,
        conf: Callable[[], Any] | None = None,
        *,
        create: bool = False,
        by_boto3: bool = False,
    ) -> Savepoints:
        """The savepoints at a location: a path, or a URL that Hadoop knows.

        The arguments are those of `sparkonce.storage.open_folder`.

        Raises:
            ConfigurationError: the location cannot be used.
        """
        return cls(open_folder(location, conf, create=create, by_boto3=by_boto3))

    @property
    def address(self) -> str:
        return self._folder.address

    # -- reading -----------------------------------------------------------------------------------

    def names(self) -> list[str]:
        """The names of all savepoints, sorted."""
        return sorted(self._ending_with(_MANIFEST))

    def read(self, name: str) -> Manifest:
        """A savepoint's manifest.

        Raises:
            SavepointError: there is none of this name, or it is damaged.
        """
        text = self._folder.read(name + _MANIFEST)
        if text is None:
            known = ", ".join(self.names()) or "none"
            raise SavepointError(f"{self.address} has no savepoint {name!r}; it has {known}")
        return Manifest.decode(text, f"the savepoint {name} in {self.address}")

    def verify(self, manifest: Manifest) -> Iterator[tuple[str, str]]:
        """Read every file; yields the names of those that are damaged, and what is wrong."""
        for name, expected in manifest.files.items():
            pieces = self._folder.pieces(_content(expected.sha256))
            if pieces is None:
                yield name, "is missing"
            elif (found := measured(pieces)) != expected:
                yield name, f"has {found.size:,} bytes with another checksum"

    def check_whole(self, manifest: Manifest) -> None:
        """Read every file.

        Raises:
            SavepointError: one is missing or damaged.
        """
        for name, what in self.verify(manifest):
            raise self._damaged(manifest, name, what)

    def content(self, manifest: Manifest, name: str) -> Iterator[bytes]:
        """The bytes of a file; an error comes after the last piece if the checksum is another.

        Raises:
            SavepointError: the file is missing or damaged.
        """
        expected = manifest.files[name]
        pieces = self._folder.pieces(_content(expected.sha256))
        if pieces is None:
            raise self._damaged(manifest, name, "is missing")
        wrong = self._damaged(manifest, name, "does not have the checksum of its manifest")
        return _checked(pieces, expected, wrong)

    def _damaged(self, manifest: Manifest, name: str, what: str) -> SavepointError:
        return SavepointError(
            f"the savepoint {manifest.name} in {self.address} is damaged: its file {name} {what}; "
            "restore another savepoint, or export a whole copy of this one to this place"
        )

    # -- making ------------------------------------------------------------------------------------

    def keep(self, name: str, pieces: Callable[[], Iterable[bytes] | None]) -> Stored:
        """Keep a file of a checkpoint, unless its content is kept already, and whole.

        Raises:
            FileGoneError: the file is not there any more.
        """

        def there() -> Iterable[bytes]:
            found = pieces()
            if found is None:
                raise FileGoneError(name)
            return found

        stored = measured(there())
        changed = FileGoneError(f"{name}, as it was a moment ago")
        self._store(stored, lambda: _checked(there(), stored, changed))
        return stored

    def _store(self, expected: Stored, pieces: Callable[[], Iterable[bytes]]) -> None:
        """Write a file of this content, unless it is there; a damaged one is written again."""
        name = _content(expected.sha256)
        known = self._folder.pieces(name)
        if known is not None:
            if measured(known) == expected:
                return
            self._folder.delete(name)
        self._folder.store(name, pieces)

    def publish(self, manifest: Manifest) -> None:
        """Make the savepoint exist; its files are kept already.

        Raises:
            SavepointError: one of this name exists; or a deletion is under way, or has taken files
                meanwhile. Nothing was published.
        """
        if not self._folder.create(manifest.name + _MANIFEST, manifest.encode()):
            found = self._folder.read(manifest.name + _MANIFEST)
            if found != manifest.encode():
                raise SavepointError(
                    f"{self.address} has a savepoint {manifest.name!r} already: give another name"
                )
        # In this order; see above.
        deleting = self._ending_with(_DELETING)
        kept = {name.rpartition("/")[2] for name in self._folder.names(_FILES)}
        is_whole = kept.issuperset(file.sha256 for file in manifest.files.values())
        if deleting or not is_whole:
            self._folder.delete(manifest.name + _MANIFEST)
            fix = (
                f"run `sparkonce savepoint delete` for {', '.join(sorted(deleting))} again"
                if deleting
                else "make it again"
            )
            raise SavepointError(
                f"the savepoint {manifest.name} was not made: another one in {self.address} was "
                f"being deleted meanwhile, and both may share files; {fix}"
            )

    def export(self, manifest: Manifest, to: Savepoints, progress: Progress) -> None:
        """Copy a savepoint to another root, with each checksum compared, also of what is there.

        A copy that was interrupted continues, and damaged files are written again.

        Raises:
            SavepointError: the savepoint is damaged, or the other root has another one of its name.
        """
        for number, (name, expected) in enumerate(manifest.files.items(), start=1):
            to._store(expected, partial(self.content, manifest, name))
            progress(number, len(manifest.files))
        to.publish(manifest)

    # -- deleting ----------------------------------------------------------------------------------

    def delete(self, name: str) -> int:
        """Delete a savepoint, and the files that no other one needs. Continues one that was killed.

        Returns:
            The number of files that were deleted.

        Raises:
            SavepointError: there is no such savepoint.
        """
        text = self._folder.read(name + _DELETING)
        if text is None:
            text = self.read(name).encode()
            self._folder.create(name + _DELETING, text)
        doomed = Manifest.decode(text, f"the savepoint {name} in {self.address}")
        self._folder.delete(name + _MANIFEST)
        needed = {file.sha256 for other in self._manifests() for file in other.files.values()}
        gone = {file.sha256 for file in doomed.files.values()} - needed
        for sha256 in sorted(gone):
            self._folder.delete(_content(sha256))
        self._folder.delete(name + _DELETING)
        return len(gone)

    def _manifests(self) -> Iterator[Manifest]:
        """Every savepoint that is still there when its turn comes."""
        for name in self.names():
            text = self._folder.read(name + _MANIFEST)
            if text is not None:
                yield Manifest.decode(text, f"the savepoint {name} in {self.address}")

    def _ending_with(self, ending: str) -> list[str]:
        files = self._folder.files("")
        names = [file.removesuffix(ending) for file in files if file.endswith(ending)]
        return [name for name in names if NAME.fullmatch(name)]


def measured(pieces: Iterable[bytes]) -> Stored:
    """The size and checksum of a file."""
    digest, size = hashlib.sha256(), 0
    for piece in pieces:
        digest.update(piece)
        size += len(piece)
    return Stored(size, digest.hexdigest())


def _checked(pieces: Iterable[bytes], expected: Stored, wrong: Exception) -> Iterator[bytes]:
    """The same pieces, and the error `wrong` after the last one if they are not what they were."""
    digest, size = hashlib.sha256(), 0
    for piece in pieces:
        digest.update(piece)
        size += len(piece)
        yield piece
    if Stored(size, digest.hexdigest()) != expected:
        raise wrong


def _content(sha256: str) -> str:
    return f"{_FILES}/{sha256}"
