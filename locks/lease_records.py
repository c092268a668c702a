"""A lease on snapshots: as a value, and as bytes.

Format 1, in the frame of `framing`:

    stamp (16 bytes), duration_ms, started_ms (0: when the node was written),
    the ids of the snapshots held by bucket, those of the snapshots asked for by bucket

Ids by bucket are packed as offsets are: 10,000 of them take 10 KB if they differ by less than 256.
"""

from dataclasses import dataclass, field

from locks.errors import CorruptRecord
from locks.framing import Reader, encode_integers, frame
from locks.offsets import Offsets
from locks.records import STAMP_BYTES
from locks.store import Node

FORMAT = 1


@dataclass(frozen=True, kw_only=True)
class LeaseRecord:
    """Which snapshot of which bucket is held, and for how long.

    `asked`: what an acquisition under way asks for; kept from being deleted, and not held before
    the lists were read. `started_ms`: since when, by the store's clock; 0 for the moment of the
    write itself. So a lease can be made smaller without being prolonged. `stamp`: new with every
    change; by it a write of unknown outcome is recognised.
    """

    stamp: bytes = bytes(STAMP_BYTES)
    duration_ms: int = 0
    started_ms: int = 0
    snapshots: Offsets = field(default_factory=Offsets)
    asked: Offsets = field(default_factory=Offsets)


@dataclass(frozen=True, kw_only=True)
class Lease:
    """A lease as it was read, with what a change of it checks.

    `version_above`: of the node above, read before the lease. `started_ms`: since when it runs.
    """

    record: LeaseRecord
    version: int
    version_above: int
    started_ms: int

    @property
    def snapshots(self) -> Offsets:
        """The ids of the snapshots that it holds, by bucket."""
        return self.record.snapshots

    @property
    def expires_ms(self) -> int:
        """When it ends, by the store's clock."""
        return self.started_ms + self.record.duration_ms

    def is_live(self, now_ms: int) -> bool:
        """Whether it has not expired."""
        return now_ms < self.expires_ms


@dataclass(frozen=True, kw_only=True)
class LeaseInfo:
    """A lease as it is shown. `expires_ms` is by ZooKeeper's clock."""

    lease_id: str
    snapshots: Offsets
    expires_ms: int
    live: bool


def encode_lease(record: LeaseRecord) -> bytes:
    """Return the record's bytes."""
    times = encode_integers([record.duration_ms, record.started_ms])
    return frame(FORMAT, [record.stamp, times, *record.snapshots.parts(), *record.asked.parts()])


def decode_lease(data: bytes) -> LeaseRecord:
    """Return the record; CorruptRecord if the bytes are none, or of another format."""
    reader = Reader(data, FORMAT, "a lease")
    record = LeaseRecord(
        stamp=reader.take(STAMP_BYTES),
        duration_ms=reader.integer(),
        started_ms=reader.integer(),
        snapshots=reader.offsets(),
        asked=reader.offsets(),
    )
    reader.end()
    return record


def lease_of(path: str, node: Node, version_above: int) -> Lease:
    """Return the lease in a node; the error says which node it is."""
    try:
        record = decode_lease(node.data)
    except CorruptRecord as exc:
        raise CorruptRecord(f"{path}: {exc}") from exc
    return Lease(
        record=record,
        version=node.version,
        version_above=version_above,
        started_ms=record.started_ms or node.modified_ms,
    )
