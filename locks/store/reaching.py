"""Why there is no ZooKeeper at an address: what is found there when one looks.

Each host is asked for `srvr`, a word that every ZooKeeper answers at once, if only to say that it
does not serve, or is not allowed to tell. Nothing is changed by that, and no session is opened.
"""

import socket
from collections.abc import Sequence
from dataclasses import dataclass

from kazoo.hosts import collect_hosts

_QUESTION = b"srvr"
_LONGEST_ANSWER = 4096
_NOT_SERVING = b"not currently serving"
_ZOOKEEPER_SAYS = (b"Zookeeper version", b"is not executed because", _NOT_SERVING)


@dataclass(frozen=True)
class Finding:
    """What was found at `address`; `zookeeper`: that it is one, whatever its trouble is."""

    address: str
    zookeeper: bool
    what: str

    def __str__(self) -> str:
        return f"{self.address}: {self.what}"


def look(hosts: str, timeout_s: float) -> list[Finding]:
    """Return what is at each of `host:port[,host:port...]`; at most so long for each."""
    found, _ = collect_hosts(hosts.partition("/")[0])
    return [_look_at(host, int(port), timeout_s) for host, port in found]


def in_words(findings: Sequence[Finding]) -> str:
    """Return all findings as one line."""
    return "; ".join(map(str, findings))


def _look_at(host: str, port: int, timeout_s: float) -> Finding:
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    try:
        socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as exc:
        return Finding(address, False, f"no host of the name {host} is known here ({exc})")
    try:
        with socket.create_connection((host, port), timeout_s) as connection:
            return Finding(address, *_ask(connection, timeout_s))
    except ConnectionRefusedError:
        return Finding(address, False, "the connection was refused: nothing listens at this port")
    except TimeoutError:
        return Finding(
            address, False, f"no answer within {timeout_s:g} s: a firewall, or no such machine"
        )
    except OSError as exc:
        return Finding(address, False, f"it cannot be reached: {exc.strerror or exc}")


def _ask(connection: socket.socket, timeout_s: float) -> tuple[bool, str]:
    """Return whether a ZooKeeper answers there, and what it, or what else answers, says."""
    connection.settimeout(timeout_s)
    try:
        connection.sendall(_QUESTION)
        answer = connection.recv(_LONGEST_ANSWER)
    except TimeoutError:
        return False, "something listens there and says nothing: not ZooKeeper, or one that hangs"
    except OSError:
        answer = b""
    if not any(word in answer for word in _ZOOKEEPER_SAYS):
        return False, "something that is not ZooKeeper answers there, or one that wants TLS"
    if _NOT_SERVING in answer:
        return True, "this ZooKeeper does not serve: it has no quorum, or is about to start"
    return True, "this ZooKeeper answers, but gave us no session"
