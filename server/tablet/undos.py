"""The call of a tablet server that undoes: it goes on for about a second, and is asked again."""

import os

from merge_engine.bucket.results import UndoResult
from merge_engine.bucket.undo import UndoRange
from recovery.leader.led_bucket import LedBucket
from server.protocol.writers import Undo, UndoAnswer, Undone, UndoStep
from server.tablet.requests import Requests
from server.tablet.steps import CALL_S, GoOn, Steps


class Undos:
    """Undoes in the buckets of this server, side by side. Safe for threads.

    `call_s`: about how long a call goes on. The buckets whose turn does not come by then are left
    for the next call.
    """

    def __init__(self, requests: Requests, *, call_s: float = CALL_S) -> None:
        self._requests = requests
        self._steps = Steps("undo", threads=os.cpu_count() or 1, call_s=call_s)

    def undo(self, call: Undo) -> UndoAnswer:
        """Go on with an undo for a while; say of each bucket what was done, and what is left."""
        led = self._requests.led(call)
        session = self._requests.session.name

        def undo(one: tuple[LedBucket, UndoStep], go_on: GoOn) -> UndoResult:
            bucket, (term, wanted) = one
            self._requests.session.check_connected()
            if call.writer is None or term is None:
                return bucket.undo_unlocked(call.debtor, call.columns, wanted, go_on=go_on)
            return bucket.undo(call.writer, term, call.debtor, call.columns, wanted, go_on=go_on)

        steps = list(zip(led, call.buckets.values(), strict=True))
        results = self._steps.run(steps, undo, lambda one: _untouched(one[0], one[1].wanted))
        return UndoAnswer(session=session, results=tuple(map(Undone.of, results)))

    def shutdown(self) -> None:
        """End the threads."""
        self._steps.shutdown()


def _untouched(led: LedBucket, wanted: UndoRange) -> UndoResult:
    """Return the result of doing nothing; from here on it is known where the range ends."""
    end = led.bucket.settled_end()
    until = end if wanted.until is None else wanted.until
    rest = UndoRange(wanted.from_offset, until)
    return UndoResult(base_offset=end, end_offset=end, rows=0, rest=rest)
