"""A copy as plain Parquet: each version is a list of files, in `_tallybook`.

    {"format": 1, "nonce": .., "mark": {..}, "files": [{"name", "rows", "size", "bounds"}, ..],
     "removed": {name: ms, ..}, "operation": .., "time_ms": ..}

A version is an object that is created once, and has all files, so that any tool that reads JSON
knows what to read. There are no deletion vectors: what is in the files is in the copy.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pyarrow as pa

from foundation.errors import CorruptLake, InvalidInput, MissingObject, UnknownFormat
from foundation.formats import Formats
from merge_engine.storage.objects import ObjectStorage
from sink.lake.log import Nonces, create_version, taken, version_name, versions_of
from sink.lake.state import Change, LakeFile, LakeState, Layout, Mark

DIRECTORY = "_tallybook"


class ParquetLog:
    """The versions of a copy, each a list of files."""

    layouts = (Layout.REWRITE,)

    def __init__(self, storage: ObjectStorage, location: str) -> None:
        self._storage = storage.child(DIRECTORY)
        self._location = location
        self._nonces = Nonces()

    def check(self, fields: pa.Schema) -> None:
        """Parquet has all types that tables have."""

    def load(self, version: int | None = None, *, to_replace: bool = False) -> LakeState | None:  # noqa: ARG002
        """Return the copy at a version, or as it is now; None if there is nothing yet."""
        versions = versions_of(self._storage.names())
        if not versions:
            return None
        wanted = versions[-1] if version is None else version
        name = version_name(wanted)
        try:
            data = self._storage.read(name)
        except MissingObject as exc:
            raise InvalidInput(
                f"{self._location} has no version {version}, or not any more; it is at "
                f"{versions[-1]}"
            ) from exc
        state = decode_version(data, f"{name} of {self._location}")
        if state.version == wanted:
            return state
        altered = f"version {wanted}: a copy of version {state.version}"
        return replace(state, version=wanted, altered=altered)

    def commit(self, before: LakeState | None, change: Change, fields: pa.Schema) -> LakeState:  # noqa: ARG002
        """Commit a change of the copy as it was."""
        version = 0 if before is None else before.version + 1
        empty = LakeState(version=-1, mark=change.mark, files={})
        state = (empty if before is None else before).after(change, version)
        nonce = self._nonces.next()
        data = encode_version(state, change, nonce)
        if create_version(self._storage, version, data, nonce, self._nonces):
            return state
        raise taken(self._location, version)

    def tidy(self, state: LakeState, keep_since_ms: int) -> None:
        """Remove versions that were replaced before this time, and what came late to their
        names."""
        there = {one for one in versions_of(self._storage.names()) if one <= state.version}
        first = state.version
        while first - 1 in there:
            first -= 1
        replaced = [version_name(one) for one in sorted(there) if one < first]
        for version in range(first, state.version):
            following = json.loads(self._storage.read(version_name(version + 1)))
            if following["time_ms"] >= keep_since_ms:
                break
            replaced.append(version_name(version))
        self._storage.delete(replaced)


def encode_version(state: LakeState, change: Change, nonce: str) -> bytes:
    """Return the bytes of a version; `nonce`: by which whoever commits it knows it again."""
    files = [
        {"name": one.name, "rows": one.rows, "size": one.size, "bounds": one.bounds}
        for one in state.files.values()
    ]
    return json.dumps(
        {
            "format": FORMATS.current,
            "nonce": nonce,
            "operation": change.operation,
            "time_ms": change.time_ms,
            "mark": json.loads(state.mark.to_json()),
            "files": files,
            "removed": dict(state.removed),
        }
    ).encode()


def decode_version(data: bytes, what: str) -> LakeState:
    """Return the copy at a version; CorruptLake if the bytes are none, and what they are of."""
    try:
        found = json.loads(data)
        return FORMATS.reader(found["format"], f"{what} is")(found, what)
    except (AttributeError, KeyError, TypeError, ValueError) as exc:
        raise CorruptLake(f"{what} cannot be read ({exc!r}); restore it from a copy") from exc


def _read_format_1(found: Mapping[str, Any], where: str) -> LakeState:
    mark = Mark.from_json(json.dumps(found["mark"]), where)
    files = [
        LakeFile(
            name=one["name"],
            rows=one["rows"],
            size=one["size"],
            bounds=None if one["bounds"] is None else (one["bounds"][0], one["bounds"][1]),
        )
        for one in found["files"]
    ]
    return LakeState(
        version=mark.version,
        mark=mark,
        files={one.name: one for one in files},
        removed=dict(found["removed"]),
    )


FORMATS: Formats[Callable[[Mapping[str, Any], str], LakeState]] = Formats(
    name="lake-version", current=1, readers={1: _read_format_1}, error=UnknownFormat
)
