"""A cut: a position of a whole table, at which each owner's committed batches are seen, whole.

Taken from the lock records, read within one epoch; read in each bucket at any later time. An
owner's work is in the cut up to where its record said, and all of it that comes later in a bucket's
log is not: its tail and its unpaid debts from their offsets on, and whatever carries an epoch that
the cut does not know, or that was not ready. `docs/spec/protocol.py` has the rules: `reader`,
`after_cut`, `cut`.

As text, for checkpoints: `cut-` and, in URL-safe base 64, the frame of `framing` with

    table (text), epoch + 1 (0: nobody has locks), time (ms), whether there are ends, ends
    (offsets), how many owners, and per owner: name (text), batch + 1, which of the following there
    are (1: offsets, 2: through), offsets, epoch and batch of `through`
"""

import base64
import binascii
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import NamedTuple

from foundation.errors import CorruptRecord, InvalidInput
from foundation.formats import Formats
from foundation.ids import BucketId, Token
from locks.column_locks.acquisition import unpaid
from locks.column_locks.lock_set import LockSet
from locks.column_locks.records import LockRecord
from locks.encoding.framing import (
    Reader,
    RecordFormats,
    encode_integers,
    encode_text,
    frame,
    read_framed,
)
from locks.encoding.integers import encode_one
from locks.encoding.offsets import Offsets

_PREFIX = "cut-"
LAST_BATCH = 2**63 - 1
_HAS_OFFSETS, _HAS_THROUGH = 1, 2


class Bound(NamedTuple):
    """How far an owner's work in a bucket belongs to a cut; by default all of it does.

    Not what comes at `offset` or later; nor, if `through` is given, what has a later token than
    that. With both, what is at `offset` or later and has a later token. Nothing at `end` or later.
    The first that does not belong to it ends it: what comes after that does not, either.
    """

    offset: int | None = None
    through: Token | None = None
    end: int | None = None


@dataclass(frozen=True, kw_only=True)
class BucketCut:
    """A cut as far as it is about one bucket. `others`: of all owners that are not named."""

    bounds: Mapping[str, Bound]
    others: Bound

    def bound(self, owner: str) -> Bound:
        """Return how far an owner's work belongs to the cut."""
        return self.bounds.get(owner, self.others)


@dataclass(frozen=True, kw_only=True)
class OwnerCut:
    """Where a cut leaves an owner. `batch`: the last that it has of it (-1: none).

    `offsets` and `through` are those of `Bound`, for all buckets; without either, the owner is like
    those that the cut does not know: what has an epoch that it knows is in it.
    """

    batch: int
    offsets: Offsets | None = None
    through: Token | None = None


@dataclass(frozen=True, kw_only=True)
class Cut:
    """A position of a table: `str()` writes it down, and `Cut.of` reads that.

    `table`: the table's own id, which no other table has, whatever its name. `epoch`: the highest
    that is known; None: the table has no locks. `time_ms`: of the last commit in it, or when it was
    taken, by the clock of ZooKeeper. `ends`: where the logs ended, for what was put without a lock.
    """

    table: str
    epoch: int | None
    time_ms: int
    owners: Mapping[str, OwnerCut] = field(default_factory=dict)
    ends: Offsets | None = None

    @classmethod
    def of_locks(cls, table: str, locks: LockSet) -> "Cut":
        """Return the cut that lock records make which were read within one epoch."""
        records = {owner: record for owner, record in locks.records.items() if not record.blank}
        starts, promised = _starts(records), _promised(records)
        owners = {}
        for owner, record in records.items():
            offsets, through = starts.pop(owner, None), None
            if offsets is None and record.held and not record.ready:
                # It has written nothing under its epoch yet.
                through = Token(record.epoch - 1, LAST_BATCH)
            # A promise counts as committed once its owner is succeeded, and is not written yet.
            batch = min(record.batch, promised.get(owner, record.batch + 1) - 1)
            owners[owner] = OwnerCut(batch=batch, offsets=offsets, through=through)
        # Of a debtor that was forgotten, there is no record any more.
        owners |= {debtor: OwnerCut(batch=-1, offsets=at) for debtor, at in starts.items()}
        return cls(table=table, epoch=locks.epoch, time_ms=locks.modified_ms, owners=owners)

    @classmethod
    def of(cls, text: "str | Cut") -> "Cut":
        """Return a cut that was written down; InvalidInput if it is none."""
        if isinstance(text, Cut):
            return text
        if not isinstance(text, str) or not text.startswith(_PREFIX):
            raise InvalidInput(f"{text!r} is no cut: give what `str(table.cut())` has returned")
        encoded = text.removeprefix(_PREFIX)
        try:
            data = base64.b64decode(encoded + "=" * (-len(encoded) % 4), b"-_", validate=True)
            return cls.decode(data)
        except (binascii.Error, ValueError, CorruptRecord) as exc:
            raise InvalidInput(
                f"this is no cut, or it was cut short: {exc}; give what `str(table.cut())` has "
                "returned"
            ) from exc

    def __str__(self) -> str:
        return _PREFIX + base64.urlsafe_b64encode(self.encode()).decode().rstrip("=")

    def __repr__(self) -> str:
        owners = ", ".join(f"{owner}: {one.batch}" for owner, one in sorted(self.owners.items()))
        return f"Cut({self.time:%Y-%m-%d %H:%M:%S}, batches {{{owners}}})"

    @property
    def time(self) -> datetime:
        """The time of the last commit in it, or when it was taken, by the clock of ZooKeeper."""
        return datetime.fromtimestamp(self.time_ms / 1000, UTC)

    @property
    def batches(self) -> dict[str, int]:
        """The last batch of each owner that is in it, of those that have committed any."""
        return {owner: one.batch for owner, one in self.owners.items() if one.batch >= 0}

    def at(self, bucket: BucketId) -> BucketCut:
        """Return what it says of a bucket; also of one that did not exist when it was taken."""
        end = None if self.ends is None else self.ends.get(bucket, 0)
        known = None if self.epoch is None else Token(self.epoch, LAST_BATCH)
        bounds = {}
        for owner, one in self.owners.items():
            if one.offsets is not None:
                bounds[owner] = Bound(one.offsets.get(bucket, 0), one.through)
            elif one.through is not None:
                bounds[owner] = Bound(None, one.through, end)
        return BucketCut(bounds=bounds, others=Bound(None, known, end))

    def checked(self, table: str, name: str) -> "Cut":
        """Return it if it is of the table with this id; InvalidInput, with the name, if not."""
        if self.table != table:
            raise InvalidInput(
                f"this cut is of another table than {name}: of one that had this name before, "
                "perhaps; take a cut of this one"
            )
        return self

    def only(self, buckets: Collection[BucketId]) -> "Cut":
        """Return it as far as it is about these buckets: shorter, for whoever has only those."""
        owners = {
            owner: one
            if one.offsets is None
            else replace(one, offsets=_restricted(one.offsets, buckets))
            for owner, one in self.owners.items()
        }
        ends = None if self.ends is None else _restricted(self.ends, buckets)
        return replace(self, owners=owners, ends=ends)

    def is_before(self, later: "Cut") -> bool:
        """Whether the other may be a later one of the same table: it has nothing less."""
        if self.table != later.table or (later.epoch or 0) < (self.epoch or 0):
            return False
        if self.ends is not None and later.ends is not None:
            buckets = self.ends.keys() & later.ends.keys()
            if any(self.ends[bucket] > later.ends[bucket] for bucket in buckets):
                return False
        # Where nobody acquired in between, nobody was forgotten and has begun anew, either.
        known = self.owners.keys() & later.owners.keys() if self.epoch == later.epoch else ()
        return all(self.owners[one].batch <= later.owners[one].batch for one in known)

    def has_same_work(self, other: "Cut") -> bool:
        """Whether it has just what the other has: nothing was committed from one to the other.

        False if that is not certain: somebody has acquired a lock since.
        """
        ours = self.table, self.epoch, self.batches, self.ends
        return ours == (other.table, other.epoch, other.batches, other.ends)

    # --- As bytes -------------------------------------------------------------------------------

    def encode(self) -> bytes:
        """Return the bytes."""
        parts = [
            encode_text(self.table),
            encode_integers([0 if self.epoch is None else self.epoch + 1, self.time_ms]),
            encode_one(self.ends is not None),
            *(() if self.ends is None else self.ends.parts()),
            encode_one(len(self.owners)),
        ]
        for owner, one in sorted(self.owners.items()):
            has = (_HAS_OFFSETS if one.offsets is not None else 0) | (
                _HAS_THROUGH if one.through is not None else 0
            )
            parts += [encode_text(owner), encode_integers([one.batch + 1, has])]
            parts += [] if one.offsets is None else one.offsets.parts()
            parts += [] if one.through is None else [encode_integers(one.through)]
        return frame(FORMATS.current, parts)

    @classmethod
    def decode(cls, data: bytes) -> "Cut":
        """Return a cut from its bytes; CorruptRecord if they are none."""
        return read_framed(FORMATS, data, "the cut")


def _starts(records: Mapping[str, LockRecord]) -> dict[str, Offsets]:
    """Return, by debtor, the offsets from which on its work is not committed."""
    starts: dict[str, Offsets] = {}
    for owner, record in records.items():
        for debt in unpaid(owner, record):
            known = starts.get(debt.owner)
            starts[debt.owner] = debt.offsets if known is None else _lower(known, debt.offsets)
    return starts


def _promised(records: Mapping[str, LockRecord]) -> dict[str, int]:
    """Return, by debtor, the first batch that was promised and is not known to be written."""
    promised: dict[str, int] = {}
    for owner, record in records.items():
        for debt in unpaid(owner, record):
            if debt.prepared is not None:
                batch = debt.prepared.token.batch
                promised[debt.owner] = min(batch, promised.get(debt.owner, batch))
    return promised


def _lower(one: Offsets, other: Offsets) -> Offsets:
    """Return the lower offset of each bucket; one that either does not have is at 0."""
    return Offsets(
        {bucket: min(at, other[bucket]) for bucket, at in one.items() if bucket in other}
    )


def _restricted(offsets: Offsets, buckets: Iterable[BucketId]) -> Offsets:
    return Offsets({bucket: offsets[bucket] for bucket in buckets if bucket in offsets})


def _read_format_1(reader: Reader) -> Cut:
    table, epoch, time_ms = reader.text(), reader.integer(), reader.integer()
    ends = reader.offsets() if reader.integer() else None
    owners = {}
    for _ in range(reader.count()):
        owner, batch, has = reader.text(), reader.integer(), reader.integer()
        offsets = reader.offsets() if has & _HAS_OFFSETS else None
        through = Token(reader.integer(), reader.integer()) if has & _HAS_THROUGH else None
        owners[owner] = OwnerCut(batch=batch - 1, offsets=offsets, through=through)
    return Cut(
        table=table,
        epoch=epoch - 1 if epoch else None,
        time_ms=time_ms,
        owners=owners,
        ends=ends,
    )


FORMATS: RecordFormats[Cut] = Formats(
    name="cut", current=1, readers={1: _read_format_1}, error=CorruptRecord
)
