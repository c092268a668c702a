"""Batches that say in every cell which one wrote it: whoever reads knows what it has, and lacks.

The values of a column are lists of numbers, and each batch adds its number to all that it touches.
The number says which columns and keys these are. So any state can be judged by itself: each batch
in all of its cells, once, or in none. And from read to read, a list only grows at its end.
"""

import random
import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

COLUMNS = ("x", "y", "z")
KEYS = 12
ALL_KEYS = {"k": list(range(KEYS))}
_MOST_KEYS = 5
_MASKS = 1 << len(COLUMNS)

Cell = tuple[str, int]
State = Mapping[Cell, Sequence[int]]


def number_of(serial: int, columns: Iterable[str]) -> int:
    """Return the number of a batch of these columns."""
    return serial * _MASKS + sum(1 << COLUMNS.index(column) for column in columns)


def columns_of(number: int) -> list[str]:
    """Return the columns that a batch touches."""
    return [column for at, column in enumerate(COLUMNS) if number >> at & 1]


def keys_of(number: int) -> list[int]:
    """Return the keys that a batch touches."""
    chance = random.Random(number)
    return sorted(chance.sample(range(KEYS), chance.randint(1, _MOST_KEYS)))


def rows_of(number: int) -> dict[str, list[int]]:
    """Return the rows of a batch."""
    keys = keys_of(number)
    return {"k": keys, **{column: [number] * len(keys) for column in columns_of(number)}}


def state_of(rows: Iterable[Mapping[str, Any]]) -> State:
    """Return what is in the cells, of those that have something; an empty list is something."""
    return {
        (column, row["k"]): tuple(row[column])
        for row in rows
        for column in COLUMNS
        if row[column] is not None
    }


def scanned_state(rows: Iterable[Mapping[str, Any]]) -> State:
    """Return the same of a scan, which has no rows but those that somebody has written."""
    found = list(rows)
    ghosts = {(COLUMNS[0], row["k"]): () for row in found if not _is_touched(row)}
    return {**state_of(found), **ghosts}


def _is_touched(row: Mapping[str, Any]) -> bool:
    return any(row[column] is not None for column in COLUMNS)


def numbers_in(state: State) -> set[int]:
    """Return the batches that have left anything."""
    return {number for numbers in state.values() for number in numbers}


def wrong_batches(state: State) -> list[str]:
    """Say which batches are there in part, or more than once, and which cells have nothing."""
    wrong = [f"{cell} was touched by nobody" for cell, numbers in state.items() if not numbers]
    found: dict[int, dict[Cell, int]] = {}
    for cell, numbers in state.items():
        for number in numbers:
            cells = found.setdefault(number, {})
            cells[cell] = cells.get(cell, 0) + 1
    for number, cells in found.items():
        expected = {(column, key): 1 for column in columns_of(number) for key in keys_of(number)}
        if cells != expected:
            wrong.append(f"batch {number} is in {cells}, not once in each of {sorted(expected)}")
    return wrong


class Ledger:
    """What rivals have begun, and what was acknowledged to them. Safe for threads.

    `after`: the last serial that a ledger of the same table may have given before this one.
    """

    def __init__(self, after: int = 0) -> None:
        self._lock = threading.Lock()
        self._serial = after
        self._acknowledged: set[int] = set()
        self._never: set[int] = set()

    def begin(self, columns: Iterable[str]) -> int:
        """Return the number of a new batch."""
        with self._lock:
            self._serial += 1
            return number_of(self._serial, columns)

    def begin_late(self, columns: Iterable[str]) -> int:
        """Return the number of rows that come too late, whenever they come: they count never."""
        number = self.begin(columns)
        with self._lock:
            self._never.add(number)
        return number

    def acknowledge(self, number: int) -> None:
        """Know that a batch was committed."""
        with self._lock:
            self._acknowledged.add(number)

    @property
    def acknowledged(self) -> frozenset[int]:
        """The batches that were, so far."""
        with self._lock:
            return frozenset(self._acknowledged)

    def wrong(self, state: State, least: Iterable[int] = (), before: State | None = None) -> str:
        """Say what is wrong with a committed state; nothing is an empty text.

        `least`: what was acknowledged before it was read; `before`: what was read before that.
        """
        wrong = wrong_batches(state)
        there = numbers_in(state)
        missing = sorted(set(least) - there)
        if missing:
            wrong.append(f"batches {missing} were acknowledged, and are not there")
        with self._lock:
            late = sorted(there & self._never)
        if late:
            wrong.append(f"batches {late} came too late, and are there")
        for cell, numbers in (before or {}).items():
            now = state.get(cell, ())
            if tuple(now[: len(numbers)]) != tuple(numbers):
                wrong.append(f"{cell} was {list(numbers)}, and is {list(now)}")
        return "; ".join(wrong[:4])
