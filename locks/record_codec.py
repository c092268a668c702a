"""The lock record of an owner, as bytes.

Format 1 (integers and arrays are those of `integers`, text is its UTF-8 length and bytes, columns
are a count and the deltas of sorted ids):

    format (1 byte), xxh3_64 of all that follows (8 bytes, little-endian),
    flags (1 byte: 1 held, 2 ready, 4 abandoned, 8 prepared), stamp (16 bytes),
    epoch, ttl_ms, batch + 1, query id, columns,
    columns ever committed, then the epochs of their last commits,
    offsets, [prepared: epoch, batch + 1, location],
    count of debts, then per debt: kind (1 byte: 0 undo, 1 redo), owner, columns, offsets,
                                   [redo: epoch, batch + 1, location]
"""

from collections.abc import Iterable
from functools import lru_cache

import xxhash

from locks.errors import CorruptRecord
from locks.integers import decode_one, encode_one
from locks.offsets import Offsets
from locks.records import (
    STAMP_BYTES,
    Debt,
    DebtKind,
    LockRecord,
    Prepared,
    Token,
    check_record,
)
from locks.store import Node

FORMAT = 1
_FORMAT = bytes([FORMAT])
_CHECKSUM_BYTES = 8
_HELD, _READY, _ABANDONED, _PREPARED = 1, 2, 4, 8


def encode_record(record: LockRecord) -> bytes:
    """Return the record's bytes."""
    check_record(record)
    flags = (
        _HELD * record.held
        | _READY * record.ready
        | _ABANDONED * record.abandoned
        | _PREPARED * (record.prepared is not None)
    )
    committed = sorted(record.committed.items())
    parts = [
        bytes([flags]),
        record.stamp,
        _integers([record.epoch, record.ttl_ms, record.batch + 1]),
        _text(record.query_id),
        _columns(record.columns),
        _columns(tuple([column for column, _ in committed])),
        _integers([epoch for _, epoch in committed]),
        *record.offsets.parts(),
    ]
    if record.prepared is not None:
        parts.append(_prepared(record.prepared))
    parts.append(encode_one(len(record.debts)))
    for debt in record.debts:
        parts += [
            bytes([debt.kind]),
            _text(debt.owner),
            _columns(debt.columns),
            debt.offsets.encode(),
        ]
        if debt.prepared is not None:
            parts.append(_prepared(debt.prepared))
    body = b"".join(parts)
    return b"".join([_FORMAT, _checksum(body), body])


def decode_record(data: bytes) -> LockRecord:
    """Return the record; CorruptRecord if the bytes are none, or of another format."""
    reader = _Reader(data)
    version = reader.octet()
    if version != FORMAT:
        raise CorruptRecord(
            f"a lock record of format {version}, this release reads {FORMAT}; upgrade"
        )
    if reader.take(_CHECKSUM_BYTES) != _checksum(reader.rest):
        raise CorruptRecord("a damaged lock record: its checksum does not match")
    record = reader.record()
    check_record(record)
    return record


def decode_node(path: str, node: Node) -> LockRecord:
    """Return the record in a node; the error says which node it is."""
    try:
        return decode_record(node.data)
    except CorruptRecord as exc:
        raise CorruptRecord(f"{path}: {exc}") from exc


def _checksum(body: bytes) -> bytes:
    return xxhash.xxh3_64_intdigest(body).to_bytes(_CHECKSUM_BYTES, "little")


def _integers(values: Iterable[int]) -> bytes:
    return b"".join(map(encode_one, values))


def _text(text: str) -> bytes:
    data = text.encode()
    return encode_one(len(data)) + data


@lru_cache(maxsize=256)
def _columns(columns: tuple[int, ...]) -> bytes:
    ids = sorted(columns)
    deltas = [after - before for before, after in zip([0, *ids], ids, strict=False)]
    return _integers([len(ids), *deltas])


def _prepared(prepared: Prepared) -> bytes:
    return _integers([prepared.token.epoch, prepared.token.batch + 1]) + _text(prepared.location)


class _Reader:
    """Takes a record apart, from the front."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    @property
    def rest(self) -> bytes:
        return self._data[self._at :]

    def take(self, size: int) -> bytes:
        end = self._at + size
        if end > len(self._data):
            raise CorruptRecord(f"a lock record that ends {end - len(self._data)} bytes early")
        taken, self._at = self._data[self._at : end], end
        return taken

    def octet(self) -> int:
        return self.take(1)[0]

    def integer(self) -> int:
        value, self._at = decode_one(self._data, self._at)
        return value

    def count(self) -> int:
        """A number of things that take at least a byte each."""
        count = self.integer()
        if count > len(self._data) - self._at:
            raise CorruptRecord(f"a lock record with {count} entries in {len(self.rest)} bytes")
        return count

    def text(self) -> str:
        try:
            return self.take(self.integer()).decode()
        except UnicodeDecodeError as exc:
            raise CorruptRecord(f"a lock record with damaged text: {exc}") from exc

    def columns(self) -> tuple[int, ...]:
        column, columns = 0, []
        for _ in range(self.count()):
            column += self.integer()
            columns.append(column)
        return tuple(columns)

    def offsets(self) -> Offsets:
        offsets, self._at = Offsets.decode(self._data, self._at)
        return offsets

    def prepared(self) -> Prepared:
        epoch, batch = self.integer(), self.integer() - 1
        return Prepared(Token(epoch, batch), self.text())

    def debt(self) -> Debt:
        kind = self.octet()
        if kind not in tuple(DebtKind):
            raise CorruptRecord(f"a lock record with a debt of unknown kind {kind}")
        return Debt(
            kind=DebtKind(kind),
            owner=self.text(),
            columns=self.columns(),
            offsets=self.offsets(),
            prepared=self.prepared() if kind == DebtKind.REDO else None,
        )

    def record(self) -> LockRecord:
        flags = self.octet()
        record = LockRecord(
            held=bool(flags & _HELD),
            ready=bool(flags & _READY),
            abandoned=bool(flags & _ABANDONED),
            stamp=self.take(STAMP_BYTES),
            epoch=self.integer(),
            ttl_ms=self.integer(),
            batch=self.integer() - 1,
            query_id=self.text(),
            columns=self.columns(),
            committed={column: self.integer() for column in self.columns()},
            offsets=self.offsets(),
            prepared=self.prepared() if flags & _PREPARED else None,
            debts=tuple(self.debt() for _ in range(self.count())),
        )
        if self.rest or flags & ~(_HELD | _READY | _ABANDONED | _PREPARED):
            raise CorruptRecord("a lock record with more in it than this release knows")
        return record
