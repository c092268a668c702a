"""Questions to the coordinator, over whichever session the client has by now."""

from collections.abc import Callable
from typing import TypeVar

from foundation.errors import SessionLost
from locks.coordinator import Coordinator

Result = TypeVar("Result")


def ask(
    coordinator: Callable[[], Coordinator], question: Callable[[Coordinator], Result]
) -> Result:
    """Return the answer to a question that changes nothing.

    Asked again if the session was lost while it was asked: the coordinator is of another one then,
    and nothing that a client reads rests on its session.
    """
    try:
        return question(coordinator())
    except SessionLost:
        return question(coordinator())
