"""What goes wrong between hosts: cuts per peer and direction, cables, delay and loss.

Only iproute2 and sockets: a packet that is to be lost is sent to a hardware address that nobody
has, so that whoever sent it is told nothing, as when a switch or a firewall drops it.
"""

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import count

from tests.multihost import wire
from tests.multihost.hosts import BRIDGE, Host, Lab
from tests.support.zookeeper_server import wait_until

_NOBODY = "02:de:ad:00:00:00"


class Network:
    """The cables of a lab. Several faults may meet: what two have cut is whole after both."""

    def __init__(self, lab: Lab) -> None:
        self._lab = lab
        self._faults: Counter[str] = Counter()
        self._wires = count()

    @contextmanager
    def lost(self, source: Host, target: Host) -> Iterator[None]:
        """Lose all that one host sends to another; what comes back still comes."""
        to = (target.address, "dev", "eth0")
        nobody = ("lladdr", _NOBODY, "nud", "permanent")
        with self._once(
            f"{source.name} to {target.name}",
            lambda: source.run("ip", "neighbour", "replace", *to, *nobody),
            lambda: source.run("ip", "neighbour", "delete", *to),
        ):
            yield

    @contextmanager
    def apart(self, some: Iterable[Host], others: Iterable[Host]) -> Iterator[None]:
        """Cut each of some hosts off from each of the others, both ways."""
        targets = list(others)
        with ExitStack() as stack:
            for one in some:
                for other in targets:
                    stack.enter_context(self.lost(one, other))
                    stack.enter_context(self.lost(other, one))
            yield

    @contextmanager
    def pulled(self, host: Host) -> Iterator[None]:
        """Pull a host's cable out of the switch."""
        with self._once(
            f"the cable of {host.name}",
            lambda: self._lab.run("ip", "link", "set", host.plug, "down"),
            lambda: self._lab.run("ip", "link", "set", host.plug, "up"),
        ):
            yield

    @contextmanager
    def long_cable(
        self, host: Host, *, round_trip_ms: float, loss_percent: float = 0.0
    ) -> Iterator[None]:
        """Make a host's cable long: everything takes half of the round trip each way, or is lost.

        One at a time per host.
        """
        run = self._lab.run
        near, far = f"x-{host.name}", f"y-{host.name}"
        run("ip", "link", "add", near, "type", "veth", "peer", "name", far)
        for end in (near, far):
            run("ip", "link", "set", end, "up")
        run("ip", "link", "set", near, "master", BRIDGE)
        settings = (host.plug, far, str(round_trip_ms / 2), str(loss_percent))
        command = [sys.executable, "-S", "-E", wire.__file__, *settings]
        program = self._lab.program(f"wire-{next(self._wires)}-{host.name}", command)
        try:
            wait_until(lambda: program.last_words() == "ready", f"{program.name} passes frames")
            run("ip", "link", "set", host.plug, "nomaster")
            yield
        finally:
            program.kill()
            run("ip", "link", "set", host.plug, "master", BRIDGE)
            run("ip", "link", "delete", near)

    @contextmanager
    def _once(
        self, what: str, begin: Callable[[], object], end: Callable[[], object]
    ) -> Iterator[None]:
        self._faults[what] += 1
        if self._faults[what] == 1:
            begin()
        try:
            yield
        finally:
            self._faults[what] -= 1
            if self._faults[what] == 0:
                end()
