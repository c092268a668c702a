"""Charts as SVG, drawn by hand: bars and lines need no library, and equal numbers equal bytes."""

import math
from collections.abc import Iterator, Sequence
from xml.sax.saxutils import escape

from benchmarks.figure import Chart
from benchmarks.report import amount

_WIDTH = 860
_LEFT, _RIGHT = 220, 70
_BAR, _GAP = 18, 26
_PLOT_HEIGHT = 300
_TOP = 56
_COLOURS = ("#1b6ca8", "#c8553d", "#588157", "#8d6a9f", "#b08900", "#4a4e69", "#2a9d8f")
_OURS, _OTHERS = "#1b6ca8", "#9aa5b1"


def svg(chart: Chart) -> str:
    """Return the chart: lines if its points have places, else bars, ours in another colour."""
    return _lines(chart) if chart.across else _bars(chart)


def _bars(chart: Chart) -> str:
    groups = dict.fromkeys(place for points in chart.series.values() for place, _ in points)
    values = {who: dict(points) for who, points in chart.series.items()}
    others = any(who.startswith("ours") for who in chart.series)
    width = _WIDTH - _LEFT - _RIGHT
    y = _TOP
    parts = []
    for group in groups:
        scale = _Scale([bars[group] for bars in values.values() if group in bars], False)
        parts.append(_text(_LEFT, y + 12, str(group), weight="bold"))
        y += _BAR + 4
        for who, bars in values.items():
            if group not in bars:
                continue
            length = max(1.0, scale.share(bars[group]) * width)
            colour = _OURS if who.startswith("ours") or not others else _OTHERS
            parts.append(_text(_LEFT - 8, y + 12, who, anchor="end"))
            parts.append(
                f'<rect x="{_LEFT}" y="{y}" width="{length:.1f}" height="{_BAR - 4}" '
                f'fill="{colour}"/>'
            )
            parts.append(_text(_LEFT + length + 6, y + 12, amount(bars[group])))
            y += _BAR
        y += _GAP
    note = "; each group has a scale of its own" if len(groups) > 1 else ""
    return _document(chart, note, parts, height=y)


def _lines(chart: Chart) -> str:
    places = sorted({float(place) for points in chart.series.values() for place, _ in points})
    values = [value for points in chart.series.values() for _, value in points]
    down = _Scale(values, chart.logarithmic)
    along = _Scale(places, chart.logarithmic and places[0] > 0)
    left, width, bottom = 80, _WIDTH - 80 - _RIGHT, _TOP + _PLOT_HEIGHT

    def x(place: float) -> float:
        return left + along.share(place) * width

    def y(value: float) -> float:
        return bottom - down.share(value) * _PLOT_HEIGHT

    parts = []
    for tick in down.ticks():
        parts.append(
            f'<line x1="{left}" x2="{left + width}" y1="{y(tick):.1f}" y2="{y(tick):.1f}" '
            'stroke="#dde1e6"/>'
        )
        parts.append(_text(left - 8, y(tick) + 4, amount(tick), anchor="end"))
    for place in places if len(places) <= 8 else along.ticks():
        parts.append(_text(x(place), bottom + 18, amount(place), anchor="middle"))
    parts.append(_text(left + width / 2, bottom + 38, chart.across, anchor="middle"))
    for number, (name, points) in enumerate(chart.series.items()):
        colour = _COLOURS[number % len(_COLOURS)]
        path = " ".join(f"{x(float(place)):.1f},{y(value):.1f}" for place, value in points)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        at = bottom + 60 + 18 * number
        parts.append(f'<rect x="{left}" y="{at - 9}" width="18" height="4" fill="{colour}"/>')
        parts.append(_text(left + 26, at, name))
    note = ", logarithmic" if chart.logarithmic else ""
    return _document(chart, note, parts, height=bottom + 70 + 18 * len(chart.series))


class _Scale:
    """Where values lie between the end of an axis (0) and the other (1)."""

    def __init__(self, values: Sequence[float], logarithmic: bool) -> None:
        self._logarithmic = logarithmic
        highest = max(values, default=1.0) or 1.0
        if logarithmic:
            self._low = 10.0 ** math.floor(math.log10(min(values)))
            self._high = max(highest, 1.01 * self._low)
        else:
            self._low, self._high = 0.0, highest

    def share(self, value: float) -> float:
        """Return the place of a value."""
        if self._logarithmic:
            return math.log(value / self._low) / math.log(self._high / self._low)
        return (value - self._low) / (self._high - self._low)

    def ticks(self) -> Iterator[float]:
        """Yield round values on the axis."""
        if self._logarithmic:
            tick = self._low
            while tick <= self._high:
                yield from (tick * one for one in (1, 2, 5) if tick * one <= self._high)
                tick *= 10
            return
        step = 10.0 ** math.floor(math.log10(self._high))
        step *= next(one for one in (1, 0.5, 0.2, 0.1) if self._high / (step * one) >= 3)
        for number in range(int(self._high / step) + 1):
            yield number * step


def _text(x: float, y: float, text: str, *, anchor: str = "start", weight: str = "normal") -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-weight="{weight}">'
        f"{escape(text)}</text>"
    )


def _document(chart: Chart, note: str, parts: Sequence[str], *, height: float) -> str:
    head = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height:.0f}" '
        f'viewBox="0 0 {_WIDTH} {height:.0f}" font-family="sans-serif" font-size="13">',
        f'<rect width="{_WIDTH}" height="{height:.0f}" fill="white"/>',
        _text(16, 24, chart.title, weight="bold"),
        _text(16, 42, f"{chart.unit}{note}"),
    ]
    return "\n".join([*head, *parts, "</svg>"]) + "\n"
