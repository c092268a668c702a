"""Counters, durations and gauges, as Prometheus reads them."""

import threading

import pytest

from foundation.errors import Closed, Overloaded
from server.tablet.limits import Admission, Limits
from server.tablet.metrics import Labels, Metrics


def test_without_anything_there_is_nothing() -> None:
    assert Metrics().values() == {}


def test_a_counter_adds_up_by_its_labels() -> None:
    metrics = Metrics()
    metrics.count("rows", 3, table="a")
    metrics.count("rows", 4, table="a")
    metrics.count("rows", table="b")
    assert metrics.values() == {
        'tallybook_rows_total{table="a"}': 7,
        'tallybook_rows_total{table="b"}': 1,
    }


def test_labels_are_escaped_and_sorted() -> None:
    metrics = Metrics()
    metrics.count("rows", table='a"b\\c\nd', call="put")
    [name] = metrics.values()
    assert name == 'tallybook_rows_total{call="put",table="a\\"b\\\\c\\nd"}'


def test_a_duration_counts_in_every_bucket_that_it_fits() -> None:
    metrics = Metrics()
    for seconds in (0.0005, 0.003, 0.003, 1_000.0):
        metrics.observe("call", seconds, call="put")
    values = metrics.values()

    def within(bound: str) -> float:
        return values[f'tallybook_call_seconds_bucket{{call="put",le="{bound}"}}']

    assert [within(bound) for bound in ("0.001", "0.004", "0.016", "+Inf")] == [1, 3, 3, 4]
    assert values['tallybook_call_seconds_count{call="put"}'] == 4
    assert values['tallybook_call_seconds_sum{call="put"}'] == pytest.approx(1_000.0065)


def test_a_block_is_timed_however_it_ends() -> None:
    metrics = Metrics()
    with pytest.raises(ValueError, match="x"), metrics.timed("call"):
        raise ValueError("x")
    assert metrics.values()["tallybook_call_seconds_count"] == 1


def test_gauges_are_asked_when_they_are_wanted() -> None:
    metrics = Metrics()
    open_puts = 1.0
    metrics.gauge("puts", lambda: {(): open_puts})
    assert metrics.values() == {"tallybook_puts": 1}
    open_puts = 2.0
    assert metrics.values() == {"tallybook_puts": 2}


def test_what_was_counted_for_tables_that_are_gone_is_forgotten() -> None:
    metrics = Metrics()
    for table in ("kept", "gone"):
        metrics.count("rows", 1, table=table)
        metrics.observe("scan", 1.0, table=table)
    metrics.count("errors", call="put", error="Overloaded")
    metrics.forget_tables({"kept"})
    assert not [name for name in metrics.values() if "gone" in name]
    assert metrics.values()['tallybook_rows_total{table="kept"}'] == 1
    assert metrics.values()['tallybook_errors_total{call="put",error="Overloaded"}'] == 1


def test_a_gauge_that_cannot_be_read_leaves_the_others() -> None:
    def closed() -> dict[Labels, float]:
        raise Closed("the bucket was closed")

    metrics = Metrics()
    metrics.gauge("offsets", closed)
    metrics.gauge("puts", lambda: {(): 1})
    assert metrics.values() == {"tallybook_puts": 1}


def test_the_text_has_one_type_per_family_before_its_samples() -> None:
    metrics = Metrics()
    metrics.gauge("puts", lambda: {(): 1})
    metrics.count("rows", 2, table="b")
    metrics.count("rows", 1, table="a")
    metrics.observe("call", 0.5)
    lines = metrics.to_prometheus().splitlines()
    assert [line for line in lines if line.startswith("#")] == [
        "# TYPE tallybook_call_seconds histogram",
        "# TYPE tallybook_puts gauge",
        "# TYPE tallybook_rows_total counter",
    ]
    assert lines[-2:] == ['tallybook_rows_total{table="b"} 2', 'tallybook_rows_total{table="a"} 1']


def test_threads_do_not_lose_counts() -> None:
    metrics = Metrics()

    def count() -> None:
        for _ in range(2_000):
            metrics.count("rows")

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert metrics.values() == {"tallybook_rows_total": 8_000}


# --- What is admitted, which the metrics show ---------------------------------------------------


def test_what_a_put_held_is_given_back_however_it_ends() -> None:
    admission = Admission(Limits())

    def fail() -> None:
        with admission.put(100) as load:
            load.grow(300)
            assert (admission.puts, admission.bytes, load.received) == (1, 300, 300)
            raise ValueError("x")

    with pytest.raises(ValueError, match="x"):
        fail()
    assert (admission.puts, admission.bytes) == (0, 0)


def test_announced_bytes_are_not_counted_twice() -> None:
    admission = Admission(Limits())
    with admission.put(100) as load:
        load.grow(60)
        assert admission.bytes == 100
        load.grow(60)
        assert admission.bytes == 120


def test_beyond_a_limit_is_refused_and_nothing_stays_counted() -> None:
    admission = Admission(Limits(max_puts=2, max_bytes_in_flight=100))
    with admission.put(90):
        with pytest.raises(Overloaded, match="--max-bytes-in-flight"), admission.put(20):
            pass
        with admission.put(10):
            with pytest.raises(Overloaded, match="--max-puts"), admission.put():
                pass
            with pytest.raises(Overloaded, match="--max-bytes-in-flight"), admission.holding(1):
                pass
    assert (admission.puts, admission.bytes, admission.refused) == (0, 0, 3)


def test_one_call_alone_may_be_larger_than_the_limit() -> None:
    with Admission(Limits(max_bytes_in_flight=100)).put(1_000) as load:
        load.grow(600)
        load.grow(600)
        assert load.bytes == 1_200


def test_a_server_that_stops_refuses_puts_and_waits_for_those_under_way() -> None:
    admission = Admission(Limits())
    with admission.put():
        assert not admission.close(0.0)
        with pytest.raises(Overloaded, match="the server is stopping"), admission.put():
            pass
    assert admission.close(0.0)
