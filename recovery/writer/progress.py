"""What a writer has done, and how long its steps took."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass
class Progress:
    """What a writer has done, for logs and status. `undoing_s`: how long undos took so far."""

    batch: int = -1
    keys_changed: int = 0
    undone_keys: int = 0
    undoing_s: float = 0.0
    starts: int = 0
    skipped: int = 0
    seconds: dict[str, float] = field(default_factory=dict)


@contextmanager
def timed(seconds: dict[str, float], step: str) -> Iterator[None]:
    """Add the time of a block to that of its step."""
    began = time.perf_counter()
    try:
        yield
    finally:
        seconds[step] = seconds.get(step, 0.0) + time.perf_counter() - began
