"""What the tasks of a tiering job do, each in a process of Spark's: they read, and write files."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby

import pyarrow as pa
import pyarrow.compute as pc

from foundation.errors import CorruptLake
from foundation.failpoints import hit
from foundation.ids import BucketId
from merge_engine.encoding.keys import KeyCodec
from merge_engine.schema.schema import Schema
from merge_engine.storage.objects import ObjectStorage
from recovery.reader.cut import Cut
from server.client.scan_sources import snapshot_rows
from sink.lake.fields import LakeFields, lake_fields
from sink.lake.files import FileWriter, encoded_keys, find_keys, read_rows, sorted_by_key
from sink.lake.opening import Place
from sink.lake.state import LakeFile
from sink.source.schemas import CHANGE_TYPE, UPSERT
from sink.source.tasks import ReadUpserts, Wanted
from sink.worker_connections import connected


@dataclass(frozen=True, kw_only=True)
class FilesDone:
    """What a task has done: files that it wrote or marked, and those that were there before."""

    added: tuple[LakeFile, ...] = ()
    removed: tuple[LakeFile, ...] = ()
    upserts: int = 0
    deletes: int = 0

    def __add__(self, other: "FilesDone") -> "FilesDone":
        return FilesDone(
            added=self.added + other.added,
            removed=self.removed + other.removed,
            upserts=self.upserts + other.upserts,
            deletes=self.deletes + other.deletes,
        )


@dataclass(frozen=True, kw_only=True)
class StepWork:
    """What all tasks of a step have in common.

    `wanted`: of the table, as it is known to all of them. `schema`, `states`: what the copy has.
    """

    wanted: Wanted
    schema: Schema
    states: bool
    place: Place
    step: int

    @cached_property
    def fields(self) -> LakeFields:
        """The columns of the copy."""
        return lake_fields(self.schema, states=self.states)

    @cached_property
    def storage(self) -> ObjectStorage:
        """Where the files of the copy are."""
        return self.place.storage

    @property
    def key_names(self) -> list[str]:
        """The names of the key columns."""
        return [column.name for column in self.fields.key]

    @property
    def codec(self) -> KeyCodec:
        """How the table encodes keys."""
        return KeyCodec([column.type for column in self.fields.key])

    def writer(self, bucket: BucketId) -> FileWriter:
        """Return what writes files with rows of a bucket."""
        return FileWriter(self.storage, bucket, self.step, self.fields.arrow)

    def read_rows(self, file: LakeFile) -> pa.Table:
        """Return the rows of a file that are there."""
        return read_rows(self.storage, file, self.fields.arrow.names)


@dataclass(frozen=True, kw_only=True)
class LakeTask(ABC):
    """Something to do for a step of a copy. Run twice, it writes other files, of other names."""

    work: StepWork

    @abstractmethod
    def run(self) -> FilesDone:
        """Do it."""


@dataclass(frozen=True, kw_only=True)
class CopyBuckets(LakeTask):
    """Copy all rows of buckets, from the snapshots that a lease holds; no server is asked."""

    buckets: tuple[BucketId, ...]
    cut: Cut
    lease: str

    def run(self) -> FilesDone:
        """Write the rows at the cut."""
        wanted, fields = self.work.wanted, self.work.fields
        table = wanted.remote
        open_rows = snapshot_rows(
            connected(wanted.recipe).storage(),
            wanted.table,
            (*fields.values, *fields.states),
            table.borrow_lease(self.lease),
            cut=self.cut,
            knowing=table.caller.knowing,
        )
        done = FilesDone()
        for bucket in self.buckets:
            writer, rows = self.work.writer(bucket), 0
            for batch in open_rows(bucket, None):
                writer.add(batch)
                rows += batch.num_rows
            done += FilesDone(added=tuple(writer.close()), upserts=rows)
            hit("tier.files_written")
        return done


@dataclass(frozen=True, kw_only=True)
class ApplyChanges(LakeTask):
    """Bring the files of buckets from one cut to another.

    `files`: all that have rows of these buckets. `rewrite`: write those anew that have rows which
    changed, instead of marking these rows as deleted.
    """

    buckets: tuple[BucketId, ...]
    since: Cut
    until: Cut
    files: tuple[LakeFile, ...]
    rewrite: bool

    def run(self) -> FilesDone:
        """Write the rows that changed, and have them out of the files where they were."""
        # Where a partition was dropped meanwhile, the round is done again without it: else there
        # would be a version of the copy that has less of some batches there than elsewhere.
        reading = ReadUpserts(
            wanted=self.work.wanted,
            buckets=self.buckets,
            since=self.since,
            until=self.until,
            all_or_nothing=True,
        )
        done = FilesDone()
        for bucket, batches in groupby(reading.by_bucket(), key=lambda one: one[0]):
            done += self._apply(bucket, (batch for _, batch in batches))
            hit("tier.files_written")
        return done

    def _apply(self, bucket: BucketId, batches: Iterable[pa.RecordBatch]) -> FilesDone:
        work = self.work
        writer, changed = work.writer(bucket), _Keys(work.key_names, work.codec)
        upserts = 0
        for batch in batches:
            changed.add(batch)
            there = batch.filter(pc.equal(batch.column(CHANGE_TYPE), UPSERT))
            upserts += there.num_rows
            writer.add(there)
        added: list[LakeFile] = []
        removed: list[LakeFile] = []
        keys, died = changed.keys, 0
        for file in self.files:
            if file.bucket != bucket or not changed.may_be_in(file):
                continue
            found = find_keys(work.storage, file, changed.names, changed.codec, keys)
            now = replace(file, dead=file.dead | found)
            if now.live == file.live:
                continue
            died += file.live - now.live
            removed.append(file)
            if self.rewrite:
                writer.add(work.read_rows(now))
            elif now.live:
                added.append(now)
        if died > changed.count:
            raise CorruptLake(
                f"of {changed.count} keys of bucket {bucket} that have changed, the copy at "
                f"{work.place.location} has {died}: some are there twice. Begin again"
            )
        return FilesDone(
            added=(*writer.close(), *added),
            removed=tuple(removed),
            upserts=upserts,
            deletes=changed.count - upserts,
        )


@dataclass(frozen=True, kw_only=True)
class MergeFiles(LakeTask):
    """Write the rows of several files of one bucket to new ones, in the order of their keys."""

    groups: tuple[tuple[LakeFile, ...], ...]

    def run(self) -> FilesDone:
        """Write each group anew."""
        done, work = FilesDone(), self.work
        for group in self.groups:
            writer = work.writer(group[0].bucket)
            rows = pa.concat_tables(map(work.read_rows, group), promote_options="default")
            writer.add(sorted_by_key(rows, work.key_names, work.codec))
            done += FilesDone(added=tuple(writer.close()), removed=group, upserts=rows.num_rows)
            hit("tier.files_written")
        return done


class _Keys:
    """The keys of a bucket that changed, as they come."""

    def __init__(self, names: Sequence[str], codec: KeyCodec) -> None:
        self.names, self.codec = names, codec
        self._parts: list[pa.BinaryArray] = []
        self._bounds: tuple[int, int] | None = None

    def add(self, rows: pa.RecordBatch) -> None:
        self._parts.append(encoded_keys(rows, self.names, self.codec))
        first = rows.column(self.names[0])
        if len(first) and pa.types.is_integer(first.type):
            found = pc.min_max(first).as_py()
            low, high = self._bounds or (found["min"], found["max"])
            self._bounds = min(low, found["min"]), max(high, found["max"])

    @property
    def count(self) -> int:
        return sum(map(len, self._parts))

    @property
    def keys(self) -> pa.BinaryArray:
        return pa.concat_arrays(self._parts)

    def may_be_in(self, file: LakeFile) -> bool:
        """Whether a file can have any of them, by the values of the first key column."""
        if not self.count:
            return False
        if self._bounds is None or file.bounds is None:
            return True
        return self._bounds[0] <= file.bounds[1] and file.bounds[0] <= self._bounds[1]


def total(done: Iterable[FilesDone]) -> FilesDone:
    """Return what several tasks have done."""
    return sum(done, FilesDone())
