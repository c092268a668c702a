"""The handle of a column lock: what its holder may do with it.

Every call is one conditional write of the lock record, so a holder that was fenced fails on its
next call, whatever that is. The life of a handle goes one way:

    ACQUIRED ── ready ──▶ READY ── release ──▶ ENDED
        └────────────────────┴──── abandon ──▶ ENDED
        └────────────────────┴── found out ──▶ FENCED
"""

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from enum import Enum
from typing import Any

from foundation.deadlines import deadline_in, remaining
from foundation.errors import Fenced, InvalidInput, RewoundBatch, StaleLeaders, Unavailable
from foundation.ids import BucketId, Token
from locks.column_locks.acquisition import NAMED_WRITE
from locks.column_locks.record_codec import decode_node, encode_record
from locks.column_locks.records import GIVEN_UP, Debt, LockRecord, Prepared, new_stamp
from locks.encoding.offsets import Offsets
from locks.store.base import Check, Conflict, CoordinationStore, Write
from locks.store.paths import owner_path, server_path
from locks.store.retrying import retried

logger = logging.getLogger(__name__)

_Fields = Mapping[str, Any]


class LockState(Enum):
    """Where a handle is in its life."""

    ACQUIRED = "acquired"
    READY = "ready"
    ENDED = "ended"
    FENCED = "fenced"


class ColumnLock:
    """A lock on columns of a table, held by one incarnation of an owner. Safe for threads.

    A call whose outcome could not be found out within the deadline raises UnknownOutcome; the next
    one begins by reading what came of it.
    """

    def __init__(
        self,
        store: CoordinationStore,
        *,
        deadline_s: float,
        table_id: int,
        owner: str,
        record: LockRecord,
        version: int,
    ) -> None:
        self._store = store
        self._deadline_s = deadline_s
        self._path = owner_path(table_id, owner)
        self._record = record
        self._version = version
        self._written_s = time.monotonic()  # When the record was written, as far as known here.
        self._in_doubt = False  # Whether the node may be other than `_record` and `_version` say.
        self._end: LockState | None = None
        self._fenced_why = ""
        self._mutex = threading.Lock()
        self.table_id = table_id
        self.owner = owner
        self.epoch = record.epoch

    @property
    def state(self) -> LockState:
        """Where this handle is in its life, as far as is known here."""
        return self._end or (LockState.READY if self._record.ready else LockState.ACQUIRED)

    @property
    def columns(self) -> tuple[int, ...]:
        """The ids of the locked columns."""
        return self._record.columns

    @property
    def debts(self) -> tuple[Debt, ...]:
        """What is to be paid before `ready`."""
        return self._record.debts

    @property
    def batch(self) -> int:
        """The last committed batch; -1 if there is none."""
        return self._record.batch

    @property
    def record(self) -> LockRecord:
        """The record as this holder last wrote or read it."""
        return self._record

    def check(self) -> None:
        """Ask ZooKeeper, with sync, whether the lock is still ours; Fenced if not."""
        with self._alone():
            self._guard(LockState.ACQUIRED, LockState.READY)
            self._store.sync()
            self._refresh()

    def ready(self, offsets: Mapping[BucketId, int], servers: Iterable[str]) -> None:
        """Say that all debts are paid; the log ends, read after the fences, are the baseline.

        `servers`: the sessions that answered; StaleLeaders if one of them is gone.
        """
        ends = Offsets(offsets)

        def change() -> _Fields:
            self._guard(LockState.ACQUIRED)
            return {"ready": True, "offsets": ends, "debts": ()}

        self._update(change, servers)

    def renew(self) -> None:
        """Start the TTL anew."""

        def change() -> _Fields:
            self._guard(LockState.ACQUIRED, LockState.READY)
            return {}

        self._update(change)

    def prepare(self, batch: int, location: str, *, fingerprint: str = "") -> None:
        """Redo: the folded batch lies at `location` and fits; from here on it will be applied."""

        def change() -> _Fields:
            self._guard(LockState.READY)
            self._check_batch(batch)
            return {"prepared": Prepared(Token(self.epoch, batch), location, fingerprint)}

        self._update(change)

    def commit(
        self,
        batch: int,
        offsets: Mapping[BucketId, int],
        servers: Iterable[str],
        *,
        fingerprint: str = "",
    ) -> None:
        """Commit the batch: the commit point of all that was written for it; renews the TTL.

        `offsets`: the log ends of all buckets, as sealed. `servers`: the sessions that answered;
        StaleLeaders if one of them is gone, and nothing is committed. `fingerprint`: tells this
        batch from another that comes under its number.
        """
        ends = Offsets(offsets)

        def change() -> _Fields:
            self._guard(LockState.READY)
            self._check_batch(batch)
            record = self._record
            committed = {**record.committed, **dict.fromkeys(record.columns, record.epoch)}
            fields = {"batch": batch, "offsets": ends, "prepared": None, "committed": committed}
            return {**fields, "fingerprint": fingerprint, "idle_ms": 0}

        self._update(change, servers)

    def release(self) -> None:
        """Free the columns; the batch number stays. Only with nothing uncommitted: else abandon."""

        def change() -> _Fields:
            self._guard(LockState.READY)
            prepared = self._record.prepared
            if prepared is not None:
                raise InvalidInput(
                    f"batch {prepared.token.batch} of `{self.owner}` is prepared and not "
                    "committed: commit it, or abandon the lock"
                )
            return GIVEN_UP

        self._update(change, end=LockState.ENDED)

    def abandon(self) -> None:
        """Give the lock up for takeover, with tail and debts in place for the next to pay."""

        def change() -> _Fields:
            self._guard(LockState.ACQUIRED, LockState.READY)
            return {"abandoned": True}

        self._update(change, end=LockState.ENDED)

    def _guard(self, *allowed: LockState) -> None:
        if self.state is LockState.FENCED:
            raise Fenced(self._fenced_why)
        if self.state not in allowed:
            expected = " or ".join(state.value for state in allowed)
            raise InvalidInput(
                f"the lock of `{self.owner}` (epoch {self.epoch}) is {self.state.value}, "
                f"not {expected}"
            )

    def _check_batch(self, batch: int) -> None:
        record = self._record
        if batch == record.batch:
            raise RewoundBatch(
                f"batch {batch} of `{self.owner}` is committed already: a replay; skip it"
            )
        if batch < record.batch:
            raise RewoundBatch(
                f"batch {batch} of `{self.owner}` comes after batch {record.batch} was committed: "
                "its source was rewound. Start from the checkpoint that belongs to this table, or "
                "under a new owner id with handover=True"
            )
        prepared = record.prepared
        if prepared is not None and prepared.token.batch != batch:
            raise InvalidInput(
                f"batch {prepared.token.batch} of `{self.owner}` is prepared and has to be "
                f"committed before batch {batch}"
            )
        counts = not self.owner.startswith(NAMED_WRITE)  # Else numbers are what people like.
        if counts and prepared is None and batch > record.batch + 1:
            before = "is the first that it commits"
            if record.batch >= 0:
                before = f"follows batch {record.batch}"
            start = ""
            if record.query_start:
                start = f" (its query's batch 0 is batch {record.query_start})"
            logger.warning(
                "batch %d of %s %s%s: its source left some out, or counts differently",
                *(batch, self.owner, before, start),
            )

    def _update(
        self,
        change: Callable[[], _Fields],
        servers: Iterable[str] = (),
        end: LockState | None = None,
    ) -> None:
        """Write the record with changed fields, if it is still ours and the servers are alive.

        All attempts of a call have one stamp, so whichever of them took effect is recognised. `end`
        is the state of the handle from there on.
        """
        stamp = new_stamp()
        checks = [Check(server_path(server)) for server in dict.fromkeys(servers)]

        def attempt() -> None:
            if self._in_doubt:
                self._refresh(stamp)
            if self._record.stamp == stamp:
                return
            fields = {"abandoned": False, "stamp": stamp, **change()}
            now_s = time.monotonic()
            aged = self._record.aged(int(1000 * (now_s - self._written_s)))
            changed = replace(aged, **fields)
            write = Write(self._path, encode_record(changed), self._version)
            self._in_doubt = True
            try:
                self._store.transact([write, *checks])
            except Conflict as conflict:
                if conflict.path != self._path:
                    raise StaleLeaders(
                        f"server {conflict.path.rpartition('/')[2]} is gone, and what it answered "
                        f"to `{self.owner}` counts for nothing; start over"
                    ) from conflict
                raise
            self._record, self._version, self._in_doubt = changed, self._version + 1, False
            self._written_s = now_s

        with self._alone():
            if self._in_doubt:
                self._store.sync()
            retried(self._store, self._deadline_s, attempt)
            self._end = end

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """One call at a time; a thread waits for another's no longer than for ZooKeeper."""
        if not self._mutex.acquire(timeout=remaining(deadline_in(self._deadline_s))):
            raise Unavailable(
                f"another call on the lock of `{self.owner}` is still under way after "
                f"{self._deadline_s:g} s; try again"
            )
        try:
            yield
        finally:
            self._mutex.release()

    def _refresh(self, stamp: bytes | None = None) -> None:
        """Read the record again; Fenced if it is no longer ours and was not left so by `stamp`."""
        node = self._store.read(self._path)
        record = None if node is None else decode_node(self._path, node)
        ours = record is not None and record.epoch == self.epoch
        if node is None or record is None or not ours or not (record.held or record.stamp == stamp):
            self._fenced_why = self._why(record)
            self._end = LockState.FENCED
            raise Fenced(self._fenced_why)
        self._record, self._version, self._in_doubt = record, node.version, False

    def _why(self, record: LockRecord | None) -> str:
        now = "is gone: forgotten, or its table was dropped"
        if record is not None and not record.blank:
            now = "was taken over or released"
            if record.held:
                now = f"was acquired again, with epoch {record.epoch}"
        return f"the lock of `{self.owner}` (epoch {self.epoch}) {now}; stop for good"
