"""A race: contestants take turns with the same batches, and are checked at the end."""

from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median

import numpy as np
import pyarrow as pa

from benchmarks.figure import NO_GOAL, Figure, Skipped
from benchmarks.measure import Pairs, timed, until_idle
from benchmarks.peers.peer import NotInstalled, Opening, Peer, Work
from benchmarks.peers.reference import Reference
from benchmarks.workload import Workload

LOAD_ROWS = 500_000
# A table is read back as a whole up to this size; of a larger one all that the race has written.
_READ_ROWS = 2_000_000


@dataclass(frozen=True)
class Result:
    """Seconds per event of each contestant, round by round, and who did not take part."""

    work: Work
    seconds: dict[str, list[float]] = field(default_factory=dict)
    skipped: list[Skipped] = field(default_factory=list)

    def rate(self, who: str) -> float:
        """Return events per second, the median of the rounds."""
        return 1 / median(self.seconds[who])

    def rates(self) -> Iterator[tuple[str, float]]:
        """Yield each contestant with its events per second."""
        for who in self.seconds:
            yield who, self.rate(who)

    def figure(
        self, name: str, who: str, against: str, *, goal: str = NO_GOAL, note: str = ""
    ) -> Iterator[Figure]:
        """Yield how fast one is beside another, if both took part."""
        if who not in self.seconds or against not in self.seconds:
            return
        yield Pairs(self.seconds[who], self.seconds[against]).speed(
            name,
            what=f"{self.work.batch_rows:,}-row batches into a table of {self.work.keys:,} rows: "
            f"{who}, against {against}{note}",
            unit="events",
            goal=goal,
        )


@dataclass(frozen=True)
class Entered:
    """A peer that is open, and what it has."""

    peer: Peer
    reference: Reference


def race(
    directory: Path,
    work: Work,
    contestants: Mapping[str, Opening],
    entered: Mapping[str, "Entered"] | None = None,
) -> Result:
    """Load each contestant with every key, let them take turns, and check what they have.

    `entered` have their rows already, and stay open. Raises WrongResult if one does not have what
    the batches add up to.
    """
    result = Result(work)
    with ExitStack() as stack:
        loaded = Reference(work.keys)
        for batch in loading(work.keys):
            loaded.add(batch)
        all_: dict[str, Entered] = {}
        for who, opening in contestants.items():
            try:
                peer = opening(directory / who.replace(" ", "-"), work)
            except NotInstalled as exc:
                result.skipped.append(Skipped(what=f"{who}, {work.name}", reason=str(exc)))
                continue
            stack.callback(peer.close)
            peer.load(loading(work.keys))
            all_[who] = Entered(peer, loaded)
        all_.update(entered or {})
        written = _turns(work, all_, result)
        keys = pa.array(np.arange(work.keys) if work.keys <= _READ_ROWS else written)
        for who, one in all_.items():
            one.reference.check(who, keys, one.peer.read(keys))
    return result


def loading(keys: int) -> Iterator[pa.RecordBatch]:
    """Yield the events that a table of so many keys is loaded with: each key once."""
    return Workload(keys, batch_rows=LOAD_ROWS, string=False).fill()


def _turns(
    work: Work, all_: Mapping[str, Entered], result: Result
) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Let all do the same batches, each round in another order; return the keys written to."""
    source = Workload(work.keys, batch_rows=work.batch_rows, string=False, seed=1)
    references = {id(one.reference): one.reference for one in all_.values()}.values()
    result.seconds.update({who: [] for who in all_})
    written = []
    for round_ in range(-1, work.rounds):
        batches = [source.batch() for _ in range(work.turn)]
        order = deque(all_)
        order.rotate(round_)
        for who in order:
            peer = all_[who].peer
            seconds = sum(timed(partial(peer.upsert, batch))[0] for batch in batches)
            peer.settle()
            until_idle()
            if round_ >= 0:  # The round before the first is for everybody to get to speed.
                result.seconds[who].append(seconds / (work.turn * work.batch_rows))
        for batch in batches:
            written.append(batch["key"].to_numpy())
            for reference in references:
                reference.add(batch)
    return np.unique(np.concatenate(written))
