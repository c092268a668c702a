"""What a sink can be told, and the names of the options for people who write them as text."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from foundation.errors import InvalidInput
from foundation.suggestions import did_you_mean
from locks.column_locks.locks import DEFAULT_TTL_MS

OWNER_ID = "client.column-lock.owner-id"
TTL = "client.column-lock.ttl"
_UNITS_MS = {"ms": 1, "s": 1000, "min": 60_000, "h": 3_600_000, "d": 86_400_000}


@dataclass(frozen=True, kw_only=True)
class SinkOptions:
    """How a sink works; all of it has working defaults.

    `recovery`: "undo" takes an uncommitted batch back, "redo" rolls a prepared one forward and
    needs `redo_location`, a place that driver and executors share: a directory, or an object store
    that is opened with `redo_settings`. `route`: "driver" collects the batch, "executors" puts from
    the tasks, "auto" goes by the size of the batch and the number of executors: see `sink.routing`.
    What has more than `driver_max_bytes` goes by the executors in any case.
    `bad_rows`: "fail" the batch, or "quarantine" them as Parquet below `quarantine_path`.
    `check`: look at the cluster, the table and its columns when the sink is made.
    """

    owner_id: str | None = None
    ttl_ms: int = DEFAULT_TTL_MS
    recovery: str = "undo"
    redo_location: str | None = None
    redo_settings: Mapping[str, Any] = field(default_factory=dict)
    local_aggregation: bool = True
    route: str = "auto"
    driver_max_rows: int = 1_000_000
    driver_max_bytes: int = 256 << 20
    bad_rows: str = "fail"
    quarantine_path: str | None = None
    handover: bool = False
    deadline_s: float = 120.0
    renamed: Mapping[str, str] = field(default_factory=dict)
    operation_column: str | None = None
    ignore_extra: bool = False
    check: bool = True

    def __post_init__(self) -> None:
        _one_of("recovery", self.recovery, ("undo", "redo"))
        _one_of("route", self.route, ("auto", "driver", "executors"))
        _one_of("bad_rows", self.bad_rows, ("fail", "quarantine"))
        if self.bad_rows == "quarantine" and self.quarantine_path is None:
            raise InvalidInput("bad_rows='quarantine' needs a quarantine_path for the bad rows")
        if self.recovery == "redo" and self.redo_location is None:
            raise InvalidInput("recovery='redo' needs a redo_location for the promised batches")

    def with_texts(self, options: Mapping[str, str]) -> "SinkOptions":
        """Return these with options under their configuration names."""
        changes: dict[str, Any] = {}
        for name, value in options.items():
            if name == OWNER_ID:
                changes["owner_id"] = value
            elif name == TTL:
                changes["ttl_ms"] = parse_duration_ms(name, value)
            else:
                hint = did_you_mean(name, [OWNER_ID, TTL])
                raise InvalidInput(f"unknown option '{name}'{hint}")
        return replace(self, **changes)


def checked_settings(settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the settings, if there is one of each name."""
    known = [one.name for one in fields(SinkOptions)]
    for name in settings:
        if name not in known:
            raise InvalidInput(f"a sink has no setting '{name}'{did_you_mean(name, known)}")
    return settings


def parse_duration_ms(name: str, text: str) -> int:
    """Return '10 min', '30s' or '250 ms' in milliseconds."""
    number = text.strip().rstrip("abcdefghijklmnopqrstuvwxyz").strip()
    unit = text.strip()[len(number) :].strip() or "ms"
    if unit not in _UNITS_MS or not number.isdigit():
        raise InvalidInput(f"{name} = {text!r} is no duration; write '10 min', '30 s' or '250 ms'")
    return int(number) * _UNITS_MS[unit]


def _one_of(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        choices = " or ".join(repr(one) for one in known)
        raise InvalidInput(f"{name} is {choices}, not {value!r}{did_you_mean(str(value), known)}")
