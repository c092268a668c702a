"""The exactly-once writer as a contestant of the benchmarks, on servers of its own."""

from pathlib import Path

from benchmarks.peers.ours import Writer
from benchmarks.peers.peer import Work
from benchmarks.peers.race import race

TINY = Work(name="tiny", keys=1_000, batch_rows=200, turn=2, rounds=2)


def test_the_writer_on_two_servers_has_what_the_events_add_up_to(tmp_path: Path) -> None:
    result = race(tmp_path, TINY, {"ours": Writer.on_servers(2)})
    assert len(result.seconds["ours"]) == TINY.rounds
