"""What is right: every batch folded into plain arrays, which all contestants are compared with."""

import numpy as np
import pyarrow as pa

from benchmarks.peers.peer import COLUMNS


class WrongResult(AssertionError):
    """A contestant does not have what the events add up to: its figures mean nothing."""


class Reference:
    """One row for each key below `keys`, in arrays, and which of them were written at all."""

    def __init__(self, keys: int) -> None:
        self.total = np.zeros(keys, np.int64)
        self.highest = np.full(keys, -np.inf)
        self.events = np.zeros(keys, np.int64)

    def add(self, events: pa.RecordBatch) -> None:
        """Fold a batch; its columns have no nulls."""
        keys = events["key"].to_numpy()
        np.add.at(self.total, keys, events["total"].to_numpy())
        np.maximum.at(self.highest, keys, events["highest"].to_numpy())
        np.add.at(self.events, keys, 1)

    def check(self, who: str, keys: pa.Array, found: pa.Table) -> None:
        """Raise WrongResult unless `found` has each of these different keys once, and is right."""
        found = found.select(list(COLUMNS)).sort_by("key")
        wanted = np.sort(keys.to_numpy())
        wanted = wanted[self.events[wanted] > 0]
        if not np.array_equal(found["key"].to_numpy(), wanted):
            raise WrongResult(f"{who} has {found.num_rows:,} rows, not {len(wanted):,}, or others")
        for name in COLUMNS[1:]:
            expected = getattr(self, name)[wanted]
            wrong = np.flatnonzero(found[name].to_numpy() != expected)
            if wrong.size:
                at = wrong[0]
                raise WrongResult(
                    f"{who}: {name} of key {wanted[at]} is {found[name][at].as_py()}, not "
                    f"{expected[at]}; {wrong.size:,} of {len(wanted):,} are wrong"
                )
