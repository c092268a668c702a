"""A long cable: passes frames between two interfaces, late, and not all of them.

    python wire.py INTERFACE INTERFACE DELAY_MS LOSS_PERCENT

For kernels without netem. `PACKET_VNET_HDR` keeps checksums and segments as they are, so that what
the kernel has put together passes whole. Only the standard library; says "ready" when it passes.
"""

import random
import select
import socket
import struct
import sys
import time
from collections import deque
from contextlib import suppress

_SOL_PACKET = 263
_ADD_MEMBERSHIP, _VNET_HDR, _IGNORE_OUTGOING = 1, 15, 23
_PROMISCUOUS = 1
_ALL_PROTOCOLS = 3
_LARGEST = 1 << 17


def open_end(interface: str) -> socket.socket:
    """Return what sends to an interface, and receives what others send to it."""
    end = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
    end.setsockopt(_SOL_PACKET, _VNET_HDR, 1)
    end.setsockopt(_SOL_PACKET, _IGNORE_OUTGOING, 1)
    end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8 << 20)
    end.bind((interface, _ALL_PROTOCOLS))
    everything = struct.pack("IHH8s", socket.if_nametoindex(interface), _PROMISCUOUS, 0, b"")
    end.setsockopt(_SOL_PACKET, _ADD_MEMBERSHIP, everything)
    end.setblocking(False)
    return end


def main(one: str, other: str, delay_ms: float, loss_percent: float) -> None:
    """Pass frames in both directions until killed."""
    ends = open_end(one), open_end(other)
    opposite = {ends[0]: ends[1], ends[1]: ends[0]}
    under_way: deque[tuple[float, socket.socket, bytes]] = deque()
    print("ready", flush=True)
    while True:
        wait_s = max(under_way[0][0] - time.monotonic(), 0) if under_way else None
        ready, _, _ = select.select(ends, [], [], wait_s)
        for end in ready:
            with suppress(OSError):  # Nothing is there after all; or the interface went down.
                frame = end.recv(_LARGEST)
                if random.random() * 100 >= loss_percent:
                    due = time.monotonic() + delay_ms / 1000
                    under_way.append((due, opposite[end], frame))
        while under_way and under_way[0][0] <= time.monotonic():
            _, end, frame = under_way.popleft()
            with suppress(OSError):  # It is lost, as on any cable that is pulled.
                end.send(frame)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], float(sys.argv[3]), float(sys.argv[4]))
