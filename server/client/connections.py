"""Connections to tablet servers, one per address, reused by all threads."""

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar, cast
from weakref import WeakSet

import pyarrow as pa
from pyarrow import flight

from foundation import forks
from foundation.errors import AccessRefused, InvalidInput, ServerUnavailable
from server.protocol import wire
from server.protocol.calls import Call
from server.protocol.messages import Message
from server.protocol.reads import StreamCall
from server.protocol.security import ClientTls, check_token, token_headers

# gRPC waits longer and longer before it connects again; a server that is back should be met soon.
# `grpc.min_reconnect_backoff_ms` is none of that, whatever its name: it is how long one attempt may
# take, with TLS three round trips, and is left at its 20 seconds. Calls have their own time-outs.
_OPTIONS = [
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.max_reconnect_backoff_ms", 500),
]
# A server that broke off is asked again with less patience: it may be gone, and others may lead its
# buckets long before it would answer. With more each time, for it may only be slow.
_FIRST_PATIENCE_S, _MOST_PATIENCE_S = 1.0, 60.0
Answer = TypeVar("Answer", bound=Message)

CLOSED = "this connection to the cluster was closed; connect again"
_LIBRARY = "an Arrow Flight client"
_NEVER_SENT = ("failed to connect", "Connection refused", "DNS resolution failed")


@dataclass(frozen=True, kw_only=True)
class ServerCredentials:
    """What a client needs to be let in: the token, and for TLS whom to trust and who it is."""

    token: str | None = field(default=None, repr=False)
    tls_root: Path | None = None
    tls_certificate: Path | None = None
    tls_key: Path | None = None

    def __post_init__(self) -> None:
        if self.token is not None:
            check_token(self.token)
        if (self.tls_certificate is None) != (self.tls_key is None):
            raise InvalidInput("a client's tls_certificate and its tls_key go together")
        if self.tls_certificate is not None and self.tls_root is None:
            raise InvalidInput("tls_certificate is for servers with TLS: give tls_root with it")

    @property
    def tls(self) -> ClientTls | None:
        """How to speak TLS; None: not at all."""
        if self.tls_root is None:
            return None
        return ClientTls(root=self.tls_root, certificate=self.tls_certificate, key=self.tls_key)


class Broken(Exception):
    """The network failed. `sent`: the call may have been carried out all the same."""

    def __init__(
        self, address: str, error: flight.FlightError, tls: ClientTls | None = None
    ) -> None:
        """`tls`: how it was called."""
        super().__init__(f"server {address}: {_plain_words(error)}{_advice(error, tls)}")
        self.sent = not any(sign in str(error) for sign in _NEVER_SENT)


def _plain_words(error: flight.FlightError) -> str:
    """Return what happened, without what Flight and gRPC say about themselves."""
    text = str(error).partition(". gRPC client debug context")[0].partition(". Detail")[0]
    return text.rpartition(", with message: ")[2]


def _advice(error: flight.FlightError, tls: ClientTls | None) -> str:
    """Return what to do where a server may have broken off for TLS; it may have died, too.

    That is all that it says to a client that does not speak TLS, and to one whose certificate it
    wants to see.
    """
    text = _plain_words(error)
    if "failed to connect" not in text or not text.endswith("Socket closed"):
        return ""
    if tls is None:
        return "; if it speaks TLS, give `tls_root`"
    if tls.certificate is None:
        return "; if it wants to see a client's certificate, give `tls_certificate` and `tls_key`"
    return "; does its --tls-client-ca vouch for this `tls_certificate`?"


def _tls_refusal(address: str, error: flight.FlightError) -> AccessRefused | None:
    """Return the error for a TLS handshake that fails each time; None if it was something else."""
    text = _plain_words(error)
    if "wrong version number" in text:
        return AccessRefused(f"server {address} does not speak TLS: leave `tls_root` out")
    if "handshake failed" not in text and "not in peer certificate" not in text:
        return None
    reason = text.rpartition("::")[2]
    return AccessRefused(
        f"`tls_root` does not vouch for the TLS certificate of server {address}: {reason}"
    )


class Connections:
    """The Flight clients of a process's cluster. Safe for threads."""

    def __init__(self, credentials: ServerCredentials) -> None:
        self._credentials = credentials
        self._headers = token_headers(credentials.token)
        self._lock = threading.Lock()
        self._clients: dict[str, flight.FlightClient] = {}
        # How long to wait for an answer, by the addresses that broke off and said nothing since.
        self._patience_s: dict[str, float] = {}
        self._exchanges: WeakSet[Exchange] = WeakSet()
        self._closed = False
        self._process = os.getpid()
        forks.check(_LIBRARY)
        forks.hold(self)

    def inherited(self) -> list[object]:
        """Return what must not be destroyed in a forked child: it would end the process."""
        return [*self._clients.values(), *self._exchanges]

    def check_open(self) -> None:
        """Raise what a call would: UsedAfterFork, or ServerUnavailable if this was closed."""
        forks.use(_LIBRARY)
        if self._closed:
            raise ServerUnavailable(CLOSED)

    def call(self, address: str, call: Call[Answer], timeout_s: float) -> Answer:
        """Make a call that is an action, and return its answer."""
        action = flight.Action(call.name, call.to_body())
        with self._calling(address) as client:
            results = client.do_action(action, self._options(address, timeout_s))
            [body] = [result.body for result in results]
            self._answered(address)
        return cast(Answer, call.answer.from_body(body))

    def put(
        self,
        address: str,
        call: Call[Answer],
        schema: pa.Schema,
        batches: Sequence[tuple[bytes, pa.RecordBatch]],
        timeout_s: float,
        *,
        holds_end: bool = False,
    ) -> Answer:
        """Make a call that is a put: batches, each with its place in the call, and an end.

        Without the end nothing is written. `holds_end`: send it when the server says GO_ON.
        """
        descriptor = flight.FlightDescriptor.for_command(call.to_body())
        ended = False
        try:
            with self._calling(address) as client:
                writer, answers = client.do_put(
                    descriptor, schema, self._options(address, timeout_s)
                )
                checksum = wire.Checksum()
                try:
                    for place, batch in batches:
                        checksum.add(batch)
                        writer.write_with_metadata(batch, place)
                    if not holds_end or answers.read() is not None:
                        ended = True
                        writer.write_metadata(checksum.closing())
                    writer.done_writing()
                    answer = answers.read()
                finally:
                    writer.close()  # Raises what the server has to say.
            if answer is None:
                raise Broken(address, flight.FlightError("it ended a put without an answer"))
            self._answered(address)
        except Broken as exc:  # It may have been carried out: whoever sent it has to find out.
            exc.sent = exc.sent and ended
            raise
        return cast(Answer, call.answer.from_body(answer))

    def stream(
        self, address: str, call: StreamCall[Answer], timeout_s: float
    ) -> Iterator[tuple[pa.RecordBatch, Answer]]:
        """Yield the batches of a stream, each with the message that came with it."""
        ticket = flight.Ticket(call.to_body())
        with self._calling(address) as client:
            reader = client.do_get(ticket, self._options(address, timeout_s))
        while True:
            with self._calling(address):
                try:
                    chunk = reader.read_chunk()
                except StopIteration:
                    return
            self._answered(address)
            yield chunk.data, call.read_message(wire.decode(chunk.app_metadata))

    def exchange(
        self, address: str, call: Call[Message], schema: pa.Schema, timeout_s: float
    ) -> "Exchange":
        """Begin an exchange: batches of this schema go there, and each is answered by another.

        It ends after this time, whatever is under way. Whoever has it closes it.
        """
        descriptor = flight.FlightDescriptor.for_command(call.to_body())
        with self._calling(address) as client:
            writer, reader = client.do_exchange(descriptor, self._waiting(timeout_s))
            exchange = Exchange(
                lambda error: self._error_of(error, address, client, waited=False), writer, reader
            )
            self._exchanges.add(exchange)
            writer.begin(schema)
        return exchange

    def close(self) -> None:
        """Close all connections; in a forked child they are the parent's, and none are closed."""
        if forks.is_inherited(self._process):
            return
        with self._lock:
            self._closed = True
            clients, self._clients = self._clients, {}
            exchanges = list(self._exchanges)
        for exchange in exchanges:
            exchange.cancel()
        for client in clients.values():
            with suppress(flight.FlightError, pa.ArrowException):
                client.close()

    @contextmanager
    def _calling(self, address: str) -> Iterator[flight.FlightClient]:
        """Lend the client; the server's errors are raised as ours, the network's as Broken."""
        client = self._client(address)
        try:
            yield client
        except (flight.FlightError, pa.ArrowException, OSError) as exc:
            raise self._error_of(exc, address, client) from exc

    def _error_of(
        self,
        error: Exception,
        address: str,
        client: flight.FlightClient,
        *,
        waited: bool = True,
    ) -> Exception:
        """Return the server's error as ours; the network's is Broken: its connection is dropped.

        `waited`: for as long as for any answer. An exchange is short: one that ends says little.
        """
        if isinstance(error, flight.FlightError):
            told = wire.from_flight_error(error)
            if told is not None:
                self._answered(address)
                return told
        else:  # The stream broke off in Arrow's own hands.
            error = flight.FlightError(str(error))
        self._drop(address, client, waited=waited)
        return _tls_refusal(address, error) or Broken(address, error, self._credentials.tls)

    def _client(self, address: str) -> flight.FlightClient:
        forks.use(_LIBRARY)
        with self._lock:
            if self._closed:
                raise ServerUnavailable(CLOSED)
            client = self._clients.get(address)
            if client is None:
                client = self._clients[address] = self._connect(address)
            return client

    def _connect(self, address: str) -> flight.FlightClient:
        tls = self._credentials.tls
        if tls is None:
            return flight.FlightClient(f"grpc://{address}", generic_options=_OPTIONS)
        return flight.FlightClient(
            f"grpc+tls://{address}", generic_options=_OPTIONS, **tls.options()
        )

    def _drop(self, address: str, client: flight.FlightClient, *, waited: bool) -> None:
        """Connect anew next time: what broke may stay broken. Others may still be using it."""
        with self._lock:
            current = self._clients.get(address) is client
            if current:
                del self._clients[address]
            # Of many that waited for one connection, the first counts, whoever dropped it.
            if waited and (current or address not in self._patience_s):
                before_s = self._patience_s.get(address, _FIRST_PATIENCE_S / 2)
                self._patience_s[address] = min(2 * before_s, _MOST_PATIENCE_S)

    def _answered(self, address: str) -> None:
        self._patience_s.pop(address, None)

    def _wait_s(self, address: str, timeout_s: float) -> float:
        return max(0.001, min(timeout_s, self._patience_s.get(address, timeout_s)))

    def _options(self, address: str, timeout_s: float) -> flight.FlightCallOptions:
        return self._waiting(self._wait_s(address, timeout_s))

    def _waiting(self, timeout_s: float) -> flight.FlightCallOptions:
        return flight.FlightCallOptions(timeout=timeout_s, headers=self._headers)


class Exchange:
    """Batches to a server, and its answers, over one call of Flight. For one thread at a time."""

    def __init__(
        self, error_of: Callable[[Exception], Exception], writer: Any, reader: Any
    ) -> None:
        """`error_of`: what an error of Flight is to our callers."""
        self._error_of = error_of
        self._writer = writer
        self._reader = reader

    def send(self, batch: pa.RecordBatch, metadata: bytes) -> None:
        """Send a batch; its answer is received later, so that others can be sent meanwhile."""
        try:
            self._writer.write_with_metadata(batch, metadata)
        except (flight.FlightError, pa.ArrowException, OSError) as exc:
            raise self._error_of(exc) from exc

    def receive(self) -> pa.RecordBatch:
        """Return the next answer."""
        try:
            return self._reader.read_chunk().data
        except StopIteration:
            ended = flight.FlightError("it ended an exchange without an answer")
            raise self._error_of(ended) from None
        except (flight.FlightError, pa.ArrowException, OSError) as exc:
            raise self._error_of(exc) from exc

    def cancel(self) -> None:
        """End it at once, also while another thread waits for an answer, which gets an error."""
        with suppress(flight.FlightError, pa.ArrowException):
            self._reader.cancel()

    def close(self) -> None:
        """End it; what is under way is of no interest any more."""
        self.cancel()
        # Arrow would say on the standard error that it was not.
        with suppress(flight.FlightError, pa.ArrowException):
            self._writer.close()

    def __del__(self) -> None:
        self.close()
