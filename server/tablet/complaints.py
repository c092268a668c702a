"""What is wrong with this server, said once: when it begins, goes on, and is over."""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

_AGAIN_S = 60.0
_KEPT_S, _MOST_KEPT = 3600.0, 100


@dataclass
class _Complaint:
    """What was said last, and when; `since` is when it began."""

    text: str
    since_s: float
    said_s: float
    times: int = 1


class Complaints:
    """Logs errors that come again and again: the first, any other text, and one a minute."""

    def __init__(
        self, logger: logging.Logger, *, clock_s: Callable[[], float] = time.monotonic
    ) -> None:
        self._logger = logger
        self._clock_s = clock_s
        self._lock = threading.Lock()
        self._open: dict[str, _Complaint] = {}
        self._ended: deque[tuple[float, str, _Complaint]] = deque(maxlen=_MOST_KEPT)

    def complain(self, about: str, text: str, error: BaseException | None = None) -> None:
        """Say that something is wrong, unless that was just said; `error`: with its traceback."""
        now_s = self._clock_s()
        with self._lock:
            known = self._open.get(about)
            if known is None:
                known = self._open[about] = _Complaint(text, now_s, now_s)
            else:
                known.times += 1
                if known.text == text and now_s - known.said_s < _AGAIN_S:
                    return
                known.text, known.said_s = text, now_s
            again = ""
            if known.times > 1:
                again = f" ({known.times} times in {now_s - known.since_s:.0f} s)"
        self._logger.error("%s: %s%s", about, text, again, exc_info=error)

    def over(self, about: str) -> None:
        """Say that it is over, if anything was said."""
        if about not in self._open:  # The usual case, which asks for no lock.
            return
        with self._lock:
            known = self._open.pop(about, None)
            if known is not None:
                self._ended.append((self._clock_s(), about, known))
        if known is not None:
            lasted_s = self._clock_s() - known.since_s
            self._logger.warning("%s: over, after %.0f s", about, lasted_s)

    def all(self) -> dict[str, str]:
        """Return what is wrong now."""
        with self._lock:
            return {about: complaint.text for about, complaint in self._open.items()}

    def before(self) -> list[dict[str, object]]:
        """Return what was wrong within the last hour and is over, the latest last."""
        now_s = self._clock_s()
        with self._lock:
            return [
                {
                    "about": about,
                    "text": known.text,
                    "times": known.times,
                    "lasted_s": round(ended_s - known.since_s, 1),
                    "over_for_s": round(now_s - ended_s, 1),
                }
                for ended_s, about, known in self._ended
                if now_s - ended_s < _KEPT_S
            ]
