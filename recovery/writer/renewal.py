"""Keeps a lock from expiring, in the background."""

import logging
import threading
from collections.abc import Callable

from foundation.background import surviving
from foundation.errors import TallybookError

logger = logging.getLogger(__name__)


class Renewal:
    """Calls `renew` again and again until it is stopped.

    Expiry decides who may ask for the columns, not who may write: a renewal that fails is not told
    to anybody. The writer finds out by itself, on its next step.
    """

    def __init__(self, renew: Callable[[], None], interval_s: float) -> None:
        self._renew = renew
        self._interval_s = interval_s
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="tallybook-renewal", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End it; a call that is under way ends first."""
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stopped.wait(self._interval_s):
            with surviving("renewing a lock"):
                try:
                    self._renew()
                except TallybookError as exc:
                    logger.info("a lock was not renewed: %s", exc)
