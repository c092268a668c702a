"""The rows of one bucket, as a client reads them from the bucket's leader."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import pyarrow as pa
from pyarrow import flight

from locks import CoordinationError, LeadKey
from merge_engine import Closed, TallybookError
from recovery.errors import NotLeader
from server import wire
from server.calls import Calls
from server.connections import Broken
from server.errors import ServerUnavailable, UnknownOrExpiredScannerError

_PAUSE_S = 0.05
_PATIENCE = 5
_CLOSE_S = 2.0

Message = tuple[pa.RecordBatch, wire.Fields]


class BucketRows:
    """A scan of one bucket, to iterate once. Every row comes exactly once, as of `offset`.

    A scan is one stream after the other, each no longer than an attempt of any call: so a server
    that hangs is noticed as soon as elsewhere, and a stream that nobody reads has an end. A stream
    that ended or broke is taken up again behind the last key that came, on the same rows. If
    the scanner is gone by then, that is UnknownOrExpiredScannerError, unless no row had come yet:
    then `offset` is another one, but rows as of another offset do not go with those that came.
    """

    def __init__(
        self,
        calls: Calls,
        key: LeadKey,
        buckets: int,
        fields: Mapping[str, Any],
        *,
        limit: int | None = None,
        check_moved: Callable[[Sequence[LeadKey]], None] | None = None,
    ) -> None:
        self._calls = calls
        self._key = key
        self._buckets = buckets
        self._fields = dict(fields)
        self._limit = limit
        self._check_moved = check_moved
        self._address = ""
        self._scanner: str | None = None
        self._after: bytes | None = None
        self._offset: int | None = None
        self._rows = 0
        self._stream: Iterator[Message] | None = None
        self._closed = False

    @property
    def offset(self) -> int:
        """Where the rows stand in the log: the changelog from here on adds up to the table.

        It is that of the rows from the first batch on.
        """
        if self._offset is None:
            self._open()
        assert self._offset is not None
        return self._offset

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
            body = wire.encode({"scanners": [scanner]})
            with suppress(Broken, TallybookError):
                connections = self._calls.connections
                connections.action(self._address, "close_scanners", body, _CLOSE_S)

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
            batch, fields = message
            if "done" in fields:
                return None
            if batch.num_rows:
                self._after = fields.octets("last_key")
                self._rows += batch.num_rows
                return batch

    def _open(self) -> None:
        """Begin: find the leader, and learn which scanner it is."""
        if self._closed:
            raise Closed(f"this scan of bucket {self._key} was closed; begin another")

        def begin(
            address: str, keys: Sequence[LeadKey], left_s: float
        ) -> Mapping[LeadKey, tuple[str, Message, Iterator[Message]]]:
            stream = self._ask(address, {}, left_s)
            first = next(stream, None)
            if first is None:
                raise Broken(address, flight.FlightError("it ended a scan without a word"))
            return dict.fromkeys(keys, (address, first, stream))

        begun = self._calls.scatter(
            [self._key], self._buckets, begin, check_moved=self._check_moved
        )
        self._address, first, self._stream = begun[self._key]
        self._scanner = first[1].get("scanner", str)
        self._offset = first[1].get("offset", int)

    def _resume(self) -> None:
        """Go on with the same scanner, behind the last key."""
        after = None if self._after is None else self._after.hex()
        more = {"scanner": self._scanner, "after": after}
        stream = self._ask(self._address, more, self._calls.attempt_s)
        next(stream, None)  # What it says about itself is known.
        self._stream = stream

    def _ask(self, address: str, more: Mapping[str, Any], left_s: float) -> Iterator[Message]:
        left = None if self._limit is None else self._limit - self._rows
        ticket = wire.encode({**self._fields, "call": "scan", "limit": left, **more})
        return self._calls.connections.stream(address, ticket, left_s)

    def _check_leader(self) -> None:
        """A server that does not answer may be back; one that no longer leads has let go."""
        if self._scanner is None:
            return
        try:
            self._calls.directory.refresh([self._key])
            leader = self._calls.directory.address_of(self._key, self._buckets)
        except (ServerUnavailable, CoordinationError):  # No server needs ZooKeeper to go on.
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
        """Begin again by ourselves while nobody has seen a row; else it is the caller's to do."""
        self._scanner = self._stream = None
        if self._rows:
            raise error
        self._offset = None
