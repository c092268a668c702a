"""What threads do that nobody waits for: what fails there is logged and counted, and ends nothing.

A thread that looks after something again and again must not end by an error that nobody foresaw:
what it looked after would be left alone from then on, and nobody would be told. Each of its turns
is a `surviving` block.
"""

import logging
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

logger = logging.getLogger(__name__)

_lock = threading.Lock()
_failures: Counter[str] = Counter()


@contextmanager
def surviving(what: str) -> Iterator[None]:
    """Go on after the block, whatever it raises; `what`: one of few names, for people.

    Also what is no `Exception`, as a panic of a library in Rust; but not what ends the process.
    """
    try:
        yield
    except (KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as exc:
        failed(what, exc)


def failed(what: str, error: BaseException, *, log: bool = True) -> None:
    """Count an error that nobody foresaw. `log`: with its traceback, too."""
    with _lock:
        _failures[what] += 1
    if log:
        logger.error("%s failed, and goes on", what, exc_info=error)


def failures() -> Mapping[str, int]:
    """Return how often something has failed in this process, by what it was."""
    with _lock:
        return dict(_failures)
