"""The mark of where a cleaned log starts, and what it says of what is gone.

Layout of a mark object, named `<offset in 20 digits>.start`, in the frame of `object_frame`:

    magic             b"TALLYSTA"
    body              JSON: by owner, [end offset, epoch, batch] of `Cleaned`, the last two null
                      if there was no token

Of an empty one, as earlier releases made them, it is not known what was cleaned. Two leaders that
mark the same offset make the same mark: it speaks of segments that both have read.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from foundation.errors import CorruptSegment, UnknownFormat
from foundation.formats import Formats
from foundation.ids import Token
from merge_engine.bucket.object_frame import ObjectFrame
from merge_engine.bucket.segment import SegmentHeader
from merge_engine.bucket.undone_work import is_undone, undone_columns

MAGIC = b"TALLYSTA"
START_SUFFIX = ".start"
_FRAME = ObjectFrame(magic=MAGIC, error=CorruptSegment, way_out="restore it from a copy of the log")


class Cleaned(NamedTuple):
    """Of an owner's changes that were cleaned: where the last one ends, and the highest token.

    That is one of a lock, or None. What was undone, and is cleaned together with its undo, does not
    count: no cut has ever had it, and the rows are as if it had not been.
    """

    end_offset: int
    token: Token | None


CleanedOwners = Mapping[str, Cleaned]


def start_name(offset: int) -> str:
    """Return the name of the mark of this start."""
    return f"{offset:020d}{START_SUFFIX}"


def with_cleaned(known: CleanedOwners, headers: Sequence[SegmentHeader]) -> dict[str, Cleaned]:
    """Return what is cleaned after these segments, too, were."""
    cleaned, undone = dict(known), undone_columns(headers)
    for header in headers:
        if not header.is_change or is_undone(undone, header):
            continue
        before = cleaned.get(header.owner, Cleaned(0, None))
        tokens = [token for token in (before.token, header.lock_token) if token is not None]
        cleaned[header.owner] = Cleaned(
            max(before.end_offset, header.end_offset), max(tokens, default=None)
        )
    return cleaned


def encode_start(cleaned: CleanedOwners | None) -> bytes:
    """Return the bytes of a mark; None: it is not known what was cleaned."""
    if cleaned is None:
        return b""
    owners = {
        owner: [one.end_offset, *(one.token or (None, None))]
        for owner, one in sorted(cleaned.items())
    }
    body = json.dumps(owners, separators=(",", ":")).encode()
    return _FRAME.wrap(FORMATS.current, body)


def decode_start(name: str, data: bytes) -> dict[str, Cleaned] | None:
    """Read a mark back; CorruptSegment or UnknownFormat if it is not what was written."""
    if not data:
        return None
    version, body = _FRAME.unwrap(name, data)
    read = FORMATS.reader(version, name)
    try:
        return read(body)
    except (ValueError, TypeError, AttributeError) as exc:
        raise CorruptSegment(f"{name}: the checksum holds, but {exc!r}") from exc


def _read_format_1(body: bytes) -> dict[str, Cleaned]:
    return {
        owner: Cleaned(end, None if epoch is None else Token(epoch, batch))
        for owner, (end, epoch, batch) in json.loads(body).items()
    }


FORMATS: Formats[Callable[[bytes], dict[str, Cleaned]]] = Formats(
    name="log-start", current=1, readers={1: _read_format_1}, error=UnknownFormat
)
