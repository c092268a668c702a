"""What a check of `tallybook doctor` finds."""

from dataclasses import dataclass
from enum import Enum
from typing import Any


class Health(Enum):
    """How it is. A warning is not wrong today."""

    FINE = "fine"
    WARNING = "look at it"
    WRONG = "wrong"


@dataclass(frozen=True)
class Finding:
    """What was looked at, how it is, what was found and, unless it is fine, what to do."""

    what: str
    health: Health
    found: str
    advice: str = ""

    def document(self) -> dict[str, Any]:
        """Return it as JSON has it."""
        return {
            "what": self.what,
            "health": self.health.name.lower(),
            "found": self.found,
            "advice": self.advice or None,
        }


def fine(what: str, found: str) -> Finding:
    """Return a finding that needs nothing."""
    return Finding(what, Health.FINE, found)


def warning(what: str, found: str, advice: str) -> Finding:
    """Return a finding that is to be looked at."""
    return Finding(what, Health.WARNING, found, advice)


def wrong(what: str, found: str, advice: str) -> Finding:
    """Return a finding that keeps something from working."""
    return Finding(what, Health.WRONG, found, advice)
