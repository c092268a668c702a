"""Buckets are closed while many look keys up: nobody is told more than to ask again."""

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

from foundation import background
from tests.conftest import SUMS
from tests.support.raw_flight import client_of, running
from tests.support.zookeeper_server import chroot, wait_until, zookeeper_server

BUCKETS, READERS, ROUNDS, ROWS = 4, 8, 10, 40_000
WAIT_S = 60.0


def test_a_look_up_beside_a_bucket_that_is_closed_finds_its_rows_and_the_bucket_is_served_again(
    tmp_path: Path,
) -> None:
    """As when a lead moves. A look-up in flight left RocksDB open, and the bucket could not be
    served by this server again; the look-up was told that the server has failed."""
    with ExitStack() as stack:
        address = chroot(stack.enter_context(zookeeper_server(tmp_path)))
        server = stack.enter_context(running(address, tmp_path / "server"))
        client = stack.enter_context(client_of(address, deadline_s=WAIT_S))
        table = client.create_table("t", SUMS, buckets=BUCKETS, column_locks=False)
        keys = list(range(ROWS))
        table.put({"k": keys, "a": keys})
        ended = threading.Event()
        before = background.failures()

        def read(number: int) -> int:
            rounds = 0
            while not ended.is_set():
                some = keys[number :: (READERS, READERS * 40)[rounds % 2]]
                isolation = ("latest", "committed")[rounds // 2 % 2]
                found = table.lookup({"k": some}, ["a"], isolation=isolation)
                assert found["a"].to_pylist() == some
                rounds += 1
            return rounds

        with ThreadPoolExecutor(READERS) as pool:
            reading = [pool.submit(read, number) for number in range(READERS)]
            try:
                for _ in range(ROUNDS):
                    for key in list(server.hosting.led()):
                        server.hosting.close(key)
                    # Its node is still its own, so it opens it again; from RocksDB, for memory is
                    # gone: what is looked up is read there.
                    server.look_again()
                    wait_until(lambda: len(server.hosting.led()) == BUCKETS, "not led", WAIT_S)
            finally:
                ended.set()
            assert all(future.result(WAIT_S) for future in reading)
        counted = server._metrics.values()
        assert not [name for name in counted if "ServerFailed" in name]
        assert background.failures() == before
        assert not server.status()["problems"]
