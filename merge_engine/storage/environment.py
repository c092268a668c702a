"""The environment variables by which obstore finds an object store and its credentials."""

import os
from dataclasses import dataclass


@dataclass(frozen=True)
class _Store:
    """What the URLs of a kind of store begin with, how its variables do, and the usual ones."""

    schemes: tuple[str, ...]
    prefix: str
    usual: tuple[str, ...]
    without_prefix: tuple[str, ...] = ()

    def in_environment(self) -> dict[str, str]:
        """Return its variables that are set."""
        return {
            name: value
            for name, value in os.environ.items()
            if name.startswith(self.prefix) or name in self.without_prefix
        }


_STORES = (
    _Store(
        ("s3", "s3a"),
        "AWS_",
        (
            "AWS_ACCESS_KEY_ID",
            "AWS_SECRET_ACCESS_KEY",
            "AWS_SESSION_TOKEN",
            "AWS_REGION",
            "AWS_ENDPOINT_URL",
            "AWS_ALLOW_HTTP",
        ),
    ),
    _Store(
        ("gs",),
        "GOOGLE_",
        ("GOOGLE_SERVICE_ACCOUNT", "GOOGLE_SERVICE_ACCOUNT_KEY", "GOOGLE_APPLICATION_CREDENTIALS"),
        without_prefix=("SERVICE_ACCOUNT",),
    ),
    _Store(
        ("az", "adl", "azure", "abfs", "abfss"),
        "AZURE_",
        (
            "AZURE_STORAGE_ACCOUNT_NAME",
            "AZURE_STORAGE_ACCOUNT_KEY",
            "AZURE_STORAGE_SAS_TOKEN",
            "AZURE_STORAGE_ENDPOINT",
        ),
    ),
)


def store_variables() -> dict[str, str]:
    """Return those of this process's environment, for stores of all kinds. Values are secrets."""
    return {name: value for store in _STORES for name, value in store.in_environment().items()}


def looked_at(location: str) -> str:
    """Return which variables are looked at for a URL and which are there; none for a directory.

    Their names only.
    """
    scheme = location.partition("://")[0]
    for store in _STORES:
        if scheme in store.schemes:
            there = sorted(store.in_environment())
            return (
                f"obstore looks at the environment for {', '.join(store.usual)} and others that "
                f"begin with {store.prefix}; of these there are: {', '.join(there) or 'none'}"
            )
    return ""
