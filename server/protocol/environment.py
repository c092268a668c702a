"""What the environment says of a cluster: where it is, and the secrets that open it."""

from collections.abc import Mapping

from foundation.errors import InvalidInput
from locks.store.zookeeper import CREDENTIALS_VARIABLE

__all__ = [
    "ADDRESS_VARIABLE",
    "CREDENTIALS_VARIABLE",
    "TLS_CERTIFICATE_VARIABLE",
    "TLS_KEY_VARIABLE",
    "TOKEN_VARIABLE",
    "check_secret",
    "credentials_from",
    "find_address",
    "read_credentials",
    "token_from",
]

ADDRESS_VARIABLE = "TALLYBOOK_ZOOKEEPER"
TOKEN_VARIABLE = "TALLYBOOK_TOKEN"
# Files: what a client shows to servers that want to see its certificate.
TLS_CERTIFICATE_VARIABLE = "TALLYBOOK_TLS_CERTIFICATE"
TLS_KEY_VARIABLE = "TALLYBOOK_TLS_KEY"


def find_address(given: str | None, how: str, environment: Mapping[str, str]) -> str:
    """Return ZooKeeper's address, as it was given or by the environment; `how` it can be given."""
    address = given or environment.get(ADDRESS_VARIABLE)
    if not address:
        raise InvalidInput(
            f"ZooKeeper's address is missing: give it as {how}, or in the variable "
            f"{ADDRESS_VARIABLE}"
        )
    return address


def check_secret(text: str, where: str) -> str:
    """Return a secret without the space around it; InvalidInput if there is none.

    Whoever says where it is wants one: without it, what it closes would be open to everybody.
    """
    secret = text.strip()
    if not secret:
        raise InvalidInput(f"{where} is empty: put the secret there, or do not name it at all")
    return secret


def token_from(environment: Mapping[str, str]) -> str | None:
    """Return the token, if the environment has one; InvalidInput if it is there, and empty."""
    text = environment.get(TOKEN_VARIABLE)
    return None if text is None else check_secret(text, f"the variable {TOKEN_VARIABLE}")


def credentials_from(environment: Mapping[str, str]) -> tuple[str, str] | None:
    """Return ZooKeeper's user and password, if the environment has them."""
    text = environment.get(CREDENTIALS_VARIABLE)
    return None if text is None else read_credentials(text, f"the variable {CREDENTIALS_VARIABLE}")


def read_credentials(text: str, where: str) -> tuple[str, str]:
    """Return ZooKeeper's user and password, of `user:password`; InvalidInput if it is not that."""
    user, colon, password = check_secret(text, where).partition(":")
    if not user or not colon:
        raise InvalidInput(f"{where} is not user:password")
    return user, password
