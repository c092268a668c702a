"""The nearest known name, for errors about an unknown one."""

from collections.abc import Iterable
from difflib import get_close_matches


def did_you_mean(name: object, known: Iterable[str]) -> str:
    """Return "; did you mean 'x'?" for the nearest known name, or "" if none is near."""
    if not isinstance(name, str):
        return ""
    spelling = {candidate.casefold(): candidate for candidate in known}
    nearest = get_close_matches(name.casefold(), spelling, n=1)
    return f"; did you mean '{spelling[nearest[0]]}'?" if nearest else ""
