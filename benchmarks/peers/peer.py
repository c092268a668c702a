"""The shape of a contestant: load rows, upsert batches of events, read rows back."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeAlias

import pyarrow as pa

# What events are folded to: one row per key.
COLUMNS = ("key", "total", "highest", "events")


class NotInstalled(Exception):
    """A peer cannot run here; the message says what is missing, and how to get it."""


@dataclass(frozen=True, kw_only=True)
class Work:
    """What all contestants do: batches of `batch_rows` events on random ones of `keys` keys.

    A contestant does `turn` batches when it is its turn, so that most of what it puts off to the
    background falls into its own time.
    """

    name: str
    keys: int
    batch_rows: int
    turn: int
    rounds: int


class Peer(Protocol):
    """A table with a row per key, `COLUMNS`, that lives on a disk.

    `load` gets events that have every key once, in the fastest way there is: it is not measured.
    `upsert` gets any events, and folds them into the rows: `total` is summed, the maximum is taken
    of `highest`, and `events` that are not null are counted. When it returns, readers see them.
    """

    def load(self, events: Iterator[pa.RecordBatch]) -> None:
        """Fill the table, which is empty."""

    def upsert(self, events: pa.RecordBatch) -> None:
        """Fold one batch of events into the table."""

    def settle(self) -> None:
        """Wait for work in the background, if one can: others are about to be measured."""

    def read(self, keys: pa.Array) -> pa.Table:
        """Return all rows that have one of these keys, in any order."""

    def close(self) -> None:
        """Release everything."""


Opening: TypeAlias = Callable[[Path, Work], Peer]
"""Opens a contestant in a directory of its own; raises NotInstalled."""


def folded(events: pa.RecordBatch) -> pa.Table:
    """Return one row per key of a batch, as peers get it that cannot fold so fast themselves."""
    grouped = (
        pa.Table.from_batches([events])
        .group_by("key")
        .aggregate([("total", "sum"), ("highest", "max"), ("events", "count")])
    )
    return grouped.rename_columns(list(COLUMNS))
