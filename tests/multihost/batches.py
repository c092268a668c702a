"""Batches of which every prefix is known, and what a reader may have seen of them.

A column has one writer, whose batches are a function of seed, column and number. The first gives
every key an amount, each later one moves some; and each adds one to the key COUNTER. So of any
state of the column one can tell how many batches it has, and what it has to be, key by key.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from tests.fault.moving_writer import KEYS, rows_of

COUNTER = KEYS
COLUMNS = ("plain", "driver", "executors")
ALL_KEYS = {"k": list(range(KEYS + 1))}

State = dict[int, int]


def batch_of(column: str, seed: int, number: int) -> dict[str, list[int]]:
    """Return the rows of a batch."""
    rows = rows_of(column, seed, number)
    return {"k": [*rows["k"], COUNTER], column: [*rows[column], 1]}


class Prefixes:
    """What a column has after any number of batches; asked for ever more of them."""

    def __init__(self, column: str, seed: int) -> None:
        self.column = column
        self._seed = seed
        self._state: State = {}
        self.count = 0

    def after(self, count: int) -> State:
        """Return the state after so many batches, at least as many as were asked for before."""
        assert count >= self.count
        while self.count < count:
            self._add(self._state, self.count)
            self.count += 1
        return self._state

    def values_of(self, least: int, most: int) -> dict[int, set[int | None]]:
        """Return what each key has after `least` to `most` batches."""
        state = dict(self.after(least))
        found: dict[int, set[int | None]] = {key: {state.get(key)} for key in range(COUNTER + 1)}
        for number in range(least, most):
            self._add(state, number)
            for key, value in state.items():
                found[key].add(value)
        return found

    def _add(self, state: State, number: int) -> None:
        rows = batch_of(self.column, self._seed, number)
        for key, amount in zip(rows["k"], rows[self.column], strict=True):
            state[key] = state.get(key, 0) + amount


def column_of(rows: Iterable[Mapping[str, Any]], column: str) -> State:
    """Return the values of a column, of those keys that have one."""
    return {row["k"]: row[column] for row in rows if row[column] is not None}


def wrong_prefix(prefixes: Prefixes, seen: State, least: int, most: int | None) -> str | None:
    """Say what is wrong with a state that should have whole batches only; None if nothing is.

    `least`: how many were acknowledged before the read began; `most`: how many had begun when it
    ended, if that is known.
    """
    count = seen.get(COUNTER, 0)
    what = f"{prefixes.column} with {count} batches"
    if count < max(least, prefixes.count):
        return f"{what}: {least} were acknowledged, and {prefixes.count} seen before"
    if most is not None and count > most:
        return f"{what}: only {most} had begun"
    expected = prefixes.after(count)
    if seen == expected:
        return None
    return f"{what}: {_differences(seen, expected)}"


def wrong_values(prefixes: Prefixes, seen: State, least: int, most: int) -> str | None:
    """Say which key has a value that it never had; None if none has."""
    allowed = prefixes.values_of(least, most)
    wrong = {key: seen.get(key) for key, values in allowed.items() if seen.get(key) not in values}
    if not wrong:
        return None
    shown = [f"{key} has {value}, not one of {allowed[key]}" for key, value in wrong.items()]
    return f"{prefixes.column} after {least} to {most} batches: key " + "; ".join(shown[:4])


def _differences(seen: State, expected: State) -> str:
    keys = [key for key in sorted({*seen, *expected}) if seen.get(key) != expected.get(key)]
    shown = [f"key {key} is {seen.get(key)}, not {expected.get(key)}" for key in keys[:4]]
    return f"{len(keys)} keys differ: " + "; ".join(shown)
