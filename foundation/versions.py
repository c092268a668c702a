"""Which versions of what are installed here."""

from functools import cache
from importlib.metadata import PackageNotFoundError, version


@cache
def version_of(package: str) -> str | None:
    """Return the version of an installed package; None if there is none."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None
