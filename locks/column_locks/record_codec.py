"""The lock record of an owner, as bytes.

Format 4, in the frame of `framing` (columns are a count and the deltas of sorted ids):

    flags (1 byte: 1 held, 2 ready, 4 abandoned, 8 prepared), stamp (16 bytes),
    epoch, ttl_ms, batch + 1, query id, query start, query name, held_ms, idle_ms,
    fingerprint of the batch, count of former queries, then their hashes (8 bytes each), columns,
    columns ever committed, then the epochs of their last commits,
    offsets, [prepared: epoch, batch + 1, location, fingerprint],
    count of debts, then per debt: kind (1 byte: 0 undo, 1 redo), owner, columns, offsets,
                                   [redo: epoch, batch + 1, location, fingerprint]

Format 3 has no fingerprints and no former queries, format 2 no query name, held_ms and idle_ms
either.
"""

from functools import lru_cache

from foundation.errors import CorruptRecord
from foundation.formats import Formats
from foundation.ids import Token
from locks.column_locks.records import (
    FORMER_QUERY_BYTES,
    STAMP_BYTES,
    Debt,
    DebtKind,
    LockRecord,
    Prepared,
    check_record,
)
from locks.encoding.framing import (
    Reader,
    RecordFormats,
    encode_integers,
    encode_text,
    frame,
    read_framed,
)
from locks.encoding.integers import encode_one
from locks.store.base import Node

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
        encode_integers([record.epoch, record.ttl_ms, record.batch + 1]),
        encode_text(record.query_id),
        encode_one(record.query_start),
        encode_text(record.query_name),
        encode_integers([record.held_ms, record.idle_ms]),
        encode_text(record.fingerprint),
        encode_one(len(record.former_queries)),
        *record.former_queries,
        _columns(record.columns),
        _columns(tuple([column for column, _ in committed])),
        encode_integers([epoch for _, epoch in committed]),
        *record.offsets.parts(),
    ]
    if record.prepared is not None:
        parts.append(_prepared(record.prepared))
    parts.append(encode_one(len(record.debts)))
    for debt in record.debts:
        parts += [
            bytes([debt.kind]),
            encode_text(debt.owner),
            _columns(debt.columns),
            debt.offsets.encode(),
        ]
        if debt.prepared is not None:
            parts.append(_prepared(debt.prepared))
    return frame(FORMATS.current, parts)


def decode_record(data: bytes) -> LockRecord:
    """Return the record; CorruptRecord if the bytes are none, or of no format that is read."""
    record = read_framed(FORMATS, data, "a lock record")
    check_record(record)
    return record


def decode_node(path: str, node: Node) -> LockRecord:
    """Return the record in a node; the error says which node it is."""
    try:
        return decode_record(node.data)
    except CorruptRecord as exc:
        raise CorruptRecord(f"{path}: {exc}") from exc


@lru_cache(maxsize=256)
def _columns(columns: tuple[int, ...]) -> bytes:
    ids = sorted(columns)
    deltas = [after - before for before, after in zip([0, *ids], ids, strict=False)]
    return encode_integers([len(ids), *deltas])


def _prepared(prepared: Prepared) -> bytes:
    token = encode_integers([prepared.token.epoch, prepared.token.batch + 1])
    return token + encode_text(prepared.location) + encode_text(prepared.fingerprint)


def _read_columns(reader: Reader) -> tuple[int, ...]:
    column, columns = 0, []
    for _ in range(reader.count()):
        column += reader.integer()
        columns.append(column)
    return tuple(columns)


def _read_prepared(reader: Reader, *, has_fingerprint: bool) -> Prepared:
    token = Token(reader.integer(), reader.integer() - 1)
    return Prepared(token, reader.text(), reader.text() if has_fingerprint else "")


def _read_former(reader: Reader) -> tuple[bytes, ...]:
    return tuple(reader.take(FORMER_QUERY_BYTES) for _ in range(reader.count()))


def _read_debt(reader: Reader, *, has_fingerprint: bool) -> Debt:
    kind = reader.octet()
    if kind not in tuple(DebtKind):
        raise CorruptRecord(f"a lock record with a debt of unknown kind {kind}")
    return Debt(
        kind=DebtKind(kind),
        owner=reader.text(),
        columns=_read_columns(reader),
        offsets=reader.offsets(),
        prepared=_read_prepared(reader, has_fingerprint=has_fingerprint)
        if kind == DebtKind.REDO
        else None,
    )


def _read_format_2(reader: Reader) -> LockRecord:
    return _read_record(reader, has_ages=False, has_fingerprint=False)


def _read_format_3(reader: Reader) -> LockRecord:
    return _read_record(reader, has_ages=True, has_fingerprint=False)


def _read_format_4(reader: Reader) -> LockRecord:
    return _read_record(reader, has_ages=True, has_fingerprint=True)


def _read_record(reader: Reader, *, has_ages: bool, has_fingerprint: bool) -> LockRecord:
    flags = reader.octet()
    record = LockRecord(
        held=bool(flags & _HELD),
        ready=bool(flags & _READY),
        abandoned=bool(flags & _ABANDONED),
        stamp=reader.take(STAMP_BYTES),
        epoch=reader.integer(),
        ttl_ms=reader.integer(),
        batch=reader.integer() - 1,
        query_id=reader.text(),
        query_start=reader.integer(),
        query_name=reader.text() if has_ages else "",
        held_ms=reader.integer() if has_ages else 0,
        idle_ms=reader.integer() if has_ages else 0,
        fingerprint=reader.text() if has_fingerprint else "",
        former_queries=_read_former(reader) if has_fingerprint else (),
        columns=_read_columns(reader),
        committed={column: reader.integer() for column in _read_columns(reader)},
        offsets=reader.offsets(),
        prepared=_read_prepared(reader, has_fingerprint=has_fingerprint)
        if flags & _PREPARED
        else None,
        debts=tuple(
            _read_debt(reader, has_fingerprint=has_fingerprint) for _ in range(reader.count())
        ),
    )
    if flags & ~(_HELD | _READY | _ABANDONED | _PREPARED):
        raise CorruptRecord("a lock record with more in it than this release knows")
    return record


FORMATS: RecordFormats[LockRecord] = Formats(
    name="lock-record",
    current=4,
    readers={2: _read_format_2, 3: _read_format_3, 4: _read_format_4},
    error=CorruptRecord,
)
