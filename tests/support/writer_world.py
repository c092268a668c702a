"""The world of the writer tests: real writers, locks, buckets and logs, and what befalls them.

Everything runs in one thread. At every failpoint of a writer, and before every call to a server,
the world may change as it was told to: a leader moves, a lock expires, somebody else takes over, an
old call arrives, the process dies. Owners, servers and late calls are as many as one likes.
"""

import os
import shutil
import tempfile
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pyarrow as pa

from foundation.errors import Closed, Deposed, Fenced, LockHeld, OldEpoch, TallybookError
from foundation.failpoints import arm
from foundation.ids import BucketId
from locks.column_locks.locks import ColumnLocks
from locks.column_locks.record_codec import decode_record
from locks.column_locks.records import LockRecord
from locks.coordinator import Coordinator
from locks.store.memory import MemoryCoordination, MemoryStore
from locks.store.paths import owners_path
from merge_engine.bucket.bucket import Bucket
from merge_engine.bucket.options import BucketOptions
from merge_engine.bucket.results import BucketResult
from merge_engine.encoding.keys import KeyCodec
from merge_engine.merging.hashing import bucket_of
from recovery.leader.led_bucket import LedBucket
from recovery.reader.bucket_scan import open_scan
from recovery.reader.changes import open_changes_between
from recovery.reader.committed_lookup import Asked, committed_lookup
from recovery.reader.cut import Cut
from recovery.reader.isolation import committed_changes
from recovery.writer.access import Answers, Grant, GrantedRows, Tried
from recovery.writer.redo import PromiseWriter, RedoLog
from recovery.writer.rows import Rows
from recovery.writer.table_writer import CURABLE, TableWriter
from tests.support.catalog_access import history_of
from tests.support.memory_log import MemoryLog
from tests.support.works import PutBy
from tests.support.writer_access import ReaderStore, Server, WorldAccess, WorldStore
from tests.support.writer_model import Cells, Content, Key, Model
from tests.support.writer_table import BUCKETS, COLUMNS, definition, rows_of

TTL_MS = 10_000
# For what ends after as many attempts as were planned, however slow the machine is.
DEADLINE_S = 60.0
FAILPOINTS = [
    f"writer.{name}"
    for name in (
        *("acquired", "fenced", "undone", "paid", "recovered", "ready", "redo_written", "prepared"),
        *("before_put", "put", "sealed", "committed"),
    )
]
# Between two parts of a put, its bucket is free.
BETWEEN_PARTS = "put.part_written"
_OPTIONS = BucketOptions(write_buffer_bytes=1 << 20, block_cache_bytes=1 << 20)
STOPPED = (Fenced, OldEpoch, *CURABLE)
"""How a writer ends that was succeeded, or that nothing could cure in time."""


class Crash(BaseException):
    """The writer's process dies here."""


class World:
    """A table, its servers, and everything that may happen to them. Close it at the end."""

    def __init__(
        self, *, partitioned: bool = False, small_parts: bool = False, small_undos: bool = False
    ) -> None:
        """`small_parts`: every row of a batch is a part of its own.

        `small_undos`: a call of undo takes one step per bucket, of one segment.
        """
        self.partitioned = partitioned
        self.small_parts = small_parts
        self.small_undos = small_undos
        self.directory = Path(tempfile.mkdtemp(prefix="tallybook-writer-", dir=_in_memory()))
        self.shared = MemoryCoordination()
        self.model = Model()
        self.plan: deque[tuple[int, Callable[[], object]]] = deque()
        self.crash_at: str | None = None
        self.losses: deque[str] = deque()
        self.late: list[tuple[str, Callable[[], object]]] = []
        self.keep_calls = True
        self.logs: dict[BucketId, MemoryLog] = {}
        self.redo_storage = MemoryLog()
        self.leads: dict[BucketId, Server] = {}
        self.zombies: dict[BucketId, Server] = {}
        self.accesses: list[WorldAccess] = []
        self.scans: list[tuple[BucketId, int, Cells]] = []
        self.cuts: list[tuple[Cut, Cells]] = []
        self._opened: list[LedBucket] = []
        self._promising: list[TableWriter] = []
        self._cache = _OPTIONS.to_cache()
        self._memory = _OPTIONS.to_memory()
        self._views = 0
        self._stack = ExitStack()
        self._stack.enter_context(mock.patch("recovery.writer.table_writer.Renewal"))
        for name in (*FAILPOINTS, BETWEEN_PARTS):
            self._stack.enter_context(arm(name, partial(self.step, name)))
        self.coordinator = Coordinator(self.connect(quiet=True))
        self.table = self.coordinator.tables.create("t", definition(partitioned))
        self.schema = history_of(self.table).current
        self.names = {column.id: column.name for column in self.schema.value_columns}

    def close(self) -> None:
        self._stack.close()
        for led in self._opened:
            led.bucket.close()
        shutil.rmtree(self.directory)

    # --- Steps, and what happens between them ---------------------------------------------------

    def step(self, failpoint: str | None = None) -> None:
        """Something may happen here: what was planned, after as many steps as it says."""
        if failpoint is not None and failpoint == self.crash_at:
            self.crash_at = None
            self.crash()
        if not self.plan:
            return
        steps, act = self.plan[0]
        if steps > 0:
            self.plan[0] = (steps - 1, act)
            return
        self.plan.popleft()
        rest, self.plan = self.plan, deque()  # Whoever acts is not acted upon.
        try:
            act()
        finally:
            self.plan = rest

    def run(self, call: Callable[[], Any], *plan: tuple[int, Callable[[], object]]) -> Any:
        """Call, and let happen what is planned on the way; the rest of it is dropped."""
        self.plan = deque(plan)
        try:
            return call()
        finally:
            self.plan = deque()
            self.losses.clear()
            for log in (*self.logs.values(), self.redo_storage):
                log.faults.clear()

    @staticmethod
    def crash() -> None:
        raise Crash

    def expire(self) -> None:
        """Let all locks expire that are not renewed."""
        self.shared.advance(TTL_MS)

    def hand_over(self, number: int) -> None:
        """Let a leader close a bucket and another one take it."""
        key = self._led_key(number)
        if key is not None:
            self.leads[key].buckets[key].bucket.close()
            self._lead(key, self.new_server())

    def lose_server(self, number: int, *, zombie: bool) -> None:
        """End a server's session; others lead its buckets. A zombie answers those that know it."""
        key = self._led_key(number)
        if key is None:
            return
        lost, heir = self.leads[key], self.new_server()
        lost.store.close()
        for other in [other for other, server in self.leads.items() if server is lost]:
            if zombie:
                self.zombies[other] = lost
                for access in self.accesses:
                    access.believes[other] = lost
            else:
                lost.buckets[other].bucket.close()
            self._lead(other, heir)

    def deliver(self, number: int = 0) -> None:
        """Let an old call arrive; whatever it is told, nobody listens."""
        if self.late:
            _, call = self.late.pop(number % len(self.late))
            keeping, self.keep_calls = self.keep_calls, False
            try:
                with self._without_faults():
                    call()
            except TallybookError:
                return
            finally:
                self.keep_calls = keeping

    def deliver_only(self, *names: str) -> None:
        """Let old calls of these names arrive, in their order; the others never do."""
        self.late = [(name, call) for name, call in self.late if name in names]
        while self.late:
            self.deliver()

    def deliver_segments(self) -> None:
        """Let the creates that timed out happen after all, where the name is still free."""
        for log in (*self.logs.values(), self.redo_storage):
            log.deliver_late()

    @contextmanager
    def _without_faults(self) -> Iterator[None]:
        """The faults are meant for the writers' calls."""
        faults = [(log, log.faults) for log in self.logs.values()]
        for log, _ in faults:
            log.faults = []
        try:
            yield
        finally:
            for log, pending in faults:
                log.faults = pending

    def fail_storage(self, number: int, fault: str) -> None:
        """Let the next create in a bucket's log, or in the redo log, go wrong."""
        logs = [*self.logs.values(), self.redo_storage]
        logs[number % len(logs)].faults.append(fault)

    # --- Sessions and leaders -------------------------------------------------------------------

    def connect(self, *, quiet: bool = False) -> MemoryStore:
        return WorldStore(self, quiet)

    def new_server(self) -> Server:
        store = self.connect(quiet=True)
        coordinator = Coordinator(store)
        return Server(store, coordinator, coordinator.servers.register("here").name)

    def leader_of(self, key: BucketId) -> Server:
        """Return who leads; a new bucket is led by whoever leads another one of its partition."""
        if key not in self.leads:
            others = [s for other, s in self.leads.items() if other.number == key.number]
            self._lead(key, others[0] if others else self.new_server())
        return self.leads[key]

    def _lead(self, key: BucketId, server: Server) -> None:
        self._views += 1
        with self._without_faults():  # Else it would try again.
            bucket = Bucket(
                self.logs.setdefault(key, MemoryLog()),
                self.directory / str(self._views),
                history_of(self.table),
                identity=f"{key}",
                options=_OPTIONS,
                cache=self._cache,
                memory=self._memory,
            )
        self.leads[key] = server
        server.buckets[key] = LedBucket(bucket, key)
        self._opened.append(server.buckets[key])

    def _led_key(self, number: int) -> BucketId | None:
        return sorted(self.leads)[number % len(self.leads)] if self.leads else None

    # --- Reading --------------------------------------------------------------------------------

    def cells(self) -> Cells:
        """Return all that the leaders' scans show; no row of theirs may be without a value."""
        cells: Cells = {}
        for key, server in self.leads.items():
            for batch in server.buckets[key].bucket.scan():
                for row in batch.to_pylist():
                    at = (row.get("p", 0), row["k"])
                    values = {(at, c): row[c] for c in COLUMNS if row[c] is not None}
                    assert values, f"a ghost row {at}"
                    assert not values.keys() & cells.keys()
                    cells.update(values)
        return cells

    def take_cut(self) -> None:
        """Take a cut, while the world goes its way; `read_cut` says whether it is a good one.

        What it must show is noted record by record, as these are read: of the columns that an owner
        has, what is committed then. In the manner of the executable specification.
        """
        expected: Cells = {}
        pinned: dict[str, set[str]] = {}

        def begun() -> None:
            nonlocal expected, pinned
            records = self.records()
            expected = self.model.visible(records)
            pinned = {
                owner: {self.names[column] for column in record.pinned}
                for owner, record in records.items()
            }

        def read(owner: str) -> None:
            nonlocal expected
            now, pins = self.model.visible(self.records()), pinned.get(owner, set())
            expected = {cell: value for cell, value in expected.items() if cell[1] not in pins}
            expected |= {cell: value for cell, value in now.items() if cell[1] in pins}

        store = ReaderStore(self, begun, read)
        cut = Cut.of_locks("t", ColumnLocks(store, DEADLINE_S).read(self.table))
        store.close()
        assert Cut.of(str(cut)) == cut
        self.cuts.append((cut, expected))

    def read_cut(self, at: int = -1) -> None:
        """Scan and look up all buckets at a cut, each when its turn comes."""
        cut, expected = self.cuts[at]
        cells: Cells = {}
        for key in sorted(self.leads):
            self.step()
            if key in self.zombies:
                with suppress(Deposed, Closed):
                    open_scan(self.zombies[key].buckets[key].bucket, cut.at(key)).close()
                    raise AssertionError("one that was deposed has answered")
            bucket = self.leads[key].buckets[key].bucket
            scan = open_scan(bucket, cut.at(key))
            shown = [
                row
                for part in scan.batches(self.schema.value_columns)
                for row in part.data.to_pylist()
            ]
            scan.close()
            cells |= self._cells_of(shown)
            every = [row for batch in bucket.scan() for row in batch.to_pylist()] + shown
            asked = [
                pa.array([row[column.name] for row in every], column.type)
                for column in self.schema.key_columns
            ]
            [found] = committed_lookup(
                [Asked(bucket, cut.at(key), asked)], self.schema.value_columns
            )
            assert self._cells_of(found.to_pylist()) == self._cells_of(shown)
        assert cells == expected, f"a cut shows {cells}, its records say {expected}"

    @staticmethod
    def _cells_of(rows: Iterable[Mapping[str, Any]]) -> Cells:
        return {
            ((row.get("p", 0), row["k"]), c): row[c]
            for row in rows
            for c in COLUMNS
            if row[c] is not None
        }

    def check_changes(self, since: int, until: int) -> None:
        """The changes between two cuts lead from one to the other."""
        (first, cells), (last, expected) = self.cuts[since], self.cuts[until]
        cells = dict(cells)
        for key, server in self.leads.items():
            bucket = server.buckets[key].bucket
            for batch, _ in open_changes_between(bucket, first.at(key), last.at(key)).records():
                for record in batch.to_pylist():
                    at = (record.get("p", 0), record["k"])
                    for column in record["_changed_columns"]:
                        cells.pop((at, column), None)
                        shown = record["_change_type"] in ("insert", "update_postimage")
                        if shown and record[column] is not None:
                            cells[at, column] = record[column]
        assert cells == expected, f"a cut and the changes since give {cells}, not {expected}"

    def committed_stream(self, key: BucketId, cells: Cells, start: int = 0) -> tuple[int, Cells]:
        """Apply the committed changes from an offset on; return where they end, and the cells."""
        bucket = self.leads[key].buckets[key].bucket
        changes = committed_changes(bucket, key, self.read_records, start)
        cells = dict(cells)
        *partition, k = (column.id for column in self.schema.key_columns)
        for segment in changes:
            for column, change in segment.changes.items():
                ps = segment.keys[partition[0]].to_pylist() if partition else [0] * 1_000
                rows = zip(ps, segment.keys[k].to_pylist(), change.touched_after, strict=False)
                for at, after in zip(rows, change.after.to_pylist(), strict=False):
                    cells.pop(((at[0], at[1]), self.names[column]), None)
                    if at[2]:
                        cells[(at[0], at[1]), self.names[column]] = after
        return changes.end, cells

    def read_records(self) -> Mapping[str, LockRecord]:
        return self.coordinator.locks.records(self.table)

    # --- Records --------------------------------------------------------------------------------

    def records(self) -> dict[str, LockRecord]:
        prefix = owners_path(self.table.table_id) + "/" if hasattr(self, "table") else "-"
        found = {
            path.removeprefix(prefix): decode_record(node.data)
            for path, node in self.shared.nodes.items()
            if path.startswith(prefix)
        }
        return {owner: record for owner, record in found.items() if not record.blank}

    def transact(self, apply: Callable[[], None]) -> None:
        before = self.records()
        apply()
        self.model.observe(before, self.records())

    # --- Writers --------------------------------------------------------------------------------

    def writer(
        self, owner: str, columns: str, *, redo: bool = False, **settings: Any
    ) -> TableWriter:
        """Return a writer that is not started. With `redo`, its batches are promised first."""
        access = WorldAccess(self)
        self.accesses.append(access)
        usual = {"handover": True, "ttl_ms": TTL_MS, "deadline_s": 0.9, "pause": lambda _: None}
        object_bytes = 1 if self.small_parts else 1_000_000
        log = RedoLog(self.redo_storage, object_bytes=object_bytes) if redo else None
        writer = TableWriter(access, owner, list(columns), redo=log, **{**usual, **settings})
        if redo:
            self._promising.append(writer)
        return writer

    def promises(self, writer: TableWriter) -> bool:
        """Whether this writer has a redo log."""
        return writer in self._promising

    def start(self, owner: str, columns: str, **settings: Any) -> TableWriter:
        return self.writer(owner, columns, **settings).start()

    def take_over(self, owner: str = "last", columns: str = COLUMNS) -> TableWriter | None:
        """Let all locks expire, and take these columns; None if something is in the way."""
        self.expire()
        with suppress(LockHeld):
            return self.start(owner, columns, redo=True)
        return None

    def scan(self) -> None:
        """Take committed scans, which `check` continues."""
        self.scans += [(key, *self.committed_stream(key, {})) for key in self.leads]

    def check(self) -> None:
        """End the world, and see whether the table is what the committed batches made of it."""
        self.settle()
        assert self.cells() == self.model.cells
        for key, offset, cells in self.scans:
            _, whole = self.committed_stream(key, {})
            assert self.committed_stream(key, cells, offset)[1] == whole, f"a scan at {offset}"
        if self.cuts:
            self.take_cut()
            for at in range(len(self.cuts)):
                self.read_cut(at)
                self.check_changes(at, -1)
                self.check_changes(max(at - 1, 0), at)

    def settle(self) -> None:
        """Take everything over; let all that is still under way arrive; and once more."""
        for _ in range(2):
            for access in self.accesses:
                access.believes.clear()
            last = self.take_over()
            assert last is not None, "what has expired is in the way of nobody"
            while self.late:
                self.deliver()
            self.deliver_segments()

    def write(
        self,
        writer: TableWriter,
        batch: int,
        content: Content,
        stray: Content | None = None,
        fingerprint: str = "",
    ) -> bool:
        """Write a batch, and hold the writer to what it says about it.

        `stray`: what another attempt of the same stage has, whose put arrives at any later time.
        """
        rows = self.rows(content)
        epochs = []

        def put(grant: Grant) -> Answers[BucketResult]:
            access = writer.access
            epochs.append(grant.writer.epoch)
            if stray:
                self.late.append(
                    ("stray", lambda: access.put(GrantedRows(grant, self.rows(stray))))
                )
            return access.put(GrantedRows(grant, rows))

        named = writer._named(rows)
        tried = partial(_try_rows, writer, named)
        written = writer.run(batch, PutBy(put, rows, tried, fingerprint))
        token = self.model.token_of(writer.owner, writer._start() + batch)
        assert token is not None, "a batch that was not committed"
        assert not written or self.promises(writer) or token.epoch in epochs, "not by this writer"
        return written

    def rows(self, content: Content) -> Rows:
        return rows_of(content, partitioned=self.partitioned)

    def bucket_of(self, key: Key) -> BucketId | None:
        """Return the bucket of a key; None if its partition does not exist: deletes create none."""
        arrays = [pa.array([part], pa.int64()) for part in (key if self.partitioned else key[1:])]
        number = int(bucket_of(arrays, BUCKETS)[0])
        if not self.partitioned:
            return BucketId(0, number)
        partition = KeyCodec([pa.int64()]).encode(arrays[:1])[0].as_py()
        found = self.coordinator.partitions.ids(self.table).get(partition)
        return None if found is None else BucketId(found, number)


def _in_memory() -> str | None:
    return "/dev/shm" if os.path.isdir("/dev/shm") else None


def _try_rows(writer: TableWriter, rows: Rows, grant: Grant, promise: PromiseWriter) -> Tried:
    return writer.access.try_put(GrantedRows(grant, rows), promise)
