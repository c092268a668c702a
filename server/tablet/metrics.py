"""Counters of a server, for its status and for Prometheus.

Few and plain: a counter rises, a gauge is asked when it is wanted, and a duration is a count and a
sum of seconds with buckets in powers of four, as Prometheus' histograms are.
"""

import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress

from foundation.errors import TallybookError

PREFIX = "tallybook_"
_BOUNDS_S = tuple(0.001 * 4**power for power in range(8))

Labels = tuple[tuple[str, str], ...]


class Metrics:
    """The counters of one server. Safe for threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counters: dict[tuple[str, Labels], float] = {}
        self._durations: dict[tuple[str, Labels], list[float]] = {}
        self._gauges: dict[str, Callable[[], Mapping[Labels, float]]] = {}

    def count(self, name: str, amount: float = 1, **labels: str) -> None:
        """Add to a counter."""
        key = (name, tuple(sorted(labels.items())))
        with self._lock:
            self._counters[key] = self._counters.get(key, 0) + amount

    @contextmanager
    def timed(self, name: str, **labels: str) -> Iterator[None]:
        """Measure how long a block takes, however it ends."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.observe(name, time.perf_counter() - began, **labels)

    def observe(self, name: str, seconds: float, **labels: str) -> None:
        """Add a duration: [sum, count per bound, ..., count]."""
        key = (name, tuple(sorted(labels.items())))
        with self._lock:
            values = self._durations.setdefault(key, [0.0] * (len(_BOUNDS_S) + 2))
            values[0] += seconds
            for at, bound in enumerate(_BOUNDS_S, 1):
                values[at] += seconds <= bound
            values[-1] += 1

    def forget_tables(self, existing: Collection[str]) -> None:
        """Drop what was counted for tables other than these: there are no others any more."""

        def stays(labels: Labels) -> bool:
            return all(name != "table" or value in existing for name, value in labels)

        with self._lock:
            self._counters = {key: one for key, one in self._counters.items() if stays(key[1])}
            self._durations = {key: one for key, one in self._durations.items() if stays(key[1])}

    def gauge(self, name: str, read: Callable[[], Mapping[Labels, float]]) -> None:
        """Register what is asked when the metrics are read."""
        self._gauges[name] = read

    def values(self) -> dict[str, float]:
        """Return everything by its Prometheus name with labels."""
        return dict(self._samples())

    def to_prometheus(self) -> str:
        """Return the text format that Prometheus reads."""
        lines: list[str] = []
        seen: set[str] = set()
        for name, value in self._samples():
            family, kind = self._family(name.partition("{")[0])
            if family not in seen:
                seen.add(family)
                lines.append(f"# TYPE {family} {kind}")
            lines.append(f"{name} {value:.17g}")
        return "\n".join(lines) + "\n"

    def _family(self, name: str) -> tuple[str, str]:
        for suffix in ("_bucket", "_sum", "_count"):
            if name.endswith(f"_seconds{suffix}"):
                return name.removesuffix(suffix), "histogram"
        return name, "counter" if name.endswith("_total") else "gauge"

    def _samples(self) -> list[tuple[str, float]]:
        with self._lock:
            counters = dict(self._counters)
            durations = {key: list(values) for key, values in self._durations.items()}
        samples = [
            (_sample(f"{name}_total", labels), value) for (name, labels), value in counters.items()
        ]
        for (name, labels), values in durations.items():
            total, *counts, count = values
            for bound, below in zip(_BOUNDS_S, counts, strict=True):
                within = (*labels, ("le", f"{bound:g}"))
                samples.append((_sample(f"{name}_seconds_bucket", within), below))
            everything = (*labels, ("le", "+Inf"))
            samples.append((_sample(f"{name}_seconds_bucket", everything), count))
            samples.append((_sample(f"{name}_seconds_sum", labels), total))
            samples.append((_sample(f"{name}_seconds_count", labels), count))
        for name, read in self._gauges.items():
            with suppress(TallybookError):  # A bucket that is being closed has nothing to say.
                samples += [(_sample(name, labels), value) for labels, value in read().items()]
        return sorted(samples, key=lambda sample: sample[0].partition("{")[0])


def _sample(name: str, labels: Labels) -> str:
    if not labels:
        return PREFIX + name
    inside = ",".join(f'{label}="{_escaped(value)}"' for label, value in labels)
    return f"{PREFIX}{name}{{{inside}}}"


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
