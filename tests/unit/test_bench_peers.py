"""Peers and ours fold the same events to the same rows, and a wrong one does not get away."""

import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from benchmarks.figure import Skipped
from benchmarks.peers.ours import Embedded
from benchmarks.peers.peer import NotInstalled, Opening, Work
from benchmarks.peers.race import Entered, loading, race
from benchmarks.peers.reference import Reference, WrongResult
from benchmarks.side_by_side import CLICKHOUSE, PEERS

TINY = Work(name="tiny", keys=1_000, batch_rows=200, turn=2, rounds=3)


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is measured here, so nobody has to wait until the machine does nothing else."""
    monkeypatch.setattr("benchmarks.peers.race.until_idle", lambda: None)


@pytest.fixture
def directory() -> Iterator[Path]:
    """A directory that other users can be let into: PostgreSQL does not run as root."""
    with tempfile.TemporaryDirectory() as path:
        yield Path(path) / "race"


@pytest.mark.parametrize(
    ("name", "work"),
    [
        *(pytest.param(name, TINY, id=name) for name in PEERS),
        # It groups a batch before, if there are fewer keys than rows.
        pytest.param(CLICKHOUSE, replace(TINY, keys=100), id=f"{CLICKHOUSE}, few keys"),
    ],
)
def test_a_peer_has_what_the_events_add_up_to(name: str, work: Work, directory: Path) -> None:
    result = race(directory, work, {name: PEERS[name]})
    if result.skipped:
        pytest.skip(result.skipped[0].reason)
    assert len(result.seconds[name]) == work.rounds
    assert result.rate(name) > 0


@pytest.mark.parametrize("name", PEERS)
def test_a_peer_takes_in_keys_that_it_did_not_have(name: str, directory: Path) -> None:
    try:
        peer = PEERS[name](directory / "peer", TINY)
    except NotInstalled as exc:
        pytest.skip(str(exc))
    reference = Reference(TINY.keys)
    first = pa.record_batch(
        {"key": [3, 5], "total": [1, 2], "highest": [0.5, 0.25], "events": [9, 9]}
    )
    second = pa.record_batch(
        {"key": [5, 7, 5], "total": [10, -4, 1], "highest": [0.1, -2.0, 0.75], "events": [9, 9, 9]}
    )
    try:
        peer.load(iter([first]))
        peer.upsert(second)
        peer.settle()
        found = peer.read(pa.array([5, 7, 8]))
    finally:
        peer.close()
    reference.add(first)
    reference.add(second)
    reference.check(name, pa.array([5, 7, 8]), found)
    assert found.sort_by("key").to_pylist() == [
        {"key": 5, "total": 13, "highest": 0.75, "events": 3},
        {"key": 7, "total": -4, "highest": -2.0, "events": 1},
    ]


@pytest.mark.parametrize("buckets", [1, 4])
def test_the_embedded_table_is_a_contestant(buckets: int, directory: Path) -> None:
    result = race(directory, TINY, {"ours": Embedded.with_buckets(buckets)})
    assert [len(times) for times in result.seconds.values()] == [TINY.rounds]
    [figure] = result.figure("ours_vs_ours", "ours", "ours", goal=">=1")
    assert figure.value == 1
    assert not list(result.figure("ours_vs_nobody", "ours", "nobody"))


class _Forgetful(Embedded):
    """Loses the last event of every batch."""

    def upsert(self, events: pa.RecordBatch) -> None:
        """Put the others."""
        super().upsert(events.slice(0, len(events) - 1))


def test_a_contestant_that_is_wrong_fails_the_race(directory: Path) -> None:
    with pytest.raises(WrongResult, match="forgetful"):
        race(directory, TINY, {"forgetful": lambda path, _: _Forgetful(path, 1)})


def test_one_that_has_its_rows_already_is_checked_with_them(directory: Path) -> None:
    peer = Embedded(directory / "peer", 1)
    reference = Reference(TINY.keys)
    extra = pa.record_batch({"key": [1], "total": [5], "highest": [9.0], "events": [1]})
    for batch in [*loading(TINY.keys), extra]:
        peer.upsert(batch)
        reference.add(batch)
    try:
        race(directory, TINY, {}, {"early": Entered(peer, reference)})
        with pytest.raises(WrongResult, match="early"):
            race(directory, TINY, {}, {"early": Entered(peer, Reference(TINY.keys))})
    finally:
        peer.close()


def test_who_is_not_installed_is_named_with_the_reason(directory: Path) -> None:
    def missing(path: Path, work: Work) -> Embedded:
        raise NotInstalled("it is not installed")

    contestants: dict[str, Opening] = {"nobody": missing, "ours": Embedded.with_buckets(1)}
    result = race(directory, TINY, contestants)
    assert result.skipped == [Skipped(what="nobody, tiny", reason="it is not installed")]
    assert list(result.seconds) == ["ours"]


ROWS = pa.table({"key": [0, 2], "total": [3, 4], "highest": [0.5, 1.5], "events": [2, 1]})


@pytest.mark.parametrize(
    ("found", "complaint"),
    [
        (ROWS.slice(1), "1 rows, not 2"),
        (pa.concat_tables([ROWS, ROWS.slice(1)]), "3 rows, not 2"),
        (ROWS.set_column(0, "key", pa.array([0, 1])), "or others"),
        (ROWS.set_column(1, "total", pa.array([3, 5])), "total of key 2 is 5, not 4"),
        (ROWS.set_column(2, "highest", pa.array([0.25, 1.5])), "highest of key 0 is 0.25, not 0.5"),
        (ROWS.set_column(3, "events", pa.array([2, None])), "events of key 2 is None, not 1"),
    ],
)
def test_the_reference_finds_what_is_wrong(found: pa.Table, complaint: str) -> None:
    reference = Reference(3)
    for key, total, highest in ((0, 1, 0.5), (0, 2, -1.0), (2, 4, 1.5)):
        reference.add(pa.record_batch({"key": [key], "total": [total], "highest": [highest]}))
    every = pa.array(np.arange(3))
    reference.check("right", every, ROWS)
    with pytest.raises(WrongResult, match=complaint):
        reference.check("wrong", every, found)
