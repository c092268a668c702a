"""Has a tablet server hand its buckets over to the others, and end."""

import time
from collections.abc import Callable
from typing import TypeVar

from foundation.deadlines import deadline_in, remaining
from foundation.errors import ServerUnavailable
from server.client.connections import Broken, Connections
from server.protocol.calls import Call, Drain, Status
from server.protocol.messages import Message

Answer = TypeVar("Answer", bound=Message)
_LOOK_S = 0.2
_ANSWER_S = 5.0


def drain(
    connections: Connections,
    address: str,
    *,
    deadline_s: float,
    sleep: Callable[[float], None] = time.sleep,
) -> str:
    """Drain the server at this address; return what to tell, once it has ended.

    ServerUnavailable if nobody is there, or if it has not ended within the deadline: it goes on.
    """
    deadline = deadline_in(deadline_s)

    def call(what: Call[Answer]) -> Answer:
        return connections.call(address, what, min(_ANSWER_S, remaining(deadline)))

    try:
        pid = call(Status()).status["pid"]
        led = left = call(Drain()).buckets
    except Broken as exc:
        raise ServerUnavailable(f"{exc}; is it one of `tallybook status`?") from exc
    while time.monotonic() < deadline:
        try:
            status = call(Status()).status
        except Broken as exc:
            if exc.sent:  # It may only be slow.
                continue
            status = {}
        if status.get("pid") != pid:  # Whoever runs it may have started it again by now.
            return f"server {address} has handed over and ended; it led {led} buckets"
        left = len(status["buckets"])
        sleep(_LOOK_S)
    raise ServerUnavailable(f"after {deadline_s:g} s it still leads {left} buckets; it goes on")
