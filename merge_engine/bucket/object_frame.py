"""The frame of the small objects beside a bucket's segments: what one is, and whether it is whole.

magic             8 bytes, the same for all objects of a kind
format version    u16, little-endian
body              what the kind says
checksum          u64, little-endian: xxh3_64 of everything before it
"""

import struct
from collections.abc import Callable
from dataclasses import dataclass

import xxhash

from foundation.errors import Corrupt

_HEAD = struct.Struct("<8sH")
_CHECKSUM = struct.Struct("<Q")


@dataclass(frozen=True, kw_only=True)
class ObjectFrame:
    """The frame of one kind of object. `error`: what a damaged one is; `way_out` ends its words."""

    magic: bytes
    error: Callable[[str], Corrupt]
    way_out: str

    def wrap(self, version: int, body: bytes) -> bytes:
        """Return the bytes of an object."""
        framed = _HEAD.pack(self.magic, version) + body
        return framed + _CHECKSUM.pack(xxhash.xxh3_64_intdigest(framed))

    def unwrap(self, what: str, data: bytes) -> tuple[int, bytes]:
        """Return the version and the body of an object that is whole; `what` names it in errors."""
        if len(data) < _HEAD.size + _CHECKSUM.size:
            raise self.error(f"{what}: only {len(data)} bytes; {self.way_out}")
        magic, version = _HEAD.unpack_from(data)
        framed, (checksum,) = data[: -_CHECKSUM.size], _CHECKSUM.unpack(data[-_CHECKSUM.size :])
        if magic != self.magic or xxhash.xxh3_64_intdigest(framed) != checksum:
            raise self.error(f"{what}: checksum mismatch; {self.way_out}")
        return version, framed[_HEAD.size :]
