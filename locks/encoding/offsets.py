"""Log offsets of many buckets, as one value."""

from collections.abc import Iterator, Mapping
from itertools import chain

import numpy as np

from foundation.errors import CorruptRecord, InvalidInput
from foundation.ids import BucketId
from locks.encoding.integers import Signed, array_parts, decode_array, encode_array

_NUMBER_BITS = 20
_PARTITION_BITS = 43
_HIGHEST_ID = 2**63 - 1


class Offsets(Mapping[BucketId, int]):
    """An offset per bucket, sorted by bucket; immutable. A bucket that is not in it is at 0.

    As bytes, three arrays of `integers`: of the runs of consecutive bucket ids (partition << 20 |
    number) how many ids are left out before each, and their lengths; then the offsets. That is
    mostly 4 bytes per bucket, and 8 at most.
    """

    _ids: Signed
    _values: Signed

    def __init__(self, offsets: Mapping[BucketId, int] | None = None) -> None:
        if isinstance(offsets, Offsets):
            self._ids, self._values = offsets._ids, offsets._values
            return
        offsets = offsets or {}
        try:
            keys = np.fromiter(chain.from_iterable(offsets), np.int64, 2 * len(offsets))
            values = np.fromiter(offsets.values(), np.int64, len(offsets))
        except OverflowError as exc:
            raise InvalidInput("a log offset or a bucket of more than 63 bits") from exc
        partitions, numbers = keys[0::2], keys[1::2]
        if (numbers >> _NUMBER_BITS).any():
            raise InvalidInput(f"bucket numbers range from 0 to {2**_NUMBER_BITS - 1}")
        if (partitions >> _PARTITION_BITS).any():
            raise InvalidInput(f"partition ids range from 0 to {2**_PARTITION_BITS - 1}")
        ids = partitions << _NUMBER_BITS | numbers
        order = np.argsort(ids, kind="stable")
        self._fill(ids[order], values[order])

    @classmethod
    def _of(cls, ids: Signed, values: Signed) -> "Offsets":
        made = cls.__new__(cls)
        made._fill(ids, values)
        return made

    def _fill(self, ids: Signed, values: Signed) -> None:
        if (values < 0).any():
            raise InvalidInput("a log offset is never negative")
        self._ids, self._values = ids, values

    def __getitem__(self, key: BucketId) -> int:
        partition, number = key
        if number >> _NUMBER_BITS or partition >> _PARTITION_BITS:
            raise KeyError(key)
        wanted = partition << _NUMBER_BITS | number
        at = int(np.searchsorted(self._ids, wanted))
        if at == len(self._ids) or self._ids[at] != wanted:
            raise KeyError(key)
        return int(self._values[at])

    def __iter__(self) -> Iterator[BucketId]:
        mask = (1 << _NUMBER_BITS) - 1
        return (BucketId(i >> _NUMBER_BITS, i & mask) for i in self._ids.tolist())

    def __len__(self) -> int:
        return len(self._ids)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Offsets):
            return np.array_equal(self._ids, other._ids) and np.array_equal(
                self._values, other._values
            )
        return dict(self) == other

    def __hash__(self) -> int:
        return hash((self._ids.tobytes(), self._values.tobytes()))

    def __repr__(self) -> str:
        return f"Offsets({dict(self)})"

    def to_dict(self) -> dict[BucketId, int]:
        """Return the same as a dict, without a search for every bucket."""
        return dict(zip(self, self._values.tolist(), strict=True))

    def encode(self) -> bytes:
        """Return the bytes."""
        return b"".join(self.parts())

    def parts(self) -> list[bytes]:
        """Return the bytes in parts: tens of kilobytes are not copied more often than needed."""
        return [self._encode_ids(), *array_parts(self._values)]

    def _encode_ids(self) -> bytes:
        begins = np.flatnonzero(np.diff(self._ids, prepend=-2) != 1)
        lengths = np.diff(begins, append=len(self._ids))
        gaps = self._ids[begins]
        gaps[1:] -= gaps[:-1] + lengths[:-1]
        return encode_array(gaps) + encode_array(lengths)

    @classmethod
    def decode(cls, data: bytes, start: int) -> tuple["Offsets", int]:
        """Return the offsets that begin at `start`, and where they end."""
        gaps, start = decode_array(data, start)
        lengths, start = decode_array(data, start)
        values, end = decode_array(data, start)
        if len(gaps) != len(lengths) or sum(lengths.tolist()) != len(values):
            raise CorruptRecord("offsets of other buckets than there are")
        if (lengths == 0).any() or sum(gaps.tolist()) + len(values) - 1 > _HIGHEST_ID:
            raise CorruptRecord("a run of no buckets, or of buckets that cannot be")
        # A gap moves all ids after it ahead of their positions.
        ids = np.repeat(np.cumsum(gaps), lengths) + np.arange(len(values))
        return cls._of(ids, values), end
