"""What a view keeps besides its rows: whose it is, how far it has got, and who has put what.

Keys in RocksDB, all below `m`; numbers are u64, little-endian:

    format            the version of the view's format, in ASCII
    identity          which bucket it is of
    applied, schema   the applied offset; the newest schema version of all rows, or a later one
    token:<owner>     epoch, batch, base offset, end offset: of the owner's last put
    parts:<owner>     epoch, batch, base offset, how many parts: of a large put, complete or not
    work:<owner>      `owner_work`: 1 if all epochs are known, else 0; the end offset; then pairs:
                      epoch, base offset

Format 2 has `work`. A view of format 1 is one of format 2 from when it is opened, with what can be
told from the rest: the last epoch of each owner that has applied a token.
"""

import struct
from collections.abc import Mapping, Sequence, Set
from contextlib import closing
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from rocksdict import Options

from foundation.errors import CorruptView, UnknownFormat
from foundation.formats import Formats
from foundation.ids import Token
from merge_engine.bucket.database import Database
from merge_engine.bucket.owner_work import OwnerWork, from_numbers, to_numbers
from merge_engine.bucket.rocksdb_errors import rebuild
from merge_engine.bucket.segment import SegmentHeader

_FORMAT = b"mformat"
_IDENTITY = b"midentity"
_APPLIED = b"mapplied"
_SCHEMA = b"mschema"
_TOKEN = b"mtoken:"
_PARTS = b"mparts:"
_WORK = b"mwork:"


class CheckpointState(NamedTuple):
    """Whose rows a checkpoint has, the offset up to which it has them all, and who has put them."""

    applied: int
    identity: str
    works: Mapping[str, OwnerWork] = MappingProxyType({})


class AppliedToken(NamedTuple):
    """An owner's last token, and the offsets that its put was given."""

    token: Token
    base_offset: int
    end_offset: int


class AppliedParts(NamedTuple):
    """How many parts of an owner's last large put were applied, and where the first begins."""

    token: Token
    base_offset: int
    parts: int


class MetaChanges(NamedTuple):
    """What is to be written besides rows, up to an offset: entries of RocksDB, and of whom."""

    applied: int
    entries: Mapping[bytes, bytes]
    owners: Set[str]


class _Layout(NamedTuple):
    """How the values are laid out: a number alone, and a token with what goes with it."""

    number: struct.Struct
    token: struct.Struct


_LAYOUT = _Layout(number=struct.Struct("<Q"), token=struct.Struct("<4Q"))
FORMATS: Formats[_Layout] = Formats(
    name="view", current=2, readers={1: _LAYOUT, 2: _LAYOUT}, error=UnknownFormat
)

_WITH_WORK = 2


class ViewMeta:
    """What is known of a view's owners. Changes are in memory until a write takes them along.

    `works` has all owners that ever put. It is replaced, never changed: readers need no lock.
    """

    def __init__(self, database: Database, version: int = FORMATS.current) -> None:
        """Read what is ours, of this version of the format."""
        self._database = database
        self._path = database.path
        self.applied = self._number(_APPLIED)
        self.schema_version = self._number(_SCHEMA)
        self._tokens: dict[str, AppliedToken] = {}
        self._parts: dict[str, AppliedParts] = {}
        self._changed: set[str] = set()  # The owners of whom RocksDB does not have all yet.
        self.works: Mapping[str, OwnerWork] = {}
        if version >= _WITH_WORK:
            self.works = {one: self._read_work(one) for one in _owners(database, _WORK)}
        elif self.applied:
            self.works = {one: self._guess_work(one) for one in _owners(database, _TOKEN)}
            # Whoever puts without a token mostly says nothing about himself, either.
            self.works = {"": OwnerWork(end_offset=self.applied), **self.works}

    @property
    def changed(self) -> bool:
        """Whether there is something of owners that RocksDB does not have yet."""
        return bool(self._changed)

    def token(self, owner: str) -> AppliedToken | None:
        """Return the owner's last applied token."""
        if owner in self._tokens:
            return self._tokens[owner]
        found = self._put_of(_TOKEN, owner)
        return None if found is None else AppliedToken(*found)

    def remember(self, owner: str, applied: AppliedToken) -> None:
        """Set the owner's last token."""
        self._tokens[owner] = applied
        self._changed.add(owner)

    def parts(self, owner: str) -> AppliedParts | None:
        """Return how far the owner's last large put has got; also of one that is complete."""
        if owner in self._parts:
            return self._parts[owner]
        found = self._put_of(_PARTS, owner)
        return None if found is None else AppliedParts(*found)

    def remember_parts(self, owner: str, parts: AppliedParts) -> None:
        """Set how far the owner's large put has got."""
        self._parts[owner] = parts
        self._changed.add(owner)

    def note_change(self, header: SegmentHeader) -> None:
        """Take in that an owner has changed something, or something of it was undone."""
        epoch = None if header.lock_token is None else header.lock_token.epoch
        work = self.works.get(header.owner, OwnerWork())
        work = work.with_change(epoch, header.base_offset, header.end_offset)
        self.works = {**self.works, header.owner: work}
        self._changed.add(header.owner)

    def changes(self) -> "MetaChanges":
        """Return all that RocksDB does not have yet, to be written."""
        number, token = _LAYOUT.number, _LAYOUT.token
        entries = {
            _APPLIED: number.pack(self.applied),
            _SCHEMA: number.pack(self.schema_version),
        }
        for owner in self._changed:
            name = owner.encode()
            if (last := self._tokens.get(owner)) is not None:
                ends = last.base_offset, last.end_offset
                entries[_TOKEN + name] = token.pack(*last.token, *ends)
            if (parts := self._parts.get(owner)) is not None:
                entries[_PARTS + name] = token.pack(*parts.token, parts.base_offset, parts.parts)
            if (work := self.works.get(owner)) is not None:
                entries[_WORK + name] = _pack(work)
        return MetaChanges(self.applied, entries, frozenset(self._changed))

    def taken(self, changes: "MetaChanges") -> None:
        """These changes, all that there are, are being written."""
        self._changed -= changes.owners

    def not_written(self, changes: "MetaChanges") -> None:
        """RocksDB did not take these changes: they are written with the next ones."""
        self._changed |= changes.owners

    def _read_work(self, owner: str) -> OwnerWork:
        stored = self._database.get([_WORK + owner.encode()])[0] or b""
        count = max(len(stored) // _LAYOUT.number.size, 2)
        return from_numbers(_numbers(struct.Struct(f"<{count}Q"), stored, self._path))

    def _guess_work(self, owner: str) -> OwnerWork:
        """Return what is known of an owner where it was not kept: under which epoch it put last."""
        token = self.token(owner)
        assert token is not None
        return OwnerWork(
            end_offset=self.applied, epochs=(token.token.epoch,), bases=(0,), complete=False
        )

    def _put_of(self, prefix: bytes, owner: str) -> tuple[Token, int, int] | None:
        stored = self._database.get([prefix + owner.encode()])[0]
        if stored is None:
            return None
        epoch, batch, base_offset, other = _numbers(_LAYOUT.token, stored, self._path)
        return Token(epoch, batch), base_offset, other

    def _number(self, key: bytes) -> int:
        stored = self._database.get([key])[0]
        return _numbers(_LAYOUT.number, stored, self._path)[0] if stored else 0


def check_identity(database: Database, identity: str) -> dict[bytes, bytes]:
    """Raise unless the view is of this bucket, or new; return what is to be written first.

    That is whose it is or, if it is of an earlier format, what makes it one of ours.
    """
    path = database.path
    version, known = database.get([_FORMAT, _IDENTITY])
    ours = str(FORMATS.current).encode()
    if version is None:
        return {_FORMAT: ours, _IDENTITY: identity.encode()}
    number = _check_format(version, path)
    if known != identity.encode():
        found = (known or b"?").decode(errors="replace")
        raise CorruptView(
            f"view {path} belongs to {found}, not to {identity}; remove the directory to rebuild "
            "it from the log"
        )
    if number == FORMATS.current:
        return {}
    works = ViewMeta(database, number).works
    return {
        _FORMAT: ours,
        **{_WORK + owner.encode(): _pack(work) for owner, work in works.items()},
    }


def read_checkpoint(directory: Path) -> CheckpointState:
    """Return what a checkpoint is of, as it says itself; its files stay as they are."""
    with closing(Database(directory, Options(raw_mode=True), read_only=True)) as database:
        version, identity = database.get([_FORMAT, _IDENTITY])
        if version is None or identity is None:
            raise CorruptView(f"{directory} is no copy of a view; make another one")
        meta = ViewMeta(database, _check_format(version, directory))
    return CheckpointState(meta.applied, identity.decode(errors="replace"), meta.works)


def _owners(database: Database, prefix: bytes) -> Sequence[str]:
    """Return the owners of whom there is something below a prefix."""
    return [key.removeprefix(prefix).decode() for key in database.keys_below(prefix)]


def _pack(work: OwnerWork) -> bytes:
    numbers = to_numbers(work)
    return struct.pack(f"<{len(numbers)}Q", *numbers)


def _check_format(version: bytes, path: Path) -> int:
    """Return the number of the format that a view is of; UnknownFormat if nothing reads that."""
    text = version.decode(errors="replace")
    found = int(text) if text.isascii() and text.isdecimal() else text
    way_out = ", or remove the directory to rebuild it from the log"
    FORMATS.reader(found, f"view {path}", way_out)
    return int(text)


def _numbers(form: struct.Struct, stored: bytes, path: Path) -> tuple[int, ...]:
    """Return what is stored; RocksDB has checked the bytes, and this that they are ours."""
    try:
        return form.unpack(stored)
    except struct.error as exc:
        raise CorruptView(rebuild(path, f"meta of {len(stored)} bytes: {exc}")) from exc
