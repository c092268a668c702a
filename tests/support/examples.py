"""How much is tried: little in `make test`, each time something else; much in `make test-fault`."""

import os

LONGER = int(os.environ.get("TALLYBOOK_EXAMPLES", "0"))


def examples(short: int, *, per: int = 1) -> int:
    """Return how many examples to try: so few or, in a longer run, one of so many asked for."""
    return max(short, LONGER // per)
