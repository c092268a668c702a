"""Bytes as text in base 85, with the letters of ZeroMQ, as Delta's log has them."""

import base64
import uuid

_PYTHON = b"0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz!#$%&()*+-;<=>?@^_`{|}~"
_ZEROMQ = b"0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#"
_TO, _FROM = bytes.maketrans(_PYTHON, _ZEROMQ), bytes.maketrans(_ZEROMQ, _PYTHON)


def to_letters(data: bytes) -> str:
    """Return the text; bytes are made up to whole groups of four with zeros."""
    return base64.b85encode(data + bytes(-len(data) % 4)).translate(_TO).decode()


def from_letters(text: str) -> bytes:
    """Return the bytes; ValueError if there are other letters."""
    data = text.encode()
    if other := data.translate(None, _ZEROMQ):  # Python has some that ZeroMQ has not.
        raise ValueError(f"{other!r} are no letters of base 85")
    return base64.b85decode(data.translate(_FROM))


def id_of(text: str) -> uuid.UUID:
    """Return the id that the last twenty letters are; what is before them is a prefix."""
    return uuid.UUID(bytes=from_letters(text[-20:]))
