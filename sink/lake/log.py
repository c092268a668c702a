"""A lake's log, which says what files each version of a copy has: the boundary of all logs."""

import re
import time
import uuid
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Protocol

import pyarrow as pa

from foundation.errors import (
    AlreadyExists,
    LakeRefused,
    LakeTaken,
    MissingObject,
    StorageFull,
    StorageUnavailable,
    UnknownOutcome,
)
from foundation.failpoints import hit
from merge_engine.storage.objects import ObjectStorage
from sink.lake.state import Change, LakeState, Layout

# For so long, earlier versions can be read, unless something else is said.
RETENTION_S = 7 * 24 * 3600.0
_TRIES = 5
_PAUSE_S = 0.5
_VERSION = re.compile(r"(\d{20})\.json")


class LakeLog(Protocol):
    """Versions of a copy, each committed once, by whoever comes first."""

    @property
    def layouts(self) -> Sequence[Layout]:
        """What can be done about rows that changed; unless it is said, the first."""

    def check(self, fields: pa.Schema) -> None:
        """SchemaError for a column that a copy of this format cannot have, by its name."""

    def load(self, version: int | None = None, *, to_replace: bool = False) -> LakeState | None:
        """Return the copy at a version, or as it is now; None if there is nothing yet.

        `to_replace`: all of it is to be removed, and may be damaged, or be somebody else's by now.
        InvalidInput if there is no such version, LakeRefused if there is something else.
        """

    def commit(self, before: LakeState | None, change: Change, fields: pa.Schema) -> LakeState:
        """Commit a change of the copy as it was; `fields`: what readers see from then on.

        LakeTaken if another job has committed since, LakeRefused if somebody else has;
        UnknownOutcome if it may be committed.
        """

    def tidy(self, state: LakeState, keep_since_ms: int) -> None:
        """Remove what nobody needs who reads a version from this time on, within the log."""


def version_name(version: int) -> str:
    """Return the name of the object that commits a version."""
    return f"{version:020}.json"


def versions_of(names: Iterable[str]) -> list[int]:
    """Return the versions that objects with these names commit; others are passed over."""
    return [int(found[1]) for found in map(_VERSION.fullmatch, names) if found]


class Nonces:
    """What commits of one job are told by: `next` is of one commit."""

    def __init__(self) -> None:
        self.job = uuid.uuid4().hex

    def next(self) -> str:
        """Return one that no other commit has; `job` is in it."""
        return f"{self.job}-{uuid.uuid4().hex}"


def create_version(
    storage: ObjectStorage, version: int, data: bytes, nonce: str, nonces: Nonces
) -> bool:
    """Create a version, which has its nonce in it; False if there is another one of this number,
    or was: names are free again once a version is let go of.

    Whether it is there after an unknown outcome is read back, and then it is tried again: it is
    created once, however late an earlier try arrives. UnknownOutcome also if another commit of this
    job is there, which was given up and has arrived since: the lake is to be looked at again.
    """
    name, in_doubt = version_name(version), False

    def is_ours() -> bool:
        there = storage.read(name)
        if nonce.encode() in there:
            return True
        if nonces.job.encode() in there:
            raise UnknownOutcome(
                f"version {version} of {storage} was committed by this job before, though it had "
                "no answer"
            )
        return False

    hit("lake.commit")
    for _ in range(_TRIES):
        try:
            storage.create(name, data)
            return not _was_let_go_of(storage, version)
        except (AlreadyExists, UnknownOutcome):
            in_doubt = True  # What exists already may be ours: stores' clients try again, too.
        except (StorageFull, StorageUnavailable):
            if not in_doubt:
                raise
        with suppress(MissingObject, StorageUnavailable):
            return is_ours() and not _was_let_go_of(storage, version)
        time.sleep(_PAUSE_S)
    raise UnknownOutcome(f"whether version {version} of {storage} was committed is not known")


def _was_let_go_of(storage: ObjectStorage, version: int) -> bool:
    """Whether there was another version of this number before the one that has just been created.

    Versions are let go of one after the other. So, if there are later ones, the one before it would
    be there still; and if the next one is not, nobody has gone on from this one, and it is deleted.
    """
    there = {*versions_of(storage.names())}
    if version - 1 in there or max(there, default=version) <= version:
        return False
    if version + 1 not in there:
        with suppress(StorageUnavailable):  # Nobody reads it.
            storage.delete([version_name(version)])
    return True


def taken(where: str, version: int) -> LakeTaken:
    """Return the error for a version that another job has committed."""
    return LakeTaken(
        f"version {version} of {where} was committed by another tiering job while this one was "
        "working on it. This one stops, and has changed nothing there: let the other go on, or "
        "stop it and start again"
    )


def altered(where: str, since: int, how: str) -> LakeRefused:
    """Return the error for a lake that somebody else has changed."""
    return LakeRefused(
        f"{where} was altered by somebody else since the last round (version {since}): {how}. So "
        "nobody knows whether it is what the table was. That version can be read; to go on, have "
        "the copy made anew (begin_again)"
    )
