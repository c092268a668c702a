"""What a tiering job can be told."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from foundation.errors import InvalidInput
from foundation.suggestions import did_you_mean
from locks.snapshots.leases import LONGEST_LEASE_MS, SHORTEST_LEASE_MS
from sink.lake.log import RETENTION_S
from sink.lake.opening import DELTA, Place, open_lake
from sink.lake.state import Layout


@dataclass(frozen=True, kw_only=True)
class TieringOptions:
    """`to`: a directory, or a URL. `once`: one round, and done.

    `format`: "delta" or "parquet". `layout`: what is done about rows that changed, "vectors" or
    "rewrite"; unless it is given, the first that the format has. `states`: the states of averages,
    sketches and bitmaps, too. `interval_s`: from the start of one round to that of the next.
    `lag_target_s`: while the copy is further behind than that, rounds follow one another, and files
    are not compacted. `retention_s`: for how long earlier versions can be read. `lease_s`: for how
    long the log is held after the job has died. `hold_s`: the same after it has ended; 0: not at
    all, which leaves what the servers keep by themselves. `attempts`: so often in a row a round may
    fail. `begin_again`: make the copy anew, whatever has become of the one that is there.
    """

    table: str
    to: str
    format: str = DELTA
    layout: str | None = None
    states: bool = False
    once: bool = False
    interval_s: float = 60.0
    lag_target_s: float | None = None
    retention_s: float = RETENTION_S
    lease_s: float = 3600.0
    hold_s: float = 0.0
    attempts: int = 5
    begin_again: bool = False
    storage_settings: Mapping[str, Any] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        for name in ("interval_s", "retention_s", "hold_s"):
            if not 0 <= getattr(self, name) < math.inf:
                raise InvalidInput(
                    f"{name} is {getattr(self, name):g}; it is a number of seconds, 0 or more"
                )
        if self.lag_target_s is not None and not self.lag_target_s > 0:
            raise InvalidInput(f"lag_target_s is {self.lag_target_s:g}; it is more than 0")
        for name in ("lease_s", "hold_s"):
            lasts_ms = 1000 * getattr(self, name)
            if name == "hold_s" and not lasts_ms:
                continue
            if not SHORTEST_LEASE_MS <= lasts_ms <= LONGEST_LEASE_MS:
                raise InvalidInput(
                    f"{name} is {getattr(self, name):g}; a lease lasts from "
                    f"{SHORTEST_LEASE_MS // 1000} s to {LONGEST_LEASE_MS // 1000} s"
                )
        if self.attempts < 1:
            raise InvalidInput(f"attempts is {self.attempts}; it is 1 or more")
        if not str(self.to):
            raise InvalidInput("where to? Give a directory, or a URL such as s3://bucket/path")
        self.chosen_layout()

    @property
    def place(self) -> Place:
        """Where the copy is."""
        return Place.of(self.to, self.storage_settings)

    def chosen_layout(self) -> Layout:
        """Return the layout: the one that is asked for, or the first that the format has."""
        log = open_lake(self.place, self.format).log
        if self.layout is None:
            return log.layouts[0]
        known = [one.value for one in Layout]
        if self.layout not in known:
            near = did_you_mean(self.layout, known) or f"; there are {' and '.join(known)}"
            raise InvalidInput(f"a layout {self.layout!r}{near}")
        layout = Layout(self.layout)
        if layout not in log.layouts:
            raise InvalidInput(
                f"the format {self.format} has no deletion vectors: leave the layout, or make a "
                "Delta table"
            )
        return layout
