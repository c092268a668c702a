"""What can go wrong, split by what the caller should do.

TallybookError              (foundation)
├── InvalidInput            fix the input; nothing was changed
│   ├── SchemaError         a schema, a column definition or an option is wrong
│   ├── UnknownColumn       a column that the table does not have
│   ├── MissingColumn       a column that the call needs and did not get
│   ├── WrongType           a value column of another type than declared
│   ├── InvalidKey          a null in a key column, or text that is not UTF-8
│   ├── InvalidValue        a value that the column's function cannot take
│   │   └── Overflow        a result that its column cannot hold
│   ├── Closed              a table or bucket that was closed; open it again
│   ├── BatchTooLarge       more rows or bytes than one put may have
│   ├── OffsetOutOfRange    an offset before the start or after the end of the log
│   └── MissingSnapshot     a snapshot that was dropped, or never finished; take another one
├── Retryable               nothing was changed; try again
│   ├── StorageUnavailable  the store did not take the write, for certain
│   └── StorageFull         no room; goes on when there is
├── Deposed                 another leader has taken the bucket; open it again
├── InUse                   another process has the bucket open; wait for it or stop it
├── Corrupt                 restore from a snapshot, or rebuild the view from the log
│   ├── CorruptSegment
│   ├── CorruptSnapshot     take another one
│   ├── CorruptTable        what a table says about itself; restore it from a copy
│   ├── CorruptView
│   ├── LogGap              segments that are needed are missing
│   └── UnknownFormat       written by a newer version; upgrade
│       └── UnknownSchema   written under a later schema; read the table's definition again
└── UnknownOutcome          the write may or may not have happened; ask again and see
"""

from foundation.errors import TallybookError


class InvalidInput(TallybookError):
    """The call was wrong and changed nothing. Fix the input."""


class SchemaError(InvalidInput):
    """A schema, column definition or option is wrong. Fix the definition."""


class UnknownColumn(InvalidInput):
    """The table has no such column. Fix the name, or add the column to the table."""


class MissingColumn(InvalidInput):
    """A key column, or a column that the function orders by, is not in the batch. Add it."""


class WrongType(InvalidInput):
    """A column has another type than declared and no lossless cast exists. Cast it first."""


class InvalidKey(InvalidInput):
    """A null in a key, or text that is not UTF-8. Filter such rows out, or give them a key."""


class InvalidValue(InvalidInput):
    """A value that the column's function cannot take, or that is none of its type: text that is not
    UTF-8. Fix or filter the row.

    `encoded_key`: the row's key as the table encodes keys, for whoever wants to find its rows.
    """

    encoded_key: bytes | None = None


class Overflow(InvalidValue):
    """The merged result does not fit its column. Use a wider type, or fix the row."""


class Closed(InvalidInput):
    """The handle was closed. Open the table or bucket again."""


class BatchTooLarge(InvalidInput):
    """More rows or bytes than one put may have. Split the batch."""


class OffsetOutOfRange(InvalidInput):
    """The log does not have this offset: cleaned already, or not written yet. Start elsewhere."""


class MissingSnapshot(InvalidInput):
    """There is no such snapshot: dropped already, or never finished. Take another one."""


class Retryable(TallybookError):
    """Nothing was changed. Try again."""


class StorageUnavailable(Retryable):
    """The store did not take the write, and it is certain that it did not. Try again."""


class StorageFull(Retryable):
    """There is no room on the device. Make room and try again; nothing needs a restart."""


class Deposed(TallybookError):
    """Another leader appended to this bucket's log. Stop using this handle; open a new one."""


class InUse(TallybookError):
    """Another process has this bucket, or directory of views, open. Wait for it, or stop it."""


class Corrupt(TallybookError):
    """Stored bytes are damaged. Restore from a snapshot, or rebuild the view from the log."""


class CorruptSegment(Corrupt):
    """A log segment does not match its checksum. Restore it from a copy of the log."""


class CorruptSnapshot(Corrupt):
    """A snapshot's manifest or one of its files is damaged or gone. Take another snapshot."""


class CorruptTable(Corrupt):
    """An embedded table's own description is damaged. Restore the object from a copy."""


class CorruptView(Corrupt):
    """The RocksDB view is damaged. Remove its directory: it is rebuilt from the log."""


class LogGap(Corrupt):
    """Segments that the view still needs are gone. Restore the view from a snapshot."""


class UnknownFormat(Corrupt):
    """Written in a format that this version does not know. Upgrade Tallybook."""


class UnknownSchema(UnknownFormat):
    """Written under a schema version that is not known here. Open the table again.

    A column that is not known is not a column that was dropped: nothing is read in part.
    """

    def __init__(self, message: str, version: int = 0) -> None:
        super().__init__(message)
        self.version = version


class UnknownOutcome(TallybookError):
    """The write may or may not have happened. Call again: the bucket finds out first."""
