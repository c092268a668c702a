"""Puts of several parts: one token, applied with the last part; begun and not finished, undone."""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pyarrow as pa
import pytest

from foundation.errors import NotFenced, OldEpoch, Overflow, SealedBatch, TornPut
from foundation.failpoints import arm
from foundation.ids import BucketId, Token
from locks.column_locks.records import LockRecord
from merge_engine.bucket.options import BucketOptions
from merge_engine.bucket.overlay import Overlay
from merge_engine.bucket.results import BucketResult
from merge_engine.bucket.segment import SegmentKind
from merge_engine.bucket.undo import UndoRange
from merge_engine.bucket.view_meta import AppliedParts
from merge_engine.encoding.stored_rows import SchemaHistory
from merge_engine.merging.batch import read_batch
from merge_engine.merging.fold import Update, fold
from recovery.leader.fenced_writers import Writer
from recovery.leader.led_bucket import LedBucket, Overtaken, Put
from recovery.writer.parts import Part, PartCutter, PartSizes
from tests.conftest import SUMS, BucketFactory, batch, rows_of
from tests.support.writer_world import BETWEEN_PARTS, Crash, World

A, B = (SUMS.column(name).id for name in "ab")
KEY = BucketId(0, 0)
ME, HER = Writer("me", 1), Writer("her", 2)
TOKEN = Token(1, 0)
SUMS_CODEC = SchemaHistory([SUMS]).key_codec


@pytest.fixture
def led(bucket_factory: BucketFactory) -> LedBucket:
    return LedBucket(bucket_factory(), KEY)


def get_ready(led: LedBucket, writer: Writer = ME, column: int = A) -> int:
    record = LockRecord(held=True, epoch=writer.epoch, columns=(column,))
    term = led.fence(writer, [column], record)
    led.end_recovery(writer, term)
    return term


def add(amount: int, *keys: int, column: str = "a") -> Update:
    data = batch(k=list(keys or (1,)), **{column: [amount] * len(keys or (1,))})
    return fold(read_batch(data, SUMS, BucketOptions()), SUMS_CODEC)


def attempt(put_id: str = "first", *, resumable: bool = False, token: Token = TOKEN) -> Put:
    return Put(writer=ME, owner="me", token=token, put_id=put_id, resumable=resumable)


def test_the_token_is_applied_with_the_last_part(led: LedBucket) -> None:
    term = get_ready(led)
    base = led.bucket.end_offset
    assert led.put_part(attempt(), term, add(1, 1, 2), part=0, more=True) is None
    assert led.bucket.last_token("me") is None
    assert led.bucket.parts_applied("me") == AppliedParts(TOKEN, base, 1)
    led.put_part(attempt(), term, add(1, 2, 3), part=1, more=True)
    done = led.put_part(attempt(), term, add(1, 4), part=2, more=False)
    assert done == BucketResult(base_offset=base, end_offset=base + 5, rows=5)
    assert rows_of(led.bucket) == {1: (1, None), 2: (2, None), 3: (1, None), 4: (1, None)}
    assert led.seal(ME, term, 0) == base + 5
    headers = [h for h in led.bucket.headers(base) if h.kind is SegmentKind.WRITE]
    assert [(h.token, h.part, h.more) for h in headers] == [
        (TOKEN, 0, True),
        (TOKEN, 1, True),
        (TOKEN, 2, False),
    ]


def test_others_write_between_two_parts(led: LedBucket) -> None:
    term, hers = get_ready(led), get_ready(led, HER, B)
    led.put_part(attempt(), term, add(1), part=0, more=True)
    put = Put(writer=HER, owner="her", token=Token(2, 0), put_id="hers")
    assert led.put_part(put, hers, add(5, column="b"), part=0, more=False) is not None
    done = led.put_part(attempt(), term, add(1), part=1, more=False)
    assert done is not None
    assert (done.changed, done.end_offset - done.base_offset) == (2, 3)
    assert rows_of(led.bucket) == {1: (2, 5)}


def test_a_token_that_was_applied_changes_nothing_whatever_the_rows(led: LedBucket) -> None:
    term = get_ready(led)
    led.put_part(attempt(), term, add(1), part=0, more=True)
    done = led.put_part(attempt(), term, add(1), part=1, more=False)
    assert done is not None
    for again in (attempt(), attempt("second")):
        repeated = led.put_part(again, term, add(100), part=0, more=True)
        assert repeated is not None
        assert repeated.repeated
        assert (repeated.base_offset, repeated.end_offset) == (done.base_offset, done.end_offset)
    led.seal(ME, term, 0)
    assert led.put_part(attempt("late"), term, add(100), part=0, more=True) is not None
    assert rows_of(led.bucket) == {1: (2, None)}


def test_a_part_that_is_sent_again_is_written_once(led: LedBucket) -> None:
    term = get_ready(led)
    for _ in range(3):
        assert led.put_part(attempt(), term, add(1), part=0, more=True) is None
    assert rows_of(led.bucket) == {1: (1, None)}


def test_of_two_attempts_beside_each_other_the_rows_of_the_first_stand(led: LedBucket) -> None:
    term = get_ready(led)
    led.put_part(attempt(), term, add(1), part=0, more=True)
    with pytest.raises(Overtaken) as raised:
        led.put_part(attempt("second"), term, add(100), part=0, more=False)
    assert raised.value.put_id == "first"
    led.put_part(attempt(), term, add(1), part=1, more=False)
    assert rows_of(led.bucket) == {1: (2, None)}


def test_a_part_that_does_not_fit_leaves_the_put_where_it_was(led: LedBucket) -> None:
    term = get_ready(led)
    led.put_part(attempt(), term, add(2**62), part=0, more=True)
    with pytest.raises(Overflow):
        led.put_part(attempt(), term, add(2**62), part=1, more=False)
    with pytest.raises(TornPut, match="sealed: start over"):
        led.seal(ME, term, 0)


def test_a_seal_in_between_is_refused_and_no_part_comes_after_it(led: LedBucket) -> None:
    term = get_ready(led)
    led.put_part(attempt(), term, add(1), part=0, more=True)
    with pytest.raises(TornPut):
        led.seal(ME, term, 0)
    with pytest.raises(SealedBatch):
        led.put_part(attempt(), term, add(1), part=1, more=False)


def test_a_new_epoch_ends_what_the_last_one_had_begun_and_undoes_it(led: LedBucket) -> None:
    term = get_ready(led)
    base = led.bucket.end_offset
    led.put_part(attempt(), term, add(1, 1, 2), part=0, more=True)
    newer = Writer("me", 3)
    record = LockRecord(held=True, epoch=3, columns=(A,))
    led.fence(newer, [A], record)
    with pytest.raises(OldEpoch):
        led.put_part(attempt(), term, add(1), part=1, more=False)
    assert led.undo(newer, term, "me", [A], UndoRange(base)).changed == 2
    led.end_recovery(newer, term)
    assert rows_of(led.bucket) == {}
    again = Put(writer=newer, owner="me", token=Token(3, 0), put_id="again")
    assert led.put_part(again, term, add(1), part=0, more=False) is not None
    led.seal(newer, term, 0)


@pytest.mark.parametrize("flushed", [False, True])
def test_a_leader_that_comes_later_knows_that_a_put_was_begun_and_not_finished(
    bucket_factory: BucketFactory, flushed: bool
) -> None:
    led = LedBucket(bucket_factory(), KEY)
    term = get_ready(led)
    base = led.bucket.end_offset
    led.put_part(attempt(), term, add(1), part=0, more=True)
    led.put_part(attempt(), term, add(1), part=1, more=True)
    if flushed:
        led.bucket.flush()
    name = bucket_factory.crash(into="copy")
    later = LedBucket(bucket_factory(name=name), KEY)
    assert later.bucket.parts_applied("me") == AppliedParts(TOKEN, base, 2)
    assert later.bucket.last_token("me") is None
    with pytest.raises(NotFenced):
        later.put_part(attempt(), later.term, add(1), part=2, more=False)
    term = get_ready(later)
    with pytest.raises(TornPut, match="begun under another leader"):
        later.put_part(attempt("second"), term, add(1), part=0, more=True)


def test_a_promise_is_gone_on_with_by_whoever_has_its_parts(
    bucket_factory: BucketFactory,
) -> None:
    led = LedBucket(bucket_factory(), KEY)
    term = get_ready(led)
    parts = [add(1, 1), add(10, 1, 2), add(100, 1)]
    for number in (0, 1):
        led.put_part(attempt(resumable=True), term, parts[number], part=number, more=True)
    later = LedBucket(bucket_factory(name=bucket_factory.crash(into="copy")), KEY)
    payer = Writer("payer", 7)
    record = LockRecord(held=True, epoch=7, columns=(A,))
    term = later.fence(payer, [A], record)
    put = Put(writer=payer, owner="me", token=TOKEN, put_id="other", resumable=True)
    for number, part in enumerate(parts):
        done = later.put_part(put, term, part, part=number, more=number < 2)
    assert done is not None
    assert rows_of(later.bucket) == {1: (111, None), 2: (10, None)}


def test_parts_are_tried_on_top_of_each_other_and_nothing_is_written(
    led: LedBucket, tmp_path: Path
) -> None:
    end = led.bucket.end_offset
    overlay = Overlay(tmp_path / "overlay")
    led.bucket.try_part(add(2**62), overlay)
    led.bucket.try_part(add(1, 2), overlay)
    with pytest.raises(Overflow):
        led.bucket.try_part(add(2**62), overlay)
    overlay.close()
    assert (led.bucket.end_offset, rows_of(led.bucket)) == (end, {})


# --- A writer, killed between any two parts -------------------------------------------------------


@pytest.fixture
def world() -> Iterator[World]:
    made = World(small_parts=True)
    yield made
    made.close()


@pytest.mark.parametrize("visit", range(1, 7))
def test_a_writer_that_dies_between_two_parts_counts_its_batch_once(
    world: World, visit: int
) -> None:
    content = {(0, key): {"x": key + 1} for key in range(4)}
    visits = 0

    def crash() -> None:
        nonlocal visits
        visits += 1
        if visits == visit:
            raise Crash

    first = world.start("a", "x")
    world.write(first, 0, content)
    with arm(BETWEEN_PARTS, crash), suppress(Crash):
        world.write(first, 1, content)
    second = world.start("a", "x")
    for number in range(second.batch, 3):
        world.write(second, max(number, 0), content)
    world.check()


# --- Cutting --------------------------------------------------------------------------------------


def cut(tables: list[pa.Table], sizes: PartSizes, buckets: int = 4) -> list[Part]:
    cutter = PartCutter(SUMS, buckets, lambda to: BucketId(0, to.bucket), sizes)
    parts = [part for table in tables for part in cutter.add(table)]
    parts += cutter.rest()
    for key in {part.key for part in parts}:
        numbers = [part.number for part in parts if part.key == key]
        assert numbers == list(range(len(numbers)))
    return parts


@pytest.mark.parametrize("sizes", [PartSizes(rows=10), PartSizes(bytes=200), PartSizes(rows=1)])
@pytest.mark.parametrize("pieces", [1, 7, 100])
def test_parts_have_all_rows_of_their_buckets_in_order_and_none_is_too_large(
    sizes: PartSizes, pieces: int
) -> None:
    keys = list(range(100)) * 3
    whole = pa.table({"k": keys, "a": list(range(300))})
    size = -(-300 // pieces)
    parts = cut([whole.slice(at, size) for at in range(0, 300, size)], sizes)
    assert max(part.rows.num_rows for part in parts) <= sizes.rows
    assert max(part.rows.nbytes for part in parts) <= max(sizes.bytes, 20)
    for number in range(4):
        of_bucket = [part for part in parts if part.key.number == number]
        assert [part.number for part in of_bucket] == list(range(len(of_bucket)))
        order = [value for part in of_bucket for value in part.rows.column("a").to_pylist()]
        assert order == sorted(order)
    values = sorted(value for part in parts for value in part.rows.column("a").to_pylist())
    assert values == list(range(300))


def test_rows_of_very_many_buckets_do_not_wait_for_ever() -> None:
    sizes = PartSizes(rows=1_000, waiting_bytes=2_000)
    cutter = PartCutter(SUMS, 500, lambda to: BucketId(0, to.bucket), sizes)
    for first in range(0, 5_000, 100):
        list(cutter.add(pa.table({"k": range(first, first + 100), "a": [1] * 100})))
        assert sum(one.bytes for one in cutter._waiting.values()) <= 2_000


def test_rows_that_are_large_are_cut_as_soon_as_they_are_enough() -> None:
    sizes = PartSizes(rows=1_000, bytes=100)
    cutter = PartCutter(SUMS, 1, lambda target: BucketId(0, target.bucket), sizes)
    rows = pa.table({"k": [1, 2, 3, 4, 5, 6], "a": [1] * 6, "b": ["x" * 40] * 6})
    parts = list(cutter.add(rows))
    assert [part.number for part in parts] == list(range(len(parts)))
    assert [part.rows.num_rows for part in parts[:2]] == [1, 1], "two would be more than 100 bytes"


def test_several_parts_are_written_as_one_and_counted_all(led: LedBucket) -> None:
    term = get_ready(led)
    assert led.parts_done(attempt(), term) == 0
    assert led.put_part(attempt(), term, add(1, 1, 2), part=0, parts=3, more=True) is None
    assert led.parts_done(attempt(), term) == 3
    parts = led.bucket.parts_applied("me")
    assert parts is not None
    assert parts.parts == 3
    assert led.put_part(attempt(), term, add(7), part=1, more=True) is None, "it is there already"
    done = led.put_part(attempt(), term, add(1), part=3, parts=2, more=False)
    assert done is not None
    assert led.parts_done(attempt(), term) == 0, "it is complete"
    assert rows_of(led.bucket) == {1: (2, None), 2: (1, None)}


def test_parts_that_are_written_in_part_are_not_written_again(led: LedBucket) -> None:
    term = get_ready(led)
    led.put_part(attempt(), term, add(1), part=0, parts=2, more=True)
    with pytest.raises(TornPut, match="part 1 is not part 2"):
        led.put_part(attempt(), term, add(1), part=1, parts=3, more=False)
    assert rows_of(led.bucket) == {1: (1, None)}


def test_a_put_that_was_begun_in_parts_does_not_go_on_as_one(led: LedBucket) -> None:
    term = get_ready(led)
    led.put_part(attempt(), term, add(1), part=0, more=True)
    with led.bucket.exclusive(), pytest.raises(TornPut, match="it goes on as one put"):
        led.check_put(attempt().writer, term, [], "me", TOKEN)
