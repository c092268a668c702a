"""Optimistic transactions: look, try, and when somebody was faster, look again."""

import random
import time
from collections.abc import Callable
from typing import TypeVar

from foundation.deadlines import deadline_in, remaining
from foundation.errors import Unavailable, UnknownOutcome
from locks.store.base import Conflict, CoordinationStore

Result = TypeVar("Result")
# What some dozens of attempts take that are under way at once, and what hundreds take.
_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.01, 4.0
_dice = random.Random()


def retried(store: CoordinationStore, deadline_s: float, attempt: Callable[[], Result]) -> Result:
    """Return the attempt's result, once it succeeds; its errors are the caller's.

    A Conflict means that what was read is no longer so: attempt again, within the deadline. An
    unknown outcome is resolved by reading: an attempt *first looks whether an earlier one of the
    same call took effect*, and here it is made sure that it sees that.

    Who was slower twice waits a little, by chance: of hundreds that want the same, each that reads
    in vain delays the one that would succeed.
    """
    deadline = deadline_in(deadline_s)
    doubt: UnknownOutcome | None = None
    conflicts = 0
    while True:
        try:
            if doubt is not None:
                store.sync()
            return attempt()
        except Conflict as exc:
            if time.monotonic() > deadline:
                raise _late(doubt, f"others were faster for {deadline_s:g} s; try again") from exc
            if conflicts:
                longest_s = min(_FIRST_WAIT_S * 2**conflicts, _LONGEST_WAIT_S, remaining(deadline))
                time.sleep(_dice.uniform(0, longest_s))
            conflicts += 1
        except UnknownOutcome as exc:
            # The first one is looked into however late it is.
            if doubt is not None and time.monotonic() > deadline:
                raise
            doubt = exc
        except Unavailable as exc:
            raise _late(doubt, str(exc)) from exc


def _late(doubt: UnknownOutcome | None, why: str) -> Unavailable | UnknownOutcome:
    if doubt is None:
        return Unavailable(why)
    return UnknownOutcome(f"{doubt}, and whether it took effect could not be read back: {why}")
