"""All keys of a batch that a fold or a merge refuses: whoever sets them aside does so at once."""

from collections.abc import Callable, Sequence

import pyarrow as pa

from foundation.errors import InvalidValue
from merge_engine.aggregates.base import Fault
from merge_engine.merging.batch import value_error
from merge_engine.merging.grouping import Positions
from merge_engine.schema.schema import Column

MOST_REFUSED = 4_000
"""So many keys are told at once. Rows of more are written when those are set aside, or refused."""


class RefusedKeys:
    """The keys that are refused, by their positions, each with the error of its first column."""

    def __init__(self, key_names: Sequence[str], keys: Sequence[pa.Array]) -> None:
        self._key_names = key_names
        self._keys = keys
        self._errors: dict[int, InvalidValue] = {}

    def __bool__(self) -> bool:
        return bool(self._errors)

    def add(
        self,
        column: Column,
        positions: Positions,
        attempt: Callable[[int, int], object],
        first: Fault,
    ) -> None:
        """Find all keys that a column refuses, by halving.

        `positions`: of the keys that the column was computed for. `attempt` computes it for those
        from one to another of them only. `first`: how it failed for all, at which of them.
        """
        waiting = [(0, len(positions))]
        while waiting and len(self._errors) < MOST_REFUSED:
            start, stop = waiting.pop()
            try:
                attempt(start, stop)
            except Fault as fault:
                if stop - start > 1:
                    middle = (start + stop) // 2
                    waiting += [(middle, stop), (start, middle)]
                    continue
                self._note(column, int(positions[start]), fault)
        if not self._errors:  # It refuses some together, and none by itself.
            self._note(column, int(positions[first.index]), first)

    def _note(self, column: Column, position: int, fault: Fault) -> None:
        if position not in self._errors:
            error = value_error(fault, column.name, self._key_names, self._keys, position)
            self._errors[position] = error

    def check(self) -> None:
        """Raise the error of the first key, with all of them."""
        if not self._errors:
            return
        errors = [self._errors[at] for at in sorted(self._errors)]
        error = errors[0]
        error.refused = {one.encoded_key: str(one) for one in errors if one.encoded_key is not None}
        raise error
