"""Deletion vectors, as Delta writes them: which rows of a file are not there any more.

A vector is the number 1681511377 (little endian, 4 bytes) and a 64-bit Roaring bitmap in the
portable format. All vectors of a commit are in one object:

    1 (a byte), and per vector: its length (4 bytes, big endian), the vector, its CRC-32 (the same)

Delta can have them in the log itself, too. Its own VACUUM fails on such tables, so we do not.
"""

import struct
import uuid
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from pyroaring import BitMap64

from foundation.errors import CorruptLake
from sink.lake.letters import id_of, to_letters
from sink.lake.state import IN_OBJECT, LakeFile, vectors_name

_MAGIC = struct.pack("<i", 1681511377)
_VERSION = b"\x01"


def write_vectors(
    files: Sequence[LakeFile], named: uuid.UUID
) -> tuple[tuple[LakeFile, ...], bytes | None]:
    """Return the files with what the log is to say of their dead rows, and the object with those.

    None if all rows of all files are there.
    """
    parts, at = [_VERSION], len(_VERSION)
    told: list[LakeFile] = []
    for file in files:
        if not file.dead:
            told.append(replace(file, told=None))
            continue
        vector = _MAGIC + bytes(file.dead.serialize())
        about = {
            "storageType": IN_OBJECT,
            "pathOrInlineDv": to_letters(named.bytes),
            "offset": at,
            "sizeInBytes": len(vector),
            "cardinality": len(file.dead),
        }
        told.append(replace(file, told=about))
        parts += [struct.pack(">I", len(vector)), vector, struct.pack(">I", zlib.crc32(vector))]
        at += len(vector) + 8
    return tuple(told), b"".join(parts) if parts[1:] else None


def read_vector(told: Mapping[str, Any] | None, read: Callable[[str], bytes]) -> BitMap64:
    """Return the dead rows that the log speaks of; `read` returns an object of the lake.

    CorruptLake if there is something else.
    """
    if told is None:
        return BitMap64()
    kind, text, size = told["storageType"], told["pathOrInlineDv"], told["sizeInBytes"]
    if kind != IN_OBJECT:
        raise CorruptLake(f"a deletion vector of kind {kind!r}, which no tiering job writes")
    try:
        name = vectors_name(id_of(text))
    except ValueError as exc:
        raise CorruptLake(f"{text!r} names no object with deletion vectors: {exc}") from exc
    data, at = read(name), told.get("offset") or 0
    vector = data[at + 4 : at + 4 + size]
    length, checksum = struct.pack(">I", size), struct.pack(">I", zlib.crc32(vector))
    if (
        not data.startswith(_VERSION)
        or data[at : at + 4] != length
        or data[at + 4 + size : at + 8 + size] != checksum
    ):
        raise CorruptLake(f"{name} is damaged at {at}; restore it from a copy, or begin again")
    found = _decode(vector, name)
    if len(found) != told["cardinality"]:
        raise CorruptLake(f"{name} has {len(found)} rows at {at}, the log says something else")
    return found


def _decode(data: bytes, where: str) -> BitMap64:
    if not data.startswith(_MAGIC):
        raise CorruptLake(f"{where} has no deletion vector where there should be one")
    try:
        return BitMap64.deserialize(data[len(_MAGIC) :])
    except ValueError as exc:
        raise CorruptLake(f"a deletion vector in {where} cannot be read: {exc}") from exc
