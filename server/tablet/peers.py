"""Calls from one tablet server to another."""

from typing import Protocol

import pyarrow as pa
from pyarrow import flight

from foundation.errors import ServerUnavailable
from foundation.ids import LeadKey
from server.protocol import wire
from server.protocol.calls import HandOver, HandOverAnswer
from server.protocol.security import ClientTls, token_headers


class Peers(Protocol):
    """The other servers, as one of them asks them."""

    def ask(self, address: str, key: LeadKey, session: str, timeout_s: float) -> str | None:
        """Ask a bucket's leader to give it up to this session; return why not, None if it has.

        ServerUnavailable if there was no answer: then it may have, or may yet.
        """


class FlightPeers:
    """The other servers, over Flight: a connection for each call, since calls are few."""

    def __init__(self, token: str | None, tls: ClientTls | None) -> None:
        self._headers = token_headers(token)
        self._tls = tls

    def ask(self, address: str, key: LeadKey, session: str, timeout_s: float) -> str | None:
        call = HandOver(table_id=key.table_id, bucket=key.bucket, session=session)
        options = flight.FlightCallOptions(timeout=timeout_s, headers=self._headers)
        try:
            with self._connect(address) as client:
                results = client.do_action(flight.Action(call.name, call.to_body()), options)
                [body] = [result.body for result in results]
        except (flight.FlightError, pa.ArrowException, OSError) as exc:
            told = wire.from_flight_error(exc) if isinstance(exc, flight.FlightError) else None
            if told is not None:
                return str(told)
            what = str(exc).partition(". gRPC client debug context")[0].partition(". Detail")[0]
            raise ServerUnavailable(f"server {address} leads it, and says nothing: {what}") from exc
        return HandOverAnswer.from_body(body).refused

    def _connect(self, address: str) -> flight.FlightClient:
        if self._tls is None:
            return flight.FlightClient(f"grpc://{address}")
        return flight.FlightClient(f"grpc+tls://{address}", **self._tls.options())
