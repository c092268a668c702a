"""The list of a bucket's snapshots: as a value, and as bytes.

Format 1, in the frame of `framing`:

    term, next id, count of snapshots, then per snapshot, by ascending id:
        id - the id before it, state (1 byte: 0 listed, 1 retired),
        term, applied, stable, created_ms, bytes

That is some 25 bytes per snapshot.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import NamedTuple

from foundation.errors import CorruptRecord
from foundation.formats import Formats
from foundation.ids import LeadKey
from locks.encoding.framing import Reader, RecordFormats, encode_integers, frame, read_framed

_HIGHEST = 2**63 - 1


class SnapshotState(IntEnum):
    """Listed: it may be leased. Retired: its files go, once no lease has it any more."""

    LISTED = 0
    RETIRED = 1


@dataclass(frozen=True, kw_only=True)
class ListedSnapshot:
    """A snapshot as the list has it. `term`: of the leader that made it, by whose clock it is.

    It has all of the log before `applied`; `stable` is the last stable offset that was found for
    it, from where on the log is needed with it.
    """

    snapshot_id: int
    term: int
    applied: int
    stable: int
    created_ms: int
    bytes: int
    state: SnapshotState = SnapshotState.LISTED

    @property
    def is_listed(self) -> bool:
        """Whether it may be leased."""
        return self.state is SnapshotState.LISTED


@dataclass(frozen=True, kw_only=True)
class SnapshotList:
    """A bucket's snapshots by ascending id, as they were read; immutable.

    `term`: of the leader that claimed the list. `next_id`: the lowest that a new snapshot may have;
    ids are never given again. `version`: the node's; None if there is none.
    """

    key: LeadKey
    term: int = 0
    next_id: int = 1
    snapshots: tuple[ListedSnapshot, ...] = ()
    version: int | None = None

    @property
    def listed(self) -> tuple[ListedSnapshot, ...]:
        """Those that may be leased."""
        return tuple(one for one in self.snapshots if one.is_listed)

    @property
    def retired(self) -> tuple[ListedSnapshot, ...]:
        """Those that go, once no lease holds them."""
        return tuple(one for one in self.snapshots if not one.is_listed)

    @property
    def kept(self) -> tuple[ListedSnapshot, ...]:
        """All whose files are there, as far as is known: listed and retired."""
        return self.snapshots

    @property
    def latest(self) -> ListedSnapshot | None:
        """The newest one that may be leased."""
        return self.listed[-1] if self.listed else None

    @property
    def oldest_stable(self) -> int | None:
        """Where the log has to begin for all that are kept; None: keep all of it."""
        return min((one.stable for one in self.kept), default=None)

    def retaining(self, count: int) -> "SnapshotList":
        """Return the list with all but the newest `count` retired."""
        retained = self.listed[-count:]
        return replace(
            self,
            snapshots=tuple(
                one if one in retained else replace(one, state=SnapshotState.RETIRED)
                for one in self.snapshots
            ),
        )


def encode_list(listed: SnapshotList) -> bytes:
    """Return the list's bytes."""
    check_list(listed)
    return frame(FORMATS.current, _parts(listed))


def _parts(listed: SnapshotList) -> Iterator[bytes]:
    yield encode_integers([listed.term, listed.next_id, len(listed.snapshots)])
    before = 0
    for one in listed.snapshots:
        yield encode_integers([one.snapshot_id - before])
        yield bytes([one.state])
        yield encode_integers([one.term, one.applied, one.stable, one.created_ms, one.bytes])
        before = one.snapshot_id


class _Stored(NamedTuple):
    """What a node says of a list, whoever's it is."""

    term: int
    next_id: int
    snapshots: tuple[ListedSnapshot, ...]


def decode_list(key: LeadKey, data: bytes, version: int | None = None) -> SnapshotList:
    """Return the list; CorruptRecord if the bytes are none, or of no format that is read."""
    stored = read_framed(FORMATS, data, f"a list of snapshots, of bucket {key},")
    listed = SnapshotList(key=key, version=version, **stored._asdict())
    check_list(listed)
    return listed


def _read_format_1(reader: Reader) -> _Stored:
    term, next_id, last = reader.integer(), reader.integer(), 0
    snapshots = []
    for _ in range(reader.count()):
        snapshots.append(_read_snapshot(reader, last))
        last = snapshots[-1].snapshot_id
    return _Stored(term, next_id, tuple(snapshots))


def _read_snapshot(reader: Reader, last_id: int) -> ListedSnapshot:
    """Take a snapshot, given the id before it."""
    snapshot_id, state = last_id + reader.integer(), reader.octet()
    if state not in tuple(SnapshotState):
        raise CorruptRecord(f"snapshot {snapshot_id} has an unknown state {state}")
    return ListedSnapshot(
        snapshot_id=snapshot_id,
        state=SnapshotState(state),
        term=reader.integer(),
        applied=reader.integer(),
        stable=reader.integer(),
        created_ms=reader.integer(),
        bytes=reader.integer(),
    )


FORMATS: RecordFormats[_Stored] = Formats(
    name="snapshot-list", current=1, readers={1: _read_format_1}, error=CorruptRecord
)


def check_list(listed: SnapshotList) -> None:
    """Raise CorruptRecord if a list contradicts itself; asked before a write, after a read."""
    ids = [one.snapshot_id for one in listed.snapshots]
    numbers = [listed.term, listed.next_id]
    for one in listed.snapshots:
        numbers += [one.term, one.applied, one.stable, one.created_ms, one.bytes]
    wrong = None
    if not all(0 <= number <= _HIGHEST for number in numbers):
        wrong = "it has a number of more than 63 bits, or a negative one"
    elif any(after <= before for before, after in zip([0, *ids], ids, strict=False)):
        wrong = "its ids do not ascend from 1"
    elif ids and ids[-1] >= listed.next_id:
        wrong = f"it has id {ids[-1]}, and {listed.next_id} is said to be the next"
    elif any(one.term > listed.term for one in listed.snapshots):
        wrong = "it has a snapshot of a later leader than its own"
    if wrong is not None:
        raise CorruptRecord(f"the snapshots of bucket {listed.key} contradict themselves: {wrong}")
