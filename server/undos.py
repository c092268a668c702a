"""The call of a tablet server that undoes: it goes on for about a second, and is asked again.

do_action   undo    per bucket, the term, and the offsets from where and until where (-1: the end);
                    the answer has base, end, changed keys, and until where there is more (-1: done)
"""

import os
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pyarrow as pa

from merge_engine import UndoRange, UndoResult
from merge_engine.parallel import map_all
from recovery.guard import Writer
from recovery.led_bucket import LedBucket
from server import wire
from server.requests import Requests

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

    def undo(self, body: pa.Buffer) -> dict[str, Any]:
        """Go on with an undo for a while; say of each bucket what was done, and what is left."""
        fields, led, numbers = self._requests.led(body, 5)
        session = self._requests.session.name
        columns, debtor = fields.integers("columns"), fields.get("debtor", str)
        writer = _writer(fields)
        deadline = time.monotonic() + self._undo_s

        def go_on() -> bool:
            return time.monotonic() < deadline

        def undo(at: int) -> UndoResult:
            term, from_offset, until = numbers[at]
            wanted = UndoRange(from_offset, None if until < 0 else until)
            if at and not go_on():  # The first one always gets further.
                return _untouched(led[at], wanted)
            self._requests.session.check_connected()
            if writer is None:
                return led[at].undo_unlocked(debtor, columns, wanted, go_on=go_on)
            return led[at].undo(writer, term, debtor, columns, wanted, go_on=go_on)

        results = map_all(self._pool, undo, range(len(led)))
        return {"session": session, "results": list(map(_to_row, results))}

    def shutdown(self) -> None:
        """End the threads."""
        self._pool.shutdown()


def _untouched(led: LedBucket, wanted: UndoRange) -> UndoResult:
    """Return the result of doing nothing; from here on it is known where the range ends."""
    end = led.bucket.settled_end()
    until = end if wanted.until is None else wanted.until
    rest = UndoRange(wanted.from_offset, until)
    return UndoResult(base_offset=end, end_offset=end, rows=0, rest=rest)


def _writer(fields: wire.Fields) -> Writer | None:
    if "writer" not in fields:
        return None
    return Writer(fields.get("writer", str), fields.get("epoch", int))


def _to_row(result: UndoResult) -> list[int]:
    rest = result.rest
    until = -1 if rest is None or rest.until is None else rest.until
    return [result.base_offset, result.end_offset, result.changed, until]
