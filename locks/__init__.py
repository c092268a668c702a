"""Who may do what: column locks, leases and leadership in ZooKeeper."""

from locks.column_lock import ColumnLock, LockState
from locks.coordinator import Coordinator, LockInfo
from locks.embedded import EmbeddedZooKeeper
from locks.errors import (
    AccessDenied,
    CoordinationError,
    CorruptRecord,
    Fenced,
    HandoverNeeded,
    InvalidColumns,
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
    TableAltered,
    TableExists,
    Unavailable,
    UnknownColumn,
    UnknownOutcome,
    UnknownTable,
)
from locks.fresh import FreshRecords
from locks.leaders import LeadKey
from locks.memory import MemoryCoordination, MemoryStore
from locks.offsets import BucketKey, Offsets
from locks.placement import place
from locks.records import Debt, DebtKind, LockRecord, Prepared, Token
from locks.servers import Server
from locks.store import CoordinationStore
from locks.tables import Table, TableDefinition
from locks.zookeeper import ZooKeeperStore

__all__ = [
    "AccessDenied",
    "BucketKey",
    "ColumnLock",
    "CoordinationError",
    "CoordinationStore",
    "Coordinator",
    "CorruptRecord",
    "Debt",
    "DebtKind",
    "EmbeddedZooKeeper",
    "Fenced",
    "FreshRecords",
    "HandoverNeeded",
    "InvalidColumns",
    "InvalidOwner",
    "InvalidRequest",
    "InvalidTtl",
    "LeadKey",
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
    "StaleLeaders",
    "Table",
    "TableAltered",
    "TableDefinition",
    "TableExists",
    "Token",
    "Unavailable",
    "UnknownColumn",
    "UnknownOutcome",
    "UnknownTable",
    "ZooKeeperStore",
    "place",
]
