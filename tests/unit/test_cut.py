"""Cuts as values: what records make of them, as text and back, which is before which."""

from dataclasses import replace
from datetime import UTC, datetime

import pytest

from foundation.errors import InvalidInput
from foundation.ids import BucketId, Token
from locks.column_locks.records import Debt, DebtKind, LockRecord, Prepared
from locks.encoding.offsets import Offsets
from recovery.reader.cut import LAST_BATCH, Bound, Cut, OwnerCut
from tests.fixtures.formats.records import CUTS
from tests.support.cuts import cut_of

A, B = BucketId(0, 0), BucketId(0, 1)


def ready(epoch: int, *, batch: int = 3, prepared: Prepared | None = None) -> LockRecord:
    return LockRecord(
        held=True,
        ready=True,
        epoch=epoch,
        batch=batch,
        columns=(2,),
        offsets=Offsets({A: 7}),
        prepared=prepared,
    )


def debt_of(owner: str, **offsets: int) -> Debt:
    by_bucket = {{"a": A, "b": B}[name]: offset for name, offset in offsets.items()}
    return Debt(kind=DebtKind.UNDO, owner=owner, columns=(2,), offsets=Offsets(by_bucket))


def known(epoch: int) -> Token:
    return Token(epoch, LAST_BATCH)


# What records make of them


def test_of_a_lock_that_is_ready_all_is_in_it_up_to_its_offsets() -> None:
    cut = cut_of({"me": ready(4)})
    assert cut.at(A).bound("me") == Bound(7)
    assert cut.at(B).bound("me") == Bound(0), "a bucket that came later, or had nothing"
    assert cut.at(A).bound("her") == Bound(None, known(4))
    assert cut.batches == {"me": 3}


def test_a_promised_batch_is_not_in_it() -> None:
    cut = cut_of({"me": ready(4, prepared=Prepared(Token(4, 4), "redo/4"))})
    assert cut.at(A).bound("me") == Bound(7)
    assert cut.batches == {"me": 3}


def test_a_promised_batch_is_not_in_it_when_its_owner_was_succeeded_and_has_not_paid() -> None:
    promise = Prepared(Token(4, 4), "redo/4")
    debt = Debt(
        kind=DebtKind.REDO, owner="me", columns=(2,), offsets=Offsets({A: 7}), prepared=promise
    )
    # It counts as committed from then on, for writers: it will be.
    mine = LockRecord(held=True, epoch=5, batch=4, columns=(2,), debts=(debt,))
    hers = {
        "her": LockRecord(held=True, epoch=5, batch=0, columns=(2,), debts=(debt,)),
        "me": LockRecord(epoch=4, batch=4),
    }
    for records in ({"me": mine}, hers):
        cut = cut_of(records)
        assert cut.at(A).bound("me") == Bound(7)
        assert cut.batches["me"] == 3
        paid = {
            owner: replace(one, debts=(), ready=one.held, offsets=Offsets({A: 9}))
            for owner, one in records.items()
        }
        assert not cut.has_same_work(cut_of(paid))
        assert cut.is_before(cut_of(paid))
        assert not cut_of(paid).is_before(cut)


def test_of_a_lock_that_is_not_ready_nothing_of_its_epoch_is_in_it() -> None:
    record = LockRecord(held=True, epoch=4, batch=3, columns=(2,), debts=(debt_of("her", a=9),))
    cut = cut_of({"me": record, "her": LockRecord(epoch=3, batch=8)}, epoch=6)
    assert cut.at(A).bound("me") == Bound(None, known(3))
    assert cut.at(A).bound("her") == Bound(9)
    assert cut.at(A).bound("new") == Bound(None, known(6))
    assert cut.batches == {"me": 3, "her": 8}


def test_of_an_owner_with_several_debts_the_lowest_offsets_count() -> None:
    debts = (debt_of("me", a=9, b=4), debt_of("me", a=5), debt_of("gone", a=1))
    cut = cut_of({"me": LockRecord(held=True, epoch=4, columns=(2,), debts=debts)})
    assert cut.at(A).bound("me") == Bound(5)
    assert cut.at(B).bound("me") == Bound(0), "where one of them has none, it begins at 0"
    assert cut.at(A).bound("gone") == Bound(1), "of one that was forgotten"


def test_what_was_released_or_forgotten_is_like_what_nobody_knows() -> None:
    cut = cut_of({"released": LockRecord(epoch=2, batch=5), "forgotten": LockRecord()}, epoch=9)
    assert cut.at(A).bounds == {}
    assert cut.batches == {"released": 5}


def test_without_locks_it_goes_by_where_the_logs_ended() -> None:
    cut = Cut(table="t", epoch=None, time_ms=0, ends=Offsets({A: 4}))
    assert cut.at(A).bound("anybody") == Bound(None, None, 4)
    assert cut.at(B).bound("anybody") == Bound(None, None, 0)


# As text


@pytest.mark.parametrize("cut", CUTS.values(), ids=CUTS)
def test_a_cut_is_written_down_and_read_again(cut: Cut) -> None:
    assert Cut.of(str(cut)) == cut
    assert Cut.of(cut) is cut
    assert str(cut).isascii()
    assert not set(str(cut)) & set(" /+=\"'")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "give what `str"),
        ("cut-", "ends 1 bytes early"),
        ("cut-AAAA", "format 0"),
        ("cut-%%%", "no cut, or it was cut short"),
        (str(CUTS["owners"])[:-9], "checksum"),
        (str(CUTS["owners"])[:30] + "A" + str(CUTS["owners"])[31:], "checksum"),
        (7, "7 is no cut"),
        (None, "None is no cut"),
    ],
)
def test_what_is_no_cut_is_refused(text: object, why: str) -> None:
    with pytest.raises(InvalidInput, match=why):
        Cut.of(text)  # type: ignore[arg-type]


def test_a_cut_tells_people_when_it_is_of_and_how_far_owners_were() -> None:
    cut = CUTS["owners"]
    assert cut.time == datetime(2026, 9, 21, 14, 13, 20, tzinfo=UTC)
    assert repr(cut) == (
        "Cut(2026-09-21 14:13:20, batches {held: 41, in part: 7, not ready: -1, "
        "released: 1099511627776})"
    )


def test_a_part_of_a_cut_is_about_some_buckets() -> None:
    owners = {"me": OwnerCut(batch=1, offsets=Offsets({A: 5, B: 6})), "you": OwnerCut(batch=2)}
    cut = Cut(table="t", epoch=1, time_ms=0, owners=owners, ends=Offsets({A: 7, B: 8}))
    part = cut.only([B])
    assert part.at(B) == cut.at(B)
    assert len(str(part)) < len(str(cut))
    assert part.owners["me"].offsets == {B: 6}


# Which is before which


def at(epoch: int | None, table: str = "t", **batches: int) -> Cut:
    owners = {owner: OwnerCut(batch=batch) for owner, batch in batches.items()}
    return Cut(table=table, epoch=epoch, time_ms=0, owners=owners)


def ended(**ends: int) -> Cut:
    by_bucket = {{"a": A, "b": B}[name]: end for name, end in ends.items()}
    return Cut(table="t", epoch=None, time_ms=0, ends=Offsets(by_bucket))


@pytest.mark.parametrize(
    ("one", "other", "before"),
    [
        (at(1, me=3), at(1, me=3), True),
        (at(1, me=3), at(1, me=4, you=0), True),
        (at(1, me=4), at(1, me=3), False),
        (at(2, me=3), at(1, me=4), False),
        # Forgotten, and begun anew.
        (at(1, me=4), at(2, me=0), True),
        (at(1, me=4), at(1), True),
        (at(None), at(1, me=4), True),
        (at(None), at(None), True),
        (at(1, me=3), at(1, "other", me=4), False),
        # Without locks, by where the logs ended.
        (ended(a=3), ended(a=3, b=1), True),
        (ended(a=3, b=2), ended(a=4), True),
        (ended(a=3, b=2), ended(a=4, b=1), False),
        (ended(a=3), at(1, me=4), True),
    ],
)
def test_a_cut_is_before_those_that_have_nothing_less(one: Cut, other: Cut, before: bool) -> None:
    assert one.is_before(other) == before
