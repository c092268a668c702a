"""Errors of a sink as people meet them: what happened stands first, and last.

Spark shows the traceback of a failed batch inside of its own, twice, with the plan of the query
behind it. What Spark is given here begins with the message and ends with it. It is also logged
before Spark logs anything, and once more when the process ends by it.
"""

import atexit
import logging
import sys

from foundation.errors import TallybookError

logger = logging.getLogger(__name__)

_last: list[str] = []


def failed_batch(error: TallybookError, batch: int, table: str) -> TallybookError:
    """Log the error of a batch, and return it to be raised from the function that Spark calls.

    Where in our code it was raised is in the log, at level DEBUG.
    """
    logger.error("batch %d of table %s failed: %s", batch, table, error)
    logger.debug("where it failed", exc_info=error)
    atexit.unregister(_say_last)
    atexit.register(_say_last)
    _last[:] = [f"batch {batch} of table {table} failed: {error}"]
    # A cause is shown before its effect, and one that was never raised has no traceback to show.
    first = TallybookError.__new__(type(error), str(error))
    raised = error.with_traceback(None)
    raised.__cause__ = first
    return raised


def went_well() -> None:
    """Forget the last failure: a batch was written since."""
    _last.clear()


def _say_last() -> None:
    """At exit: repeat the last failure, below the traceback that the process ends with."""
    if _last and getattr(sys, "last_value", None) is not None:
        print(f"tallybook: {_last[0]}", file=sys.stderr)
