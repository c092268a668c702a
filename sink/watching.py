"""How a large batch is getting on, asked of the servers while it is under way."""

import logging
import threading
import time
from collections.abc import Callable
from typing import Any

from foundation.errors import TallybookError
from foundation.ids import Token

logger = logging.getLogger(__name__)

_ASK_S = 2.0
# A server that does not answer just now must not hold up a batch that is done.
_LONGEST_WAIT_S = 0.5

Ask = Callable[[Token], dict[str, int]]
"""Asks all servers how much of a batch has arrived at them, and was written."""


class BatchWatch:
    """Asks every few seconds for the duration of a block; what it was told last is in `told`.

    A batch that is done sooner is not asked for at all.
    """

    def __init__(self, batch: int, ask: Ask, *, interval_s: float = _ASK_S) -> None:
        self._batch = batch
        self._ask = ask
        self._interval_s = interval_s
        self._token: Token | None = None
        self._began_s = time.monotonic()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="tallybook-watch", daemon=True)
        self.told: dict[str, Any] = {}

    @property
    def ended(self) -> bool:
        """Whether the block is over."""
        return self._ended.is_set()

    def put_under(self, token: Token) -> None:
        """Say under which token the batch is put from now on."""
        self._token = token

    def __enter__(self) -> "BatchWatch":
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._ended.set()
        self._thread.join(_LONGEST_WAIT_S)

    def _run(self) -> None:
        while not self._ended.wait(self._interval_s):
            self._look()

    def _look(self) -> None:
        token, seconds = self._token, round(time.monotonic() - self._began_s, 1)
        found = {"rows": 0, "bytes": 0, "rows_done": 0}
        try:
            if token is not None:
                found = self._ask(token)
        except TallybookError as exc:
            logger.info("batch %d: how far it is cannot be asked: %s", self._batch, exc)
            return
        self.told = {"batch": self._batch, "seconds": seconds, **found}
        logger.info(
            "batch %d after %.0f s: %s rows and %s bytes are at the servers, %s rows are written",
            self._batch,
            seconds,
            f"{found['rows']:,}",
            f"{found['bytes']:,}",
            f"{found['rows_done']:,}",
        )
