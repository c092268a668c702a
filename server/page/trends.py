"""What became of a cluster lately: a point in time after the other, for an hour.

Made of what `overview` has seen: counters of servers become rates, and lock records that have
changed in between become what their owners did.
"""

import re
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

KEPT_S = 3600.0
_MOST_POINTS = 720
_MOST_EVENTS = 400
_MOST_SIZES = 60
_SAMPLE = re.compile(r"tallybook_(?P<name>\w+?)(?:\{(?P<labels>.*)\})?$")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


class Trends:
    """Keeps points and events. For one thread at a time."""

    def __init__(self) -> None:
        self._points: deque[dict[str, float]] = deque(maxlen=_MOST_POINTS)
        self._events: dict[tuple[str, str], deque[dict[str, Any]]] = {}
        self._sizes: dict[str, deque[tuple[int, int]]] = {}
        self._errors: deque[tuple[int, dict[tuple[str, str], float]]] = deque(maxlen=_MOST_POINTS)
        self._before: dict[str, Any] | None = None

    def add(self, now: dict[str, Any]) -> None:
        """Take note of an overview that is later than those before."""
        before, self._before = self._before, now
        if before is not None and now["at_ms"] > before["at_ms"]:
            self._points.append(_point(before, now))
            self._note_owners(before, now)
            if rose := _errors_between(before, now):
                self._errors.append((now["at_ms"], rose))
        for table in now["tables"]:
            sizes = self._sizes.setdefault(table["name"], deque(maxlen=_MOST_POINTS))
            sizes.append((now["at_ms"], table["rows"]))
        names = {table["name"] for table in now["tables"]}
        self._sizes = {name: sizes for name, sizes in self._sizes.items() if name in names}
        owners = {(t["name"], lock["owner"]) for t in now["tables"] for lock in t["locks"]}
        self._events = {key: events for key, events in self._events.items() if key in owners}
        oldest_ms = now["at_ms"] - KEPT_S * 1000
        while self._points and self._points[0]["at_ms"] < oldest_ms:
            self._points.popleft()
        while self._errors and self._errors[0][0] < oldest_ms:
            self._errors.popleft()

    def points(self) -> list[dict[str, float]]:
        """Return the rates of each moment: rows and keys a second, mean times in ms."""
        return list(self._points)

    def events(self, table: str, owner: str) -> list[dict[str, Any]]:
        """Return what an owner did: batches, undos, takeovers, recoveries, releases."""
        return list(self._events.get((table, owner), ()))

    def growth(self, table: str) -> float:
        """Return by how many rows a table has grown per second, since it was first seen."""
        sizes = self._sizes[table]
        (began_ms, few), (ended_ms, many) = sizes[0], sizes[-1]
        return 1000 * (many - few) / (ended_ms - began_ms) if ended_ms > began_ms else 0.0

    def sizes(self, table: str) -> list[int]:
        """Return how many rows a table had, at up to 60 moments of the last hour."""
        rows = [size for _, size in self._sizes[table]]
        step = max(1, -(-len(rows) // _MOST_SIZES))
        return [*rows[:-1:step], *rows[-1:]]

    def errors(self) -> list[dict[str, Any]]:
        """Return the calls that were refused or failed in the last hour, the most frequent first.

        `times`, and `last_ms`, when it was seen last.
        """
        found: dict[tuple[str, str], dict[str, Any]] = {}
        for at_ms, rose in self._errors:
            for (call, error), times in rose.items():
                known = found.setdefault((call, error), {"call": call, "error": error, "times": 0})
                known["times"] += int(times)
                known["last_ms"] = at_ms
        return sorted(found.values(), key=lambda one: -int(one["times"]))

    def _note_owners(self, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
        known = {
            (table["name"], lock["owner"]): lock
            for table in before["tables"]
            for lock in table["locks"]
        }
        for table in now["tables"]:
            others = {owner: one for (name, owner), one in known.items() if name == table["name"]}
            for lock in table["locks"]:
                key = (table["name"], lock["owner"])
                happened = [*_happened(known.get(key), lock, others)]
                if happened:
                    events = self._events.setdefault(key, deque(maxlen=_MOST_EVENTS))
                    at_ms = now["at_ms"] - max(0, int(lock["changed_s"] * 1000))
                    events.extend({"at_ms": at_ms, **event} for event in happened)


def _happened(
    before: Mapping[str, Any] | None,
    now: Mapping[str, Any],
    others: Mapping[str, Mapping[str, Any]],
) -> Iterable[dict[str, Any]]:
    """Yield what has happened to a lock record between two looks. `others`: all, as they were.

    A recovery may begin and end between the two, so what there was to recover is told by what was
    there before.
    """
    if before is None or now["epoch"] > before["epoch"]:
        yield {"kind": "acquired", "epoch": now["epoch"]}
        mine = _columns(now)
        for owner, other in others.items():
            if owner != now["owner"] and other["state"] != "released" and mine & _columns(other):
                yield {"kind": "takeover", "of": owner}
        left = {
            owner: others[owner]["uncommitted_changes"]
            for owner in {now["owner"], *now["debtors"]} & {*others}
            if others[owner]["uncommitted_changes"]
        }
        if left:
            yield {"kind": "undo", "of": sorted(left), "changes": sum(left.values())}
    if before is not None and now["batch"] > before["batch"]:
        yield {"kind": "batch", "batch": now["batch"], "count": now["batch"] - before["batch"]}
    if before is not None and now["state"] != before["state"]:
        yield {"kind": now["state"]}


def _columns(lock: Mapping[str, Any]) -> set[str]:
    return set(lock["columns"].split(", "))


def _point(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, float]:
    """Return what happened per second between two overviews."""
    seconds = (now["at_ms"] - before["at_ms"]) / 1000
    earlier, later = _sums(before), _sums(now)
    # A server that has started again counts from zero: what it lost is not counted as less.
    rose = {name: max(0.0, later[name] - earlier.get(name, 0.0)) for name in later}
    return {
        "at_ms": now["at_ms"],
        "rows_s": rose["rows"] / seconds,
        "keys_s": rose["keys"] / seconds,
        "errors_s": rose["errors"] / seconds,
        "put_ms": 1000 * rose["put_s"] / rose["puts"] if rose["puts"] else 0.0,
        "lookup_ms": 1000 * rose["lookup_s"] / rose["lookups"] if rose["lookups"] else 0.0,
    }


def _errors_between(
    before: Mapping[str, Any], now: Mapping[str, Any]
) -> dict[tuple[str, str], float]:
    """Return how many calls failed between two overviews, by the call and the error."""
    earlier, later = _errors(before), _errors(now)
    rose: dict[tuple[str, str], float] = {}
    for (server, call, error), times in later.items():
        # A server that was not there before, or has started again, counts from zero.
        known = earlier.get((server, call, error), 0.0)
        more = times - known if times >= known else times
        if more and server in {one["address"] for one in before["servers"]}:
            rose[call, error] = rose.get((call, error), 0.0) + more
    return rose


def _errors(overview: Mapping[str, Any]) -> dict[tuple[str, str, str], float]:
    found = {}
    for server in overview["servers"]:
        for sample, value in server.get("metrics", {}).items():
            if sample.startswith("tallybook_errors_total{"):
                labels = dict(_LABEL.findall(sample))
                found[server["address"], labels.get("call", ""), labels.get("error", "")] = value
    return found


def _sums(overview: Mapping[str, Any]) -> dict[str, float]:
    """Return the counters of all servers together."""
    sums = dict.fromkeys(("rows", "keys", "errors", "puts", "put_s", "lookups", "lookup_s"), 0.0)
    for server in overview["servers"]:
        for sample, value in server.get("metrics", {}).items():
            found = _SAMPLE.match(sample)
            if found is None:
                continue
            call = dict(_LABEL.findall(found["labels"] or "")).get("call")
            match found["name"]:
                case "rows_total":
                    sums["rows"] += value
                case "keys_looked_up_total":
                    sums["keys"] += value
                case "errors_total":
                    sums["errors"] += value
                case "call_seconds_count" if call == "put":
                    sums["puts"] += value
                case "call_seconds_sum" if call == "put":
                    sums["put_s"] += value
                case "call_seconds_count" if call == "lookup":
                    sums["lookups"] += value
                case "call_seconds_sum" if call == "lookup":
                    sums["lookup_s"] += value
    return sums
