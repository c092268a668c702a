"""Committed reads of a bucket against a list of what was committed, in the manner of the protocol.

Owners acquire (by the rules of `locks`), write, commit, prepare, expire, are taken over and have
their work undone or rolled forward; some of it happens while a reader reads the records. A cut that
was taken at any time must show, at any later time, what the batches committed by then had made of
the table, or say that its log is gone; the changes between two cuts must lead from one to the
other. Every stable offset, continued with the committed changes from there on, must arrive at the
final table.
"""

import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from foundation.errors import CutTooOld
from foundation.ids import BucketId, Token
from foundation.ids import Token as LockToken
from locks.column_locks.acquisition import plan_acquisition, rivals_of
from locks.column_locks.records import Debt, DebtKind, LockRecord, Prepared, check_record
from locks.encoding.offsets import Offsets
from merge_engine.bucket.bucket import Bucket
from merge_engine.bucket.options import BucketOptions
from merge_engine.bucket.results import BucketResult
from merge_engine.bucket.segment import Segment, SegmentHeader, SegmentKind
from merge_engine.bucket.undo import UndoRange
from merge_engine.bucket.undone_work import is_undone, undone_columns
from recovery.reader.bucket_scan import open_scan
from recovery.reader.changes import headers_between, open_changes_between
from recovery.reader.committed_lookup import Asked, committed_lookup, settled_lookup
from recovery.reader.cut import BucketCut, Cut
from recovery.reader.cut_between import cut_between, pieces_of
from recovery.reader.isolation import committed_changes, last_stable_offset
from recovery.reader.later import Sieve, later_headers
from tests.conftest import BucketFactory, batch, rows_of, schema_of
from tests.support.cuts import cut_of

EXAMPLES = int(os.environ.get("TALLYBOOK_EXAMPLES", "32"))
HERE = BucketId(0, 0)
KEYS = range(4)
SUMS = schema_of(**dict.fromkeys("abc", (pa.int64(), "sum")))
K = SUMS.column("k").id
NAMES = {column.id: column.name for column in SUMS.value_columns}
IDS = {name: column for column, name in NAMES.items()}
WANTS = {"x": ("a", "ab"), "y": ("bc", "b"), "z": ("c", "ac", "abc")}

Cells = dict[tuple[int, str], int]
Rows = dict[int, int | None]
"""What a batch does per key: an amount for each of its columns, or None for a delete."""
Action = tuple[str, str, int, Rows]


@dataclass
class Work:
    """A batch in the log: its columns get the amounts, from this offset on."""

    owner: str
    offset: int
    columns: Sequence[str]
    rows: Rows
    committed: bool


class TakenCut(NamedTuple):
    """A cut, and what it must show."""

    cut: BucketCut
    expected: Cells
    whole: Cut


def fold(work: Iterable[Work], before: int) -> Cells:
    """Return what these batches make of the table, as far as they were written before an offset."""
    cells: Cells = {}
    for part in (part for part in work if part.offset < before):
        for key, amount in part.rows.items():
            for column in part.columns:
                if amount is None:
                    cells.pop((key, column), None)
                else:
                    cells[key, column] = cells.get((key, column), 0) + amount
    return cells


def replay(cells: Cells, segments: Iterable[Segment]) -> Cells:
    """Return the table after these changes."""
    cells = dict(cells)
    for segment in segments:
        for column, change in segment.changes.items():
            keys, after = segment.keys[K].to_pylist(), change.after.to_pylist()
            for key, touched, value in zip(keys, change.touched_after, after, strict=True):
                cells.pop((key, NAMES[column]), None)
                if touched:
                    cells[key, NAMES[column]] = value
    return cells


STEPS = ["write"] * 4 + ["commit"] * 2 + ["prepare", "apply", "finish", "acquire", "acquire"]
STEPS += ["pay", "ready", "ready", "expire", "release"]


def actions(names: Sequence[str] = (*STEPS, "restart", "restart")) -> st.SearchStrategy[Action]:
    rows = st.dictionaries(
        st.sampled_from(KEYS), st.none() | st.integers(-3, 9), min_size=1, max_size=3
    )
    owners = st.sampled_from(sorted(WANTS))
    return st.tuples(st.sampled_from(names), owners, st.integers(0, 2), rows)


class IsolationMachine(RuleBasedStateMachine):
    """One bucket, its lock records, and readers that come at any time."""

    bucket: Bucket
    dropped = False

    def __init__(self) -> None:
        super().__init__()
        self.directory = Path(tempfile.mkdtemp(prefix="tallybook-isolation-"))
        self.buckets = BucketFactory(self.directory)
        self.records: dict[str, LockRecord] = {}
        self.expired: set[str] = set()
        self.work: list[Work] = []
        self.prepared: dict[str, Work] = {}
        self.base: Cells = {}  # The table at the start of the log.
        self.cuts: list[TakenCut] = []
        self.dropped_headers: list[SegmentHeader] = []
        self.scans: list[tuple[int, Cells]] = []
        self.stable = 0
        self.epoch = 0
        self.batches = 0

    @initialize(
        undo_max_bytes=st.sampled_from([30, 1 << 20]), undo_looks=st.sampled_from([0, 1, 2, 1000])
    )
    def open(self, undo_max_bytes: int, undo_looks: int) -> None:
        self.undo_looks = undo_looks
        self.options = BucketOptions(undo_max_bytes=undo_max_bytes, roll_up_segments=3)
        self.bucket = self.open_bucket()
        for owner in ("x", "y"):
            self.acquire(owner, WANTS[owner][0])
            self.ready(owner)

    def open_bucket(self) -> Bucket:
        return self.buckets(SUMS, options=self.options)

    # --- What owners do: nothing, if it is not their turn ---------------------------------------

    def do(self, action: Action) -> None:
        name, owner, number, rows = action
        record = self.records.get(owner, LockRecord())
        pending = any(part.owner == owner and not part.committed for part in self.tail(record))
        if name == "acquire":
            self.acquire(owner, WANTS[owner][number % len(WANTS[owner])])
        elif name == "restart":
            self.do(("acquire", owner, number, {}))
            self.do(("ready", owner, number, {}))
        elif name == "expire" and record.held:
            self.expired.add(owner)
        elif record.held and not record.ready and name in ("pay", "ready"):
            self.pay(record, number) if name == "pay" else self.ready(owner)
        elif record.ready and record.prepared is not None:
            if name in ("apply", "finish"):
                self.apply(record.prepared)
            if name == "finish":
                self.committed(owner, batch=record.prepared.token.batch)
        elif record.ready and name == "write":
            columns = sorted(NAMES[column] for column in record.columns)[: number or None]
            self.write(Work(owner, self.bucket.end_offset, columns, rows, False), record.epoch)
        elif record.ready and name == "commit":
            self.committed(owner, batch=self.next_batch())
        elif record.ready and name == "prepare" and not pending:
            token = LockToken(record.epoch, self.next_batch())
            location = f"{owner}/{token}"
            columns = [NAMES[column] for column in record.columns]
            self.prepared[location] = Work(owner, 0, columns, rows, False)
            self.change(owner, prepared=Prepared(token, location))
        elif record.ready and name == "release" and not pending:
            self.records[owner] = record.given_up()

    def tail(self, record: LockRecord) -> list[Work]:
        return [part for part in self.work if part.offset >= record.offsets.get(HERE, 0)]

    def change(self, owner: str, **changes: Any) -> None:
        self.records[owner] = replace(self.records[owner], **changes)
        check_record(self.records[owner])
        self.expired.discard(owner)

    def acquire(self, owner: str, names: str) -> None:
        columns = frozenset(IDS[name] for name in names)
        if not self.expired.issuperset(rivals_of(owner, columns, self.records)):
            return
        self.epoch += 1
        made = plan_acquisition(
            owner,
            columns,
            self.records,
            epoch=self.epoch,
            ttl_ms=1,
            query_id="",
            stamp=bytes(16),
        )
        self.records |= {owner: made.record, **made.taken_over}
        self.expired -= {owner, *made.taken_over}

    def pay(self, record: LockRecord, count: int) -> None:
        """Pay some debts, and of the next one, if it is an undo, as much as one call does."""
        for debt in record.debts[:count]:
            if debt.kind is DebtKind.UNDO:
                rest = self.undo(debt, UndoRange(debt.offsets.get(HERE, 0)))
                while rest is not None:
                    rest = self.undo(debt, rest)
            else:
                assert debt.prepared is not None
                self.apply(debt.prepared)

        for debt in record.debts[count : count + 1]:
            if debt.kind is DebtKind.UNDO:
                self.undo(debt, UndoRange(debt.offsets.get(HERE, 0)))

    def undo(self, debt: Debt, wanted: UndoRange) -> UndoRange | None:
        """Take as many looks at the clock as a call may, and return what is left."""
        looks = iter(range(self.undo_looks))
        return self.bucket.undo(
            debt.owner,
            debt.columns,
            wanted,
            locked=True,
            go_on=lambda: next(looks, None) is not None,
        ).rest

    def ready(self, owner: str) -> None:
        self.pay(self.records[owner], len(self.records[owner].debts))
        undone = {
            debt.owner: debt.offsets.get(HERE, 0)
            for debt in self.records[owner].debts
            if debt.kind is DebtKind.UNDO
        }
        kept = {d.owner for d in self.records[owner].debts if d.kind is DebtKind.REDO}
        for part in self.work:
            part.committed |= part.owner in kept
        self.work = [
            part
            for part in self.work
            if part.committed or part.offset < undone.get(part.owner, part.offset + 1)
        ]
        self.change(owner, ready=True, debts=(), offsets=Offsets({HERE: self.bucket.end_offset}))

    def committed(self, owner: str, batch: int) -> None:
        for part in self.work:
            part.committed |= part.owner == owner
        offsets = Offsets({HERE: self.bucket.end_offset})
        self.change(owner, batch=batch, offsets=offsets, prepared=None)

    def next_batch(self) -> int:
        """Return a batch that is later than any before: an owner has several in one commit."""
        self.batches += 1
        return 1000 + self.batches

    def write(self, work: Work, epoch: int) -> None:
        self.put(work, Token(epoch, self.next_batch()))
        self.work.append(work)

    def apply(self, prepared: Prepared) -> None:
        work = replace(self.prepared[prepared.location], offset=self.bucket.end_offset)
        if not self.put(work, Token(*prepared.token)).repeated:
            self.work.append(work)

    def put(self, work: Work, token: Token) -> BucketResult:
        operations = ["delete" if amount is None else "upsert" for amount in work.rows.values()]
        amounts = [amount or 0 for amount in work.rows.values()]
        return self.bucket.put(
            batch(k=list(work.rows), op=operations, **dict.fromkeys(work.columns, amounts)),
            operation_column="op",
            owner=work.owner,
            token=token,
            locked=True,
        )

    # --- Readers --------------------------------------------------------------------------------

    def reading(self, before: list[Action], after: list[Action]) -> Callable[[], Any]:
        """Return what reads the records while owners go on; it keeps what is committed then."""

        def read() -> dict[str, LockRecord]:
            for action in before:
                self.do(action)
            records = dict(self.records)
            self.then = [replace(part) for part in self.work if part.committed]
            for action in after:
                self.do(action)
            return records

        return read

    told = st.sampled_from([1, 3, 1000])
    meanwhile = st.tuples(st.lists(actions(), max_size=4), st.lists(actions(), max_size=4))

    @rule(several=st.lists(actions(), min_size=1, max_size=8))
    def go_on(self, several: list[Action]) -> None:
        for action in several:
            self.do(action)

    @rule()
    def take_cut(self) -> None:
        expected = fold([part for part in self.work if part.committed], sys.maxsize)
        whole = cut_of(self.records, epoch=self.epoch)
        self.cuts.append(TakenCut(whole.at(HERE), expected, whole))

    @precondition(lambda self: self.cuts and not self.dropped)
    @rule(which=st.integers(0, 9), by_keys=st.booleans())
    def read_at_a_cut(self, which: int, by_keys: bool) -> None:
        self.check_cut(self.cuts[-1 - which % len(self.cuts)], by_keys=by_keys)

    def check_cut(self, taken: TakenCut, *, by_keys: bool) -> None:
        try:
            shown = self.look_up_at(taken.cut) if by_keys else self.scan_at(taken.cut)
        except CutTooOld:
            assert self.is_lost(taken.cut)
        else:
            assert shown == taken.expected
            assert not self.is_lost(taken.cut)

    def look_up_at(self, cut: BucketCut) -> Cells:
        asked = Asked(self.bucket, cut, [pa.array([*KEYS, 1], pa.int64())])
        [found] = committed_lookup([asked], SUMS.value_columns)
        return cells_in(found.to_pylist())

    @precondition(lambda self: self.cuts and not self.dropped)
    @rule(which=st.integers(0, 9))
    def look_up_without_taking_a_cut(self, which: int) -> None:
        """What an old cut has all of is what is committed now: nobody has to ask."""
        taken = self.cuts[-1 - which % len(self.cuts)]
        shown = self.settled_at(taken.cut)
        if shown is not None:
            assert shown == fold([part for part in self.work if part.committed], sys.maxsize)
            assert shown == taken.expected

    def settled_at(self, cut: BucketCut) -> Cells | None:
        asked = Asked(self.bucket, cut, [pa.array([*KEYS, 1], pa.int64())])
        found = settled_lookup([asked], SUMS.value_columns)
        return None if found is None else cells_in(found[0].to_pylist())

    def scan_at(self, cut: BucketCut) -> Cells:
        scan = open_scan(self.bucket, cut)
        shown = cells_in(
            row for part in scan.batches(SUMS.value_columns) for row in part.data.to_pylist()
        )
        scan.close()
        return shown

    def is_lost(self, cut: BucketCut) -> bool:
        """Whether something that came after the cut was cleaned, by what the log once was.

        What was cleaned together with its undo is no loss.
        """
        sieve = Sieve(cut)
        return any(sieve.is_later(header) for header in self.dropped_headers)

    @precondition(lambda self: len(self.cuts) > 1 and not self.dropped)
    @rule(one=st.integers(0, 9), other=st.integers(0, 9))
    def go_from_cut_to_cut(self, one: int, other: int) -> None:
        first, last = sorted((one % len(self.cuts), other % len(self.cuts)))
        self.check_between(self.cuts[first], self.cuts[last])

    def check_between(self, since: TakenCut, until: TakenCut) -> None:
        try:
            changes = open_changes_between(self.bucket, since.cut, until.cut)
            records = [row for part, _ in changes.records() for row in part.to_pylist()]
        except CutTooOld:
            assert self.is_lost(since.cut)
            return
        cells = dict(since.expected)
        for record in records:
            for name in record["_changed_columns"]:
                cell = record["k"], name
                if record["_change_type"] == "update_preimage":
                    assert cells.get(cell) == record[name], "it begins where the last one ended"
                cells.pop(cell, None)
                if record["_change_type"] != "delete" and record[name] is not None:
                    cells[cell] = record[name]
        assert cells == until.expected
        offsets = [record["_log_offset"] for record in records]
        assert offsets == sorted(offsets)

    @precondition(lambda self: len(self.cuts) > 1 and not self.dropped)
    @rule(one=st.integers(0, 9), other=st.integers(0, 9), most=st.integers(1, 6), told=told)
    def go_in_steps(self, one: int, other: int, most: int, told: int) -> None:
        """Go from one cut to another by cuts between them, of a few changed keys each."""
        first, last = sorted((one % len(self.cuts), other % len(self.cuts)))
        at, until = self.cuts[first], self.cuts[last]
        try:
            while at.whole != until.whole:
                following = self.step(at, until, most, told)
                self.check_between(at, following)
                at = following
        except CutTooOld:
            assert self.is_lost(at.cut)

    def step(self, at: TakenCut, until: TakenCut, most: int, told: int) -> TakenCut:
        headers = headers_between(self.bucket, at.cut, until.cut)
        between = cut_between(at.whole, until.whole, {HERE: pieces_of(headers, told)}, most)
        if between == until.whole:
            return until
        between = Cut.of(str(between))
        here = between.at(HERE)
        later = {one.base_offset for one in later_headers(self.bucket, here, sys.maxsize)}
        new = [one for one in headers if one.base_offset not in later]
        shown = [len(pieces_of(new)), sum(piece.keys for piece in pieces_of(new))]
        assert shown[0] == 1 or shown[1] <= most
        assert shown[0], "it gets ahead"
        part = [part for part in self.work if part.committed and part.offset not in later]
        expected = fold(part, sys.maxsize)
        assert self.look_up_at(here) == self.scan_at(here) == expected
        return TakenCut(here, expected, between)

    @rule(meanwhile=meanwhile)
    def scan(self, meanwhile: tuple[list[Action], list[Action]]) -> None:
        stable = last_stable_offset(self.bucket, HERE, self.reading(*meanwhile))
        assert stable >= self.stable
        self.stable = stable
        table = replay(self.base, self.bucket.read_log(self.bucket.start_offset, stable))
        self.scans.append((stable, table))
        assert table == fold(self.then, stable)

    @precondition(lambda self: self.scans)
    @rule(data=st.data(), meanwhile=meanwhile)
    def follow(self, data: st.DataObject, meanwhile: tuple[list[Action], list[Action]]) -> None:
        """Go on from a scan, in two steps; the table is the committed one at each hand-over."""
        at = data.draw(st.integers(0, len(self.scans) - 1))
        start, table = self.scans[at]
        stop = data.draw(st.none() | st.integers(start, start + 9))
        read = self.reading(*meanwhile)
        first = committed_changes(self.bucket, HERE, read, start, stop)
        table = replay(table, first)
        following = next(self.bucket.headers(first.end), None)
        if following is None or following.base_offset == first.end:  # Else it cuts a segment.
            assert table == fold(self.then, first.end)
        rest = committed_changes(self.bucket, HERE, self.reading([], []), first.end)
        table = replay(table, rest)
        assert not any(s.header.kind is SegmentKind.UNDO for s in (*first, *rest))
        assert table == fold(self.then, rest.end)
        self.scans[at] = (rest.end, table)

    # --- The bucket -----------------------------------------------------------------------------

    @rule(count=st.integers(1, 2))
    def roll_the_log_up(self, count: int) -> None:
        """All of it, also what may yet be undone, and what is cleaned later: it reads the same."""
        for _ in range(count):
            self.bucket.roll_up(self.bucket.end_offset)

    @rule(keep=st.integers(0, 2))
    def clean(self, keep: int) -> None:
        """Clean the log as far as the scans that are kept allow it."""
        self.scans = self.scans[len(self.scans) - min(keep, len(self.scans)) :]
        before = min([offset for offset, _ in self.scans], default=self.stable)
        start = self.bucket.start_offset
        dropped = list(self.bucket.read_log(start, max(before, start)))
        self.bucket.clean(before)
        ended = self.bucket.start_offset
        gone = [segment for segment in dropped if segment.header.end_offset <= ended]
        self.base = replay(self.base, gone)
        headers = [one.header for one in gone]
        undone = undone_columns(headers)
        self.dropped_headers += [
            one for one in headers if one.is_change and not is_undone(undone, one)
        ]

    @rule()
    def reopen(self) -> None:
        self.bucket.close()
        self.bucket = self.open_bucket()

    def teardown(self) -> None:
        try:
            if hasattr(self, "bucket"):
                self.check_the_end()
        finally:
            self.buckets.close()
            shutil.rmtree(self.directory)

    def check_the_end(self) -> None:
        """Everything is taken over; then every scan, continued, arrives at the table."""
        self.expired = set(self.records)
        self.acquire("last", "abc")
        self.ready("last")
        end = self.bucket.end_offset
        final = fold(self.work, end)
        assert all(part.committed for part in self.work)
        rows = {
            (key, name): value
            for key, row in rows_of(self.bucket).items()
            for name, value in zip(IDS, row, strict=True)
            if value is not None
        }
        assert rows == final
        for start, table in self.scans:
            changes = committed_changes(self.bucket, HERE, lambda: self.records, start)
            assert (changes.end, replay(table, changes)) == (end, final)
        self.take_cut()
        for taken in self.cuts:
            self.check_cut(taken, by_keys=True)
            self.check_cut(taken, by_keys=False)
            self.check_between(taken, self.cuts[-1])
        assert self.settled_at(self.cuts[-1].cut) == final


def cells_in(rows: Iterable[dict[str, Any]]) -> Cells:
    return {(row["k"], name): row[name] for row in rows for name in IDS if row[name] is not None}


TestIsolationMachine = IsolationMachine.TestCase
TestIsolationMachine.settings = settings(
    max_examples=EXAMPLES,
    stateful_step_count=25,
    deadline=None,
    print_blob=True,
    suppress_health_check=list(HealthCheck),
)
