"""Calls and answers: what the first version has sent is read for ever, and is still sent."""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, get_args

import pyarrow as pa
import pytest

from foundation.errors import BadRequest, InvalidInput
from foundation.ids import BucketId, Token
from locks.encoding.offsets import Offsets
from merge_engine.bucket.results import BucketResult, UndoResult
from merge_engine.bucket.segment import AggMode
from merge_engine.bucket.undo import UndoRange
from recovery.leader.fenced_writers import Writer
from recovery.reader.cut import LAST_BATCH, Cut, OwnerCut
from recovery.reader.cut_between import Piece
from recovery.reader.isolation import Isolation
from server.protocol import wire
from server.protocol.calls import (
    Call,
    Drain,
    DrainAnswer,
    HandOver,
    HandOverAnswer,
    Nothing,
    Ping,
    Status,
    StatusAnswer,
    TakeSnapshots,
    TakeSnapshotsAnswer,
)
from server.protocol.messages import NUMBER, Message
from server.protocol.puts import (
    Advance,
    AdvanceAnswer,
    ForgetPut,
    Put,
    PutAnswer,
    PutChunk,
    PutChunkAnswer,
    PutProgress,
    PutProgressAnswer,
    Uploads,
    read_put,
)
from server.protocol.reads import (
    ChangedPieces,
    ChangedPiecesAnswer,
    ChangelogBatch,
    CloseScanners,
    LogEnds,
    LogEndsAnswer,
    Lookup,
    LookupAnswer,
    LookupStream,
    ReadChangelog,
    ReadChanges,
    Scan,
    ScanBatch,
    ScanBegun,
    ScanDone,
    read_shares,
    write_shares,
)
from server.protocol.writers import (
    EndRecovery,
    EndsAnswer,
    Fence,
    FenceAnswer,
    Seal,
    Undo,
    UndoAnswer,
    Undone,
    UndoStep,
)

FIRST = Path(__file__).parents[1] / "fixtures" / "wire" / "v1"
A, B = BucketId(0, 0), BucketId(0, 1)
SESSION = "f210cd3d315e4e999164792c42ad2890"
UPLOAD, PROMISE = "79dc31b76e1848e8af9fab03b35d1e5a", "b9f93112437e4dcba38ee81e0b9b7983"
SCANNER = "e7ed64ee31f147d5a350f12fede94cb1"
LATEST, COMMITTED = Isolation.LATEST, Isolation.COMMITTED
SINCE = Cut(table="0f3c", epoch=None, time_ms=0, ends=Offsets({A: 4}))
UNTIL = Cut(
    table="0f3c",
    epoch=3,
    time_ms=1_790_000_000_000,
    owners={
        "etl": OwnerCut(batch=7, offsets=Offsets({A: 9})),
        "new": OwnerCut(batch=-1, through=Token(2, 5)),
    },
)
UNLOCKED: dict[str, Any] = {"table_id": 1, "schema_version": 1}
LOCKED: dict[str, Any] = {"table_id": 2, "schema_version": 1}
SCAN_AT_A_CUT = Scan(**LOCKED, bucket=A, columns=(2,), isolation=COMMITTED, cut=UNTIL)


def writer(epoch: int) -> Writer:
    return Writer("etl", epoch)


def result(base: int, end: int, rows: int | None = None) -> BucketResult:
    return BucketResult(base_offset=base, end_offset=end, rows=rows)


def by_etl(epoch: int, batch: int) -> dict[str, Any]:
    return {**LOCKED, "owner": "etl", "token": Token(epoch, batch), "writer": writer(epoch)}


RECORDED: dict[str, Message] = {
    "put": Put(**by_etl(1, 0), buckets={A: 0, B: 0}, mode=AggMode.ACCUMULATE, announced_bytes=64),
    "put-unlocked": Put(
        **UNLOCKED,
        buckets={A: None, B: None},
        columns=("a",),
        mode=AggMode.ACCUMULATE,
        owner="me",
        token=Token(3, 7),
        announced_bytes=48,
    ),
    "put-without_a_token": Put(
        **UNLOCKED,
        buckets={A: None, B: None},
        mode=AggMode.ACCUMULATE,
        owner="",
        announced_bytes=48,
    ),
    "put-deletes": Put(
        **UNLOCKED,
        buckets={B: None},
        mode=AggMode.ACCUMULATE,
        operation_column="__tallybook_operation",
        owner="me",
        token=Token(3, 8),
        announced_bytes=9,
    ),
    "put-held_end": Put(
        **UNLOCKED,
        buckets={A: None},
        mode=AggMode.ACCUMULATE,
        owner="",
        announced_bytes=48,
        holds_end=True,
    ),
    "put-tried": Put(
        **by_etl(3, 3),
        buckets={A: 0},
        columns=("a",),
        mode=AggMode.MERGE_STATE,
        announced_bytes=16,
        try_only=True,
    ),
    "put_answer": PutAnswer(session=SESSION, results=(result(1, 2), result(1, 3))),
    "put_chunk": PutChunk(
        **by_etl(1, 1),
        columns=("a",),
        mode=AggMode.ACCUMULATE,
        put_id=UPLOAD,
        chunk=0,
        announced_bytes=3200,
    ),
    "put_chunk-resumable": PutChunk(
        **by_etl(3, 2),
        columns=("a",),
        mode=AggMode.MERGE_STATE,
        put_id=PROMISE,
        resumable=True,
        chunk=0,
        announced_bytes=3200,
    ),
    "put_chunk_answer": PutChunkAnswer(session=SESSION, chunks=1),
    "advance": Advance(
        **LOCKED, put_id=UPLOAD, rows=200, buckets={A: Uploads(0, 2), B: Uploads(0, 3)}
    ),
    "advance-tried": Advance(
        **LOCKED,
        put_id=PROMISE,
        rows=200,
        buckets={A: Uploads(0, 2), B: Uploads(0, 3)},
        try_only=True,
    ),
    "advance_answer": AdvanceAnswer(
        session=SESSION,
        done=True,
        rows_done=200,
        results={A: result(2, 101, rows=99), B: result(3, 104, rows=101)},
    ),
    "forget_put": ForgetPut(put_id=UPLOAD),
    "nothing": Nothing(),
    "put_progress": PutProgress(table_id=2, owner="etl", token=Token(1, 2)),
    "put_progress_answer": PutProgressAnswer(rows=0, bytes=0, rows_done=0),
    "fence": Fence(**LOCKED, buckets=(A, B), writer=writer(1), columns=(2, 3)),
    "fence_answer": FenceAnswer(
        session=SESSION, results=(0, 0), put_max_rows=50, put_max_bytes=64 << 20
    ),
    "undo": Undo(
        **LOCKED,
        buckets={A: UndoStep(0, UndoRange(101)), B: UndoStep(0, UndoRange(104))},
        writer=writer(2),
        debtor="etl",
        columns=(2, 3),
    ),
    "undo-gone_on_with": Undo(
        **LOCKED,
        buckets={A: UndoStep(0, UndoRange(101, 150)), B: UndoStep(0, UndoRange(104, 205))},
        writer=writer(2),
        debtor="etl",
        columns=(2, 3),
    ),
    "undo-unlocked": Undo(
        **UNLOCKED,
        buckets={A: UndoStep(None, UndoRange(0)), B: UndoStep(None, UndoRange(0))},
        debtor="me",
        columns=(2,),
    ),
    "undo_answer": UndoAnswer(
        session=SESSION, results=(Undone(199, 248, 49, 150), Undone(205, 205, 0, 205))
    ),
    "undo_answer-done": UndoAnswer(session=SESSION, results=(Undone(256, 306, 50, None),)),
    "end_recovery": EndRecovery(**LOCKED, buckets={A: 0, B: 0}, writer=writer(1)),
    "ends_answer": EndsAnswer(session=SESSION, results=(1, 1)),
    "seal": Seal(**LOCKED, buckets={A: 0, B: 0}, writer=writer(1), batch=0),
    "log_ends": LogEnds(**LOCKED, buckets=(A, B)),
    "log_ends_answer": LogEndsAnswer(session=SESSION, results=(396, 407), starts=(0, 0)),
    "hand_over": HandOver(table_id=2, bucket=B, session=SESSION),
    "hand_over_answer": HandOverAnswer(),
    "hand_over_answer-refused": HandOverAnswer(refused="it is being opened or handed over"),
    "drain": Drain(),
    "drain_answer": DrainAnswer(buckets=3),
    "take_snapshots": TakeSnapshots(**LOCKED, buckets=(A, B)),
    "take_snapshots-some": TakeSnapshots(**LOCKED, buckets=(A, B), some=True),
    "take_snapshots_answer": TakeSnapshotsAnswer(session=SESSION, results=(1, 1)),
    "read_changelog": ReadChangelog(
        **LOCKED, bucket=B, from_offset=4, to_offset=9, isolation=COMMITTED
    ),
    "read_changelog-to_the_end": ReadChangelog(
        **LOCKED, bucket=A, from_offset=0, isolation=COMMITTED
    ),
    "changelog_batch": ChangelogBatch(next_offset=9),
    "changelog_batch-of_a_schema": ChangelogBatch(next_offset=9, schema_version=3),
    "read_changes": ReadChanges(**LOCKED, bucket=A, since=SINCE, until=UNTIL, after=7),
    "changed_pieces": ChangedPieces(**LOCKED, buckets=(A, B), since=SINCE, until=UNTIL),
    "changed_pieces_answer": ChangedPiecesAnswer(
        session=SESSION,
        results=(
            (
                Piece("etl", Token(3, 6), 12, 1_790_000_000_000, frozenset({2, 3}), 18),
                Piece("web", Token(4, 0), 1, 1_790_000_000_500, frozenset({4}), 19),
                Piece("etl", Token(3, LAST_BATCH), 70, 1_790_000_001_000, frozenset({2, 3}), 99),
            ),
            (Piece("", None, 5, 1_790_000_000_000, frozenset({2}), 5),),
        ),
    ),
    "lookup_stream": LookupStream(**LOCKED, columns=(2, 3), isolation=COMMITTED),
    "scan": Scan(**LOCKED, bucket=A, columns=(2,), isolation=COMMITTED),
    "scan-limited": Scan(**LOCKED, bucket=A, columns=(2, 3), isolation=COMMITTED, limit=2),
    "scan-taken_up": Scan(
        **LOCKED,
        bucket=A,
        columns=(2, 3),
        isolation=LATEST,
        limit=0,
        scanner=SCANNER,
        after=bytes.fromhex("8000000000000085"),
    ),
    "scan-at_a_cut": SCAN_AT_A_CUT,
    "scan_begun": ScanBegun(scanner=SCANNER, offset=396),
    "scan_batch": ScanBatch(last_key=bytes.fromhex("8000000000000085")),
    "scan_done": ScanDone(),
    "close_scanners": CloseScanners(scanners=(SCANNER,)),
    "status": Status(),
    "ping": Ping(),
}


def messages(kind: type[Message] = Message) -> Iterator[type[Message]]:
    """Yield all classes of messages that are sent: those that no other is made of."""
    below = [one for one in kind.__subclasses__() if one.__module__.startswith("server.")]
    for one in below:
        yield from messages(one)
    if not below:
        yield kind


MESSAGES = sorted(set(messages()), key=lambda kind: kind.__name__)


def stem(kind: type[Message]) -> str:
    """Return the name of a class, as a file has it."""
    return re.sub(r"(?<!^)(?=[A-Z])", "_", kind.__name__).lower()


def recorded(name: str) -> dict[str, Any]:
    """Return what the first version has sent, without what it said of nothing."""
    fields: dict[str, Any] = json.loads((FIRST / f"{name}.json").read_bytes())
    return {key: value for key, value in fields.items() if value is not None}


@pytest.mark.parametrize("name", RECORDED)
def test_what_the_first_version_has_sent_is_read(name: str) -> None:
    wanted = RECORDED[name]
    assert type(wanted).from_body((FIRST / f"{name}.json").read_bytes()) == wanted


@pytest.mark.parametrize("name", RECORDED)
def test_the_same_is_sent_as_long_as_the_format_is_the_first(name: str) -> None:
    sent = json.loads(bytes(RECORDED[name].to_body()))
    # A default is said, which the first version did not always do.
    assert {**sent, **recorded(name)} == sent
    assert wire.FORMATS.current == 1


@pytest.mark.parametrize("kind", MESSAGES, ids=lambda kind: kind.__name__)
def test_every_message_was_recorded(kind: type[Message]) -> None:
    assert list(FIRST.glob(f"{stem(kind)}.*"))


def test_every_record_is_read() -> None:
    read_elsewhere = {"lookup", "lookup-states", "lookup_answer", "status_answer"}
    assert {path.stem for path in FIRST.iterdir()} == {*RECORDED, *read_elsewhere}


def test_the_first_look_up_and_its_answer_are_read() -> None:
    body = (FIRST / "lookup.bin").read_bytes()
    call = Lookup.from_body(body)
    assert call == Lookup(**LOCKED, buckets=(A, B), columns=(2, 3), isolation=COMMITTED)
    assert {key: batch.to_pydict() for key, batch in call.keys.items()} == {
        A: {"k": [1]},
        B: {"k": [2]},
    }
    again = Lookup.from_body(call.to_body())
    assert (again, {**again.keys}) == (call, {**call.keys})
    answer = LookupAnswer.from_body((FIRST / "lookup_answer.bin").read_bytes())
    found = answer.batches(pa.schema([("a", pa.int64()), ("note", pa.string())]))
    assert [batch.to_pylist() for batch in found] == [
        [{"a": 4, "note": "x"}],
        [{"a": 6, "note": None}],
    ]


def test_a_look_up_that_asks_for_states_is_read() -> None:
    call = Lookup.from_body((FIRST / "lookup-states.bin").read_bytes())
    values = Lookup.from_body((FIRST / "lookup.bin").read_bytes())
    assert call == replace(values, states=(3,), found=True)
    assert {**call.keys} == {**values.keys}
    again = Lookup.from_body(call.to_body())
    assert (again, {**again.keys}) == (call, {**call.keys})
    assert call.only([B]).states == (3,)


def test_a_message_of_an_exchange_has_keys_of_the_buckets_that_it_names() -> None:
    stream = LookupStream(**LOCKED, columns=(2, 3), isolation=COMMITTED)
    keys = pa.record_batch({"k": [5, 6, 7]})
    shares = write_shares([(A, 1), (B, 2)])
    assert shares.hex() == "".join(f"{number:02x}{'00' * 7}" for number in (0, 0, 1, 0, 1, 2))
    asked = stream.keys_of(keys, shares)
    assert {key: batch.to_pydict() for key, batch in asked.items()} == {
        A: {"k": [5]},
        B: {"k": [6, 7]},
    }
    assert stream.keys_of(keys, write_shares([(B, 3)])) == {B: keys}


@pytest.mark.parametrize(
    "shares",
    [
        b"",
        b"x",
        write_shares([(A, 2)]),
        write_shares([(A, 4)]),
        write_shares([(A, 1), (A, 2)]),
        write_shares([(A, 3), (B, 0)]),
        write_shares([(A, 4), (B, -1)]),
        write_shares([(A, 2**62), (B, 2**62), (BucketId(0, 2), 3)]),
    ],
)
def test_a_message_whose_shares_do_not_add_up_is_refused(shares: bytes) -> None:
    stream = LookupStream(**LOCKED, columns=(2, 3), isolation=COMMITTED)
    with pytest.raises(BadRequest, match="a look-up"):
        stream.keys_of(pa.record_batch({"k": [5, 6, 7]}), shares)


def test_shares_are_read_as_they_were_written() -> None:
    shares = [(BucketId(7, 3), 1), (BucketId(1 << 40, 0), 200)]
    assert read_shares(write_shares(shares)) == shares


def test_another_exchange_is_refused() -> None:
    fields = {**recorded("lookup_stream"), "call": "dances"}
    with pytest.raises(BadRequest, match="there is no exchange 'dances'"):
        LookupStream.from_body(json.dumps(fields).encode())


def test_the_first_status_is_read() -> None:
    status = StatusAnswer.from_body((FIRST / "status_answer.json").read_bytes()).status
    assert status["session"] == SESSION
    assert "format" not in status


@pytest.mark.parametrize(
    "kind", [kind for kind in MESSAGES if issubclass(kind, Call)], ids=lambda kind: kind.__name__
)
def test_a_call_names_the_class_of_its_answer(kind: Any) -> None:
    """Type checkers go by the one, and connections by the other."""
    answers = {arg for base in kind.__orig_bases__ for arg in get_args(base)}
    assert answers == {kind.answer}


def test_streams_and_commands_are_told_apart() -> None:
    assert Scan.read_message(wire.decode(ScanDone().to_body())) == ScanDone()
    for name in ("scan_begun", "scan_batch"):
        body = RECORDED[name].to_body()
        assert Scan.read_message(wire.decode(body)) == RECORDED[name]
    for name in ("put", "put_chunk"):
        assert read_put(wire.decode(RECORDED[name].to_body())) == RECORDED[name]


def test_some_of_the_buckets_get_their_share_of_a_call() -> None:
    undo, fence = RECORDED["undo"], RECORDED["fence"]
    assert isinstance(undo, Undo)
    assert isinstance(fence, Fence)
    assert undo.only([B]).buckets == {B: undo.buckets[B]}
    assert fence.only([B]).buckets == (B,)


def test_what_is_left_of_an_undo_begins_where_it_was_wanted_from() -> None:
    left = UndoResult(base_offset=199, end_offset=248, rows=49, rest=UndoRange(101, 150))
    assert Undone.of(left).result(UndoRange(101)) == left
    done = UndoResult(base_offset=199, end_offset=248, rows=49)
    assert Undone.of(done).result(UndoRange(101)) == done


def test_a_cut_of_many_owners_travels_with_a_call() -> None:
    buckets = [BucketId(0, number) for number in range(200)]
    offsets = Offsets({bucket: 10**9 + bucket.number for bucket in buckets})
    owners = {f"job-{number}": OwnerCut(batch=number, offsets=offsets) for number in range(100)}
    cut = replace(UNTIL, owners=owners)
    keys = dict.fromkeys(buckets[:2], pa.record_batch({"k": [1]}))
    call = Lookup(
        **LOCKED, buckets=tuple(keys), columns=(2,), isolation=COMMITTED, cut=cut, keys=keys
    )
    assert Lookup.from_body(call.to_body()).cut == cut
    some = call.only(buckets[:1])
    assert some.cut is not None
    assert {*map(len, (one.offsets or () for one in some.cut.owners.values()))} == {1}
    scan = replace(SCAN_AT_A_CUT, cut=cut)
    assert Scan.from_body(scan.to_body()) == scan


# --- Versions -----------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class LaterSeal(Seal):
    """A call that has learnt something new."""

    at: Annotated[int | None, NUMBER] = None


def test_a_field_can_be_added_for_those_who_know_it() -> None:
    assert LaterSeal.from_body((FIRST / "seal.json").read_bytes()).at is None
    later = LaterSeal(**LOCKED, buckets={A: 0, B: 0}, writer=writer(1), batch=0, at=7)
    assert LaterSeal.from_body(later.to_body()) == later
    assert Seal.from_body(later.to_body()) == RECORDED["seal"]


def test_another_format_has_its_own_reader_and_the_last_one_stays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def read_second(fields: dict[str, Any]) -> wire.Fields:
        return wire.Fields({**fields, "batch": fields["number"]})

    second = json.dumps({**recorded("seal"), "format": 2, "batch": None, "number": 7}).encode()
    with pytest.raises(BadRequest, match="a request of format 2, this release reads 1; it was"):
        Seal.from_body(second)
    readers = {**wire.FORMATS.readers, 2: read_second}
    monkeypatch.setattr(wire, "FORMATS", replace(wire.FORMATS, readers=readers))
    assert Seal.from_body(second).batch == 7
    assert Seal.from_body((FIRST / "seal.json").read_bytes()) == RECORDED["seal"]
    with pytest.raises(BadRequest, match="of format 3, this release reads 1 and 2"):
        Seal.from_body(b'{"format":3}')


# --- What is refused ----------------------------------------------------------------------------

BAD: dict[str, tuple[str, dict[str, Any], str]] = {
    "no table": ("seal", {"table": None}, "a whole number as `table`"),
    "a term beyond 64 bits": ("seal", {"buckets": [[0, 0, 1 << 63]]}, "3 whole numbers"),
    "no epoch": ("seal", {"epoch": None}, "a whole number as `epoch`"),
    "a bucket twice": ("seal", {"buckets": [[0, 0, 1], [0, 0, 2]]}, "names a bucket twice"),
    "a bucket twice, without more": ("fence", {"buckets": [[0, 0], [0, 0]]}, "a bucket twice"),
    "a row too wide": ("fence", {"buckets": [[0, 0, 0]]}, "2 whole numbers"),
    "a token of three": ("put", {"token": [1, 2, 3]}, "an epoch and a batch"),
    "an unknown mode": ("put", {"mode": 7}, "agg mode 7"),
    "columns that are numbers": ("put", {"columns": [1]}, "`columns` are not texts"),
    "a chunk without a token": ("put_chunk", {"token": None}, "a list as `token`"),
    "a scan of two buckets": ("scan", {"buckets": [[0, 0], [0, 1]]}, "a scan of 2 buckets"),
    "an unknown isolation": ("scan", {"isolation": "dirty"}, "'dirty'; use 'latest' or 'commit"),
    "a key that is no key": ("scan-taken_up", {"after": "xyz"}, "not hexadecimal"),
    "a text too long": ("undo", {"debtor": "x" * 1_001}, "`debtor` is longer"),
}


@pytest.mark.parametrize("name", BAD)
def test_fields_that_are_not_what_they_should_be_are_refused(name: str) -> None:
    good, changes, words = BAD[name]
    fields = wire.Fields({**recorded(good), **changes})
    with pytest.raises(BadRequest, match=re.escape(words)):
        type(RECORDED[good]).from_fields(fields)


@pytest.mark.parametrize("metadata", [None, b"", b"x", b"-1", b"2", b"9" * 9_999])
def test_a_batch_that_is_for_no_bucket_of_the_put_is_refused(metadata: bytes | None) -> None:
    put = RECORDED["put"]
    assert isinstance(put, Put)
    assert put.read_place(Put.place(1)) == 1
    with pytest.raises(BadRequest, match="a batch"):
        put.read_place(metadata)


@pytest.mark.parametrize("metadata", [None, b"0 1", b"0 1 2 3", b"-1 0 0", b"0 2 0", b"0 0 -1"])
def test_a_batch_that_is_no_part_of_a_bucket_is_refused(metadata: bytes | None) -> None:
    assert PutChunk.read_place(PutChunk.place(B, 3), buckets=2) == (B, 3)
    with pytest.raises(BadRequest, match="a batch"):
        PutChunk.read_place(metadata, buckets=2)


def test_an_isolation_goes_by_its_name() -> None:
    assert Isolation.of("latest") is LATEST
    assert Isolation.of("committed") is COMMITTED
    with pytest.raises(InvalidInput, match="isolation is 'committed' or 'latest', not 'dirty'"):
        Isolation.of("dirty")
