"""What a copy of a table in a lake is made of, at one version: its files, and how far it has come.

Each commit of ours is a *step*, and its number is in the name of all files that it brings. A step
is committed once: what has the number of a committed step and is not in the lake will never be.

The mark says in each commit what the copy is a copy of, and how far it has come. As JSON:

    {"format": 1, "lake": id, "created_ms": .., "table": uid, "name": .., "schema": {..},
     "states": false, "layout": "vectors", "columns": {"cents": "2", "mean_state": "3:state"},
     "cut": "cut-..", "round": 7, "step": 9, "version": 9}
"""

import json
import re
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

from pyroaring import BitMap64

from foundation.errors import CorruptLake, InvalidInput, SchemaError, UnknownFormat
from foundation.formats import Formats
from foundation.ids import BucketId
from merge_engine.schema.schema import Schema
from recovery.reader.cut import Cut
from sink.lake.letters import id_of

IN_OBJECT = "u"  # Where a deletion vector is, in the words of Delta: in an object with this id.
_FILE = re.compile(r"(\d+)-(\d+)-(\d{12})-[0-9a-f]{32}\.parquet")
_VECTORS = re.compile(r"deletion_vector_([0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-.*)\.bin")


class Layout(Enum):
    """What a round does about a row that changed, in the file where it was.

    VECTORS: marks it as deleted, in a deletion vector. REWRITE: writes the file anew without it.
    """

    VECTORS = "vectors"
    REWRITE = "rewrite"


@dataclass(frozen=True, kw_only=True)
class LakeFile:
    """A Parquet file with rows of one bucket. `dead`: which of its rows are not there any more.

    `told`: what the log says of these, to the letter: it goes by that when the file is removed.
    `bounds`: the least and the greatest value of the first key column, if it is an integer.
    """

    name: str
    rows: int
    size: int
    dead: BitMap64 = field(default_factory=BitMap64)
    told: Mapping[str, Any] | None = None
    bounds: tuple[int, int] | None = None

    @property
    def bucket(self) -> BucketId:
        """The bucket whose rows it has."""
        found = _FILE.fullmatch(self.name)
        if found is None:
            raise CorruptLake(f"{self.name} is no name of a file that a tiering job writes")
        return BucketId(int(found[1]), int(found[2]))

    @property
    def live(self) -> int:
        """How many of its rows are there."""
        return self.rows - len(self.dead)


def file_name(bucket: BucketId, step: int) -> str:
    """Return a name for a file of a step that no other has."""
    return f"{bucket.partition}-{bucket.number}-{step:012}-{uuid.uuid4().hex}.parquet"


def objects_of(files: Iterable[LakeFile]) -> Iterator[str]:
    """Yield the objects that files need: themselves, and those with their deletion vectors."""
    for file in files:
        yield file.name
        if file.told is not None and file.told["storageType"] == IN_OBJECT:
            yield vectors_name(id_of(file.told["pathOrInlineDv"]))


def vectors_id(step: int) -> uuid.UUID:
    """Return what names an object with deletion vectors: the first half of it is the step."""
    return uuid.UUID(int=(step << 64) | (uuid.uuid4().int & (1 << 64) - 1))


def vectors_name(named: uuid.UUID) -> str:
    """Return the name of an object with deletion vectors, as Delta wants it."""
    return f"deletion_vector_{named}.bin"


def step_of(name: str) -> int | None:
    """Return the step that an object belongs to; None if none of ours is called like that."""
    if (found := _FILE.fullmatch(name)) is not None:
        return int(found[3])
    if (found := _VECTORS.fullmatch(name)) is not None:
        try:
            return uuid.UUID(found[1]).int >> 64
        except ValueError:
            return None
    return None


@dataclass(frozen=True, kw_only=True)
class Mark:
    """How far a copy has come, and of what.

    `lake`: the id of the copy. `columns`: by the name in the files, the id of a column, or of its
    states; also of columns that were dropped, as long as there are files that have them. `version`:
    the lake's own, in which this was committed.
    """

    lake: str
    created_ms: int
    table: str
    name: str
    schema: Schema
    states: bool
    layout: Layout
    columns: Mapping[str, str]
    cut: Cut
    round: int
    step: int
    version: int

    def to_json(self) -> str:
        """Return the text."""
        return json.dumps(
            {
                "format": FORMATS.current,
                "lake": self.lake,
                "created_ms": self.created_ms,
                "table": self.table,
                "name": self.name,
                "schema": json.loads(self.schema.to_json()),
                "states": self.states,
                "layout": self.layout.value,
                "columns": dict(self.columns),
                "cut": str(self.cut),
                "round": self.round,
                "step": self.step,
                "version": self.version,
            }
        )

    @classmethod
    def from_json(cls, text: str, where: str) -> "Mark":
        """Return the mark of a lake; CorruptLake if it is none."""
        try:
            found = json.loads(text)
            return FORMATS.reader(found["format"], f"the mark of {where} is")(found)
        except (KeyError, TypeError, ValueError, InvalidInput, SchemaError) as exc:
            raise CorruptLake(f"the mark of {where} cannot be read ({exc!r})") from exc


@dataclass(frozen=True, kw_only=True)
class LakeState:
    """A copy at one version of the lake: its files by their names.

    `removed`: names that were there before, and when they were removed, in ms; whoever reads an
    earlier version needs them. `altered`: what somebody else has done to the lake since.
    """

    version: int
    mark: Mark
    files: Mapping[str, LakeFile]
    removed: Mapping[str, int] = field(default_factory=dict)
    altered: str | None = None

    @property
    def rows(self) -> int:
        """How many rows there are."""
        return sum(file.live for file in self.files.values())

    @property
    def next_step(self) -> int:
        """The number of the next step. Somebody may have restored a version, with its mark."""
        return max(self.mark.step, self.version) + 1

    def of_buckets(self, buckets: Iterable[BucketId]) -> tuple[LakeFile, ...]:
        """Return the files with rows of these buckets."""
        wanted = frozenset(buckets)
        return tuple(file for file in self.files.values() if file.bucket in wanted)

    def forget(self, before_ms: int) -> "LakeState":
        """Return it without what was removed before this time: that can go, remembered or not."""
        removed = {name: at for name, at in self.removed.items() if at >= before_ms}
        return replace(self, removed=removed)

    def after(self, change: "Change", version: int) -> "LakeState":
        """Return what it is once a change was committed as this version."""
        gone = {file.name: file for file in change.removed}
        files = {name: file for name, file in self.files.items() if name not in gone}
        files |= {file.name: file for file in change.added}
        used = frozenset(objects_of(files.values()))
        freed = {name: change.time_ms for name in objects_of(gone.values()) if name not in used}
        return LakeState(
            version=version,
            mark=replace(change.mark, version=version),
            files=files,
            removed={**self.removed, **freed},
        )


@dataclass(frozen=True, kw_only=True)
class Change:
    """What a commit changes. A file whose dead rows change is removed, and added as it is now.

    `changes_rows`: False if it only moves rows from some files to others.
    """

    mark: Mark
    added: tuple[LakeFile, ...] = ()
    removed: tuple[LakeFile, ...] = ()
    time_ms: int
    operation: str
    changes_rows: bool = True

    def __post_init__(self) -> None:
        names = [file.name for file in self.added]
        assert len(names) == len(set(names)), "a file is added twice: readers would see it twice"


def _read_format_1(found: Mapping[str, Any]) -> Mark:
    return Mark(
        lake=found["lake"],
        created_ms=found["created_ms"],
        table=found["table"],
        name=found["name"],
        schema=Schema.from_json(json.dumps(found["schema"])),
        states=found["states"],
        layout=Layout(found["layout"]),
        columns=dict(found["columns"]),
        cut=Cut.of(found["cut"]),
        round=found["round"],
        step=found["step"],
        version=found["version"],
    )


FORMATS: Formats[Callable[[Mapping[str, Any]], Mark]] = Formats(
    name="lake-mark", current=1, readers={1: _read_format_1}, error=UnknownFormat
)
