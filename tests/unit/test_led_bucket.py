"""A bucket's leader and its writers: fences, terms, recovery, seals and tokens."""

from collections.abc import Callable

import pytest

from foundation.errors import (
    NotFenced,
    NotLeader,
    NotReady,
    OldEpoch,
    Overflow,
    RecoveryOver,
    SealedBatch,
    WrongColumns,
)
from foundation.ids import BucketId, Token
from locks.column_locks.records import LockRecord
from merge_engine.bucket.options import BucketOptions
from merge_engine.bucket.results import BucketResult
from merge_engine.bucket.undo import UndoRange
from merge_engine.merging.batch import read_batch
from merge_engine.merging.fold import fold
from recovery.leader.fenced_writers import Writer
from recovery.leader.led_bucket import LedBucket, LedUpdate, put_led
from tests.conftest import SUMS, BucketFactory, batch, rows_of

A, B = (SUMS.column(name).id for name in "ab")
KEY = BucketId(0, 0)
ME, HER = Writer("me", 1), Writer("her", 2)


@pytest.fixture
def led(bucket_factory: BucketFactory) -> LedBucket:
    return LedBucket(bucket_factory(), KEY)


def record(writer: Writer, *columns: int) -> LockRecord:
    return LockRecord(held=True, epoch=writer.epoch, columns=columns or (A,))


def fence(led: LedBucket, writer: Writer = ME, *columns: int) -> int:
    wanted = columns or (A,)
    return led.fence(writer, wanted, record(writer, *wanted))


def get_ready(led: LedBucket, writer: Writer = ME, *columns: int) -> int:
    term = fence(led, writer, *columns)
    led.end_recovery(writer, term)
    return term


def put(
    led: LedBucket,
    amount: int,
    *,
    writer: Writer | None = ME,
    token: Token | None = None,
    term: int | None = None,
    owner: str | None = None,
    column: str = "a",
    seals: bool = False,
) -> BucketResult:
    """Add to a column of key 1; by default the writer's batch 0."""
    rows = read_batch(batch(k=[1], **{column: [amount]}), SUMS, BucketOptions())
    update = fold(rows, led.bucket.history.key_codec)
    if writer is not None and token is None:
        token = Token(writer.epoch, 0)
    [result] = put_led(
        [LedUpdate(bucket=led, update=update, term=led.term if term is None else term)],
        lambda call, items: [call(item) for item in items],
        writer=writer,
        owner=owner or ("" if writer is None else writer.owner),
        token=token,
        seals=seals,
    )
    return result


def test_a_writer_goes_from_fence_to_seal(led: LedBucket) -> None:
    term = fence(led)
    assert term == led.bucket.term
    assert led.end_recovery(ME, term) == 1
    assert put(led, 5).changed == 1
    assert led.seal(ME, term, 0) == 2
    assert put(led, 7, token=Token(1, 1)).base_offset == 2
    assert rows_of(led.bucket) == {1: (12, None)}
    assert led.owners() == {"me": 1}


def test_nobody_writes_who_was_not_fenced(led: LedBucket) -> None:
    with pytest.raises(NotFenced, match="not fenced at this leader, which may be new: start over"):
        put(led, 1)
    fence(led)
    with pytest.raises(NotFenced):
        put(led, 1, writer=Writer("me", 2))
    with pytest.raises(NotFenced, match="this table has column locks: write to it through"):
        put(led, 1, writer=None)
    with pytest.raises(NotFenced, match="this table has column locks"):
        led.undo_unlocked("me", [A], UndoRange(0))
    assert rows_of(led.bucket) == {}


def test_a_fence_is_granted_to_the_epoch_that_zookeeper_has_now(led: LedBucket) -> None:
    newer = record(Writer("me", 3))
    for known in (None, LockRecord(epoch=1, columns=(A,)), newer):
        with pytest.raises(OldEpoch, match="epoch 1 is over: stop for good"):
            led.fence(ME, [A], known)
    with pytest.raises(WrongColumns, match=rf"does not have the columns with ids \[{B}\]"):
        led.fence(ME, [A, B], record(ME, A))
    assert led.owners() == {}


def test_a_successor_of_the_same_owner_ends_its_former_self(led: LedBucket) -> None:
    term = get_ready(led)
    put(led, 1)
    get_ready(led, Writer("me", 2))
    for call in (lambda: put(led, 1), lambda: led.seal(ME, term, 0), lambda: fence(led)):
        with pytest.raises(OldEpoch, match="fenced with epoch 2; epoch 1 is over: stop for good"):
            call()


def test_whoever_took_the_columns_over_ends_their_former_owner(led: LedBucket) -> None:
    get_ready(led)
    get_ready(led, HER)
    with pytest.raises(OldEpoch, match=r"taken over at epoch 2; `me` .* has lost it"):
        put(led, 1)
    put(led, 3, writer=HER)
    assert rows_of(led.bucket) == {1: (3, None)}
    assert led.owners() == {HER.owner: HER.epoch}, "former owners are not told of"


def test_owners_of_other_columns_do_not_meet(led: LedBucket) -> None:
    get_ready(led)
    get_ready(led, HER, B)
    put(led, 1)
    put(led, 2, writer=HER, column="b")
    assert rows_of(led.bucket) == {1: (1, 2)}
    with pytest.raises(WrongColumns, match=rf"was not fenced for the columns with ids \[{A}\]"):
        put(led, 2, writer=HER, token=Token(2, 1))


def test_a_call_for_another_term_is_refused(led: LedBucket) -> None:
    term = get_ready(led)
    calls: list[Callable[[], object]] = [
        lambda: put(led, 1, term=term + 1),
        lambda: led.seal(ME, term + 1, 0),
        lambda: led.end_recovery(ME, term + 1),
        lambda: led.undo(ME, term + 1, "me", [A], UndoRange(0)),
    ]
    for call in calls:
        with pytest.raises(NotLeader, match=f"led at term {term}, and the call is for term"):
            call()


def test_a_new_leader_knows_nobody(led: LedBucket, bucket_factory: BucketFactory) -> None:
    term = get_ready(led)
    successor = LedBucket(bucket_factory(view="successor"), KEY)
    with pytest.raises(NotLeader):
        put(successor, 1, term=term)
    with pytest.raises(NotFenced):
        put(successor, 1)


def test_a_token_is_applied_once_and_answered_also_when_it_is_sealed(led: LedBucket) -> None:
    term = get_ready(led)
    first = put(led, 5)
    again = put(led, 100)
    led.seal(ME, term, 0)
    sealed = put(led, 100)
    for result in (again, sealed):
        assert result.repeated
        assert (result.base_offset, result.end_offset) == (first.base_offset, first.end_offset)
    assert rows_of(led.bucket) == {1: (5, None)}


def test_a_sealed_batch_and_all_before_it_take_no_more(led: LedBucket) -> None:
    term = get_ready(led)
    put(led, 1, token=Token(1, 4))
    led.seal(ME, term, 4)
    led.seal(ME, term, 2)
    for late in (0, 3):
        with pytest.raises(SealedBatch, match=f"batch {late} of `me` .* is sealed, with all up to"):
            put(led, 1, token=Token(1, late))
    put(led, 1, token=Token(1, 5))


def test_a_put_that_is_all_of_its_batch_closes_it_and_is_still_answered(led: LedBucket) -> None:
    get_ready(led)
    first = put(led, 5, token=Token(1, 4), seals=True)
    again = put(led, 100, token=Token(1, 4), seals=True)
    assert again.repeated
    assert again.end_offset == first.end_offset
    with pytest.raises(SealedBatch):
        put(led, 1, token=Token(1, 3))
    put(led, 1, token=Token(1, 5))
    assert rows_of(led.bucket) == {1: (6, None)}


def test_a_put_that_is_refused_closes_nothing(led: LedBucket) -> None:
    get_ready(led)
    put(led, 2**62)
    with pytest.raises(Overflow):
        put(led, 2**62, token=Token(1, 4), seals=True)
    put(led, 1, token=Token(1, 3))


def test_own_batches_come_after_recovery_and_debts_before(led: LedBucket) -> None:
    """Also the redo of a batch that an earlier epoch has prepared."""
    get_ready(led, HER)
    put(led, 5, writer=HER)
    heir = Writer("heir", 3)
    term = fence(led, heir)
    with pytest.raises(NotReady, match="comes before its recovery is over"):
        put(led, 1, writer=heir)
    prepared = Token(2, 1)
    put(led, 7, writer=heir, owner="her", token=prepared)
    assert led.undo(heir, term, "her", [A], UndoRange(1)).changed == 1
    led.end_recovery(heir, term)
    assert put(led, 7, writer=heir, owner="her", token=prepared).repeated
    with pytest.raises(RecoveryOver, match="is over: this payment came too late"):
        put(led, 7, writer=heir, owner="her", token=Token(2, 2))
    with pytest.raises(RecoveryOver):
        led.undo(heir, term, "her", [A], UndoRange(1))
    assert rows_of(led.bucket) == {}


def test_a_fence_that_arrives_twice_takes_nothing_back(led: LedBucket) -> None:
    term = get_ready(led)
    put(led, 1)
    led.seal(ME, term, 0)
    fence(led)
    with pytest.raises(SealedBatch):
        put(led, 1, owner="another")
    with pytest.raises(RecoveryOver):
        led.undo(ME, term, "her", [A], UndoRange(0))


def test_an_undo_of_dropped_columns_has_nothing_to_do(led: LedBucket) -> None:
    term = led.fence(ME, [A, 99], record(ME, A, 99))
    assert led.undo(ME, term, "me", [99], UndoRange(0)).changed == 0


def test_without_column_locks_anybody_writes(bucket_factory: BucketFactory) -> None:
    led = LedBucket(bucket_factory(), KEY, locked=False)
    put(led, 1, writer=None)
    put(led, 2, writer=None, owner="x", token=Token(1, 1))
    with pytest.raises(NotLeader):
        put(led, 2, writer=None, term=99)
    assert put(led, 2, writer=None, owner="x", token=Token(1, 1)).repeated
    with pytest.raises(SealedBatch, match=r"comes after its batch 1 .*: a duplicate that is late"):
        put(led, 2, writer=None, owner="x", token=Token(1, 0))
    assert led.undo_unlocked("x", [A], UndoRange(0)).changed == 1
    assert rows_of(led.bucket) == {1: (1, None)}
