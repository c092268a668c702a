"""What can go wrong with coordination, split by what the caller should do.

CoordinationError
├── InvalidRequest        fix the request; nothing was changed
│   ├── UnknownTable
│   ├── TableExists
│   ├── TableAltered      it is no longer as it was when you looked
│   ├── UnknownColumn
│   ├── InvalidColumns    none, or one of the primary key
│   ├── InvalidOwner      an owner id that ZooKeeper cannot hold
│   ├── InvalidLease      a lease id that ZooKeeper cannot hold
│   ├── InvalidTtl
│   ├── RewoundBatch      a batch older than the last committed one
│   └── RecordTooLarge
├── Refused               somebody else has, or last had, the columns
│   ├── LockHeld          wait until it expires, or have it released
│   └── HandoverNeeded    say handover=True if that is meant
├── Fenced                a newer epoch holds the lock: stop for good
├── Superseded            a later leader has the bucket's snapshots: stop
├── UnknownLease          expired, dropped or never there: acquire again, the latest snapshots
├── StaleLeaders          a server that answered is gone: start over under a new epoch
├── Unavailable           no answer within the deadline; nothing was changed; try again
├── UnknownOutcome        the write may have happened; read the record before anything else
├── SessionLost           this connection's session is gone: connect again
├── AccessDenied          ZooKeeper refuses these credentials, or wants some
├── CorruptRecord         a znode that this release cannot read
└── ServerNotStarted      the embedded ZooKeeper: no Java, no jars, no port
"""


class CoordinationError(Exception):
    """Base of everything that the coordinator raises on purpose."""


class InvalidRequest(CoordinationError):
    """The request was wrong and changed nothing. Fix it."""


class UnknownTable(InvalidRequest):
    """There is no table of this name or id. Create it, or fix the name."""


class TableExists(InvalidRequest):
    """There is a table of this name already. Use it, drop it, or choose another name."""


class TableAltered(InvalidRequest):
    """Somebody altered the table since you looked. Look again, and decide again."""


class UnknownColumn(InvalidRequest):
    """The table has no such column. Fix the name, or add the column to the table."""


class InvalidColumns(InvalidRequest):
    """No column at all, or one of the primary key, which nobody owns. Fix the list."""


class InvalidOwner(InvalidRequest):
    """An owner id that cannot be the name of a znode. Choose another."""


class InvalidLease(InvalidRequest):
    """A lease id that cannot be the name of a znode. Choose another."""


class InvalidTtl(InvalidRequest):
    """A time to live out of range. Choose one within it."""


class RewoundBatch(InvalidRequest):
    """A batch at or below the last committed one. Skip it, or find out why it came back."""


class RecordTooLarge(InvalidRequest):
    """A transaction that ZooKeeper would cut the connection for.

    Use fewer buckets, debts or partitions.
    """


class Refused(CoordinationError):
    """The columns are not to be had now. The message says whose they are and the way out."""


class LockHeld(Refused):
    """A live lock is in the way. Wait until it expires, or release it; a drop can be forced."""


class HandoverNeeded(Refused):
    """Another owner, or another query of this one, committed last. Say handover=True if meant."""


class Fenced(CoordinationError):
    """A newer epoch holds this owner's lock, or nobody does. Stop for good.

    A commit that was under way may have been the last thing before: its batch is in the record.
    """


class Superseded(CoordinationError):
    """A later leader has the bucket's list of snapshots, or nobody does any more. Stop.

    A change that was under way may have been the last thing before: whoever has the list sees it.
    """


class UnknownLease(CoordinationError):
    """The lease expired, was dropped or never was: what it held may be gone by now.

    Acquire again, the latest snapshots, and begin anew with them.
    """


class StaleLeaders(CoordinationError):
    """A server that answered no longer has its session. Start over under a new epoch."""


class Unavailable(CoordinationError):
    """ZooKeeper did not answer within the deadline, and nothing was changed. Try again."""


class UnknownOutcome(CoordinationError):
    """A write was sent and never answered. Read the record before anything else."""


class SessionLost(CoordinationError):
    """The ZooKeeper session is gone, and with it this handle. Connect again.

    A write that was under way may have happened: acquire again, and look at the record.
    """


class CorruptRecord(CoordinationError):
    """A znode holds bytes of another format or damaged ones. Upgrade, or restore it."""


class AccessDenied(CoordinationError):
    """ZooKeeper does not let these credentials do this, or wants some. Give the cluster's."""


class ServerNotStarted(CoordinationError):
    """The embedded ZooKeeper did not start. The message says what is missing."""
