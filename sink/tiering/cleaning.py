"""What a copy does not need any more: files of steps that were not committed, or long replaced.

A file that has the number of a committed step, or an earlier one, and that no version has which can
still be read, is nobody's: each step is committed once. So it does not matter how old it is, or
whether the job that wrote it still runs; files of steps to come are left alone.
"""

from collections.abc import Iterable

from foundation.failpoints import hit
from sink.lake.opening import Lake
from sink.lake.state import LakeState, objects_of, step_of

# One call deletes no more than that: the rest has its turn after the next round.
_AT_ONCE = 1_000


def garbage(names: Iterable[str], state: LakeState, keep_since_ms: int) -> list[str]:
    """Return what can be deleted of what is there; removed files are kept since this time."""
    needed = frozenset(objects_of(state.files.values()))
    return [
        name
        for name in names
        if name not in needed
        and (step := step_of(name)) is not None
        and step <= state.mark.step
        and state.removed.get(name, 0) < keep_since_ms
    ]


def clean(lake: Lake, state: LakeState, keep_since_ms: int) -> int:
    """Delete what is not needed, and return how many objects that were."""
    found = garbage(lake.storage.names(), state, keep_since_ms)[:_AT_ONCE]
    lake.storage.delete(found)
    hit("tier.cleaned")
    return len(found)
