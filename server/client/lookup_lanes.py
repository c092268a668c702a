"""Look-ups of few keys, of all threads of a client: those that ask for the same go together.

A lane is one table, its columns and an isolation. While a call of it is under way, others gather
(`foundation.gatherer`), and go in the next: one message to each server, over an exchange that is
kept open while it is in use (`server.protocol.reads.LookupStream`). A lane is for when all goes
well. Where a server has no exchange yet, or does not lead any more, or does not answer, a look-up
is told to go by itself, and does so with all the patience of any other call.
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import numpy as np
import pyarrow as pa

from foundation.errors import BadRequest, ServerUnavailable, TallybookError, Unavailable
from foundation.gatherer import Gatherer
from foundation.ids import BucketId, LeadKey
from merge_engine.merging.grouping import Positions
from merge_engine.merging.routing import Route, route, route_one
from merge_engine.schema.schema import Column, Schema
from recovery.reader.isolation import Isolation
from server.client.asked_keys import AskedKeys, KeyReader, Keys
from server.client.connections import CLOSED, Broken, Connections, Exchange
from server.client.leader_directory import LeaderDirectory
from server.protocol.reads import LookupStream, write_shares

logger = logging.getLogger(__name__)

_MOST_KEYS = 256  # A look-up of more is a batch by itself.
_MOST_GATHERED = 4_096
_MOST_LANES = 256
_THREADS = 16
# An exchange takes a thread of the server, and its stop waits for them: none lasts for long, and
# none is begun for a single look-up, for which it is no cheaper than a call.
_EXCHANGE_S = 1.0
_STEADY_S = 0.1
_TROUBLED_S = 1.0


@dataclass(frozen=True, kw_only=True)
class LaneShape:
    """What the look-ups of a lane have in common. `find`: finds the bucket of a route, if any."""

    table_id: int
    buckets: int
    schema: Schema
    columns: Sequence[Column]
    isolation: Isolation
    find: Callable[[Route], BucketId | None]


class LookupLanes:
    """All lanes of a client. Safe for threads.

    `pool`: for look-ups of an event loop that take no lane. Threads come with the first of them.
    """

    def __init__(
        self,
        connections: Connections,
        directory: Callable[[], LeaderDirectory],
        *,
        attempt_s: float,
    ) -> None:
        """`attempt_s`: how long to wait for an answer, if that is shorter than an exchange."""
        self._connections = connections
        self._directory = directory
        self._exchange_s = min(attempt_s, _EXCHANGE_S)
        self._lock = threading.Lock()
        self._lanes: dict[object, LookupLane] = {}
        self.pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="tallybook-lookup")

    def lane(self, name: object, shape: Callable[[], LaneShape]) -> "LookupLane":
        """Return the lane of this name; `shape` is asked if there is none yet."""
        self._connections.check_open()
        lane = self._lanes.get(name)
        if lane is None:
            made = LookupLane(self._connections, self._directory, shape(), self._exchange_s)
            with self._lock:
                self._connections.check_open()
                lane = self._lanes.setdefault(name, made)
                if len(self._lanes) > _MOST_LANES:  # Whoever has it goes on with it.
                    del self._lanes[next(iter(self._lanes))]
        return lane

    def close(self) -> None:
        """Let nobody wait any longer."""
        with self._lock:
            lanes, self._lanes = self._lanes, {}
        for lane in lanes.values():
            lane.close()
        self.pool.shutdown(wait=False, cancel_futures=True)


class _Share:
    """The rows of a call that one server has: `positions`, bucket after bucket."""

    def __init__(self, server: "_Server") -> None:
        self.server = server
        self.routes: list[tuple[BucketId, Route]] = []
        self.found: pa.RecordBatch | None = None

    def is_all_of(self, size: int) -> bool:
        """Whether these are all rows, of so many, and in their order."""
        return len(self.routes) == 1 and len(self.routes[0][1].positions) == size

    @cached_property
    def positions(self) -> Positions:
        """Where its rows are in the call; once all its routes are known."""
        if len(self.routes) == 1:
            return self.routes[0][1].positions
        return np.concatenate([target.positions for _, target in self.routes])


class LookupLane:
    """Look-ups that ask for the same columns of a table. Safe for threads.

    `keys` reads what is looked up. `calls` looks it up, and returns the rows, or None if this one
    has to go by itself.
    """

    def __init__(
        self,
        connections: Connections,
        directory: Callable[[], LeaderDirectory],
        shape: LaneShape,
        exchange_s: float,
    ) -> None:
        self._connections = connections
        self._directory = directory
        self._shape = shape
        self._exchange_s = exchange_s
        keys = [(column.name, column.type) for column in shape.schema.key_columns]
        values = [(column.name, column.type) for column in shape.columns]
        self._key_schema, self._schema = pa.schema(keys), pa.schema([*keys, *values])
        self._opening = LookupStream(
            table_id=shape.table_id,
            schema_version=shape.schema.version,
            columns=tuple(column.id for column in shape.columns),
            isolation=shape.isolation,
        )
        self._servers: dict[str, _Server] = {}
        self.keys = KeyReader(shape.schema)
        self.calls: Gatherer[AskedKeys, pa.Table | None] = Gatherer(
            self._look_up,
            name="tallybook-lookups",
            most=_MOST_GATHERED,
            weigh=lambda keys: keys.rows,
        )

    def takes(self, asked: AskedKeys, deadline: float) -> bool:
        """Whether a look-up of these keys may go with others, and has the time to.

        Committed rows of one look-up stand at one cut, and several servers would take several.
        """
        most = _MOST_KEYS if self._shape.isolation is Isolation.LATEST else 1
        return 0 < asked.rows <= most and deadline - time.monotonic() > 2 * self._exchange_s

    def close(self) -> None:
        """Raise ServerUnavailable to all who wait."""
        for server in list(self._servers.values()):
            server.cancel()
        self.calls.close(ServerUnavailable(CLOSED))

    def _look_up(self, asked: Sequence[AskedKeys]) -> Sequence[pa.Table | None]:
        """Look all keys up, with one message to each server; return the rows of each who asked."""
        alone = len(asked) == 1
        keys = self.keys.arrays(asked)
        size = len(keys[0])
        try:
            shares = self._shares(self._routes(asked, keys))
        except (ServerUnavailable, Unavailable):  # Who goes by itself waits until there is one.
            return [None] * len(asked)
        for share in [one for one in shares if self._send(one, keys, size, steady=not alone)]:
            self._receive(share)
        failed = [share.positions for share in shares if share.found is None]
        if failed and alone:
            return [None]
        if alone and len(shares) == 1 and shares[0].is_all_of(size):
            return [pa.Table.from_batches([shares[0].found])]
        if size == len(asked) == sum(len(share.positions) for share in shares):
            return _rows(size, shares)
        table = self._in_order(keys, [share for share in shares if share.found is not None])
        return [table] if alone else _parts(table, asked, failed)

    def _in_order(self, keys: Keys, answered: Sequence[_Share]) -> pa.Table:
        """Return the rows in the order of the keys; those that nobody answered for are null."""
        place = np.full(len(keys[0]), -1, np.int64)
        rows = pa.RecordBatch.from_pylist([], schema=self._schema)
        if answered:
            positions = np.concatenate([share.positions for share in answered])
            place[positions] = np.arange(len(positions))
            rows = pa.concat_batches([share.found for share in answered])
        values = rows.take(pa.array(place, mask=place < 0)).columns[len(keys) :]
        return pa.Table.from_arrays([*keys, *values], schema=self._schema)

    def _routes(self, asked: Sequence[AskedKeys], keys: Keys) -> list[Route]:
        shape = self._shape
        if len(keys[0]) == 1 and asked[0].plain and not shape.schema.partition_by:
            return route_one([values[0] for values in asked[0].columns], shape.buckets)
        return route(shape.schema, keys, shape.buckets)

    def _shares(self, routes: Sequence[Route]) -> list[_Share]:
        """Return which rows go to which server. Rows of no partition go nowhere, and are null."""
        shape, directory = self._shape, self._directory()
        shares: dict[str, _Share] = {}
        for target in routes:
            bucket = shape.find(target)
            if bucket is None:
                continue
            address = directory.address_of(LeadKey(shape.table_id, bucket), shape.buckets)
            share = shares.get(address)
            if share is None:
                server = self._servers.get(address)
                if server is None:
                    server = self._servers[address] = _Server(address, self._exchange_s)
                share = shares[address] = _Share(server)
            share.routes.append((bucket, target))
        return list(shares.values())

    def _send(self, share: _Share, keys: Keys, size: int, *, steady: bool) -> bool:
        """Send a server its keys; False if these have to go by themselves."""
        server, rows = share.server, keys
        if not share.is_all_of(size):
            index = pa.array(share.positions)
            rows = [array.take(index) for array in keys]
        batch = pa.RecordBatch.from_arrays(list(rows), schema=self._key_schema)
        shares = write_shares((bucket, len(target.positions)) for bucket, target in share.routes)
        try:
            exchange = server.exchange_for(self._open, steady=steady)
            if exchange is not None:
                exchange.send(batch, shares)
            return exchange is not None
        except (Broken, TallybookError) as exc:
            server.trouble(exc)
            return False

    def _open(self, address: str) -> Exchange:
        return self._connections.exchange(
            address, self._opening, self._key_schema, self._exchange_s
        )

    def _receive(self, share: _Share) -> None:
        """Take the values of a share; if they do not come, its keys go by themselves."""
        try:
            exchange = share.server.exchange
            assert exchange is not None
            found = exchange.receive()
            if found is None or found.num_rows != len(share.positions):
                raise BadRequest("an answer to another look-up")
            share.found = found
        except (Broken, TallybookError) as exc:
            share.server.trouble(exc)


class _Server:
    """What a lane knows of a server. For one thread at a time."""

    def __init__(self, address: str, exchange_s: float) -> None:
        self._address = address
        self._exchange_s = exchange_s
        self._fresh_until = 0.0
        self._last_asked = 0.0
        self._troubled_until = 0.0
        self.exchange: Exchange | None = None

    def exchange_for(self, begin: Callable[[str], Exchange], *, steady: bool) -> Exchange | None:
        """Return an exchange that lasts for a while yet.

        None: there is trouble, or there has been nothing to ask for a while. `steady`: there is.
        """
        now = time.monotonic()
        steady = steady or now - self._last_asked < _STEADY_S
        self._last_asked = now
        if self.exchange is None or now > self._fresh_until:
            self._end()
            if not steady or now < self._troubled_until:
                return None
            self.exchange = begin(self._address)
            self._fresh_until = now + self._exchange_s / 2
        return self.exchange

    def trouble(self, reason: Exception) -> None:
        """Ask it nothing for a while: who goes by itself finds out who is to be asked."""
        logger.info("look-ups at %s go by themselves for a while: %s", self._address, reason)
        self._end()
        self._troubled_until = time.monotonic() + _TROUBLED_S

    def cancel(self) -> None:
        """Let nobody wait for it any longer; any thread may."""
        exchange = self.exchange
        if exchange is not None:
            exchange.cancel()

    def _end(self) -> None:
        exchange, self.exchange = self.exchange, None
        if exchange is not None:
            exchange.close()


def _rows(size: int, shares: Sequence[_Share]) -> list[pa.Table | None]:
    """Return the row of each who asked for one, as it came; None where it was not found out."""
    rows: list[pa.Table | None] = [None] * size
    for share in shares:
        if share.found is not None:
            table = pa.Table.from_batches([share.found])
            for at, position in enumerate(share.positions.tolist()):
                rows[position] = table.slice(at, 1)
    return rows


def _parts(
    table: pa.Table, asked: Sequence[AskedKeys], failed: Sequence[Positions]
) -> list[pa.Table | None]:
    """Return the rows of each who asked; None for those who asked for one that was not found out.

    `failed`: the positions of these.
    """
    ends = list(accumulate(keys.rows for keys in asked))
    starts = [0, *ends[:-1]]
    parts = [table.slice(start, end - start) for start, end in zip(starts, ends, strict=True)]
    if not failed:
        return parts
    lost = np.zeros(table.num_rows, bool)
    lost[np.concatenate(failed)] = True
    without = np.logical_or.reduceat(lost, starts)
    return [None if gone else part for part, gone in zip(parts, without, strict=True)]
