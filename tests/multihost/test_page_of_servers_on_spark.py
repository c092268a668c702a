"""The page of servers on Spark works as it is written, on hosts with the names it has."""

import os
import signal
from collections.abc import Iterator

import pytest

from tests.multihost.documented_hosts import DocumentedHosts, documented_hosts
from tests.multihost.network import Network
from tests.support.documented import page
from tests.support.zookeeper_server import wait_until

pytestmark = [pytest.mark.hosts, pytest.mark.spark]

BLOCKS = [block for block in page("docs/servers-on-spark.md").blocks if block.hosts]
FIRST_LOOK = next(at for at, block in enumerate(BLOCKS) if "tallybook status" in block.text) + 1
WORKERS = {"t1", "t2", "t3"}
_DEADLINE_S = 120.0


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DocumentedHosts]:
    """Have servers on hosts, by the commands of the page, and clients that write and read."""
    with documented_hosts(tmp_path_factory.mktemp("page") / "hosts") as made:
        for block in BLOCKS[:FIRST_LOOK]:
            made.run(block)
        made.begin_load()
        made.wait_until_gone_on("the beginning")
        yield made


def on_hosts(hosts: DocumentedHosts) -> list[str]:
    """Return the hosts of the servers that run."""
    return sorted(hosts.servers().values())


def test_the_commands_of_the_page_work_while_clients_write_and_read(hosts: DocumentedHosts) -> None:
    for block in BLOCKS[FIRST_LOOK:]:
        began = hosts.history.note(block.where)
        hosts.run(block)
        hosts.wait_until_gone_on(block.where, began)
    assert on_hosts(hosts) == ["t2", "t3"], "t1 was emptied, and is a spare now"


def test_a_killed_driver_is_started_again_and_so_are_its_servers(hosts: DocumentedHosts) -> None:
    before = hosts.servers().keys()
    began = hosts.history.note("the driver is killed")
    os.kill(hosts.process_of("spark", "tallybook"), signal.SIGKILL)
    wait_until(lambda: len(hosts.servers().keys() - before) == 2, "two new servers", _DEADLINE_S)
    hosts.wait_until_gone_on("the driver was killed", began)
    assert not hosts.servers().keys() & before


def test_a_server_whose_host_is_gone_is_started_elsewhere_and_ends_there(
    hosts: DocumentedHosts,
) -> None:
    victim, other = on_hosts(hosts)
    [spare] = WORKERS - {victim, other}
    began = hosts.history.note(f"the cable of {victim} is pulled")
    with Network(hosts.lab).pulled(hosts.host(victim)):
        wait_until(lambda: spare in on_hosts(hosts), f"one on {spare}", _DEADLINE_S)
        hosts.wait_until_gone_on(f"the cable of {victim} was pulled", began)
    began = hosts.history.note(f"the cable of {victim} is plugged in")
    wait_until(lambda: victim not in on_hosts(hosts), f"{victim} has none", _DEADLINE_S)
    hosts.wait_until_gone_on(f"the cable of {victim} was plugged in", began)
    assert on_hosts(hosts) == sorted([spare, other])
