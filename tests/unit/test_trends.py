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
    known = {"owner": "a", "epoch": 1, "batch": -1, "state": "ready", "changed_s": 0.0}
    return {**known, "columns": "x", "uncommitted_changes": 0, "debtors": [], **fields}


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


def test_what_was_dropped_or_forgotten_is_not_remembered() -> None:
    trends = Trends()
    for at_ms, batch in ((0, 1), (1_000, 2)):
        seen = overview(at_ms, locks=[lock(batch=batch)])
        trends.add(seen)
    [table] = seen["tables"]
    assert trends.events(table["name"], lock()["owner"])
    assert trends.sizes(table["name"])
    trends.add({**overview(2_000), "tables": []})
    assert (len(trends._sizes), len(trends._events)) == (0, 0)


def test_a_takeover_is_seen_however_soon_it_is_over_and_what_it_brought_back() -> None:
    trends = Trends()
    trends.add(overview(100, locks=[lock(columns="x, y", uncommitted_changes=7)]))
    trends.add(
        overview(
            102,
            locks=[
                lock(columns="x, y", state="released"),
                lock(owner="b", epoch=2, columns="y, z", debtors=["a"]),
                lock(owner="c", epoch=3, columns="w"),
            ],
        )
    )
    assert trends.events("t", "b") == [
        {"at_ms": 102_000, "kind": "acquired", "epoch": 2},
        {"at_ms": 102_000, "kind": "takeover", "of": "a"},
        {"at_ms": 102_000, "kind": "undo", "of": ["a"], "changes": 7},
    ]
    assert [event["kind"] for event in trends.events("t", "c")] == ["acquired"]


def test_an_owner_that_comes_back_to_what_it_had_not_committed_undoes_it() -> None:
    trends = Trends()
    trends.add(overview(100, locks=[lock(uncommitted_changes=3)]))
    trends.add(overview(102, locks=[lock(epoch=2)]))
    assert [event["kind"] for event in trends.events("t", "a")] == ["acquired", "undo"]


def test_sizes_are_thinned_out_and_end_with_the_last() -> None:
    trends = Trends()
    for at in range(200):
        trends.add(overview(100 + at, size=at))
    sizes = trends.sizes("t")
    assert len(sizes) <= 61
    assert (sizes[0], sizes[-1]) == (0, 199)


def test_failed_calls_of_the_last_hour_are_counted_by_their_errors() -> None:
    def failed(at_s: float, times: float) -> dict[str, Any]:
        seen = overview(at_s)
        name = 'tallybook_errors_total{call="put",error="Overloaded"}'
        seen["servers"][0]["metrics"][name] = times
        return seen

    trends = Trends()
    trends.add(failed(100, 5))  # Before anybody looked.
    trends.add(failed(102, 8))
    trends.add(failed(104, 2))  # It has started again.
    assert trends.errors() == [
        {"call": "put", "error": "Overloaded", "times": 5, "last_ms": 104_000}
    ]
    trends.add(failed(104 + KEPT_S + 1, 2))
    assert trends.errors() == []
