"""Answers by HTTP: clients that are slow, silent or many must not hold its threads."""

import socket
import ssl
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path

import pytest

from server.protocol.http_endpoint import HttpAnswer, HttpEndpoint, HttpLimits
from tests.support.certificates import make_certificate
from tests.support.zookeeper_server import wait_until

LARGE = b"x" * (64 << 20)  # More than a socket takes by itself.


@contextmanager
def endpoint(
    tls: tuple[Path, Path] | None = None, **limits: float
) -> Iterator[tuple[HttpEndpoint, tuple[str, int]]]:
    """Run an endpoint with a small and a large answer; yield it, and its address."""
    routes = {
        "/small": lambda _: HttpAnswer(body=b"here\n"),
        "/large": lambda _: HttpAnswer(body=LARGE),
    }
    bounds = HttpLimits(**limits)  # type: ignore[arg-type]
    with closing(HttpEndpoint(routes, host="127.0.0.1", port=0, tls=tls, limits=bounds)) as running:
        host, _, port = running.address.partition(":")
        yield running, (host, int(port))


def connected(address: tuple[str, int], says: bytes = b"") -> socket.socket:
    connection = socket.create_connection(address, timeout=180)
    connection.sendall(says)
    return connection


def answer_of(address: tuple[str, int]) -> bytes:
    with urllib.request.urlopen(f"http://{address[0]}:{address[1]}/small", timeout=180) as answer:
        return bytes(answer.read())


def is_closed(connection: socket.socket) -> bool:
    connection.setblocking(False)
    try:
        return connection.recv(1) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


@pytest.mark.parametrize("secure", [False, True], ids=["http", "https"])
def test_a_question_that_trickles_in_is_not_waited_for(tmp_path: Path, secure: bool) -> None:
    tls = tmp_path / "ours.pem", tmp_path / "ours.key"
    make_certificate(*tls)
    given = tls if secure else None
    with endpoint(given, ask_s=0.5) as (running, address), ExitStack() as stack:
        trickling = stack.enter_context(connected(address))
        if secure:
            context = ssl.create_default_context(cafile=tls[0])
            trickling = context.wrap_socket(trickling, server_hostname="127.0.0.1")
            stack.enter_context(trickling)
        trickling.sendall(b"GET /small HTTP/1.0\r\nX: ")

        def is_over() -> bool:
            try:
                trickling.sendall(b"a")  # Always less than any time-out of one step.
            except OSError:
                return True
            return running.connections == 0

        wait_until(is_over, "the connection is ended")


def test_an_answer_that_nobody_takes_is_given_up() -> None:
    with (
        endpoint(answer_s=0.5) as (running, address),
        connected(address, b"GET /large HTTP/1.0\r\n\r\n") as taker,
    ):
        assert taker.recv(4) == b"HTTP"
        wait_until(lambda: running.connections == 0, "the connection is ended")


def test_a_question_without_end_is_cut() -> None:
    with endpoint(question_bytes=10_000) as (running, address), connected(address) as talker:
        talker.sendall(b"GET /small HTTP/1.0\r\n" + b"X: y\r\n" * 50)
        with suppress(OSError):
            talker.sendall((b"X: " + b"y" * 1_000 + b"\r\n") * 10_000)
        wait_until(lambda: running.connections == 0, "the connection is ended")


def test_of_too_many_connections_those_that_are_silent_make_room() -> None:
    with endpoint(connections=8, ask_s=600) as (running, address), ExitStack() as stack:
        silent = [stack.enter_context(connected(address, b"GET /sm")) for _ in range(40)]
        assert answer_of(address) == b"here\n"
        wait_until(lambda: sum(map(is_closed, silent)) >= 33, "the first ones are ended")
        assert not is_closed(silent[-1])
        assert running.connections <= 8
        assert answer_of(address) == b"here\n"


def test_while_all_are_being_answered_others_are_refused() -> None:
    with endpoint(connections=2, answer_s=600) as (running, address), ExitStack() as stack:
        for _ in range(2):
            taker = stack.enter_context(connected(address, b"GET /large HTTP/1.0\r\n\r\n"))
            assert taker.recv(4) == b"HTTP"
        refused = stack.enter_context(connected(address, b"GET /small HTTP/1.0\r\n\r\n"))
        wait_until(lambda: is_closed(refused), "it is refused")
        assert running.connections == 2
