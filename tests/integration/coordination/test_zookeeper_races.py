"""Processes that race for overlapping columns of one table: one of them wins."""

import os
import random
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from locks.coordinator import Coordinator
from locks.store.embedded_zookeeper import EmbeddedZooKeeper
from tests.support.coordinators import DEFINITION
from tests.support.zookeeper_server import chroot, session

ROUNDS = 1_000 if "TALLYBOOK_EXAMPLES" in os.environ else 120


RACER = """
import sys
from locks.coordinator import Coordinator
from foundation.errors import LockHeld
from locks.store.zookeeper import ZooKeeperStore

address, owner, columns = sys.argv[1], sys.argv[2], sys.argv[3:]
coordinator = Coordinator(ZooKeeperStore(address))
table = coordinator.tables.get("t")
print("here", flush=True)
for _ in sys.stdin:
    try:
        lock = coordinator.locks.acquire(table, owner, columns)
    except LockHeld:
        print("refused", flush=True)
        continue
    print("won", lock.epoch, flush=True)
    if sys.stdin.readline() == "release\\n":
        lock.ready({}, [])
        lock.release()
    else:
        lock.abandon()
    print("gave it up", flush=True)
"""


def test_three_processes_race_for_overlapping_columns_and_one_wins_every_time(
    zookeeper: EmbeddedZooKeeper,
) -> None:
    address, seed = chroot(zookeeper), random.SystemRandom().randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    # Any two of them have a column in common.
    wanted = {"a": ["orders", "tags"], "b": ["tags", "status"], "c": ["status", "orders"]}
    with session(address) as store, ExitStack() as stack:
        coordinator = Coordinator(store)
        table = coordinator.tables.create("t", DEFINITION)
        racers = {
            owner: stack.enter_context(racer(address, owner, columns))
            for owner, columns in wanted.items()
        }
        for process in racers.values():
            assert answer(process) == ["here"]
        won = dict.fromkeys(racers, 0)
        for number in range(1, ROUNDS + 1):
            for process in rng.sample(list(racers.values()), 3):
                tell(process, "go")
            answers = {owner: answer(process) for owner, process in racers.items()}
            winners = [owner for owner, words in answers.items() if words[0] == "won"]
            assert len(winners) == 1, f"seed {seed}: {answers}"
            (winner,) = winners
            # Nobody acquired besides, not even for a moment: each time there is one epoch more.
            assert answers[winner] == ["won", str(number)], f"seed {seed}"
            won[winner] += 1
            tell(racers[winner], rng.choice(["release", "abandon"]))
            assert answer(racers[winner]) == ["gave", "it", "up"]
        assert sum(record.held for record in coordinator.locks.records(table).values()) <= 1
        print(f"won: {won}")


@contextmanager
def racer(address: str, owner: str, columns: list[str]) -> Iterator["subprocess.Popen[str]"]:
    with subprocess.Popen(
        [sys.executable, "-c", RACER, address, owner, *columns],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def tell(process: "subprocess.Popen[str]", what: str) -> None:
    assert process.stdin is not None
    process.stdin.write(f"{what}\n")
    process.stdin.flush()


def answer(process: "subprocess.Popen[str]") -> list[str]:
    assert process.stdout is not None
    words = process.stdout.readline().split()
    assert words, f"a racer ended with {process.wait()}"
    return words
