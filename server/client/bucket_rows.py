"""The rows of one bucket, as a client reads them from the bucket's leader."""

import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace

import pyarrow as pa
from pyarrow import flight

from foundation.errors import (
    Closed,
    NotLeader,
    ServerUnavailable,
    TallybookError,
    UnknownOrExpiredScannerError,
)
from foundation.ids import LeadKey
from server.client.connections import Broken
from server.client.table_caller import TableCaller
from server.protocol.reads import (
    CloseScanners,
    Scan,
    ScanBatch,
    ScanBegun,
    ScanDone,
    ScanMessage,
)

_PAUSE_S = 0.05
_PATIENCE = 5
_CLOSE_S = 2.0

Told = tuple[pa.RecordBatch, ScanMessage]


class BucketRows:
    """A scan of one bucket, to iterate once. Every row comes exactly once.

    A scan is one stream after the other, each no longer than an attempt of any call: so a server
    that hangs is noticed as soon as elsewhere, and a stream that nobody reads has an end. A stream
    that ended or broke is taken up again after the last key that came, on the same rows. If the
    scanner is gone by then, another one at the same cut has the same rows, also at another leader.
    Without a cut, that is UnknownOrExpiredScannerError, unless no row had come yet: then `offset`
    is another one, but rows as of another offset do not go with those that came.
    """

    def __init__(self, caller: TableCaller, scan: Scan) -> None:
        """`scan`: the call that begins it."""
        self._caller = caller
        self._calls = caller.calls
        self._key = LeadKey(scan.table_id, scan.bucket)
        self._scan = scan
        self._address = ""
        self._scanner: str | None = None
        self._after: bytes | None = None
        self._offset: int | None = None
        self._rows = 0
        self._stream: Iterator[Told] | None = None
        self._closed = False

    @property
    def closed(self) -> bool:
        """Whether nothing is held for them any more."""
        return self._closed

    @property
    def offset(self) -> int:
        """Where the rows were pinned. It is that of the rows from the first batch on.

        Without a cut, the changelog from here on adds up to the table.
        """
        if self._offset is None:
            self._open()
        assert self._offset is not None
        return self._offset

    def open_early(self) -> None:
        """Begin now, if the server that probably leads lets us; else the first batch begins it."""
        with suppress(Broken, TallybookError):
            address = self._calls.directory.address_of(self._key, self._caller.table.buckets)
            self._take(*self._begin(address, self._calls.attempt_s))

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        """Yield batches in key order; the scanner is closed at the end, however it comes."""
        try:
            while (batch := self._next()) is not None:
                yield batch
        finally:
            self.close()

    def close(self) -> None:
        """Let the server forget the scanner; if it cannot be told now, it will by itself.

        Whoever reads on is told Closed. Closing twice is fine.
        """
        self._closed = True
        scanner, self._scanner = self._scanner, None
        self._stream = None
        if scanner is not None:
            call = CloseScanners(scanners=(scanner,))
            with suppress(Broken, TallybookError):
                self._calls.connections.call(self._address, call, _CLOSE_S)

    def _next(self) -> pa.RecordBatch | None:
        """Return the next batch, whatever happens to the connection meanwhile."""
        began, deadline = time.monotonic(), self._calls.deadline()
        failures = 0
        while True:
            try:
                return self._receive()
            except Broken as exc:
                self._stream = None
                if time.monotonic() > deadline:
                    raise ServerUnavailable(f"the scan of bucket {self._key}: {exc}") from exc
                failures += 1
                if failures > 1:
                    time.sleep(_PAUSE_S)
                # Mostly it is the connection alone. To ask ZooKeeper takes long when it is away,
                # and the scanner may be gone by then.
                waited_s = time.monotonic() - began
                if failures > _PATIENCE or waited_s > self._calls.attempt_s:
                    self._check_leader()
            except (UnknownOrExpiredScannerError, NotLeader) as exc:
                lost = self._lost(str(exc)) if isinstance(exc, NotLeader) else exc
                if time.monotonic() > deadline:
                    raise lost from exc
                self._lose(lost)

    def _receive(self) -> pa.RecordBatch | None:
        """Return the next batch that has rows; None if there are no more."""
        while True:
            if self._scanner is None:
                self._open()
            if self._stream is None:
                self._resume()
            assert self._stream is not None
            message = next(self._stream, None)
            if message is None:  # It ended without saying that this was all.
                raise Broken(self._address, flight.FlightError("the stream was cut short"))
            batch, told = message
            if isinstance(told, ScanDone):
                return None
            if isinstance(told, ScanBatch) and batch.num_rows:
                self._after = told.last_key
                self._rows += batch.num_rows
                return batch

    def _open(self) -> None:
        """Begin: find the leader, and learn which scanner it is."""
        if self._closed:
            raise Closed(f"this scan of bucket {self._key} was closed; begin another")

        begun = self._calls.scatter(
            [self._key],
            self._caller.table.buckets,
            lambda address, keys, left_s: dict.fromkeys(keys, self._begin(address, left_s)),
            check_moved=self._caller.check_buckets,
        )
        self._take(*begun[self._key])

    def _begin(self, address: str, left_s: float) -> tuple[str, ScanBegun, Iterator[Told]]:
        """Ask a server for a scanner: after the last key that came, if one did."""
        stream = self._ask(address, replace(self._scan, after=self._after), left_s)
        _, first = next(stream, (None, None))
        if not isinstance(first, ScanBegun):
            raise Broken(address, flight.FlightError("it ended a scan without a word"))
        return address, first, stream

    def _take(self, address: str, begun: ScanBegun, stream: Iterator[Told]) -> None:
        self._address, self._stream = address, stream
        self._scanner, self._offset = begun.scanner, begun.offset

    def _resume(self) -> None:
        """Go on with the same scanner, after the last key."""
        again = replace(self._scan, scanner=self._scanner, after=self._after)
        stream = self._ask(self._address, again, self._calls.attempt_s)
        next(stream, None)  # What it says about itself is known.
        self._stream = stream

    def _ask(self, address: str, scan: Scan, left_s: float) -> Iterator[Told]:
        left = None if scan.limit is None else scan.limit - self._rows
        return self._calls.connections.stream(address, replace(scan, limit=left), left_s)

    def _check_leader(self) -> None:
        """A server that does not answer may be back; one that no longer leads has let go."""
        if self._scanner is None:
            return
        try:
            self._calls.directory.refresh([self._key])
            leader = self._calls.directory.address_of(self._key, self._caller.table.buckets)
        except TallybookError:  # No server needs ZooKeeper to go on.
            return
        if leader != self._address:
            self._lose(
                self._lost(f"{self._address} does not answer, and {leader} leads the bucket by now")
            )

    def _lost(self, why: str) -> UnknownOrExpiredScannerError:
        return UnknownOrExpiredScannerError(
            f"the scanner of bucket {self._key} is gone: {why}; begin the scan again"
        )

    def _lose(self, error: UnknownOrExpiredScannerError) -> None:
        """Begin again by ourselves if that gives the same rows; else it is the caller's to do."""
        self._scanner = self._stream = None
        if self._rows and self._scan.cut is None:
            raise error
        self._offset = None
