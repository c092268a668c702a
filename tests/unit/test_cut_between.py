"""Cuts between two others: whole batches, owners in their order, no more keys than asked for."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import count
from typing import Any

import pytest

from foundation.ids import BucketId, Token
from locks.column_locks.records import LockRecord
from locks.encoding.offsets import Offsets
from merge_engine.bucket.bucket import Bucket
from merge_engine.bucket.segment import SegmentHeader, SegmentKind
from recovery.reader.changes import headers_between, open_changes_between
from recovery.reader.cut import LAST_BATCH, Cut, OwnerCut
from recovery.reader.cut_between import Piece, cut_between, pieces_of
from recovery.reader.later import later_headers
from tests.conftest import BucketFactory, batch, pay, undo
from tests.support.cuts import cut_of

A, B, C = BucketId(0, 0), BucketId(0, 1), BucketId(0, 2)
NOBODY = Cut(table="t", epoch=0, time_ms=0)
EARLIEST = Cut(table="t", epoch=None, time_ms=0, ends=Offsets({A: 0, B: 0}))
Found = Mapping[BucketId, Sequence[Piece]]


def piece(
    epoch: int, number: int, *, end: int, keys: int = 1, at: int | None = None, **more: Any
) -> Piece:
    """Return a batch of owner `o<epoch>`, in column <epoch>, unless said otherwise."""
    return Piece(
        owner=more.get("owner", f"o{epoch}"),
        token=Token(epoch, number),
        keys=keys,
        time_ms=end if at is None else at,
        columns=frozenset(more.get("columns", {epoch})),
        end_offset=end,
    )


def put(end: int, keys: int = 1) -> Piece:
    """Return a put without a lock."""
    return Piece("", None, keys, end, frozenset({2}), end)


def until(epoch: int | None = 9) -> Cut:
    ends = Offsets({A: 100, B: 100}) if epoch is None else None
    return Cut(table="t", epoch=epoch, time_ms=1000, ends=ends)


def steps(since: Cut, found: Found, most: int) -> list[dict[str, Token | None]]:
    """Go on until all is taken; return what each step has added, of each owner the last."""
    told: list[dict[str, Token | None]] = []
    left = {bucket: list(pieces) for bucket, pieces in found.items()}
    at = since
    while True:
        following = cut_between(at, until(), left, most)
        assert Cut.of(str(following)) == following
        if following == until():
            return told
        assert at.is_before(following)
        assert at.time_ms <= following.time_ms
        told.append(
            {
                owner: one.through
                for owner, one in following.owners.items()
                if at.owners.get(owner) != one
            }
        )
        left = {
            bucket: [one for one in pieces if is_later(following, bucket, one)]
            for bucket, pieces in left.items()
        }
        at = following


def is_later(cut: Cut, bucket: BucketId, one: Piece) -> bool:
    """Whether a batch is not in a cut, by the rule of `Bound`."""
    bound = cut.at(bucket).bound(one.owner)
    assert one.token is not None
    if bound.offset is not None and one.end_offset <= bound.offset:
        return False
    return bound.through is None or one.token > bound.through


# --- How far it goes ------------------------------------------------------------------------------


def test_all_that_may_be_had_is_the_later_cut_itself() -> None:
    found = {A: [piece(1, 0, end=2, keys=2)], B: [piece(1, 1, end=3, keys=3)]}
    assert cut_between(NOBODY, until(), found, 5) is not None
    assert cut_between(NOBODY, until(), found, 5) == until()
    assert cut_between(NOBODY, until(), {A: [], B: []}, 1) == until()
    assert cut_between(NOBODY, until(), found, 4) != until()


def test_one_batch_is_taken_however_large_with_all_its_buckets() -> None:
    found = {
        A: [piece(1, 0, end=50, keys=50), piece(1, 1, end=51)],
        B: [piece(1, 0, end=40, keys=40)],
    }
    cut = cut_between(NOBODY, until(), found, 3)
    assert cut.owners == {
        "o1": OwnerCut(batch=0, offsets=Offsets({A: 50, B: 40}), through=Token(1, 0))
    }
    assert (cut.epoch, cut.table) == (NOBODY.epoch, "t")


def test_the_only_batch_is_the_later_cut_however_large() -> None:
    found = {A: [piece(1, 0, end=50, keys=50)], B: [piece(1, 0, end=40, keys=40)]}
    assert cut_between(NOBODY, until(), found, 3) == until()


def test_batches_are_taken_by_their_time_and_each_epochs_in_their_order() -> None:
    # The clock of one of the servers is ahead: its own order counts.
    found = {
        A: [piece(1, 0, end=1, at=90), piece(2, 0, end=2, at=20)],
        B: [piece(1, 1, end=1, at=10), piece(2, 1, end=2, at=30), piece(2, 2, end=3, at=95)],
    }
    assert steps(NOBODY, found, 1) == [
        {"o2": Token(2, 0)},
        {"o2": Token(2, 1)},
        {"o1": Token(1, 0)},
        {"o1": Token(1, 1)},
    ]


def test_no_step_has_more_keys_than_asked_for_unless_it_is_one_batch() -> None:
    sizes = [2, 3, 1, 9, 4, 4, 1]
    found = {
        A: [piece(1, at, end=10 * at, keys=size) for at, size in enumerate(sizes)],
        B: [piece(2, 0, end=1000, keys=1)],
    }
    assert steps(NOBODY, found, 6) == [
        {"o1": Token(1, 2)},
        {"o1": Token(1, 3)},
        {"o1": Token(1, 4)},
    ]


# --- Who waits for whom ---------------------------------------------------------------------------


def test_what_had_a_column_before_comes_first_whatever_the_clocks_say() -> None:
    found = {
        A: [piece(1, 0, end=9, at=500), piece(1, 1, end=10, at=501, columns={1, 6})],
        B: [piece(2, 7, end=1, at=3, columns={6, 7}), piece(3, 0, end=2, at=4, columns={7})],
        C: [piece(4, 0, end=3, at=300, columns={8})],
    }
    # The third epoch waits for the first, too: by way of the second.
    assert steps(NOBODY, found, 1) == [
        {"o4": Token(4, 0)},
        {"o1": Token(1, 0)},
        {"o1": Token(1, 1)},
        {"o2": Token(2, 7)},
    ]


def test_an_owner_that_has_come_back_goes_on_where_it_was_whatever_its_columns() -> None:
    found = {
        A: [piece(1, 5, end=9, at=500, owner="me", columns={5})],
        B: [piece(2, 6, end=1, at=3, owner="me", columns={6}), piece(2, 7, end=2, owner="me")],
    }
    assert steps(NOBODY, found, 1) == [{"me": Token(1, 5)}, {"me": Token(2, 6)}]


# --- Where it begins ------------------------------------------------------------------------------


def test_offsets_of_buckets_without_changes_stay_as_they_were() -> None:
    before = OwnerCut(batch=3, offsets=Offsets({A: 7, B: 8, C: 9}))
    since = Cut(table="t", epoch=4, time_ms=5, owners={"o1": before, "you": OwnerCut(batch=2)})
    found = {A: [piece(1, 4, end=11)], B: [piece(1, 5, end=12), piece(1, 6, end=13)]}
    cut = cut_between(since, until(), found, 2)
    expected = OwnerCut(batch=5, offsets=Offsets({A: 11, B: 12, C: 9}), through=Token(1, 5))
    assert cut.owners == {"o1": expected, "you": OwnerCut(batch=2)}
    assert cut.epoch == 4


def test_of_an_owner_that_the_first_cut_does_not_know_its_tokens_tell() -> None:
    cut = cut_between(NOBODY, until(), {B: [piece(1, 4, end=11), piece(1, 5, end=12)]}, 1)
    assert cut.at(B).bound("o1") == (11, Token(1, 4), None)
    assert cut.at(A).bound("o1") == (0, Token(1, 4), None)


def test_from_the_earliest_cut_on_it_begins_where_the_logs_do() -> None:
    since = Cut(table="t", epoch=None, time_ms=0, ends=Offsets({A: 40, B: 50}))
    found = {A: [piece(1, 4, end=41), piece(2, 0, end=42)], C: [piece(2, 1, end=3)]}
    cut = cut_between(since, until(), found, 1)
    assert cut.owners == {
        "o1": OwnerCut(batch=4, offsets=Offsets({A: 41, B: 50}), through=Token(1, 4))
    }
    assert (cut.epoch, cut.ends) == (None, since.ends)
    again = cut_between(cut, until(), {A: found[A][1:], C: found[C]}, 1)
    assert again.owners["o1"] == cut.owners["o1"]
    assert again.owners["o2"].offsets == {A: 42, B: 50}
    assert steps(since, found, 1) == [{"o1": Token(1, 4)}, {"o2": Token(2, 0)}]


def test_a_log_of_an_earlier_release_is_read_at_once() -> None:
    found = {A: [put(1), piece(1, 0, end=2), piece(1, 1, end=3)]}
    assert cut_between(EARLIEST, until(), found, 1) == until()


# --- Tables without locks -------------------------------------------------------------------------


def test_without_locks_each_bucket_goes_on_by_itself() -> None:
    since = Cut(table="t", epoch=None, time_ms=7, ends=Offsets({A: 2, C: 9}))
    found = {A: [put(4, 2), put(6, 2)], B: [put(3, 3), put(5, 2)]}
    cut = cut_between(since, until(None), found, 5)
    assert cut.ends == {A: 4, B: 3, C: 9}
    assert cut.owners == {}
    assert Cut.of(str(cut)) == cut
    assert since.is_before(cut)
    assert cut.is_before(until(None))
    cut = cut_between(cut, until(None), {A: found[A][1:], B: found[B][1:]}, 2)
    assert cut.ends == {A: 4, B: 5, C: 9}
    assert cut_between(cut, until(None), {A: found[A][1:], B: []}, 2) == until(None)


def test_without_locks_the_rest_of_a_bucket_is_not_taken_with_what_was_told() -> None:
    headers = [header(at, at, None) for at in range(6)]
    found = {A: pieces_of(headers, 2), B: pieces_of(headers[:1], 2)}
    assert [one.keys for one in found[A]] == [1, 1, 4]
    cut = cut_between(EARLIEST, until(None), found, 6)
    assert cut.ends == {A: 2, B: 1}
    # A rest that is all there is comes at once.
    assert cut_between(EARLIEST, until(None), {A: found[A][2:]}, 1) == until(None)


# --- What was not told one by one -----------------------------------------------------------------


def header(
    base: int, number: int, epoch: int | None = 1, rows: int = 1, **more: Any
) -> SegmentHeader:
    return SegmentHeader(
        kind=SegmentKind.WRITE,
        base_offset=base,
        term=0,
        nonce="",
        timestamp_ms=base,
        rows=rows,
        owner=more.get("owner", f"o{epoch}"),
        token=Token(epoch or 0, number),
        column_ids=more.get("columns", (epoch or 2,)),
        locked=epoch is not None,
        part=more.get("part", 0),
        more=more.get("more", False),
    )


def test_segments_of_one_batch_are_one_piece() -> None:
    headers = [
        header(0, 0, rows=3, more=True),
        header(3, 0, epoch=2, rows=2),
        header(5, 0, rows=4, part=1, columns=(1, 7)),
    ]
    first, second = pieces_of(headers)
    assert first == Piece("o1", Token(1, 0), 7, 0, frozenset({1, 7}), 9)
    assert second == Piece("o2", Token(2, 0), 2, 3, frozenset({2}), 5)


def test_of_each_epoch_what_follows_is_one_piece_and_not_taken_in_part() -> None:
    headers = [header(at, at, 1 + at % 2, columns=(1 + at % 2,)) for at in range(9)]
    pieces = pieces_of(headers, 3)
    assert [(one.token, one.keys) for one in pieces] == [
        (Token(1, 0), 1),
        (Token(2, 1), 1),
        (Token(1, 2), 1),
        (Token(2, LAST_BATCH), 3),
        (Token(1, LAST_BATCH), 3),
    ]
    cut = cut_between(NOBODY, until(), {A: pieces}, 8)
    assert {owner: one.through for owner, one in cut.owners.items()} == {
        "o1": Token(1, 2),
        "o2": Token(2, 1),
    }


def test_what_waits_for_a_rest_is_not_taken_before_it() -> None:
    headers = [header(at, at) for at in range(4)]
    other = {B: pieces_of([header(0, 0, 2, columns=(1, 2))])}
    cut = cut_between(NOBODY, until(), {A: pieces_of(headers, 2), **other}, 4)
    assert set(cut.owners) == {"o1"}
    assert cut.owners["o1"].through == Token(1, 1)
    # Where only a rest is left that others wait for, all comes at once.
    rest = {A: [one for one in pieces_of(headers, 2) if one.token == Token(1, LAST_BATCH)]}
    assert cut_between(NOBODY, until(), {**rest, **other}, 1) == until()


def test_a_batch_that_one_bucket_tells_and_another_has_in_its_rest_is_whole() -> None:
    found = {
        A: pieces_of([header(at, at) for at in range(4)], 1),
        B: pieces_of([header(at, at) for at in range(4)]),
    }
    cut = cut_between(NOBODY, until(), found, 2)
    assert cut.owners["o1"].through == Token(1, 0)
    cut = cut_between(NOBODY, until(), found, 4)
    through = cut.owners["o1"].through
    assert through is not None
    for bucket in (A, B):
        later = [at for at in range(4) if is_later(cut, bucket, piece(1, at, end=at + 1))]
        assert later == list(range(through.batch + 1, 4)), "in all buckets alike"


# --- On logs --------------------------------------------------------------------------------------


class Log:
    """A bucket that owners write to under locks, and cuts of it."""

    def __init__(self, bucket: Bucket) -> None:
        self.bucket = bucket
        self._batches: dict[str, int] = {}

    def write(self, owner: str, epoch: int, amount: int, *keys: int, column: str = "a") -> int:
        """Write a batch; return where it begins."""
        number = self._batches[owner] = self._batches.get(owner, -1) + 1
        rows = batch(k=list(keys), **{column: [amount] * len(keys)})
        begins = self.bucket.end_offset
        self.bucket.put(rows, owner=owner, token=Token(epoch, number), locked=True)
        return begins

    def cut(self, epoch: int, **owners: int) -> Cut:
        """Return a cut of these ready owners, each at the end of the log."""
        records = {
            owner: LockRecord(
                held=True,
                ready=True,
                epoch=of,
                batch=self._batches.get(owner, -1),
                columns=(2 + list(owners).index(owner),),
                offsets=Offsets({A: self.bucket.end_offset}),
            )
            for owner, of in owners.items()
        }
        return cut_of(records, epoch=epoch)

    def earliest(self) -> Cut:
        return Cut(table="t", epoch=None, time_ms=0, ends=Offsets({A: self.bucket.start_offset}))

    def walk(
        self, since: Cut, until: Cut, most: int, told: int = 1000
    ) -> list[list[tuple[Any, ...]]]:
        """Go from cut to cut; return the `records` of each step."""
        steps, at = [], since
        while at != until:
            headers = headers_between(self.bucket, at.at(A), until.at(A))
            following = cut_between(at, until, {A: pieces_of(headers, told)}, most)
            following = Cut.of(str(following))
            steps.append(self.records(at, following))
            at = following
        return steps

    def records(self, since: Cut, until: Cut) -> list[tuple[Any, ...]]:
        """Return the changes between two cuts: owner, key, and the value after, or if deleted."""
        found = open_changes_between(self.bucket, since.at(A), until.at(A))
        return [
            (row["_owner"], row["k"], row[name])
            for part, _ in found.records()
            for row in part.to_pylist()
            for name in row["_changed_columns"]
            if row["_change_type"] != "update_preimage"
        ]


@pytest.fixture
def log(bucket_factory: BucketFactory) -> Log:
    """A millisecond goes by with each look at the clock: no two batches are of the same one."""
    return Log(bucket_factory(clock_ms=count(1).__next__))


def test_undone_work_is_neither_counted_nor_taken(log: Log) -> None:
    since = log.cut(1, x=1, y=1)
    log.write("x", 1, 1, 1)
    begins = log.write("x", 1, 1000, 1, 2, 3, 4, 5, 6)
    log.write("y", 2, 5, 1, column="b")
    pay(log.bucket, "x", ["a"], begins)
    log.write("x", 3, 10, 1)
    until = log.cut(3, x=3, y=2)
    headers = headers_between(log.bucket, since.at(A), until.at(A))
    assert [one.keys for one in pieces_of(headers)] == [1, 1, 1]
    assert log.walk(since, until, 3) == [[("x", 1, 1), ("y", 1, 5), ("x", 1, 11)]]
    assert log.walk(since, until, 1) == [[("x", 1, 1)], [("y", 1, 5)], [("x", 1, 11)]]


def test_what_is_undone_without_a_lock_was_in_every_cut_and_is_a_change(log: Log) -> None:
    since = Cut(table="t", epoch=0, time_ms=0, ends=Offsets({A: log.bucket.end_offset}))
    begins = log.bucket.end_offset
    log.bucket.put(batch(k=[1, 2], a=[5, 5]), owner="x")
    between = replace(since, ends=Offsets({A: log.bucket.end_offset}))
    log.bucket.put(batch(k=[2], a=[1]), owner="x")
    undo(log.bucket, "x", ["a"], begins)
    until = replace(since, ends=Offsets({A: log.bucket.end_offset}))
    headers = headers_between(log.bucket, since.at(A), until.at(A))
    assert [one.keys for one in pieces_of(headers)] == [2, 1, 2]
    assert log.records(since, between) == [("x", 1, 5), ("x", 2, 5)]
    assert log.records(between, until) == [("x", 2, 6), ("x", 1, 5), ("x", 2, 6)]


def test_from_the_earliest_cut_on_a_log_that_was_cleaned_before_it_is_read_in_steps(
    log: Log,
) -> None:
    first = log.cut(0)
    for amount in (1, 10):
        log.write("x", 1, amount, 1, 2)
        log.write("y", 2, amount, 1, column="b")
    log.bucket.clean(log.bucket.end_offset)
    start = log.bucket.start_offset
    assert start > 0
    log.write("y", 2, 100, 1, 2, column="b")
    log.write("x", 1, 100, 1)
    begins = log.write("x", 1, 1000, 1)
    pay(log.bucket, "x", ["a"], begins)
    log.write("x", 3, 100, 2)
    until = log.cut(3, x=3, y=2)
    whole = [
        [("y", 1, 111), ("y", 2, 100)],
        [("x", 1, 111)],
        [("x", 2, 111)],
    ]
    assert log.walk(log.earliest(), until, 1) == whole
    assert log.walk(log.earliest(), until, 3) == [whole[0] + whole[1], whole[2]]
    assert log.walk(log.earliest(), until, 1, told=1)[0] == whole[0]
    told = log.walk(log.earliest(), until, 1, told=1)
    assert [row for step in told for row in step] == [row for step in whole for row in step]
    # A reader of rows at a cut between them finds what it masks in the log, too.
    between = cut_between(
        log.earliest(),
        until,
        {A: pieces_of(headers_between(log.bucket, log.earliest().at(A), until.at(A)))},
        1,
    )
    later = later_headers(log.bucket, between.at(A), log.bucket.end_offset)
    assert [one.owner for one in later if one.kind is SegmentKind.WRITE] == ["x", "x", "x"]
    with pytest.raises(Exception, match="take another cut"):
        later_headers(log.bucket, first.at(A), log.bucket.end_offset)


def test_an_owner_that_takes_over_comes_after_all_that_it_took(log: Log) -> None:
    since = log.cut(0)
    log.write("x", 1, 1, 1)
    log.write("y", 2, 5, 2, column="b")
    log.write("x", 1, 1, 1)
    log.write("z", 3, 1, 1, 2)
    log.write("y", 2, 5, 2, column="b")
    until = log.cut(3, z=3, y=2)
    together = log.walk(since, until, 1)
    assert [step[0][0] for step in together] == ["x", "y", "x", "z", "y"]
    assert [value for step in together for _, _, value in step] == [1, 5, 2, 3, 1, 10]
