"""A lease on snapshots: as a value, and as bytes.

Format 1, in the frame of `framing`:

    stamp (16 bytes), duration_ms, started_ms (0: when the node was written),
    the ids of the snapshots held by bucket, those of the snapshots asked for by bucket

Ids by bucket are packed as offsets are: 10,000 of them take 10 KB if they differ by less than 256.
"""

from dataclasses import dataclass, field

from foundation.errors import CorruptRecord
from foundation.formats import Formats
from locks.column_locks.records import STAMP_BYTES
from locks.encoding.framing import Reader, RecordFormats, encode_integers, frame, read_framed
from locks.encoding.offsets import Offsets
from locks.store.base import Node


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
    ids = [*record.snapshots.parts(), *record.asked.parts()]
    return frame(FORMATS.current, [record.stamp, times, *ids])


def decode_lease(data: bytes) -> LeaseRecord:
    """Return the record; CorruptRecord if the bytes are none, or of no format that is read."""
    return read_framed(FORMATS, data, "a lease")


def _read_format_1(reader: Reader) -> LeaseRecord:
    return LeaseRecord(
        stamp=reader.take(STAMP_BYTES),
        duration_ms=reader.integer(),
        started_ms=reader.integer(),
        snapshots=reader.offsets(),
        asked=reader.offsets(),
    )


FORMATS: RecordFormats[LeaseRecord] = Formats(
    name="lease", current=1, readers={1: _read_format_1}, error=CorruptRecord
)


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
