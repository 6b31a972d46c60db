"""Commits the files of a large batch together: one listing proves what takes a HEAD for each file.

    complete each file ─► list their folder ─┬─ listed with our ETag ─► committed
                                             └─ anything else ─► committed alone: `outcome`

The listing proves the commit, never the answer to the completion: a key belongs to one branch, and
its ETag follows from the parts of our upload. If the server's ETags are no MD5s, each file takes
its HEAD.

Only folders that get many files are listed. A listing of Amazon's costs as much as twelve HEADs,
and some servers read the whole folder for it.
"""

from __future__ import annotations

import contextlib
import os.path
from collections.abc import Iterator, Mapping, Sequence
from typing import TypeAlias

from sparkonce.errors import CommitUnresolvedError, ConfigurationError
from sparkonce.model import Committable
from sparkonce.parallel import at_once
from sparkonce.sinks.s3.connecting.answers import S3_ERRORS
from sparkonce.sinks.s3.connecting.client import Clients, Purpose
from sparkonce.sinks.s3.finishing.branch import BranchOutcome
from sparkonce.sinks.s3.writing.staged import StagedFile

_MANY_FILES = 100

_Folder: TypeAlias = tuple[str, str]
"""A bucket, and what the keys in one folder begin with."""


def commit_together(clients: Clients, committables: Sequence[Committable]) -> set[str]:
    """Commit the branches whose files are all in folders that get many files.

    Returns:
        Names of the branches that are proven to be committed. The others are as before, or a
        second commit shows their outcome.
    """
    branches = dict(_branches(clients, committables))
    folders: dict[_Folder, list[str]] = {}
    for branch in branches.values():
        for file in branch.files:
            folders.setdefault(_folder(branch, file), []).append(file.key)
    folders = {folder: keys for folder, keys in folders.items() if len(keys) >= _MANY_FILES}
    together = {
        name: branch
        for name, branch in branches.items()
        if branch.files and all(_folder(branch, file) in folders for file in branch.files)
    }
    at_once(_complete, ((branch, file) for branch in together.values() for file in branch.files))
    listings = at_once(lambda folder: _listed(clients, folder, folders[folder]), folders)
    listed = dict(zip(folders, listings, strict=True))

    def is_proven(branch: BranchOutcome, file: StagedFile) -> bool:
        etag = listed[_folder(branch, file)].get(file.key)
        return etag is not None and etag == file.etag

    return {
        name
        for name, branch in together.items()
        if all(is_proven(branch, file) for file in branch.files)
    }


def _branches(
    clients: Clients, committables: Sequence[Committable]
) -> Iterator[tuple[str, BranchOutcome]]:
    for committable in committables:
        try:
            yield committable.branch_id.name, BranchOutcome.of(committable, clients)
        except ConfigurationError:  # `commit` raises it for this branch
            continue


def _folder(branch: BranchOutcome, file: StagedFile) -> _Folder:
    return branch.outcome.bucket, file.key.rpartition("/")[0]


def _complete(item: tuple[BranchOutcome, StagedFile]) -> None:
    branch, file = item
    with contextlib.suppress(CommitUnresolvedError):  # the listing shows it, or `commit` raises it
        branch.outcome.complete(file)


def _listed(clients: Clients, folder: _Folder, keys: Sequence[str]) -> Mapping[str, str]:
    """The ETags, without quotes, of what is listed in a folder; none where it cannot be listed."""
    bucket, _ = folder
    pages = clients.client(Purpose.ASK).get_paginator("list_objects_v2")
    prefix = os.path.commonprefix(keys)  # noqa: RUF071 - of keys, letter by letter
    try:
        return {
            found["Key"]: found["ETag"].strip('"')
            for page in pages.paginate(Bucket=bucket, Prefix=prefix)
            for found in page.get("Contents", ())
        }
    except S3_ERRORS:
        return {}
