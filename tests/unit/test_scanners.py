"""Scanner sessions under a clock that is set by hand: time to live, limits, streams, closing."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import pyarrow as pa
import pytest

from foundation.errors import Closed, NotLeader, TooManyScanners, UnknownOrExpiredScannerError
from foundation.ids import BucketId, LeadKey
from recovery.reader.bucket_scan import BucketScan, ScannedBatch
from recovery.reader.table_scan import TableScan
from server.tablet.limits import ScannerLimits
from server.tablet.scanners import Scanner, Scanners

HERE, THERE = (LeadKey(1, BucketId(0, number)) for number in (0, 1))
DEADLINE_S = 20.0


class Clock:
    """A clock that stands still until it is moved."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


class FakeScan:
    """Rows 0 to 9, one batch each; a batch waits at `gate`, if there is one."""

    def __init__(self, gate: threading.Event | None = None) -> None:
        self.offset = 7
        self.closed = 0
        self.reading = threading.Event()
        self._gate = gate

    def batches(
        self, _: Any, *, after: bytes | None, limit: int | None, **_more: Any
    ) -> Iterator[ScannedBatch]:
        for number in range(int(after or b"-1") + 1, 10)[:limit]:
            if self.closed:
                raise Closed("these rows were closed")
            self.reading.set()
            if self._gate is not None:
                assert self._gate.wait(DEADLINE_S)
            assert not self.closed, "closed under a batch that is being read"
            yield ScannedBatch(pa.record_batch({"k": [number]}), str(number).encode())

    def close(self) -> None:
        self.closed += 1


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def scanners(clock: Clock) -> Iterator[Scanners]:
    # Its own thread looks after 5 s, and finds the sessions as this clock has them.
    limits = ScannerLimits(ttl_s=60, max_per_bucket=3, max_per_server=4)
    made = Scanners(limits, clock_s=clock)
    yield made
    made.shutdown()
    assert len(made) == 0


def begin(scanners: Scanners, key: LeadKey = HERE) -> tuple[Scanner, FakeScan]:
    scan = FakeScan()
    return scanners.open(key, lambda: cast(BucketScan, scan)), scan


def stream(scanner: Scanner, after: bytes | None = None, limit: int | None = None) -> Iterator[int]:
    found = scanner.batches([], after=after, limit=limit, batch_rows=1)
    return (batch.data["k"][0].as_py() for batch in found)


# Time to live


def test_each_batch_is_a_use_and_what_is_not_used_ends_before_it_is_reaped(
    scanners: Scanners, clock: Clock
) -> None:
    scanner, scan = begin(scanners)
    rows = stream(scanner)
    for number in range(5):
        clock.now_s += 60
        assert scanners.get(scanner.scanner_id) is scanner
        assert (next(rows), scanner.offset) == (number, 7)
    clock.now_s += 60.1
    for use in (lambda: next(rows), lambda: scanner.offset, lambda: stream(scanner)):
        with pytest.raises(UnknownOrExpiredScannerError, match="begin the scan again"):
            use()
    assert (len(scanners), scan.closed, scanners.reaped) == (1, 0, 0), "nobody has reaped it"
    with pytest.raises(UnknownOrExpiredScannerError):
        scanners.get(scanner.scanner_id)
    assert (len(scanners), scan.closed) == (0, 1)


def test_the_reaper_ends_what_was_not_used_and_nothing_else(
    scanners: Scanners, clock: Clock
) -> None:
    old, old_scan = begin(scanners)
    clock.now_s += 40
    young, young_scan = begin(scanners)
    clock.now_s += 40
    scanners.reap()
    scanners.reap()
    assert (old_scan.closed, young_scan.closed, scanners.reaped) == (1, 0, 1)
    assert list(stream(young)) == list(range(10))
    with pytest.raises(UnknownOrExpiredScannerError):
        scanners.get(old.scanner_id)


def test_the_reaper_comes_by_itself() -> None:
    scan = FakeScan()
    closed = threading.Event()
    scan.close = closed.set  # type: ignore[method-assign]
    scanners = Scanners(ScannerLimits(ttl_s=0.01))
    try:
        scanners.open(HERE, lambda: cast(BucketScan, scan))
        assert closed.wait(DEADLINE_S)
    finally:
        scanners.shutdown()


def test_of_many_who_reap_at_once_each_session_is_counted_once(
    scanners: Scanners, clock: Clock
) -> None:
    for _ in range(50):
        begin(scanners)
        begin(scanners)
        clock.now_s += 61
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda _: scanners.reap(), range(4)))
    assert scanners.reaped == 100


def test_a_session_that_takes_long_to_open_is_not_reaped_meanwhile(
    scanners: Scanners, clock: Clock
) -> None:
    scan = FakeScan()

    def open_slowly() -> BucketScan:
        clock.now_s += 1000
        scanners.reap()
        return cast(BucketScan, scan)

    assert list(stream(scanners.open(HERE, open_slowly))) == list(range(10))


# Unknown, closed, closed twice


def test_unknown_expired_and_closed_sessions_get_one_and_the_same_error(
    scanners: Scanners, clock: Clock
) -> None:
    closed, scan = begin(scanners)
    assert scanners.close(closed.scanner_id)
    assert not scanners.close(closed.scanner_id)
    closed.close()
    assert scan.closed == 1
    expired, _ = begin(scanners)
    clock.now_s += 61
    words = set()
    for scanner_id in (closed.scanner_id, expired.scanner_id, "nobody's", ""):
        with pytest.raises(UnknownOrExpiredScannerError) as caught:
            scanners.get(scanner_id)
        words.add(str(caught.value).replace(scanner_id, "").replace("  ", " "))
    assert len(words) == 1, words


def test_a_session_that_was_closed_ends_the_streams_that_read_it(scanners: Scanners) -> None:
    scanner, _ = begin(scanners)
    rows = stream(scanner)
    assert next(rows) == 0
    scanners.close(scanner.scanner_id)
    with pytest.raises(UnknownOrExpiredScannerError):
        next(rows)


# Limits


def test_limits_of_a_bucket_and_of_the_server(scanners: Scanners) -> None:
    here = [begin(scanners)[0] for _ in range(3)]
    with pytest.raises(TooManyScanners, match=r"bucket .* has 3 scanners.*scanners-per-bucket"):
        begin(scanners)
    begin(scanners, THERE)
    with pytest.raises(TooManyScanners, match=r"the server has 4 scanners.*scanners-per-server"):
        begin(scanners, THERE)
    scanners.close(here[0].scanner_id)
    begin(scanners, THERE)


def test_expired_sessions_make_room(scanners: Scanners, clock: Clock) -> None:
    scans = [begin(scanners)[1] for _ in range(3)]
    clock.now_s += 61
    begin(scanners)
    assert [scan.closed for scan in scans] == [1, 1, 1]


def test_a_limit_holds_when_many_open_at_once(scanners: Scanners) -> None:
    everybody, decided = threading.Barrier(16), threading.Barrier(16)

    def pin() -> BucketScan:
        decided.wait(DEADLINE_S)  # Nobody has its rows before all others were counted.
        return cast(BucketScan, FakeScan())

    def one(_: int) -> bool:
        everybody.wait(DEADLINE_S)
        try:
            scanners.open(HERE, pin)
        except TooManyScanners:
            decided.wait(DEADLINE_S)
            return False
        return True

    with ThreadPoolExecutor(16) as pool:
        assert sum(pool.map(one, range(16))) == 3
    assert len(scanners) == 3


def test_a_session_whose_rows_cannot_be_had_leaves_no_trace(scanners: Scanners) -> None:
    def fail() -> BucketScan:
        raise NotLeader("somebody else leads it")

    for _ in range(10):
        with pytest.raises(NotLeader, match="somebody else leads it"):
            scanners.open(HERE, fail)
    assert len(scanners) == 0


# Streams


def test_a_stream_that_resumes_takes_the_session_over(scanners: Scanners) -> None:
    scanner, _ = begin(scanners)
    first = stream(scanner)
    assert [next(first) for _ in range(6)] == list(range(6))
    # The reader has seen the first three; the rest was lost with the connection.
    second = stream(scanner, after=b"2")
    with pytest.raises(UnknownOrExpiredScannerError):
        next(first)  # Even before the second was read from.
    assert list(second) == list(range(3, 10))
    assert list(stream(scanner, after=b"9")) == []
    assert list(stream(scanner, after=b"4", limit=2)) == [5, 6]


def test_a_batch_that_is_being_read_ends_before_the_session_does(scanners: Scanners) -> None:
    gate = threading.Event()
    scan = FakeScan(gate)
    scanner = scanners.open(HERE, lambda: cast(BucketScan, scan))
    rows = stream(scanner)
    with ThreadPoolExecutor(2) as pool:
        reading = pool.submit(next, rows)
        assert scan.reading.wait(DEADLINE_S)
        closing = pool.submit(scanners.close, scanner.scanner_id)
        assert not closing.done()
        assert scan.closed == 0
        gate.set()
        assert reading.result(DEADLINE_S) == 0
        assert closing.result(DEADLINE_S)
    assert scan.closed == 1
    with pytest.raises(UnknownOrExpiredScannerError):
        next(rows)


# Buckets that close


def test_a_bucket_that_closes_ends_its_sessions_and_no_others(scanners: Scanners) -> None:
    mine, my_scan = begin(scanners)
    other, other_scan = begin(scanners, THERE)
    scanners.close_bucket(HERE)
    assert (my_scan.closed, other_scan.closed, len(scanners)) == (1, 0, 1)
    with pytest.raises(UnknownOrExpiredScannerError):
        stream(mine)
    assert list(stream(other)) == list(range(10))


def test_a_bucket_closes_only_after_rows_that_were_being_pinned_are_let_go(
    scanners: Scanners,
) -> None:
    """RocksDB's lock file is free when the last iterator is gone."""
    pinning, go_on = threading.Event(), threading.Event()
    scan = FakeScan()

    def close() -> int:
        scanners.close_bucket(HERE)
        return scan.closed

    def pin() -> BucketScan:
        pinning.set()
        assert go_on.wait(DEADLINE_S)
        return cast(BucketScan, scan)

    with ThreadPoolExecutor(2) as pool:
        opening = pool.submit(scanners.open, HERE, pin)
        assert pinning.wait(DEADLINE_S)
        closing = pool.submit(close)
        assert not closing.done()
        go_on.set()
        assert closing.result(DEADLINE_S) == 1
        with pytest.raises(NotLeader, match="ask who leads"):
            opening.result(DEADLINE_S)
    assert len(scanners) == 0


def test_a_bucket_does_not_wait_for_ever_for_rows_that_are_being_pinned(
    scanners: Scanners, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("server.tablet.scanners._LONGEST_OPENING_S", 0.01)
    pinning, go_on = threading.Event(), threading.Event()
    scan = FakeScan()

    def pin() -> BucketScan:
        pinning.set()
        assert go_on.wait(DEADLINE_S)
        return cast(BucketScan, scan)

    with ThreadPoolExecutor(1) as pool:
        opening = pool.submit(scanners.open, HERE, pin)
        assert pinning.wait(DEADLINE_S)
        scanners.close_bucket(HERE)
        go_on.set()
        with pytest.raises(NotLeader):
            opening.result(DEADLINE_S)
    assert scan.closed == 1


def test_shutdown_ends_all_sessions() -> None:
    scanners = Scanners(ScannerLimits())
    scans = [begin(scanners, key)[1] for key in (HERE, THERE)]
    scanners.shutdown()
    assert [scan.closed for scan in scans] == [1, 1]
    assert len(scanners) == 0


# What a table's scan says of its buckets


class RestartedRows:
    """Rows whose leader moved before the first of them came: they stand at another offset."""

    def __init__(self, rows: int) -> None:
        self.offset = 5
        self.closed = False
        self._rows = rows

    def open_early(self) -> None:
        """Nothing is held."""

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        self.offset = 9
        if self._rows:
            yield pa.record_batch({"k": list(range(self._rows))})

    def close(self) -> None:
        self.closed = True


@pytest.mark.parametrize("rows", [0, 3])
def test_offsets_are_those_of_the_rows_that_came(rows: int) -> None:
    bucket = HERE.bucket
    schema = pa.schema([("k", pa.int64())])
    scan = TableScan([bucket], schema, lambda _key, _limit: RestartedRows(rows))
    for _ in scan:
        assert scan.offsets == {bucket: 9}
    assert scan.offsets == {bucket: 9}
    whole = TableScan([bucket], schema, lambda _key, _limit: RestartedRows(rows))
    assert whole.to_arrow().num_rows == rows
    assert whole.offsets == {bucket: 9}
