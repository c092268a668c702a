"""What the clients of a load share: settings, connections, how far writers are, and the output.

Each client is a thread with a connection of its own, and does one operation after the other, each
until it succeeds. Every operation is a line of JSON: who, which, when it began and ended, and what
failed meanwhile; so is everything that is wrong.
"""

import json
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from foundation.errors import Corrupt, ServerFailed, TallybookError
from server.client.cluster import Cluster, connect
from server.protocol.environment import TOKEN_VARIABLE, credentials_from

TABLE = "moved"
BUCKETS = 6
ATTEMPT_S = 5.0
"""As the servers' session time-out, which it is by default, too."""
PATIENT_S = 30.0
"""For who has snapshots taken: a call that is given up too early is made again, and is as long."""
DEADLINE_S = 120.0
PAUSE_S = 0.3
_START_DEADLINE_S = 120.0
# Nothing that goes wrong between hosts damages anything, or makes a server fail.
_NEVER = (Corrupt, ServerFailed)


@dataclass
class Shared:
    """One per process. `begun`, `acknowledged`: how many batches, by column, of its writers."""

    settings: dict[str, Any]
    begun: Counter[str] = field(default_factory=Counter)
    acknowledged: Counter[str] = field(default_factory=Counter)
    stopping: threading.Event = field(default_factory=threading.Event)
    _writing: threading.Lock = field(default_factory=threading.Lock)

    def say(self, **event: Any) -> None:
        """Write an event down, in one piece: whoever is killed leaves no half of a line."""
        with self._writing:
            sys.stdout.write(f"{json.dumps(event)}\n")
            sys.stdout.flush()

    def wait_for_writer(self, column: str) -> None:
        """Wait until this process knows how far the writer of the column is, or is to end."""
        while column not in self.begun and not self.stopping.wait(PAUSE_S):
            pass

    def say_wrong(self, what: str) -> None:
        """Write down what must not be."""
        self.say(wrong=what, at=time.monotonic())

    @contextmanager
    def connected(self, attempt_s: float = ATTEMPT_S) -> Iterator[Cluster]:
        """Connect; as long as ZooKeeper is not there yet, again."""
        deadline = time.monotonic() + _START_DEADLINE_S
        while True:
            try:
                cluster = connect_to(self.settings, attempt_s)
                break
            except TallybookError:
                if time.monotonic() > deadline:
                    raise
        with cluster:
            yield cluster

    def until_it_works(self, kind: str, number: int, call: Callable[[], None]) -> bool:
        """Do an operation, and again when it fails, until it has succeeded; write it down.

        Returns whether it has: it is given up when the process is to end.
        """
        began, errors = time.monotonic(), []
        while not self.stopping.is_set():
            try:
                call()
                break
            except TallybookError as exc:
                text = f"{type(exc).__name__}: {exc}"
                errors.append({"after_s": round(time.monotonic() - began, 3), "error": text})
                self.check_error(kind, exc)
        else:
            return False
        ended = time.monotonic()
        self.say(kind=kind, number=number, began=began, ended=ended, errors=errors)
        return True

    def in_time(self, kind: str, number: int, call: Callable[[], None]) -> bool:
        """Do an operation once, and write it down if it succeeds; return whether it does."""
        began = time.monotonic()
        try:
            call()
        except TallybookError as exc:
            self.check_error(kind, exc)
            return False
        self.say(kind=kind, number=number, began=began, ended=time.monotonic(), errors=[])
        return True

    def check_error(self, kind: str, exc: TallybookError) -> None:
        """Say so if an error is one that no fault between hosts explains."""
        if isinstance(exc, _NEVER):
            self.say_wrong(f"{kind}: {type(exc).__name__}: {exc}")


def connect_to(settings: dict[str, Any], attempt_s: float = ATTEMPT_S) -> Cluster:
    """Connect as the clients of a bed do: with token, credentials and TLS."""
    return connect(
        settings["zookeeper"],
        token=os.environ[TOKEN_VARIABLE],
        credentials=credentials_from(os.environ),
        tls_root=settings["tls_root"],
        deadline_s=DEADLINE_S,
        attempt_s=attempt_s,
    )
