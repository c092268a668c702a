"""What the status page makes of one look at the cluster after the other."""

from typing import Any

from server.page.trends import KEPT_S, Trends


def overview(
    at_s: float,
    *,
    rows: float = 0,
    put: tuple[float, float] = (0, 0),
    locks: list[dict[str, Any]] | None = None,
    size: int = 0,
) -> dict[str, Any]:
    """Return an overview as far as trends read it. `put`: how many calls, and their seconds."""
    metrics = {
        'tallybook_rows_total{table="a \\"b\\""}': rows,
        'tallybook_call_seconds_count{call="put"}': put[0],
        'tallybook_call_seconds_sum{call="put"}': put[1],
        'tallybook_call_seconds_sum{call="fence"}': 99.0,
    }
    return {
        "at_ms": int(at_s * 1000),
        "servers": [{"address": "x:1", "metrics": metrics}, {"address": "y:1", "error": "gone"}],
        "tables": [{"name": "t", "rows": size, "locks": locks or []}],
    }


def lock(**fields: Any) -> dict[str, Any]:
    """Return a lock as an overview has it."""
    return {"owner": "a", "epoch": 1, "batch": -1, "state": "ready", "changed_s": 0.0, **fields}


def test_counters_become_rates_and_mean_times() -> None:
    trends = Trends()
    trends.add(overview(100, rows=1_000, put=(10, 1.0)))
    assert trends.points() == []
    trends.add(overview(102, rows=1_500, put=(14, 1.2)))
    [point] = trends.points()
    assert point["rows_s"] == 250
    assert round(point["put_ms"], 6) == 50
    assert point["lookup_ms"] == 0


def test_a_server_that_has_started_again_takes_nothing_back() -> None:
    trends = Trends()
    trends.add(overview(100, rows=1_000))
    trends.add(overview(102, rows=10))
    assert trends.points()[0]["rows_s"] == 0


def test_the_same_moment_twice_is_one_point() -> None:
    trends = Trends()
    trends.add(overview(100))
    trends.add(overview(100))
    assert trends.points() == []


def test_points_are_kept_for_an_hour() -> None:
    trends = Trends()
    for at_s in (0, 10, 20, KEPT_S + 15):
        trends.add(overview(at_s))
    assert [point["at_ms"] for point in trends.points()] == [20_000, (KEPT_S + 15) * 1000]


def test_growth_is_that_since_the_first_look() -> None:
    trends = Trends()
    trends.add(overview(100, size=50))
    assert trends.growth("t") == 0
    trends.add(overview(110, size=90))
    trends.add(overview(120, size=150))
    assert trends.growth("t") == 5


def test_owners_acquire_commit_recover_and_release() -> None:
    trends = Trends()
    states = [
        [],
        [lock(epoch=1, state="recovering")],
        [lock(epoch=1)],
        [lock(epoch=1, batch=2)],
        [lock(epoch=4, batch=2, state="recovering", changed_s=1.5)],
        [lock(epoch=4, batch=2, state="released")],
    ]
    for at, locks in enumerate(states):
        trends.add(overview(100 + 2 * at, locks=locks))
    assert trends.events("t", "a") == [
        {"at_ms": 102_000, "kind": "acquired", "epoch": 1},
        {"at_ms": 104_000, "kind": "ready"},
        {"at_ms": 106_000, "kind": "batch", "batch": 2, "count": 3},
        {"at_ms": 106_500, "kind": "acquired", "epoch": 4},
        {"at_ms": 106_500, "kind": "recovering"},
        {"at_ms": 110_000, "kind": "released"},
    ]
    assert trends.events("t", "b") == []
