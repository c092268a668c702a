"""What happened on a bed: operations of the clients, faults, and who led; and who waited how long.

Times are of the monotonic clock, which all processes of a machine share, whatever their hosts.
"""

import json
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_WORTH_TELLING_S = 1.0
_WORTH_TELLING_AT_ONCE_S = 10.0


@dataclass(frozen=True, kw_only=True)
class Operation:
    """A batch, or a read, from its first attempt to its success."""

    kind: str
    number: int
    began: float
    ended: float
    errors: list[dict[str, Any]] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        """How long it took, with all that failed."""
        return self.ended - self.began


class History:
    """Reads what the load writes down, as it comes, and has notes of our own."""

    def __init__(self, follow: Callable[[str], None] = lambda _: None) -> None:
        """`follow`: gets each event, as a line, when it is known."""
        self._follow = follow
        self._began = time.monotonic()
        self.operations: list[Operation] = []
        self._last: dict[str, float] = {}
        self.wrong: list[str] = []
        self.led: dict[str, str] = {}
        self.led_at = 0.0
        self._notes: list[tuple[float, str]] = []
        self._read: dict[Path, int] = {}

    def note(self, what: str) -> float:
        """Write down what we do; return when."""
        now = time.monotonic()
        self._note_at(now, what)
        return now

    def _note_at(self, at: float, what: str) -> None:
        self._notes.append((at, what))
        self._tell(at, what)

    def _tell(self, at: float, what: str) -> None:
        self._follow(f"{at - self._began:8.1f} s  {what}")

    def read(self, path: Path) -> None:
        """Read what was added to a load's output."""
        with path.open("rb") as lines:
            lines.seek(self._read.get(path, 0))
            for line in lines:
                if not line.endswith(b"\n"):
                    break  # The rest of it is on its way.
                self._read[path] = self._read.get(path, 0) + len(line)
                self.add(line.decode())

    def add(self, line: str) -> None:
        """Take a line of a load's output; what is no event is a word of a library."""
        if not line.startswith("{"):
            return
        event = json.loads(line)
        if "kind" in event:
            done = Operation(**event)
            self.operations.append(done)
            self._last[done.kind] = max(done.began, self._last.get(done.kind, 0.0))
            if done.seconds >= _WORTH_TELLING_AT_ONCE_S:
                self._tell(done.ended, f"{done.kind} {done.number} took {done.seconds:.1f} s")
        elif "wrong" in event:
            self.wrong.append(event["wrong"])
            self._note_at(event["at"], f"WRONG: {event['wrong']}")
        elif "led" in event:
            self._add_leaders(event["led"], event["at"])

    def _add_leaders(self, led: dict[str, str], at: float) -> None:
        if led != self.led:
            by_leader: dict[str, list[str]] = {}
            for bucket, leader in sorted(led.items()):
                by_leader.setdefault(leader, []).append(bucket)
            told = ", ".join(f"{leader} {' '.join(own)}" for leader, own in by_leader.items())
            self._note_at(at, f"leaders: {told or 'none'}")
        self.led, self.led_at = led, at

    def kinds(self) -> set[str]:
        """Return the kinds of clients that have ever done something."""
        return {operation.kind for operation in self.operations}

    def batches(self, kind: str) -> int:
        """Return how many batches a writer has done."""
        return max((each.number + 1 for each in self.operations if each.kind == kind), default=0)

    def has_gone_on(self, since: float, kinds: Iterable[str]) -> bool:
        """Whether each kind of client has done something that it began since then."""
        return all(self._last.get(kind, 0.0) >= since for kind in kinds)

    def of(self, kind: str, since: float) -> list[Operation]:
        """Return what a kind of client has done that ended since then."""
        return [each for each in self.operations if each.kind == kind and each.ended >= since]

    def slowest(self, since: float) -> str:
        """Tell how long the slowest operation of each kind took, of those that ended since then."""
        longest = {
            kind: max(each.seconds for each in self.of(kind, since))
            for kind in sorted(self.kinds())
        }
        return ", ".join(f"{kind} {seconds:.1f} s" for kind, seconds in longest.items())

    def told(self, since: float) -> str:
        """Tell what happened: what we did, who led, and who waited for what."""
        lines = [(at, what) for at, what in self._notes if at >= since]
        for each in self.operations:
            if each.ended >= since and (each.seconds >= _WORTH_TELLING_S or each.errors):
                what = f"{each.kind} {each.number} ended after {each.seconds:.1f} s"
                for error in each.errors:
                    what += f"\n             {error['after_s']:.1f} s: {error['error']}"
                lines.append((each.ended, what))
        return "\n".join(f"{at - since:+8.1f} s  {what}" for at, what in sorted(lines))
