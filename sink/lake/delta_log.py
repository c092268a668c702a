"""A copy as a Delta table: its log, in `_delta_log`, read and committed.

delta-rs does not write deletion vectors, and hands none out. So commits are written here, as the
Delta protocol has them: a line of JSON per action, in an object that is created once. A commit of
ours has all in it: the files, the table's transaction version (`txn`, our step), and the mark, in
the table's configuration, which is part of checkpoints. Those, and the end of old logs, are left to
delta-rs.
"""

import json
import logging
import re
from collections.abc import Collection, Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from foundation.errors import CorruptLake, InvalidInput, LakeRefused, MissingObject
from foundation.failpoints import hit
from merge_engine.storage.objects import ObjectStorage, local_directory
from sink.lake.delta_actions import MARK, about, add, metadata, remove, transaction
from sink.lake.delta_schema import needed_features, protocol_of, schema_text
from sink.lake.delta_table import (
    Action,
    DeltaTable,
    checkpoint_actions,
    is_harmless,
    is_ours,
    who,
)
from sink.lake.fields import lake_fields
from sink.lake.log import (
    RETENTION_S,
    Nonces,
    altered,
    create_version,
    taken,
    version_name,
    versions_of,
)
from sink.lake.state import (
    Change,
    LakeFile,
    LakeState,
    Layout,
    Mark,
    vectors_id,
    vectors_name,
)
from sink.lake.vectors import read_vector, write_vectors

logger = logging.getLogger(__name__)

DIRECTORY = "_delta_log"
_CHECKPOINT = re.compile(r"(\d{20})\.checkpoint\.parquet")
_CHECKPOINT_EVERY = 10


class DeltaLog:
    """The log of a Delta table. `settings`: of the object store, as obstore is given them.

    `retention_s`: for how long earlier versions can be read. The table says so itself, for others
    who look after it, and for checkpoints, which forget what was removed before that.
    """

    layouts = (Layout.VECTORS, Layout.REWRITE)

    def __init__(
        self,
        storage: ObjectStorage,
        location: str,
        settings: Mapping[str, Any],
        retention_s: float = RETENTION_S,
    ) -> None:
        self._files = storage
        self._storage = storage.child(DIRECTORY)
        self._location = location
        self._settings = settings
        self._retention_s = retention_s
        self._nonces = Nonces()
        self._checkpoint = -1  # The last one that we know of.

    def check(self, fields: pa.Schema) -> None:
        """SchemaError for a column of a type that a Delta table cannot have."""
        schema_text(fields)

    # --- Reading --------------------------------------------------------------------------------

    def load(self, version: int | None = None, *, to_replace: bool = False) -> LakeState | None:
        """Return the copy at a version, or as it is now; None if there is nothing yet."""
        names = self._storage.names()
        commits = frozenset(versions_of(names))
        checkpoints = {int(one[1]) for one in map(_CHECKPOINT.fullmatch, names) if one}
        if not commits and not checkpoints:
            return None
        last = max(commits | checkpoints)
        self._checkpoint = max(checkpoints, default=-1)
        wanted = last if version is None else version
        start = max((one for one in checkpoints if one <= wanted), default=-1)
        missing = [one for one in range(start + 1, min(wanted, last) + 1) if one not in commits]
        if version is None and missing:
            raise CorruptLake(
                f"version {missing[0]} of {self._location} is missing, though it is at {last}: "
                "restore it from a copy, or begin again"
            )
        if not 0 <= wanted <= last or missing:
            raise InvalidInput(
                f"{self._location} has no version {wanted}, or not any more; it is at {last}"
            )
        try:
            return self._load(wanted, start, commits, to_replace=to_replace)
        except (AttributeError, KeyError, TypeError, ValueError) as exc:
            raise CorruptLake(
                f"version {wanted} of {self._location} cannot be read ({exc!r}); restore it from a "
                "copy"
            ) from exc

    def _load(
        self, version: int, start: int, commits: Collection[int], *, to_replace: bool
    ) -> LakeState:
        """Return the copy at a version, from the checkpoint at `start`, or from none (-1)."""
        found = DeltaTable()
        if start >= 0:
            data = self._storage.read(f"{start:020}.checkpoint.parquet")
            # Not by threads: those of Arrow, if they have read from Python, may end it with abort.
            rows = pq.ParquetFile(pa.BufferReader(data)).read(use_threads=False)
            found.add_checkpoint(checkpoint_actions(rows))
        for one in range(start + 1, version + 1):
            found.add(one, self._read_commit(one))
        mark = self._mark(found)
        # A checkpoint of somebody else may be of a later version than our last one.
        for one in range(mark.version + 1, start + 1):
            found.commits |= self._made_by(one, known=one in commits)
        how = found.altered_since(mark.version)
        trusted = how is None and not to_replace
        files = self._read_files(found.files, mark, trusted=trusted)
        removed = {name: at for name, at in found.removed.items() if name not in files}
        return LakeState(version=version, mark=mark, files=files, removed=removed, altered=how)

    def _mark(self, found: DeltaTable) -> Mark:
        text = (found.metadata.get("configuration") or {}).get(MARK)
        if text is None:
            raise LakeRefused(
                f"{self._location} has a Delta table that no tiering job has made: choose another "
                "path, or move it away"
            )
        return Mark.from_json(text, self._location)

    def _made_by(self, version: int, *, known: bool) -> dict[int, str]:
        """Return who has changed something by a commit, if anybody has, or that is not known."""
        actions = self._read_commit(version) if known else ()
        return {} if known and is_harmless(actions) else {version: who(actions)}

    def _read_commit(self, version: int) -> list[Action]:
        data = self._storage.read(version_name(version))
        return [json.loads(line) for line in data.splitlines() if line.strip()]

    def _read_files(
        self, actions: Mapping[str, Mapping[str, Any]], mark: Mark, *, trusted: bool
    ) -> dict[str, LakeFile]:
        """Return the files; of those of somebody else, no more than it takes to remove them."""
        read = cache(self._read_vectors)
        files = {}
        for name, action in actions.items():
            stats, told = json.loads(action.get("stats") or "{}"), action.get("deletionVector")
            files[name] = LakeFile(
                name=name,
                rows=stats["numRecords"] if trusted else 0,
                size=action["size"],
                dead=read_vector(told if trusted else None, read),
                told=told,
                bounds=_bounds(stats, mark),
            )
        return files

    def _read_vectors(self, name: str) -> bytes:
        try:
            return self._files.read(name)
        except MissingObject as exc:
            raise CorruptLake(
                f"{name}, which says which rows of {self._location} are deleted, is gone. Has "
                "something vacuumed the table that does not know deletion vectors? Restore it from "
                "a copy, or begin again"
            ) from exc

    # --- Committing -----------------------------------------------------------------------------

    def commit(self, before: LakeState | None, change: Change, fields: pa.Schema) -> LakeState:
        """Commit a change of the copy as it was."""
        change = self._with_vectors(change)
        version = 0 if before is None else before.version + 1
        while True:
            state = self._commit(before, change, fields, version)
            if state is not None:
                return state
            try:
                actions = self._read_commit(version)
            except MissingObject as exc:  # It was let go of, like others after it.
                raise taken(self._location, version) from exc
            if before is None or is_ours(actions):
                raise taken(self._location, version)
            if not is_harmless(actions):
                raise altered(self._location, before.version, who(actions))
            # Who has only looked after the table, and said so in the log, is not in the way.
            version += 1

    def _with_vectors(self, change: Change) -> Change:
        """Write the deletion vectors of the files, and return what the log is to say of them."""
        named = vectors_id(change.mark.step)
        told, data = write_vectors(change.added, named)
        if data is not None:
            self._files.create(vectors_name(named), data)
            hit("lake.vectors_written")
        return replace(change, added=told)

    def _commit(
        self, before: LakeState | None, change: Change, fields: pa.Schema, version: int
    ) -> LakeState | None:
        empty = LakeState(version=-1, mark=change.mark, files={})
        state = (empty if before is None else before).after(change, version)
        nonce = self._nonces.next()
        actions: list[Action] = [{"commitInfo": about(change, nonce)}]
        features = needed_features(fields, change.mark.layout)
        if before is None or not features <= _features(before.mark):
            actions.append({"protocol": protocol_of(features)})
        actions += [
            {"metaData": metadata(state.mark, fields, self._retention_s)},
            {"txn": transaction(change)},
            *({"remove": remove(file, change)} for file in change.removed),
            *({"add": add(file, change, fields)} for file in change.added),
        ]
        data = "".join(json.dumps(action) + "\n" for action in actions).encode()
        created = create_version(self._storage, version, data, nonce, self._nonces)
        return state if created else None

    # --- Looking after it -----------------------------------------------------------------------

    def tidy(self, state: LakeState, keep_since_ms: int) -> None:  # noqa: ARG002
        """Write a checkpoint now and then, and let go of logs that are older than the retention.

        Nothing depends on either: if it fails, the log says why, and the job goes on.
        """
        if state.version - self._checkpoint < _CHECKPOINT_EVERY:
            return
        self._checkpoint = state.version
        import deltalake  # noqa: PLC0415

        directory = local_directory(self._location)
        try:
            there = deltalake.DeltaTable(
                self._location if directory is None else str(directory),
                version=state.version,
                storage_options=_flat(self._settings),
            )
            there.create_checkpoint()
            there.cleanup_metadata()
        except Exception as exc:  # delta-rs has several roots.
            logger.warning("no checkpoint of %s: %s", self._location, str(exc).splitlines()[0])


def _features(mark: Mark) -> frozenset[str]:
    return needed_features(lake_fields(mark.schema, states=mark.states).arrow, mark.layout)


def _bounds(stats: Mapping[str, Any], mark: Mark) -> tuple[int, int] | None:
    name = mark.schema.key_columns[0].name
    try:
        return stats["minValues"][name], stats["maxValues"][name]
    except KeyError:
        return None


def _flat(settings: Mapping[str, Any]) -> dict[str, str]:
    """Return the settings of obstore, which nests some of them, as delta-rs takes them."""
    flat: dict[str, str] = {}
    for name, value in settings.items():
        if isinstance(value, Mapping):
            flat |= _flat(value)
        else:
            flat[name] = str(value).lower() if isinstance(value, bool) else str(value)
    return flat
