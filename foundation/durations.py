"""How long, as people write it: "30 days", "12 h"; and as one says it back."""

import re
from datetime import timedelta

from foundation.errors import InvalidInput

_MICROSECOND = timedelta(microseconds=1)
_UNITS = {
    "week": timedelta(weeks=1),
    "day": timedelta(days=1),
    "hour": timedelta(hours=1),
    "minute": timedelta(minutes=1),
    "second": timedelta(seconds=1),
}
_SHORT = {"w": "week", "d": "day", "h": "hour", "min": "minute", "s": "second"}
_WRITTEN = re.compile(r"(\d{1,12})\s*([a-z]+)", re.IGNORECASE)


def read_duration(value: timedelta | str) -> timedelta:
    """Return how long this is; InvalidInput if it is no duration, or none that is positive."""
    duration = value if isinstance(value, timedelta) else _parsed(value)
    if duration is None:
        raise InvalidInput(
            f"{value!r} is no duration; give a timedelta, or a text such as '30 days', '12 hours', "
            "'90 min' or '45 s'"
        )
    if duration <= timedelta():
        raise InvalidInput(f"a duration is longer than nothing, not {value!r}")
    return duration


def show_duration(duration: timedelta) -> str:
    """Return it as text that is read back as the same, in the largest unit that fits."""
    for name in ("day", "hour", "minute"):
        count, rest = divmod(duration, _UNITS[name])
        if count and not rest:
            return f"{count} {name}" if count == 1 else f"{count} {name}s"
    # Not more precisely than seconds, and never shorter than it is.
    return f"{-(-duration // _UNITS['second'])} seconds"


def microseconds(duration: timedelta) -> int:
    """Return the duration as a number."""
    return duration // _MICROSECOND


def _parsed(text: object) -> timedelta | None:
    found = _WRITTEN.fullmatch(text.strip()) if isinstance(text, str) else None
    if found is None:
        return None
    word = found[2].lower()
    unit = _UNITS.get(_SHORT.get(word, word.removesuffix("s")))
    try:
        return None if unit is None else int(found[1]) * unit
    except OverflowError:
        return None
