"""What the environment says of a cluster: where it is, and the secrets that open it."""

from collections.abc import Mapping

from foundation.errors import InvalidInput
from locks.store.zookeeper import CREDENTIALS_VARIABLE

__all__ = [
    "ADDRESS_VARIABLE",
    "CREDENTIALS_VARIABLE",
    "TOKEN_VARIABLE",
    "credentials_from",
    "find_address",
    "read_credentials",
]

ADDRESS_VARIABLE = "TALLYBOOK_ZOOKEEPER"
TOKEN_VARIABLE = "TALLYBOOK_TOKEN"


def find_address(given: str | None, how: str, environment: Mapping[str, str]) -> str:
    """Return ZooKeeper's address, as it was given or by the environment; `how` it can be given."""
    address = given or environment.get(ADDRESS_VARIABLE)
    if not address:
        raise InvalidInput(
            f"ZooKeeper's address is missing: give it as {how}, or in the variable "
            f"{ADDRESS_VARIABLE}"
        )
    return address


def credentials_from(environment: Mapping[str, str]) -> tuple[str, str] | None:
    """Return ZooKeeper's user and password, if the environment has them."""
    return read_credentials(environment.get(CREDENTIALS_VARIABLE, ""))


def read_credentials(text: str) -> tuple[str, str] | None:
    """Return ZooKeeper's user and password, of `user:password`; None if there is no user."""
    user, _, password = text.partition(":")
    return (user, password) if user else None
