"""Look-ups of one key: one after the other, from many threads at a time, and beside puts."""

import multiprocessing
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import count
from multiprocessing.connection import Connection
from statistics import median
from typing import NamedTuple

import numpy as np
import pyarrow as pa
from pyarrow import flight

from benchmarks.figure import Figure, Setting
from benchmarks.measure import interleave, timed
from benchmarks.workload import Workload
from recovery.writer.rows import Rows
from server.client.cluster import connect
from server.client.lookups import look_up
from server.client.remote_table import RemoteTable
from server.launch.local_cluster import LocalCluster

_BUCKETS = 4
_SINGLE_LOOKUPS = 200
_THREADS = 32
_PUT_ROWS = 10_000
_BEFORE_PER_S = 1_000.0
"""What 32 threads reached on two servers of 2 cores before look-ups were gathered."""


class _Names(NamedTuple):
    """The names of figures, which people search for."""

    vs_empty_call: str
    p99_ms: str
    rate: str
    p99_vs_p50: str


_NAMES = {
    "latest": _Names(
        "single_lookup_vs_empty_call",
        "single_lookup_p99_ms",
        "lookup_32_threads_rate_ratio",
        "lookup_32_threads_p99_vs_p50",
    ),
    "committed": _Names(
        "single_committed_lookup_vs_empty_call",
        "single_committed_lookup_p99_ms",
        "committed_lookup_32_threads_rate_ratio",
        "committed_lookup_32_threads_p99_vs_p50",
    ),
}


def single_key_lookups(setting: Setting) -> Iterator[Figure]:
    """Look-ups of one key on two servers, of the latest rows and of the committed ones."""
    work = Workload(setting.keys, batch_rows=setting.batch_rows)
    with ExitStack() as stack:
        local = stack.enter_context(LocalCluster(setting.directory / "cluster", servers=2))
        client = stack.enter_context(local.connect())
        latest = client.create_table("latest", work.schema, buckets=_BUCKETS, column_locks=False)
        for batch in work.fill():
            latest.put(batch)
        committed = client.create_table("committed", work.schema, buckets=_BUCKETS)
        columns = [column.name for column in work.schema.value_columns]
        with committed.writer(owner_id="bench", columns=columns) as writer:
            for number, batch in enumerate(work.fill()):
                writer.write(number, Rows(data=batch))
        look_ups = [
            _LookUps(latest, setting.keys, "latest"),
            _LookUps(committed, setting.keys, "committed"),
        ]
        for one in look_ups:
            yield from _one_by_one(setting, one)
        for one in look_ups:
            yield from _from_threads(setting, one)
        yield _gathered(setting, look_ups[0])
        yield _beside_puts(setting, local.address, look_ups[0])


class _LookUps:
    """Looks up one key after the other, in no order. Safe for threads."""

    def __init__(self, table: RemoteTable, keys: int, isolation: str) -> None:
        self.table = table
        self.isolation = isolation
        self.names = _NAMES[isolation]
        random = np.random.default_rng(1)
        self._keys = random.integers(0, keys, 1 << 16).tolist()
        self._next = count()

    def key(self) -> int:
        return int(self._keys[next(self._next) % len(self._keys)])

    def __call__(self) -> pa.Table:
        return self.table.lookup({"key": [self.key()]}, isolation=self.isolation)

    def by_itself(self) -> pa.Table:
        """Look a key up as a call of its own."""
        return look_up(self.table.caller, {"key": [self.key()]}, None, None)


def _one_by_one(setting: Setting, look_ups: _LookUps) -> Iterator[Figure]:
    """A look-up after the other, against the cheapest call that Flight's client can make alone."""
    address = look_ups.table.caller.calls.directory.refresh()[0]
    slowest: list[float] = []
    with flight.FlightClient(f"grpc://{address}") as bare:
        options = flight.FlightCallOptions(timeout=10)

        def empty() -> None:
            list(bare.do_action(flight.Action("ping", b""), options))

        def step() -> tuple[float, float]:
            ours, theirs = [], []
            for _ in range(_SINGLE_LOOKUPS):
                ours.append(timed(look_ups)[0])
                theirs.append(timed(empty)[0])
            slowest.append(float(np.quantile(ours, 0.99)))
            return median(ours), median(theirs)

        step()
        slowest.clear()
        pairs = interleave(setting.runs, 1, step)
    yield pairs.duration(
        look_ups.names.vs_empty_call,
        what=f"p50 of a look-up of one key, {look_ups.isolation}, by one thread, over that of an "
        "empty Flight action in bare pyarrow",
        goal="<=1.5",
    )
    yield Figure(
        name=look_ups.names.p99_ms,
        what="p99 of the same look-ups",
        ours=f"{median(slowest) * 1e3:.2f} ms",
        baseline="-",
        value=median(slowest) * 1e3,
    )


@dataclass(frozen=True)
class _Rush:
    """What many threads saw in a while: how many look-ups, and how long they took."""

    per_s: float
    p50_s: float
    p99_s: float

    @classmethod
    def of(cls, setting: Setting, call: Callable[[], object]) -> "_Rush":
        seconds: list[float] = []
        end = time.perf_counter() + setting.rush_s

        def ask() -> None:
            mine = []
            while time.perf_counter() < end:
                mine.append(timed(call)[0])
            seconds.extend(mine)

        threads = [threading.Thread(target=ask) for _ in range(_THREADS)]
        took, _ = timed(partial(_run_all, threads))
        p50, p99 = np.quantile(seconds, (0.5, 0.99))
        return cls(len(seconds) / took, float(p50), float(p99))


def _run_all(threads: list[threading.Thread]) -> None:
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _from_threads(setting: Setting, look_ups: _LookUps) -> Iterator[Figure]:
    _Rush.of(setting, look_ups)
    rushes = [_Rush.of(setting, look_ups) for _ in range(setting.runs)]
    rate = median(one.per_s for one in rushes)
    what = f"look-ups of one key, {look_ups.isolation}, by {_THREADS} threads on two servers"
    yield Figure(
        name=look_ups.names.rate,
        what=f"{what}, over the {_BEFORE_PER_S:,.0f}/s of before they were gathered",
        ours=f"{rate:,.0f}/s",
        baseline=f"{_BEFORE_PER_S:,.0f}/s",
        value=rate / _BEFORE_PER_S,
        goal=">=15",
    )
    p50, p99 = median(one.p50_s for one in rushes), median(one.p99_s for one in rushes)
    yield Figure(
        name=look_ups.names.p99_vs_p50,
        what=f"p99 of these {what}, over their p50",
        ours=f"{p99 * 1e3:.1f} ms",
        baseline=f"{p50 * 1e3:.1f} ms",
        value=median(one.p99_s / one.p50_s for one in rushes),
        goal="<=5",
    )


def _gathered(setting: Setting, look_ups: _LookUps) -> Figure:
    rate, alone = [], []
    for _ in range(setting.runs):
        rate.append(_Rush.of(setting, look_ups).per_s)
        alone.append(_Rush.of(setting, look_ups.by_itself).per_s)
    return Figure(
        name="lookup_32_threads_vs_calls_of_their_own",
        what=f"look-ups of one key by {_THREADS} threads, over the same where each is a call of "
        "its own",
        ours=f"{median(rate):,.0f}/s",
        baseline=f"{median(alone):,.0f}/s",
        value=median(one / other for one, other in zip(rate, alone, strict=True)),
    )


def _beside_puts(setting: Setting, address: str, look_ups: _LookUps) -> Figure:
    """Puts by another process at half of what it can put, alone."""
    with _putting(address, look_ups.table.name, setting.keys) as puts:
        full_s = puts.measure(setting.rush_s)
        ours, without = [], []
        for _ in range(setting.runs):
            without.append(_Rush.of(setting, look_ups).p99_s)
            with puts.every(2 * full_s):
                ours.append(_Rush.of(setting, look_ups).p99_s)
    return Figure(
        name="lookup_p99_beside_puts_ratio",
        what=f"p99 of look-ups of one key by {_THREADS} threads beside puts of {_PUT_ROWS:,} rows "
        f"by another process at half of its speed ({full_s * 1e3:.0f} ms each, at full speed), "
        "over that without",
        ours=f"{median(ours) * 1e3:.1f} ms",
        baseline=f"{median(without) * 1e3:.1f} ms",
        value=median(one / other for one, other in zip(ours, without, strict=True)),
        goal="<=2",
    )


class _Puts:
    """A process that puts, once it is told how often."""

    def __init__(self, told: Connection) -> None:
        self._told = told

    def measure(self, seconds: float) -> float:
        """Put for so long, one after the other; return how many seconds a put takes."""
        self._told.send(0.0)
        self._told.recv()
        time.sleep(seconds)
        return self._stop()

    @contextmanager
    def every(self, seconds: float) -> Iterator[None]:
        """Have a put begun after every so many seconds."""
        self._told.send(seconds)
        self._told.recv()
        yield
        self._stop()

    def _stop(self) -> float:
        self._told.send(None)
        return float(self._told.recv())


@contextmanager
def _putting(address: str, table: str, keys: int) -> Iterator[_Puts]:
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    process = spawn.Process(target=_put, args=(theirs, address, table, keys), daemon=True)
    process.start()
    theirs.close()
    try:
        yield _Puts(ours)
    finally:
        ours.close()
        process.join()


def _put(told: Connection, address: str, name: str, keys: int) -> None:
    """Put in one process what another one tells; ends when that closes its side."""
    work = Workload(keys, batch_rows=_PUT_ROWS, seed=1)
    with connect(address) as client:
        table = client.table(name)
        table.put(work.batch())
        try:
            while True:
                every_s = told.recv()
                told.send("ready")
                took = []
                while not told.poll():
                    seconds, _ = timed(partial(table.put, work.batch()))
                    took.append(seconds)
                    time.sleep(max(0.0, every_s - seconds))
                told.recv()
                told.send(median(took) if took else 0.0)
        except EOFError:
            return
