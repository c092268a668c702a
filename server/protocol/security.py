"""Who may call a server: the token, where one is required, and TLS."""

import hmac
import logging
import ssl
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pyarrow import flight

from foundation.errors import AccessRefused, BadRequest, InvalidInput
from server.protocol.wire import to_flight_error

logger = logging.getLogger(__name__)

_HEADER = "authorization"
_CALLS = (
    flight.FlightMethod.DO_PUT,
    flight.FlightMethod.DO_GET,
    flight.FlightMethod.DO_ACTION,
    flight.FlightMethod.DO_EXCHANGE,
)


class Gate(flight.ServerMiddlewareFactory):  # type: ignore[misc]
    """Refuses calls that there are not, and calls without the token if there is one.

    Before anything of them is read; so it does not know the peer, and its log lines do not say it.
    """

    def __init__(self, token: str | None) -> None:
        super().__init__()
        self._token = token

    def start_call(self, info: flight.CallInfo, headers: Mapping[str, Sequence[Any]]) -> None:
        """Raise unless the call may go on."""
        call = info.method.name.lower()
        if self._token is not None:
            given = [
                value for name in headers if name.lower() == _HEADER for value in headers[name]
            ]
            if not any(is_token(value, self._token) for value in given):
                logger.warning("refused a %s with %s", call, _what(given))
                raise to_flight_error(
                    AccessRefused(
                        f"this server wants a token, and got {_what(given)}; give the right one "
                        "as `token`, as TALLYBOOK_TOKEN, or by --token-file"
                    )
                )
        if info.method not in _CALLS:
            logger.warning("refused a %s: there is no such call", call)
            raise to_flight_error(BadRequest(f"there is no call {call}"))


def is_token(header: str | bytes, token: str) -> bool:
    """Whether the header carries the token; how long it takes says nothing about it."""
    text = header if isinstance(header, bytes) else header.encode(errors="replace")
    return hmac.compare_digest(text, f"Bearer {token}".encode())


def _what(given: Sequence[Any]) -> str:
    return "a wrong token" if given else "no token"


def token_headers(token: str | None) -> list[tuple[bytes, bytes]]:
    """Return the headers that a client sends with every call."""
    return [(_HEADER.encode(), f"Bearer {token}".encode())] if token is not None else []


def check_token(token: str) -> None:
    """Raise InvalidInput for a token that no header can carry. The message does not show it."""
    if not token or not token.isascii() or not token.isprintable() or " " in token:
        raise InvalidInput(
            "a token has letters, digits and signs of ASCII, at least one, and no spaces"
        )


def check_certificate(certificate: Path, key: Path) -> None:
    """Raise InvalidInput unless these are a certificate and its key: gRPC would not say why."""
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key, password="")
    except (OSError, ValueError) as exc:  # An SSLError is an OSError.
        raise InvalidInput(
            f"{certificate} and {key} are not a certificate and its key, in PEM files without a "
            f"password: {exc}"
        ) from exc


def read_certificates(path: Path, what: str) -> bytes:
    """Return the certificates that somebody trusts; InvalidInput, of `what`, if there are none."""
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cafile=path)
        return path.read_bytes()
    except (OSError, ValueError) as exc:  # An SSLError is an OSError.
        raise InvalidInput(f"{what}: {path} is no PEM file with certificates: {exc}") from exc


@dataclass(frozen=True, kw_only=True)
class ClientTls:
    """How a client speaks TLS: whom it trusts and, where servers want to see one, its certificate.

    `certificate` and `key` go together.
    """

    root: Path
    certificate: Path | None = None
    key: Path | None = None

    def options(self) -> dict[str, bytes]:
        """Return them as Flight wants them; InvalidInput if a file is not what it should be."""
        found = {"tls_root_certs": read_certificates(self.root, "tls_root")}
        if self.certificate is not None and self.key is not None:
            check_certificate(self.certificate, self.key)
            found["cert_chain"] = self.certificate.read_bytes()
            found["private_key"] = self.key.read_bytes()
        return found
