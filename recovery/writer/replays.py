"""What makes a batch the one that was committed under its number, and not another one.

A batch is its owner's, or its query's; it has a number; and it was planned, once. A source that is
set back, such as a checkpoint that is restored from an older copy, plans another batch under the
number of the last committed one. Skipped as a replay, its new rows would be lost; written, those
that it shares with the committed one would count twice. So it is neither.
"""

from collections.abc import Iterable, Mapping

from foundation.arguments import text_of
from foundation.errors import InvalidInput, RewoundBatch
from locks.column_locks.records import MOST_FINGERPRINT_BYTES, LockRecord


def check_fingerprint(fingerprint: str) -> None:
    """Raise InvalidInput if this is none that a lock record can keep; "" stands for none."""
    if fingerprint and len(text_of(fingerprint, "a fingerprint").encode()) > MOST_FINGERPRINT_BYTES:
        raise InvalidInput(
            f"a fingerprint has at most {MOST_FINGERPRINT_BYTES} bytes: give a hash of what it is"
        )


def check_same(
    owner: str, batch: int, fingerprint: str, record: LockRecord, names: Mapping[int, str]
) -> None:
    """Raise RewoundBatch if the last committed batch is not this one, which has its number.

    That is: it was planned at another time, or it did not have all columns that the lock has now. A
    fingerprint that only one of the two has says nothing. `batch` is by the caller's count; `names`
    are those of columns, by their ids.
    """
    if record.batch < 0:
        return
    if fingerprint and record.fingerprint and fingerprint != record.fingerprint:
        raise RewoundBatch(
            f"batch {batch} of `{owner}` is committed, and this is another batch of its number: it "
            f"has the fingerprint {fingerprint}, and the committed one {record.fingerprint}. Its "
            "checkpoint, or its source, was set back to before that batch, which was then planned "
            "anew. Nothing was written: rows that both have would count twice, and to skip it "
            "would lose the others. Restore the checkpoint that belongs to the table; or start "
            "with a new one behind the rows that are committed, with handover=True"
        )
    missing = set(record.columns) - record.last_columns
    if missing:
        raise RewoundBatch(
            f"batch {batch} of `{owner}` was committed with columns "
            f"{_named(record.last_columns, names)}, and comes again with {_named(missing, names)}, "
            "which would be lost if it were skipped. Two writers need an owner id each. A job that "
            "has got a column more since sends its last batch again with the columns that it had"
        )


def _named(columns: Iterable[int], names: Mapping[int, str]) -> str:
    return ", ".join(names.get(column, f"#{column}") for column in sorted(columns))
