"""`tallybook verify`: reads all that a table is made of, and says what is damaged.

The log and the snapshots are read where they are, in the object store. Views are on the disks of
servers: they are read through their leaders, by a scan of all rows, which checks every block.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Annotated

import typer

from foundation.errors import (
    Corrupt,
    MissingObject,
    MissingSnapshot,
    OffsetOutOfRange,
    TallybookError,
    UnknownFormat,
)
from foundation.ids import BucketId
from locks.snapshots.list_records import ListedSnapshot
from merge_engine.bucket.log_names import LogNames
from merge_engine.bucket.log_reader import LogReader
from merge_engine.bucket.log_start import decode_start
from merge_engine.bucket.rolled import decode_rolled
from merge_engine.bucket.segment import decode_segment, segment_name
from merge_engine.bucket.snapshot_storage import SnapshotStorage
from merge_engine.storage.objects import ObjectStorage
from server.client.cluster import Cluster
from server.client.remote_table import RemoteTable
from server.protocol.definitions import SNAPSHOTS
from tallybook.commands.output import counted, print_json, print_line, print_table, progress, size
from tallybook.commands.reaching import Json, TableName, cluster_command, connected
from tallybook.connecting import Reach

_AT_ONCE = 8


def add_commands(app: typer.Typer) -> None:
    """Add `verify` to the application."""
    cluster_command(app, "verify", deadline_s=60.0)(verify)


@dataclass(frozen=True)
class Damage:
    """What is wrong with a part of a bucket, and what to do about it."""

    bucket: str
    part: str
    what: str
    advice: str


@dataclass
class Read:
    """How much was read."""

    segments: int = 0
    snapshots: int = 0
    rows: int = 0
    bytes: int = 0

    def plus(self, other: "Read") -> None:
        """Add what was read elsewhere."""
        for name, count in asdict(other).items():
            setattr(self, name, getattr(self, name) + count)


_LOG = "restore the object from a copy of the log store"
_SNAPSHOT = "take another: `tallybook snapshots TABLE --take`; this one is passed over"
_VIEW = "stop its server, delete the bucket's view, and start it: it is made anew from the log"


def verify(
    reach: Reach,
    *,
    table: TableName,
    views: Annotated[bool, typer.Option(help="read all rows at their leaders, too")] = True,
    json: Json = False,
) -> None:
    """Read a table's segments, snapshots and views, and say what is damaged. Exit code 1 if any is.

    Nothing is changed, and the table may be in use.
    """
    with connected(reach) as cluster:
        found = cluster.table(table)
        buckets = found.bucket_ids()
        damages: list[Damage] = []
        read = Read()
        with (
            progress(f"verifying {table}", len(buckets)) as advance,
            ThreadPoolExecutor(_AT_ONCE, "verify") as pool,
        ):
            check = Bucket.checker(cluster, found, views=views)
            for some, of_bucket in pool.map(check, buckets):
                damages += some
                read.plus(of_bucket)
                advance(1)
    if json:
        document = {"table": table, "buckets": len(buckets), **asdict(read)}
        print_json({**document, "damages": [asdict(one) for one in damages]})
    else:
        if damages:
            rows = [(one.bucket, one.part, one.what, one.advice) for one in damages]
            print_table(("BUCKET", "PART", "WHAT IS WRONG", "WHAT TO DO"), rows)
        verdict = f"{counted(len(damages), 'damage')} found" if damages else "nothing is damaged"
        print_line(
            f"table {table}: {verdict}; read {counted(read.segments, 'segment')} in "
            f"{counted(len(buckets), 'bucket')}, {counted(read.snapshots, 'snapshot')}, "
            f"{counted(read.rows, 'row')}, {size(read.bytes)}"
        )
    if damages:
        raise typer.Exit(1)


class Bucket:
    """One bucket, to be read once."""

    def __init__(self, cluster: Cluster, table: RemoteTable, bucket: BucketId) -> None:
        self._cluster = cluster
        self._table = table
        self._bucket = bucket
        self._storage: ObjectStorage = cluster.storage().child(table.definition.path(bucket))
        self.read = Read()

    @classmethod
    def checker(
        cls, cluster: Cluster, table: RemoteTable, *, views: bool
    ) -> Callable[[BucketId], tuple[list[Damage], Read]]:
        """Return what reads a bucket, and says what is damaged and how much was read."""

        def check(bucket: BucketId) -> tuple[list[Damage], Read]:
            one = cls(cluster, table, bucket)
            damages = [*one.log(), *one.snapshots()]
            if views:
                damages += one.view()
            return damages, one.read

        return check

    def log(self) -> Iterator[Damage]:
        """Yield what is wrong with the log: each object by itself, then whether one is missing."""
        names = LogNames.of(self._storage.names())
        start, rolled = names.start, names.to_ranges()
        damaged = False
        loose = [base for base in names.bases if base >= start and rolled.at(base) is None]
        checks: list[tuple[str, Callable[[str, bytes], int]]] = [
            *((segment_name(base), _check_segment) for base in loose),
            *((one.name, _check_rolled) for one in names.rolled if one.end > start),
            *((name, _check_mark) for name in names.marks),
        ]
        for name, check in checks:
            try:
                data = self._storage.read(name)
                self.read.bytes += len(data)
                self.read.segments += check(name, data)
            except MissingObject:  # Cleaned or rolled up since.
                continue
            except (Corrupt, UnknownFormat) as exc:
                if LogNames.of(self._storage.names()).frees(name):
                    continue  # Nobody reads it: cleaned or rolled up since, and a stray by now.
                damaged = True
                yield self._damage(f"log, {name}", exc, _LOG)
        if not damaged:
            yield from self._gaps()

    def _gaps(self) -> Iterator[Damage]:
        try:
            log = LogReader(self._storage)
            for _ in log.headers(log.start):
                pass
        except OffsetOutOfRange:  # Cleaned since.
            return
        except TallybookError as exc:
            yield self._damage("log", exc, _LOG)

    def snapshots(self) -> Iterator[Damage]:
        """Yield what is wrong with the snapshots that are listed, and still are afterwards."""
        storage = SnapshotStorage(self._storage.child(SNAPSHOTS))
        for listed in self._listed():
            try:
                manifest = storage.manifest(listed.snapshot_id, listed.term)
                for file in manifest.files:
                    self.read.bytes += len(storage.read_file(manifest, file))
                self.read.snapshots += 1
            except (Corrupt, MissingSnapshot, UnknownFormat) as exc:
                if listed in self._listed():  # Else retired since.
                    yield self._damage(f"snapshot {listed.snapshot_id}", exc, _SNAPSHOT)

    def _listed(self) -> Sequence[ListedSnapshot]:
        lists = self._cluster.coordinator.snapshots
        return lists.read_many(self._table.table_id, [self._bucket])[self._bucket].listed

    def view(self) -> Iterator[Damage]:
        """Yield what is wrong with the view: its leader reads all of its rows."""
        try:
            for batch in self._table.scan(buckets=[self._bucket], isolation="latest"):
                self.read.rows += batch.num_rows
        except TallybookError as exc:
            yield self._damage("view", exc, _VIEW)

    def _damage(self, part: str, exc: Exception, advice: str) -> Damage:
        return Damage(str(self._bucket), part, " ".join(str(exc).split()), advice)


def _check_segment(name: str, data: bytes) -> int:
    decode_segment(name, data)
    return 1


def _check_rolled(name: str, data: bytes) -> int:
    rolled = decode_rolled(name, data)
    for header in rolled.index.headers:
        rolled.segment_at(header.base_offset)
    return len(rolled.index.headers)


def _check_mark(name: str, data: bytes) -> int:
    decode_start(name, data)
    return 0
