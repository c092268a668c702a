"""Who writes: owners and their tokens, judged before anything is written under them."""

from foundation.errors import InvalidInput
from foundation.ids import Token
from merge_engine.encoding.soundness import is_text


def check_writer(owner: str, token: Token | None) -> None:
    """Raise for what the log would take and nobody could ever apply."""
    if not is_text(owner):
        raise InvalidInput(f"an owner is a text, not {owner!r}")
    numbers = token if isinstance(token, Token) else ()
    good = len(numbers) == 2 and all(type(n) is int and 0 <= n < 2**63 for n in numbers)
    if token is not None and not good:
        raise InvalidInput(
            f"a token is Token(epoch, batch), two whole numbers from 0 on, not {token!r}"
        )
