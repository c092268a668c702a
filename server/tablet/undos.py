"""The call of a tablet server that undoes: it goes on for about a second, and is asked again."""

import os
import time
from concurrent.futures import ThreadPoolExecutor

from foundation.parallel import map_all
from merge_engine.bucket.results import UndoResult
from merge_engine.bucket.undo import UndoRange
from recovery.leader.led_bucket import LedBucket
from server.protocol.writers import Undo, UndoAnswer, Undone
from server.tablet.requests import Requests

UNDO_S = 1.0


class Undos:
    """Undoes in the buckets of this server, side by side. Safe for threads.

    `undo_s`: about how long a call goes on. The buckets whose turn does not come by then are left
    for the next call.
    """

    def __init__(self, requests: Requests, *, undo_s: float = UNDO_S) -> None:
        self._requests = requests
        self._undo_s = undo_s
        # Not the puts' threads: an undo waits for its bucket, and a put that holds it needs those.
        self._pool = ThreadPoolExecutor(os.cpu_count() or 1, thread_name_prefix="tallybook-undo")

    def undo(self, call: Undo) -> UndoAnswer:
        """Go on with an undo for a while; say of each bucket what was done, and what is left."""
        led = self._requests.led(call)
        session = self._requests.session.name
        steps = list(call.buckets.values())
        deadline = time.monotonic() + self._undo_s

        def go_on() -> bool:
            return time.monotonic() < deadline

        def undo(at: int) -> UndoResult:
            term, wanted = steps[at]
            if at and not go_on():  # The first one always gets further.
                return _untouched(led[at], wanted)
            self._requests.session.check_connected()
            if call.writer is None or term is None:
                return led[at].undo_unlocked(call.debtor, call.columns, wanted, go_on=go_on)
            return led[at].undo(call.writer, term, call.debtor, call.columns, wanted, go_on=go_on)

        results = map_all(self._pool, undo, range(len(led)))
        return UndoAnswer(session=session, results=tuple(map(Undone.of, results)))

    def shutdown(self) -> None:
        """End the threads."""
        self._pool.shutdown()


def _untouched(led: LedBucket, wanted: UndoRange) -> UndoResult:
    """Return the result of doing nothing; from here on it is known where the range ends."""
    end = led.bucket.settled_end()
    until = end if wanted.until is None else wanted.until
    rest = UndoRange(wanted.from_offset, until)
    return UndoResult(base_offset=end, end_offset=end, rows=0, rest=rest)
