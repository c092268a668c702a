"""Committed reads of a bucket: what is masked, where they stand, what is left out."""

from collections.abc import Iterable, Sequence
from typing import Any
from unittest import mock

import pyarrow as pa
import pytest

from foundation.errors import CutTooOld, Deposed, OffsetOutOfRange, UnknownColumn
from foundation.ids import BucketId, Token
from locks.column_locks.acquisition import plan_acquisition
from locks.column_locks.records import Debt, DebtKind, LockRecord, Prepared
from locks.encoding.offsets import Offsets
from merge_engine.bucket import log_reader
from merge_engine.bucket.bucket import Bucket
from merge_engine.bucket.log import Log
from merge_engine.bucket.segment import Segment, SegmentHeader, SegmentKind
from merge_engine.bucket.view import Read, View
from merge_engine.encoding.stored_rows import SchemaHistory, concatenated
from merge_engine.storage.objects import LocalStorage
from recovery.reader.changes import open_changes
from recovery.reader.committed_lookup import Asked, committed_lookup
from recovery.reader.isolation import Unresolved, committed_changes, last_stable_offset, unresolved
from tests.conftest import SUMS, BucketFactory, pay, undo
from tests.support.buckets import ADDED, DROPPED, delete, put
from tests.support.cuts import cut_at
from tests.support.logs import write_of

HERE = BucketId(0, 3)
K, A, B = (SUMS.column(name).id for name in "kab")
Records = dict[str, LockRecord]
REDO = Prepared(Token(1, 1), "redo/1")


def ready(offset: int, *columns: int, prepared: Prepared | None = None) -> LockRecord:
    """Return the record of a live lock that committed at this offset."""
    return LockRecord(
        held=True,
        ready=True,
        epoch=1,
        columns=columns,
        offsets=Offsets({HERE: offset}),
        prepared=prepared,
    )


def indebted(*debts: Debt) -> LockRecord:
    """Return the record of a lock that has yet to pay."""
    return LockRecord(held=True, epoch=2, columns=(A,), debts=debts)


def debt_of(owner: str, offset: int, *columns: int) -> Debt:
    return Debt(kind=DebtKind.UNDO, owner=owner, columns=columns, offsets=Offsets({HERE: offset}))


def look_up(
    bucket: Bucket, records: Records, *keys: int, columns: list[str] | None = None
) -> list[tuple[Any, ...]]:
    """Return the values of these keys, as a committed look-up has them."""
    chosen = bucket.history.current.values(columns)
    asked = Asked(bucket, cut_at(HERE, records), [pa.array(keys, pa.int64())])
    [found] = committed_lookup([asked], chosen)
    assert found.column("k").to_pylist() == list(keys)
    return [tuple(row.values())[1:] for row in found.to_pylist()]


def stable(bucket: Bucket, records: Records | None = None) -> int:
    return last_stable_offset(bucket, HERE, lambda: records or {})


def written(segments: Iterable[Segment]) -> list[tuple[str, str, list[int]]]:
    """Return kind, owner and keys of the segments that change something."""
    return [
        (segment.header.kind.value, segment.header.owner, segment.keys[K].to_pylist())
        for segment in segments
        if segment.changes
    ]


# What is unresolved


def test_the_tail_of_a_live_lock_is_unresolved_from_its_offset_on() -> None:
    assert unresolved({"me": ready(7, A, B)}, HERE) == [
        Unresolved(owner="me", columns=(A, B), offset=7)
    ]


def test_a_bucket_that_is_not_in_the_offsets_is_at_0() -> None:
    assert [work.offset for work in unresolved({"me": ready(7, A)}, BucketId(0, 4))] == [0]


def test_a_lock_that_is_given_up_has_nothing_to_undo() -> None:
    assert unresolved({"gone": ready(7, A).given_up()}, HERE) == []


def test_debts_are_unresolved_under_their_debtor_wherever_they_went() -> None:
    abandoned = {"me": indebted(debt_of("me", 4, A), debt_of("her", 5, B))}
    expected = [
        Unresolved(owner="me", columns=(A,), offset=4),
        Unresolved(owner="her", columns=(B,), offset=5),
    ]
    assert unresolved(abandoned, HERE) == expected
    taken = plan_acquisition(
        "heir", [A], abandoned, epoch=9, ttl_ms=1, query_id="", stamp=bytes(16)
    )
    after = {"heir": taken.record, **taken.taken_over}
    assert unresolved(after, HERE) == expected


def test_what_is_promised_is_not_read_before_all_of_it_is_written() -> None:
    offsets = Offsets({HERE: 4})
    redo = Debt(kind=DebtKind.REDO, owner="me", columns=(A,), offsets=offsets, prepared=REDO)
    expected = [Unresolved(owner="me", columns=(A,), offset=4)]
    assert unresolved({"heir": indebted(redo)}, HERE) == expected
    assert unresolved({"me": ready(4, A, prepared=REDO)}, HERE) == expected


# Look-ups


def test_the_tail_of_a_live_lock_is_masked_and_shown_once_it_is_committed(bucket: Bucket) -> None:
    put(bucket, owner="me", k=[1, 2], a=[1, 2])
    offset = bucket.end_offset
    put(bucket, owner="me", k=[2, 3], a=[20, 30])
    put(bucket, owner="me", k=[2], a=[200])
    records = {"me": ready(offset, A)}
    assert look_up(bucket, records, 3, 2, 1, 9) == [
        (None, None),
        (2, None),
        (1, None),
        (None, None),
    ]
    records["me"] = ready(bucket.end_offset, A)
    assert look_up(bucket, records, 3, 2, 1) == [(30, None), (222, None), (1, None)]


def test_a_key_may_be_asked_for_twice_and_no_key_is_fine(bucket: Bucket) -> None:
    put(bucket, owner="me", k=[1], a=[1])
    assert look_up(bucket, {"me": ready(0, A)}, 1, 2, 1) == [(None, None)] * 3
    assert look_up(bucket, {"me": ready(0, A)}) == []


def test_of_two_owners_of_one_row_only_the_uncommitted_one_is_masked(bucket: Bucket) -> None:
    put(bucket, owner="me", k=[1], a=[1])
    offset = bucket.end_offset
    put(bucket, owner="me", k=[1], a=[10])
    put(bucket, owner="her", k=[1, 2], b=[5, 6])
    put(bucket, owner="me", k=[1, 2], a=[100, 100])
    records = {"me": ready(offset, A), "her": ready(bucket.end_offset, B)}
    assert look_up(bucket, records, 1, 2) == [(1, 5), (None, 6)]
    records["her"] = ready(offset, B)
    assert look_up(bucket, records, 1, 2) == [(1, None), (None, None)]


def test_uncommitted_deletes_are_masked(bucket: Bucket) -> None:
    put(bucket, owner="me", k=[1, 2], a=[1, 2], b=[3, 4])
    offset = bucket.end_offset
    delete(bucket, 1, 2, columns=["a", "b"], owner="me")
    put(bucket, owner="me", k=[2], a=[9])
    assert look_up(bucket, {"me": ready(offset, A, B)}, 1, 2) == [(1, 3), (2, 4)]


def test_only_the_columns_asked_for_are_read_and_masked(bucket: Bucket) -> None:
    put(bucket, owner="me", k=[1], a=[1], b=[2])
    offset = bucket.end_offset
    put(bucket, owner="me", k=[1], a=[10])
    with mock.patch.object(log_reader._Pass, "segment_at", side_effect=AssertionError):
        assert look_up(bucket, {"me": ready(offset, A)}, 1, columns=["b"]) == [(2,)]
    assert look_up(bucket, {"me": ready(offset, A)}, 1, columns=["a"]) == [(1,)]


def test_debts_are_masked_also_when_they_are_paid_in_part_or_in_full(bucket: Bucket) -> None:
    put(bucket, owner="me", k=[1], a=[1])
    offset = bucket.end_offset
    put(bucket, owner="me", k=[1, 2], a=[10, 20])
    records = {"heir": indebted(debt_of("me", offset, A))}
    assert look_up(bucket, records, 1, 2) == [(1, None), (None, None)]
    pay(bucket, "me", ["a"], offset)
    assert look_up(bucket, records, 1, 2) == [(1, None), (None, None)]
    assert look_up(bucket, {}, 1, 2) == [(1, None), (None, None)]


def test_a_tail_that_is_not_about_the_keys_masks_nothing(bucket: Bucket) -> None:
    put(bucket, owner="me", k=[1], a=[1])
    assert look_up(bucket, {"me": ready(0, A)}, 2, 3) == [(None, None), (None, None)]


def test_a_promised_batch_is_masked_until_it_is_committed(bucket: Bucket) -> None:
    put(bucket, owner="me", k=[1], a=[1])
    assert look_up(bucket, {"me": ready(0, A, prepared=REDO)}, 1) == [(None, None)]
    assert look_up(bucket, {"me": ready(bucket.end_offset, A)}, 1) == [(1, None)]


def test_what_is_written_under_an_epoch_that_the_cut_does_not_know_is_not_shown(
    bucket: Bucket,
) -> None:
    put(bucket, owner="her", token=Token(1, 7), k=[1], b=[5])
    records = {"her": LockRecord(epoch=1)}
    put(bucket, owner="me", token=Token(2, 0), k=[1], a=[1])
    put(bucket, owner="her", token=Token(3, 8), k=[1], b=[10])
    assert look_up(bucket, records, 1) == [(None, 5)]
    # One that is not ready has not written under its epoch.
    assert look_up(bucket, {"me": indebted(), "her": LockRecord(epoch=1)}, 1) == [(None, 5)]
    assert look_up(bucket, {"me": ready(9, A), "her": LockRecord(epoch=3)}, 1) == [(1, 15)]


def test_what_was_undone_since_is_shown_neither_way(bucket: Bucket) -> None:
    put(bucket, owner="me", k=[1], a=[1])
    offset = bucket.end_offset
    put(bucket, owner="me", k=[1, 2], a=[10, 10])
    pay(bucket, "me", ["a"], offset)
    for known in (offset, bucket.end_offset):
        assert look_up(bucket, {"me": ready(known, A)}, 1, 2) == [(1, None), (None, None)]


def test_of_two_owners_of_one_column_that_came_after_the_cut_the_first_one_counts(
    bucket: Bucket,
) -> None:
    """Whoever has the column from the other has the lower offset: it had another one before."""
    put(bucket, owner="her", k=[1], b=[1])
    records = {"me": ready(bucket.end_offset, A), "her": ready(1, B)}
    put(bucket, owner="me", k=[1], a=[10])
    put(bucket, owner="her", k=[1], a=[100])
    assert look_up(bucket, records, 1) == [(None, None)]


def test_rows_that_are_read_while_a_put_is_applied_are_all_as_of_one_offset(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(bucket, owner="me", k=[1, 2], a=[1, 2])

    def half_way(view: View, keys: Sequence[pa.Array], _: object) -> Read:
        monkeypatch.undo()
        first = view.read([keys[0][:1]])
        put(bucket, owner="me", k=[1, 2], a=[10, 10])
        return Read(first.history, concatenated([first.rows, view.read([keys[0][1:]]).rows]))

    monkeypatch.setattr(View, "read", half_way)
    stored = bucket.stored([pa.array([1, 2], pa.int64())])
    found = stored.rows.states[0].to_pylist()
    assert (found, stored.offset) == ([11, 12], bucket.end_offset)


def test_a_deposed_leader_does_not_answer(bucket_factory: BucketFactory) -> None:
    """The new leader may have undone what the old one has stored, and the records say so."""
    bucket = bucket_factory()
    put(bucket, owner="me", k=[1], a=[1])
    heir = bucket_factory(view="other view")
    pay(heir, "me", ["a"], 0)
    with pytest.raises(Deposed):
        look_up(bucket, {}, 1)
    assert look_up(heir, {}, 1) == [(None, None)]


def test_a_leader_deposed_while_the_records_are_read_has_no_stable_offset(
    bucket_factory: BucketFactory,
) -> None:
    bucket = bucket_factory()

    def read() -> Records:
        bucket_factory(view="other view")
        return {}

    with pytest.raises(Deposed):
        last_stable_offset(bucket, HERE, read)


def test_a_leader_that_went_on_writing_meanwhile_is_not_deposed(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    confirm_at = Log.confirm_at

    def after_a_put(log: Log, end: int) -> None:
        put(bucket, owner="her", k=[1], b=[1])
        confirm_at(log, end)

    monkeypatch.setattr(Log, "confirm_at", after_a_put)
    assert bucket.confirm() == 1
    assert bucket.end_offset == 2


def test_columns_that_were_added_or_dropped_since(bucket_factory: BucketFactory) -> None:
    bucket = bucket_factory(name="added")
    put(bucket, owner="me", k=[1], a=[1])
    bucket.evolve(SchemaHistory(ADDED))
    c = ADDED[-1].column("c").id
    offset = bucket.end_offset
    put(bucket, owner="me", k=[1], a=[1], c=[1])
    assert look_up(bucket, {"me": ready(offset, A, c)}, 1) == [(1, None, None)]
    bucket = bucket_factory(name="dropped")
    put(bucket, owner="me", k=[1], a=[1], b=[1])
    bucket.evolve(SchemaHistory(DROPPED))
    records = {"me": ready(0, A, B)}
    assert look_up(bucket, records, 1) == [(None,)]
    asked = Asked(bucket, cut_at(HERE, records), [pa.array([1], pa.int64())])
    with pytest.raises(UnknownColumn, match="'a' was dropped"):
        committed_lookup([asked], [SUMS.column("a")])


def test_without_changes_of_an_unresolved_owner_no_segment_is_read(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(bucket, owner="her", k=[1], b=[1])
    put(bucket, owner="me", k=[1], a=[1])
    records = {"me": ready(bucket.end_offset, A), "new": ready(0, B)}
    monkeypatch.setattr(log_reader._Pass, "segment_at", None)
    monkeypatch.setattr(Bucket, "headers", None)
    assert look_up(bucket, records, 1) == [(1, 1)]


# The last stable offset


def test_with_nothing_unresolved_it_is_the_end_of_the_log(bucket: Bucket) -> None:
    assert stable(bucket) == 1
    put(bucket, owner="me", k=[1, 2], a=[1, 2])
    assert stable(bucket) == stable(bucket, {"me": ready(3, A)}) == 3
    assert stable(bucket, {"me": ready(0, A, prepared=REDO)}) == 1


def test_it_is_before_the_first_change_that_may_yet_be_undone(bucket: Bucket) -> None:
    put(bucket, owner="me", k=[1], a=[1])
    put(bucket, owner="her", k=[1, 2], b=[1, 2])
    put(bucket, owner="me", k=[1], a=[1])
    assert stable(bucket, {"me": ready(2, A)}) == 4
    assert stable(bucket, {"me": ready(2, A), "her": ready(0, B)}) == 2
    assert stable(bucket, {"heir": indebted(debt_of("me", 0, A))}) == 1
    assert stable(bucket, {"stranger": ready(0, A)}) == 5


def test_a_write_and_its_undo_are_on_the_same_side(bucket: Bucket) -> None:
    put(bucket, owner="me", k=[1], a=[1])
    put(bucket, owner="her", k=[1], b=[1])
    pay(bucket, "me", ["a"], 1)
    assert stable(bucket) == 4
    # Her tail at 2 stands between the write at 1 and the undo at 3.
    assert stable(bucket, {"her": ready(2, B)}) == 1


def test_it_is_lowered_from_undo_to_undo(bucket: Bucket) -> None:
    put(bucket, owner="me", k=[1], a=[1])  # at 1
    put(bucket, owner="her", k=[1], b=[1])  # at 2
    pay(bucket, "me", ["a"], 1)  # at 3
    put(bucket, owner="third", k=[1], a=[1])  # at 4
    pay(bucket, "her", ["b"], 2)  # at 5
    assert stable(bucket) == 6
    assert stable(bucket, {"third": ready(4, A)}) == 1


def test_an_undo_written_while_the_records_are_read_lowers_it(bucket: Bucket) -> None:
    put(bucket, owner="me", k=[1], a=[1])

    def read() -> Records:
        pay(bucket, "me", ["a"], 1)
        return {}

    assert last_stable_offset(bucket, HERE, read) == 1
    assert stable(bucket) == 3


def test_an_undo_without_a_lock_does_not_lower_it_for_that_was_stable_before(
    bucket: Bucket,
) -> None:
    put(bucket, owner="me", k=[1], a=[1])
    assert stable(bucket) == 2

    def read() -> Records:
        undo(bucket, "me", ["a"], 1)
        return {}

    assert last_stable_offset(bucket, HERE, read) == 2
    assert stable(bucket) == 3


def test_a_log_of_many_undos_is_looked_at_once(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each undo lowers the offset to just before the undo of the other owner, and so on."""
    mine = bucket.end_offset
    put(bucket, owner="me", k=[1], a=[1])
    for _ in range(20):
        hers = bucket.end_offset
        put(bucket, owner="her", k=[1], b=[1])
        pay(bucket, "me", ["a"], mine)
        mine = bucket.end_offset
        put(bucket, owner="me", k=[1], a=[1])
        pay(bucket, "her", ["b"], hers)
    seen = []
    headers = Log.headers

    def counting(log: Log, start: int, stop: int | None = None) -> Any:
        for header in headers(log, start, stop):
            seen.append(header.base_offset)
            yield header

    monkeypatch.setattr(Log, "headers", counting)
    assert stable(bucket, {"me": ready(mine, A)}) == 1
    assert sorted(seen) == list(range(1, bucket.end_offset))


# Changes


def test_writes_that_were_undone_are_left_out_together_with_their_undo(bucket: Bucket) -> None:
    put(bucket, owner="me", k=[1], a=[1])
    start = bucket.end_offset
    put(bucket, owner="me", k=[2], a=[1])
    put(bucket, owner="her", k=[2, 3], b=[1, 1])
    put(bucket, owner="me", k=[3], a=[1])
    pay(bucket, "me", ["a"], start)
    put(bucket, owner="me", k=[4], a=[1])
    changes = committed_changes(bucket, HERE, dict, 0)
    expected = [("write", "me", [1]), ("write", "her", [2, 3]), ("write", "me", [4])]
    assert written(changes) == written(changes) == expected
    assert changes.end == bucket.end_offset


def test_what_is_undone_without_a_lock_is_a_change_for_it_was_committed(bucket: Bucket) -> None:
    put(bucket, owner="me", k=[1], a=[1])
    put(bucket, owner="me", k=[2], a=[1])
    before = committed_changes(bucket, HERE, dict, 0)
    assert written(before) == [("write", "me", [1]), ("write", "me", [2])]
    put(bucket, owner="me", k=[3], a=[1])
    undo(bucket, "me", ["a"], 2)
    put(bucket, owner="me", k=[2], a=[5])
    rest = [("write", "me", [3]), ("undo", "me", [2, 3]), ("write", "me", [2])]
    # Whoever has had the writes hears of the undo, and so does whoever begins anew.
    assert written(committed_changes(bucket, HERE, dict, before.end)) == rest
    assert written(committed_changes(bucket, HERE, dict, 0)) == [*written(before), *rest]


def test_a_debt_is_left_out_beside_what_was_undone_without_a_lock(bucket: Bucket) -> None:
    put(bucket, owner="me", k=[1], a=[1])
    undo(bucket, "me", ["a"], 1)
    start = bucket.end_offset
    put(bucket, owner="me", k=[2], a=[1])
    pay(bucket, "me", ["a"], start)
    expected = [("write", "me", [1]), ("undo", "me", [1])]
    assert written(committed_changes(bucket, HERE, dict, 0)) == expected


def test_writes_that_cancelled_each_other_are_left_out_once_they_are_undone(bucket: Bucket) -> None:
    put(bucket, owner="x", k=[1], a=[5])
    delete(bucket, 1, columns=["a"], owner="x")
    end = bucket.end_offset
    result = pay(bucket, "x", ["a"], 1)
    assert (result.base_offset, result.changed) == (end, 0)
    assert bucket.end_offset == end + 1
    changes = committed_changes(bucket, HERE, dict, 0)
    assert [segment for segment in changes if segment.changes] == []
    pay(bucket, "x", ["a"], 1)
    pay(bucket, "nobody", ["a"], 0)
    assert bucket.end_offset == end + 1


def records(bucket: Bucket) -> list[tuple[Any, ...]]:
    """Return kind, offset, key, a and b of the committed change records."""
    changes = open_changes(bucket, HERE, dict, 0, None, committed=True)
    return [
        tuple(row[name] for name in ("_change_type", "_log_offset", "k", "a", "b"))
        for batch, _ in changes.records()
        for row in batch.to_pylist()
    ]


def test_an_undo_of_some_columns_leaves_out_the_changes_of_these_alone(bucket: Bucket) -> None:
    """Without column locks, whoever undoes says of which columns."""
    put(bucket, owner="me", k=[1, 2, 3], a=[1, None, 3], b=[5, 6, None])
    put(bucket, owner="me", k=[1, 2], a=[0, 4], b=[1, 1])
    pay(bucket, "me", ["b"], 1)
    assert records(bucket) == [
        ("insert", 1, 1, 1, None),
        # A null is a touch, too: of sums that stay null.
        ("insert", 2, 2, None, None),
        ("insert", 3, 3, 3, None),
        ("update_preimage", 5, 2, None, None),
        ("update_postimage", 5, 2, 4, None),
    ]


def test_an_undo_that_changes_nothing_is_about_its_columns_too(bucket: Bucket) -> None:
    put(bucket, owner="me", k=[1], a=[1])
    put(bucket, owner="me", k=[1], b=[5])
    delete(bucket, 1, columns=["b"], owner="me")
    assert pay(bucket, "me", ["b"], 1).changed == 0
    assert records(bucket) == [("insert", 1, 1, 1, None)]
    end = bucket.end_offset
    assert pay(bucket, "me", ["b"], 1).changed == 0
    assert bucket.end_offset == end, "once is enough"


def test_an_undo_without_columns_of_an_earlier_release_was_of_all(bucket: Bucket) -> None:
    put(bucket, owner="me", k=[1], a=[1])
    log = bucket._log
    header = SegmentHeader(
        kind=SegmentKind.UNDO,
        base_offset=log.end,
        term=bucket.term,
        nonce="",
        timestamp_ms=0,
        owner="me",
        undo_from=1,
        locked=True,
    )
    log.append(Segment(header, {}, {}))
    assert records(bucket) == []


def test_changes_end_at_the_last_stable_offset_where_the_next_ones_begin(bucket: Bucket) -> None:
    put(bucket, owner="me", k=[1], a=[1])
    put(bucket, owner="me", k=[2], a=[1])
    put(bucket, owner="her", k=[2], b=[1])
    records = {"me": ready(2, A)}
    first = committed_changes(bucket, HERE, lambda: records, 0)
    assert (written(first), first.end) == ([("write", "me", [1])], 2)
    none = committed_changes(bucket, HERE, lambda: records, 2)
    assert (written(none), none.end) == ([], 2)
    ahead = committed_changes(bucket, HERE, lambda: records, 3)
    assert (written(ahead), ahead.end) == ([], 3)
    rest = committed_changes(bucket, HERE, dict, first.end)
    assert written(rest) == [("write", "me", [2]), ("write", "her", [2])]
    assert rest.end == bucket.end_offset


def test_the_ends_of_the_range_cut_segments(bucket: Bucket) -> None:
    put(bucket, owner="me", k=[1, 2, 3, 4], a=[1, 2, 3, 4])
    changes = committed_changes(bucket, HERE, dict, 2, 4)
    assert (written(changes), changes.end) == ([("write", "me", [2, 3])], 4)


def test_an_undo_behind_the_range_counts_too(bucket: Bucket) -> None:
    put(bucket, owner="me", k=[1, 2], a=[1, 2])
    pay(bucket, "me", ["a"], 1)
    for start, stop in ((0, 3), (0, 2), (2, 3), (2, 5), (4, 5)):
        changes = committed_changes(bucket, HERE, dict, start, stop)
        assert (written(changes), changes.end) == ([], stop)


def test_changes_from_an_offset_that_the_log_does_not_have_are_an_error(bucket: Bucket) -> None:
    put(bucket, owner="me", k=[1], a=[1])
    bucket.clean(1)
    for offset in (0, 3):
        with pytest.raises(OffsetOutOfRange, match=r"which has \[1, 2\)"):
            committed_changes(bucket, HERE, dict, offset)


# A log that was cleaned


def test_where_the_log_was_cleaned_undo_ranges_begin_at_its_start(bucket: Bucket) -> None:
    put(bucket, owner="me", k=[1], a=[1])
    start = bucket.end_offset
    put(bucket, owner="me", k=[1, 2], a=[10, 10])
    put(bucket, owner="her", k=[1], b=[5])
    bucket.clean(start)
    # As if this owner had committed nothing since before the start of the log.
    records = {"me": ready(0, A)}
    assert stable(bucket, records) == start
    with pytest.raises(CutTooOld, match="the log of the bucket starts at offset 2"):
        look_up(bucket, records, 1, 2)
    # This one has not even written, before the log was cleaned.
    records = {"me": ready(start, A), "her": ready(0, B)}
    assert look_up(bucket, records, 1, 2) == [(1, None), (None, None)]
    pay(bucket, "me", ["a"], 0)
    assert look_up(bucket, {"her": ready(4, B)}, 1) == [(1, None)]
    assert stable(bucket, {"her": ready(4, B)}) == start
    assert written(committed_changes(bucket, HERE, dict, start)) == [("write", "her", [1])]
    end = bucket.end_offset
    assert bucket.clean(end) == stable(bucket, {"me": ready(0, A)}) == end


# The headers


class CountingStorage(LocalStorage):
    """A storage that tells which segments were read."""

    reads: list[str]

    def read(self, name: str) -> bytes:
        self.reads.append(name)
        return super().read(name)


@pytest.fixture
def counting(bucket_factory: BucketFactory) -> CountingStorage:
    storage = CountingStorage(bucket_factory.log_path())
    storage.reads = []
    return storage


def test_headers_of_what_was_written_here_are_not_read_from_the_store(
    bucket_factory: BucketFactory, counting: CountingStorage
) -> None:
    bucket = bucket_factory(storage=counting)
    put(bucket, owner="me", k=[1, 2], a=[1, 2])
    pay(bucket, "me", ["a"], 1)
    counting.reads.clear()
    assert [(h.kind, h.base_offset, h.owner, h.rows) for h in bucket.headers(0)] == [
        (SegmentKind.LEADER, 0, "", 0),
        (SegmentKind.WRITE, 1, "me", 2),
        (SegmentKind.UNDO, 3, "me", 2),
    ]
    assert [h.base_offset for h in bucket.headers(2, 3)] == [1]
    assert [h.base_offset for h in bucket.headers(2, 4)] == [1, 3]
    assert list(bucket.headers(3, 3)) == list(bucket.headers(99)) == []
    assert counting.reads == []


def test_headers_of_what_another_leader_wrote_are_read_once_or_replayed(
    bucket_factory: BucketFactory, counting: CountingStorage
) -> None:
    first = bucket_factory()
    put(first, owner="me", k=[1, 2], a=[1, 2])
    first.close()
    bucket = bucket_factory(storage=counting)
    counting.reads.clear()
    expected = [header.base_offset for header in bucket.headers(0)]
    assert (expected, len(counting.reads)) == ([0, 1, 3], 1)
    counting.reads.clear()
    assert [header.base_offset for header in bucket.headers(0)] == expected
    assert counting.reads == []
    bucket.close()
    replaying = bucket_factory(storage=counting, view="new view")
    counting.reads.clear()
    assert [header.base_offset for header in replaying.headers(0)] == [*expected, 4]
    assert counting.reads == []


def test_headers_leave_out_what_was_cleaned_before_or_meanwhile(long_log: Log) -> None:
    underway = long_log.headers(0)
    assert next(underway).base_offset == 0
    assert long_log.clean(4) == 4
    assert [header.base_offset for header in underway] == [4]
    assert [header.base_offset for header in long_log.headers(0)] == [4]
    assert sorted(long_log._headers) == [4]
    long_log.append(write_of(5))
    assert [header.base_offset for header in long_log.headers(5)] == [4, 6]
