"""Completes the files of a large batch: one listing proves what takes a HEAD for each file.

    complete each file ─► list the batch in its folder ─┬─ with our ETag ─► committed
                                                        └─ anything else ─► `FileOutcome.commit`

The listing proves the commit, never the answer to the completion: a key belongs to one branch, and
its ETag follows from the parts of our upload.

Only where a folder gets many files: a listing of Amazon's costs as much as twelve HEADs, and some
servers read the whole folder for it. An error here says nothing: the file is committed by itself.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import TypeAlias

from sparkonce.model import Committable
from sparkonce.parallel import at_once
from sparkonce.sinks.s3.connecting.client import Clients, Purpose
from sparkonce.sinks.s3.finishing.branch import BranchOutcome
from sparkonce.sinks.s3.finishing.outcome import Completed, FileOutcome
from sparkonce.sinks.s3.writing.keys import batch_stem
from sparkonce.sinks.s3.writing.staged import StagedFile

logger = logging.getLogger("sparkonce")

_MANY_FILES = 100

_Place: TypeAlias = tuple[str, str]
"""A bucket, and what the keys of one batch in one folder begin with."""

_File: TypeAlias = tuple[FileOutcome, StagedFile]


def complete_together(
    clients: Clients, committables: Sequence[Committable]
) -> Mapping[str, Completed]:
    """Complete the files of which a folder gets many, and list them.

    Returns:
        What is known of each of them, by its key.
    """
    places: dict[_Place, list[_File]] = {}
    for place, file in _files(clients, committables):
        places.setdefault(place, []).append(file)
    large = {place: files for place, files in places.items() if len(files) >= _MANY_FILES}
    files = [file for found in large.values() for file in found]
    answers = at_once(_complete, files)
    etags: dict[str, str] = {}
    for found in at_once(lambda place: _listed(clients, place), large):
        etags.update(found)
    return {
        file.key: answer._replace(etag=etags.get(file.key))
        for (_, file), answer in zip(files, answers, strict=True)
        if answer is not None
    }


def _files(clients: Clients, committables: Sequence[Committable]) -> Iterator[tuple[_Place, _File]]:
    for committable in committables:
        try:
            branch = BranchOutcome.of(committable, clients)
        except Exception:  # noqa: BLE001, S112 - `commit` raises it for this branch
            continue
        stem = batch_stem(committable.branch_id)
        for file in branch.files:
            if file.etag is not None:  # else no listing can prove it
                folder, slash, _ = file.key.rpartition("/")
                place = branch.outcome.bucket, f"{folder}{slash}{stem}"
                yield place, (branch.outcome, file)


def _complete(item: _File) -> Completed | None:
    outcome, file = item
    try:
        return Completed(outcome.complete(file))
    except Exception:
        logger.debug("%s: not completed together with others", outcome.name(file), exc_info=True)
        return None


def _listed(clients: Clients, place: _Place) -> Mapping[str, str]:
    """The ETags, without quotes, of what is listed at a place; none if it cannot be listed."""
    bucket, prefix = place
    try:
        pages = clients.client(Purpose.ASK).get_paginator("list_objects_v2")
        return {
            found["Key"]: found.get("ETag", "").strip('"')
            for page in pages.paginate(Bucket=bucket, Prefix=prefix)
            for found in page.get("Contents", ())
        }
    except Exception:
        logger.debug("s3://%s/%s… is not listed", bucket, prefix, exc_info=True)
        return {}
