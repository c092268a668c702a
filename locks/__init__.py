"""Who may do what: column locks, leases and leadership in ZooKeeper."""

from locks.column_lock import ColumnLock, LockState
from locks.coordinator import Coordinator, LockInfo
from locks.dropped import DroppedTable
from locks.embedded import EmbeddedZooKeeper
from locks.errors import (
    AccessDenied,
    CoordinationError,
    CorruptRecord,
    Fenced,
    HandoverNeeded,
    InvalidColumns,
    InvalidLease,
    InvalidOwner,
    InvalidRequest,
    InvalidTtl,
    LockHeld,
    RecordTooLarge,
    Refused,
    RewoundBatch,
    ServerNotStarted,
    SessionLost,
    StaleLeaders,
    Superseded,
    TableAltered,
    TableExists,
    Unavailable,
    UnknownColumn,
    UnknownLease,
    UnknownOutcome,
    UnknownTable,
)
from locks.heartbeat import Heartbeat
from locks.leaders import LeadKey
from locks.lease_records import LeaseInfo
from locks.leases import Acquired, Leases
from locks.memory import MemoryCoordination, MemoryStore
from locks.offsets import BucketKey, Offsets
from locks.placement import place
from locks.records import Debt, DebtKind, LockRecord, Prepared, Token
from locks.servers import Server
from locks.snapshot_lists import SnapshotLists
from locks.snapshot_records import ListedSnapshot, SnapshotList, SnapshotState
from locks.store import CoordinationStore
from locks.tables import Table, TableDefinition
from locks.zookeeper import ZooKeeperStore

__all__ = [
    "AccessDenied",
    "Acquired",
    "BucketKey",
    "ColumnLock",
    "CoordinationError",
    "CoordinationStore",
    "Coordinator",
    "CorruptRecord",
    "Debt",
    "DebtKind",
    "DroppedTable",
    "EmbeddedZooKeeper",
    "Fenced",
    "HandoverNeeded",
    "Heartbeat",
    "InvalidColumns",
    "InvalidLease",
    "InvalidOwner",
    "InvalidRequest",
    "InvalidTtl",
    "LeadKey",
    "LeaseInfo",
    "Leases",
    "ListedSnapshot",
    "LockHeld",
    "LockInfo",
    "LockRecord",
    "LockState",
    "MemoryCoordination",
    "MemoryStore",
    "Offsets",
    "Prepared",
    "RecordTooLarge",
    "Refused",
    "RewoundBatch",
    "Server",
    "ServerNotStarted",
    "SessionLost",
    "SnapshotList",
    "SnapshotLists",
    "SnapshotState",
    "StaleLeaders",
    "Superseded",
    "Table",
    "TableAltered",
    "TableDefinition",
    "TableExists",
    "Token",
    "Unavailable",
    "UnknownColumn",
    "UnknownLease",
    "UnknownOutcome",
    "UnknownTable",
    "ZooKeeperStore",
    "place",
]
