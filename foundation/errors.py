"""What can go wrong, split by what the caller does next. `except TallybookError` catches all of it.

TallybookError
├── InvalidInput              fix the call; nothing was changed
│   ├── SchemaError           a schema, a column definition or an option is wrong
│   ├── UnknownCluster        no cluster below this chroot of ZooKeeper
│   ├── UnknownTable          no table of this name or id
│   ├── TableExists           there is one of this name already
│   ├── TableAltered          it is no longer as it was when you looked
│   ├── UnknownColumn         a column that the table does not have
│   ├── MissingColumn         a column that the call needs and did not get
│   ├── InvalidColumns        a lock on no column, or on one of the primary key
│   ├── WrongColumns          columns that the writer's lock does not have
│   ├── WrongType             a value column of another type than declared
│   ├── InvalidKey            a null in a key column, or text that is not UTF-8
│   ├── InvalidValue          a value that the column's function cannot take
│   │   └── Overflow          a result that its column cannot hold
│   ├── BatchTooLarge         more rows or bytes than one put may have
│   │   └── ColumnTooLarge    more bytes in one column than Arrow holds
│   ├── RecordTooLarge        more than ZooKeeper holds in a transaction
│   ├── InvalidOwner          an owner id that ZooKeeper cannot hold
│   ├── InvalidLease          a lease id that ZooKeeper cannot hold
│   ├── InvalidTtl            a time to live out of range
│   ├── RewoundBatch          a batch older than the last committed one, or another of its number
│   ├── OffsetOutOfRange      an offset before the start or after the end of the log
│   ├── MissingSnapshot       a snapshot that was dropped, or never finished
│   ├── PartitionGone         a partition that was dropped while a call was under way
│   ├── Closed                a handle that was closed
│   └── BadRequest            bytes that no client of this release sends
├── Refused                   somebody else has it, or it is not for you: the message says who
│   ├── LockHeld              wait until the lock expires, or have it released
│   ├── HandoverNeeded        say handover=True if that is meant
│   ├── FormerQuery           the owner was handed over from this query: use a new checkpoint
│   ├── InUse                 another process has it open: wait for it, or stop it
│   ├── LakeRefused           the lake has something else, or was altered from outside
│   ├── AccessRefused         a server wants another token, or TLS
│   └── AccessDenied          ZooKeeper wants other credentials
├── Retryable                 nothing was changed; try again
│   ├── StorageUnavailable    the store did not take the write, for certain
│   ├── StorageFull           no room; goes on when there is
│   ├── Unavailable           ZooKeeper did not answer within the deadline
│   ├── ServerUnavailable     no tablet server answered within the deadline
│   ├── Overloaded            the server is at one of its limits
│   │   └── TooManyScanners   of scanners: per bucket, or in all
│   └── StagedPutLost         the server no longer has what was uploaded of a large put
├── StartOver                 what you held is another's by now: acquire, connect or open again
│   ├── SessionLost           the ZooKeeper session is gone
│   ├── Deposed               another leader has taken the bucket
│   ├── NotLeader             this server does not lead the bucket, or not at that term
│   ├── NotFenced             the leader does not know this writer
│   ├── StaleLeaders          a server that answered is gone
│   └── TornPut               some parts of a put were written, and the rest cannot be
├── Expired                   what you read from is not kept for you any more: begin again
│   ├── UnknownLease          expired, dropped or never there
│   ├── CutTooOld             the log that a cut needs was cleaned
│   └── UnknownOrExpiredScannerError  closed, not used in time, or its bucket moved
├── TooLate                   nobody waits for this call any more: do nothing
│   ├── NotReady              a batch before the recovery of its epoch is over
│   ├── RecoveryOver          a debt that is paid after recovery ended
│   └── SealedBatch           rows that come after their batch was sealed
├── Fenced                    a newer epoch holds the lock: stop for good
│   ├── OldEpoch              a leader says so
│   ├── LakeTaken             another tiering job has committed to the lake
│   └── Superseded            a later leader has the bucket's snapshots
├── UnknownOutcome            it may or may not have happened: ask again and see
├── Corrupt                   restore what is damaged from a copy, or upgrade
│   ├── CorruptSegment        a log segment, or a promised batch
│   ├── CorruptSnapshot       a KV snapshot; take another one
│   ├── CorruptLake           the log of a copy in a lake, or a deletion vector
│   ├── CorruptTable          what an embedded table says about itself
│   ├── CorruptView           a RocksDB directory; it is rebuilt from the log
│   ├── CorruptRecord         a znode, or the locks of an embedded table
│   ├── LogGap                segments that are needed are missing
│   └── UnknownFormat         written by a newer version; upgrade
│       └── UnknownSchema     written under a later schema; read the definition again
├── AlreadyExists             the object store has an object of this name
├── MissingObject             the object store has none of this name
├── ServerFailed              a bug or a broken machine: the server's log says more
├── ServerNotStarted          ZooKeeper or a server did not come up: the message says why
└── UsedAfterFork             a forked process: start it by spawn, or connect in it
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType


class TallybookError(Exception):
    """Base of everything that Tallybook raises on purpose."""


# --- Fix the call ---------------------------------------------------------------------------------


class InvalidInput(TallybookError):
    """The call was wrong and changed nothing. Fix the input."""


class SchemaError(InvalidInput):
    """A schema, column definition or option is wrong. Fix the definition."""


class UnknownCluster(InvalidInput):
    """There is no cluster below this chroot. Give the servers' own, or start a server there."""


class UnknownTable(InvalidInput):
    """There is no table of this name or id. Create it, or fix the name."""


class TableExists(InvalidInput):
    """There is a table of this name already. Use it, drop it, or choose another name."""


class TableAltered(InvalidInput):
    """Somebody altered the table since you looked. Look again, and decide again."""


class UnknownColumn(InvalidInput):
    """The table has no such column. Fix the name, or add the column to the table."""


class MissingColumn(InvalidInput):
    """A key column, or a column that the function orders by, is not in the batch. Add it."""


class InvalidColumns(InvalidInput):
    """No column at all, or one of the primary key, which nobody owns. Fix the list."""


class WrongColumns(InvalidInput):
    """A column that the writer's lock, or the debt it pays, does not have. Fix the call."""


class WrongType(InvalidInput):
    """A column has another type than declared and no lossless cast exists. Cast it first."""


class InvalidKey(InvalidInput):
    """A null in a key, or text that is not UTF-8. Filter such rows out, or give them a key."""


class InvalidValue(InvalidInput):
    """A value that the column's function cannot take, or that is none of its type: text that is not
    UTF-8. Fix or filter the row.

    `encoded_key`: the row's key as the table encodes keys, for whoever wants to find its rows.
    `refused`: all keys that a merge refused, up to a bound, each with why; none if it is told of
    one row only.
    """

    encoded_key: bytes | None = None
    refused: Mapping[bytes, str] = MappingProxyType({})

    @classmethod
    def together(cls, errors: "Sequence[InvalidValue]") -> "InvalidValue":
        """Return the first of several errors, with the keys that all of them refuse."""
        first = errors[0]
        if len(errors) > 1:
            first.refused = {key: why for one in errors for key, why in one.all_refused().items()}
        return first

    def all_refused(self) -> Mapping[bytes, str]:
        """Return the keys that are known to be refused, each with why."""
        if self.refused or self.encoded_key is None:
            return self.refused
        return {self.encoded_key: str(self)}


class Overflow(InvalidValue):
    """The merged result does not fit its column. Use a wider type, or fix the row."""


class BatchTooLarge(InvalidInput):
    """More rows or bytes than one put may have. Split the batch."""


class ColumnTooLarge(BatchTooLarge):
    """Rows, or what is stored of their keys, have more bytes in one column than Arrow holds.

    Send fewer at a time. Writers and look-ups do so by themselves.
    """


class RecordTooLarge(InvalidInput):
    """A transaction that ZooKeeper would cut the connection for.

    Use fewer buckets, debts or partitions.
    """


class InvalidOwner(InvalidInput):
    """An owner id that cannot be the name of a znode. Choose another."""


class InvalidLease(InvalidInput):
    """A lease id that cannot be the name of a znode. Choose another."""


class InvalidTtl(InvalidInput):
    """A time to live out of range. Choose one within it."""


class RewoundBatch(InvalidInput):
    """A batch below the last committed one, or another batch of the same number.

    Its source or its checkpoint was set back: use those that belong to the table.
    """


class OffsetOutOfRange(InvalidInput):
    """The log does not have this offset: cleaned already, or not written yet. Start elsewhere."""


class MissingSnapshot(InvalidInput):
    """There is no such snapshot: dropped already, or never finished. Take another one."""


class PartitionGone(InvalidInput):
    """A partition was dropped meanwhile, and perhaps made anew. Send the call again."""


class Closed(InvalidInput):
    """The handle was closed. Open the table or bucket again."""


class BadRequest(InvalidInput):
    """A request that cannot be read: cut short, too large, or of another version."""


# --- Wait, or ask otherwise -----------------------------------------------------------------------


class Refused(TallybookError):
    """It is not to be had now, or not by you. The message says whose it is and the way out."""


class LockHeld(Refused):
    """A live lock is in the way. Wait until it expires, or release it; a drop can be forced."""


class HandoverNeeded(Refused):
    """Another owner, or another query of this one, committed last. Say handover=True if meant."""


class FormerQuery(Refused):
    """This query has written for an owner that was handed over since. Use a new checkpoint."""


class InUse(Refused):
    """Another process has this table, bucket or directory of views. Wait for it, or stop it."""


class LakeRefused(Refused):
    """The lake has something else than a copy of this table, or somebody else has altered it.

    Choose another path, or have the copy made anew there (`begin_again`).
    """


class AccessRefused(Refused):
    """The token is missing or wrong, or TLS does not fit. Give what the server wants."""


class AccessDenied(Refused):
    """ZooKeeper does not let these credentials do this, or wants some. Give the cluster's."""


# --- Try again ------------------------------------------------------------------------------------


class Retryable(TallybookError):
    """Nothing was changed. Try again."""


class StorageUnavailable(Retryable):
    """The store did not take the write, and it is certain that it did not. Try again."""


class StorageFull(Retryable):
    """There is no room on the device. Make room and try again; nothing needs a restart."""


class Unavailable(Retryable):
    """ZooKeeper did not answer within the deadline, and nothing was changed. Try again."""


class ServerUnavailable(Retryable):
    """No server answered within the deadline, and nothing was changed. Try again."""


class Overloaded(Retryable):
    """The server is at its limit of puts or bytes in flight, or stops. Try again later."""


class TooManyScanners(Overloaded):
    """The bucket or the server has as many scanners as it may. Close one, or try again later."""


class StagedPutLost(Retryable):
    """The server no longer has what was uploaded of a large put. Start over."""


# --- Acquire, connect or open again ---------------------------------------------------------------


class StartOver(TallybookError):
    """What this handle, session or epoch held is another's by now. Acquire or open again."""


class SessionLost(StartOver):
    """The ZooKeeper session is gone, and with it this handle. Connect again.

    A write that was under way may have happened: acquire again, and look at the record.
    """


class Deposed(StartOver):
    """Another leader appended to this bucket's log. Stop using this handle; open a new one."""


class NotLeader(StartOver):
    """This server does not lead the bucket, or leads it at another term. Find the leader."""


class NotFenced(StartOver):
    """The leader was never told of this writer. Acquire again, recover, and run the batch again."""


class StaleLeaders(StartOver):
    """A server that answered no longer has its session. Start over under a new epoch."""


class TornPut(StartOver):
    """Some parts of a put were written, and the rest cannot be. Start over, which undoes them."""


# --- Begin to read again --------------------------------------------------------------------------


class Expired(TallybookError):
    """What you read from is not kept for you any more. Begin again, with the latest."""


class UnknownLease(Expired):
    """The lease expired, was dropped or never was: what it held may be gone by now.

    Acquire again, the latest snapshots, and begin anew with them.
    """


class CutTooOld(Expired):
    """The log no longer has what came after this cut. Take another one, and begin again.

    To read from a cut for longer than the log is kept, hold a lease while you do.
    """


class UnknownOrExpiredScannerError(Expired):
    """The scanner was closed, not used in time, or its bucket moved. Begin the scan again."""


# --- Do nothing -----------------------------------------------------------------------------------


class TooLate(TallybookError):
    """A call that nobody waits for any more, and that changed nothing. Do nothing."""


class NotReady(TooLate):
    """A batch of this epoch before its recovery is over. Pay the debts and read the ends first."""


class RecoveryOver(TooLate):
    """A debt that is paid after recovery ended. Whoever sent it is no longer waited for."""


class SealedBatch(TooLate):
    """A batch that is sealed takes no more rows. Whoever sent them is no longer waited for."""


# --- Stop for good --------------------------------------------------------------------------------


class Fenced(TallybookError):
    """A newer epoch holds this owner's lock, or nobody does. Stop for good.

    A commit that was under way may have been the last thing before: its batch is in the record.
    """


class OldEpoch(Fenced):
    """A leader knows of a newer epoch of the owner or one of its columns. Stop for good."""


class LakeTaken(Fenced):
    """Another tiering job has committed to the same lake. Stop; let one of them go on."""


class Superseded(Fenced):
    """A later leader has the bucket's list of snapshots, or nobody does any more. Stop.

    A change that was under way may have been the last thing before: whoever has the list sees it.
    """


# --- Find out -------------------------------------------------------------------------------------


class UnknownOutcome(TallybookError):
    """It may or may not have happened. Call again, with the same token, or look at the record."""


# --- Restore --------------------------------------------------------------------------------------


class Corrupt(TallybookError):
    """Stored bytes are damaged. Restore from a snapshot, or rebuild the view from the log."""


class CorruptSegment(Corrupt):
    """A log segment does not match its checksum. Restore it from a copy of the log."""


class CorruptSnapshot(Corrupt):
    """A snapshot's manifest or one of its files is damaged or gone. Take another snapshot."""


class CorruptLake(Corrupt):
    """A lake's own account of its files is damaged. Restore it from a copy, or begin again."""


class CorruptTable(Corrupt):
    """An embedded table's own description is damaged. Restore the object from a copy."""


class CorruptView(Corrupt):
    """The RocksDB view is damaged. Remove its directory: it is rebuilt from the log."""


class CorruptRecord(Corrupt):
    """A znode, or the locks of an embedded table, are damaged. Upgrade, or restore the bytes."""


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


# --- What an object store says: whoever asked it decides ------------------------------------------


class AlreadyExists(TallybookError):
    """There is an object of this name already. Whoever creates one decides whose it is."""


class MissingObject(TallybookError):
    """There is no object of this name. Whoever reads one decides whether it should be there."""


# --- Look into it ---------------------------------------------------------------------------------


class ServerFailed(TallybookError):
    """The server failed in a way that it did not foresee. Its log has the traceback."""


class ServerNotStarted(TallybookError):
    """ZooKeeper, or a server, did not start. The message says what is missing."""


class UsedAfterFork(TallybookError):
    """This process was forked from one that used Tallybook. Start it by spawn, or connect in it."""
