"""A lake by its path: a directory, or a place in an object store."""

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from foundation.errors import InvalidInput, LakeRefused
from foundation.suggestions import did_you_mean
from merge_engine.storage.objects import ObjectStorage, local_directory, open_storage
from sink.lake import delta_log, parquet_log
from sink.lake.delta_log import DeltaLog
from sink.lake.log import RETENTION_S, LakeLog, altered
from sink.lake.parquet_log import ParquetLog
from sink.lake.state import LakeState, step_of

DELTA, PARQUET = "delta", "parquet"
FORMATS = (DELTA, PARQUET)


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a lake is. `settings`: of the object store, as obstore takes them; they are secret."""

    location: str
    settings: Mapping[str, Any]

    @classmethod
    def of(cls, location: str, settings: Mapping[str, Any] | None = None) -> "Place":
        """Return the place; a directory by its whole path, as others are to find it."""
        directory = local_directory(str(location))
        where = str(location).rstrip("/") if directory is None else str(directory.absolute())
        return cls(location=where, settings=dict(settings or {}))

    def __repr__(self) -> str:
        return f"Place({self.location!r})"

    @property
    def storage(self) -> ObjectStorage:
        """What is there."""
        return open_storage(self.location, **self.settings)


@dataclass(frozen=True)
class Lake:
    """A lake that can be read and written: its objects, and their log."""

    place: Place
    storage: ObjectStorage
    log: LakeLog


def open_lake(place: Place, kind: str, retention_s: float = RETENTION_S) -> Lake:
    """Return a lake of this format, which may have nothing in it yet.

    `retention_s`: for how long earlier versions of it can be read.
    """
    if kind not in FORMATS:
        near = did_you_mean(kind, FORMATS) or f"; there are {' and '.join(FORMATS)}"
        raise InvalidInput(f"a lake of the format {kind!r}{near}")
    if kind == DELTA and find_spec("deltalake") is None:
        raise InvalidInput(
            "a copy as a Delta table needs the package deltalake: pip install 'tallybook[delta]', "
            "or make a copy of the format parquet"
        )
    storage = place.storage
    log: LakeLog
    if kind == DELTA:
        log = DeltaLog(storage, place.location, place.settings, retention_s)
    else:
        log = ParquetLog(storage, place.location)
    return Lake(place, storage, log)


def find_lake(place: Place) -> Lake:
    """Return the lake that is there, whatever its format; InvalidInput if there is none."""
    storage = place.storage
    if storage.child(delta_log.DIRECTORY).names():
        return Lake(place, storage, DeltaLog(storage, place.location, place.settings))
    if storage.child(parquet_log.DIRECTORY).names():
        return Lake(place, storage, ParquetLog(storage, place.location))
    raise InvalidInput(f"{place.location} has no copy of a table: make one by `tallybook tier`")


def check_empty(lake: Lake) -> None:
    """LakeRefused if there is something in a lake that has no log, but for what a job has left."""
    for kind, log in ((DELTA, delta_log), (PARQUET, parquet_log)):
        if lake.storage.child(log.DIRECTORY).names():
            raise LakeRefused(
                f"{lake.place.location} has a lake of the format {kind}: say so, if it is a copy "
                "of this table, or choose another path"
            )
    others = [name for name in lake.storage.names() if step_of(name) is None]
    if others:
        raise LakeRefused(
            f"{lake.place.location} is not empty, and has no copy of a table: it has {others[0]}"
            f"{f' and {len(others) - 1} more' if others[1:] else ''}; choose another path"
        )


def load_unaltered(lake: Lake, version: int | None = None) -> LakeState | None:
    """Return the copy that is there; LakeRefused if somebody else has changed it."""
    state = lake.log.load(version)
    if state is not None and state.altered is not None:
        raise altered(lake.place.location, state.mark.version, state.altered)
    return state
