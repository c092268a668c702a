"""A bucket's changelog, as a client reads it."""

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pyarrow as pa

from locks import LeadKey
from server import wire
from server.calls import Calls
from server.connections import Broken
from server.errors import ServerUnavailable


class Changelog:
    """A bucket's change records, to iterate. `next_offset` is where a later one goes on."""

    def __init__(
        self,
        calls: Calls,
        key: LeadKey,
        buckets: int,
        fields: dict[str, Any],
        from_offset: int,
    ) -> None:
        self._calls = calls
        self._key = key
        self._buckets = buckets
        self._fields = fields
        self.next_offset = from_offset

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        """Yield batches; a connection that breaks is taken up again where it broke.

        So is a stream that lasts longer than a call may: a server that hangs is noticed by that.
        """
        reached, deadline = self.next_offset, self._calls.deadline()
        while True:
            try:
                yield from self._stream()
                return
            except Broken as exc:
                if self.next_offset > reached:
                    reached, deadline = self.next_offset, self._calls.deadline()
                elif time.monotonic() > deadline:
                    raise ServerUnavailable(
                        f"the changelog of bucket {self._key} does not get beyond offset "
                        f"{reached}: {exc}"
                    ) from exc
                self._calls.directory.refresh([self._key])

    def _stream(self) -> Iterator[pa.RecordBatch]:
        def begin(address: str, keys: Sequence[LeadKey], left_s: float) -> Mapping[LeadKey, Any]:
            ticket = wire.encode(
                {**self._fields, "call": "changelog", "from_offset": self.next_offset}
            )
            stream = self._calls.connections.stream(address, ticket, left_s)
            return {key: (next(stream, None), stream) for key in keys}

        begun = self._calls.scatter([self._key], self._buckets, begin)
        first, stream = begun[self._key]
        while first is not None:
            batch, fields = first
            self.next_offset = fields.get("next_offset", int)
            if batch is not None and batch.num_rows:
                yield batch
            first = next(stream, None)
