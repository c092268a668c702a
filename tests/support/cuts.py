"""Cuts from lock records, and what changes between two of them make of a table."""

from collections.abc import Mapping

from foundation.ids import BucketId
from locks.column_locks.lock_set import LockEntry, LockSet
from locks.column_locks.records import LockRecord
from recovery.reader.cut import BucketCut, Cut


def cut_of(records: Mapping[str, LockRecord], *, epoch: int | None = None) -> Cut:
    """Return the cut that these records make; `epoch`: the counter's, else their highest."""
    highest = max((record.epoch for record in records.values()), default=0)
    return Cut.of_locks(
        "t",
        LockSet(
            epoch=highest if epoch is None else epoch,
            epoch_version=0,
            modified_ms=0,
            owners={
                owner: LockEntry(record=record, version=0, modified_ms=0)
                for owner, record in records.items()
            },
        ),
    )


def cut_at(
    bucket: BucketId, records: Mapping[str, LockRecord], *, epoch: int | None = None
) -> BucketCut:
    """Return the same, as far as it is about one bucket."""
    return cut_of(records, epoch=epoch).at(bucket)
