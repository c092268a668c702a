"""A snapshot's manifest: what the snapshot is of, and the objects that its files are in.

Layout of a manifest object, named `<snapshot id>-<term>.manifest`, in the frame of `object_frame`:

    magic             b"TALLYSNP"
    body              JSON: the fields of `Manifest`; a file is [name, object name, size]

Format 2 is that of format 1: the files are those of a view of format 2.

A data object is named `<SHA-256 of its bytes, in hex>-<term>`. The term is that of the leader that
made it, so that no two leaders ever create the same name.
"""

import json
import re
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from hashlib import sha256
from typing import NamedTuple

from foundation.errors import CorruptSnapshot, InvalidInput, UnknownFormat
from foundation.formats import Formats
from merge_engine.bucket.object_frame import ObjectFrame

MAGIC = b"TALLYSNP"
_FRAME = ObjectFrame(magic=MAGIC, error=CorruptSnapshot, way_out="take another snapshot")
_MANIFEST_NAME = re.compile(r"(\d+)-(\d+)\.manifest")
_DATA_NAME = re.compile(r"([0-9a-f]{64})-(\d+)")


class SnapshotFile(NamedTuple):
    """A file of the view's directory, and the object that has its bytes."""

    name: str
    object_name: str
    size: int

    @property
    def content(self) -> str:
        """What identifies the bytes."""
        return self.object_name.partition("-")[0]


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """One snapshot. It exists once its manifest does, and then all its files do.

    It has every change below `applied` and none from there on; from `stable` on, they may yet be
    undone. `schema_version` is that of its newest row, or a later one.
    """

    snapshot_id: int
    term: int
    identity: str
    applied: int
    stable: int
    created_ms: int
    schema_version: int
    files: tuple[SnapshotFile, ...]

    def __post_init__(self) -> None:
        numbers = (self.snapshot_id, self.term, self.created_ms, self.schema_version, self.stable)
        if any(type(number) is not int or number < 0 for number in numbers):
            raise InvalidInput(f"a snapshot's numbers are whole, from 0 on, not {numbers}")
        if self.stable > self.applied:
            raise InvalidInput(
                f"snapshot {self.snapshot_id}: it cannot be stable up to offset {self.stable} and "
                f"have only what is below {self.applied}"
            )
        _check_files(self.files)

    @property
    def object_name(self) -> str:
        """The name of the manifest's own object."""
        return manifest_name(self.snapshot_id, self.term)


def manifest_name(snapshot_id: int, term: int) -> str:
    """Return the object name of a manifest."""
    return f"{snapshot_id}-{term}.manifest"


def data_name(content: str, term: int) -> str:
    """Return the object name of a file that the leader of this term uploads."""
    return f"{content}-{term}"


def content_of(data: bytes) -> str:
    """Return what identifies these bytes."""
    return sha256(data).hexdigest()


def is_manifest(name: str) -> bool:
    """Whether an object of this name is a manifest."""
    return _MANIFEST_NAME.fullmatch(name) is not None


def term_of(name: str) -> int | None:
    """Return the term of the leader that made an object; None if it is no object of a snapshot."""
    found = _MANIFEST_NAME.fullmatch(name) or _DATA_NAME.fullmatch(name)
    return None if found is None else int(found[2])


def encode_manifest(manifest: Manifest) -> bytes:
    """Return the manifest's bytes."""
    body = json.dumps(asdict(manifest), separators=(",", ":")).encode()
    return _FRAME.wrap(FORMATS.current, body)


def decode_manifest(name: str, data: bytes) -> Manifest:
    """Read a manifest back; CorruptSnapshot or UnknownFormat if it is not what was written."""
    version, body = _FRAME.unwrap(f"manifest {name}", data)
    read = FORMATS.reader(version, f"manifest {name}")
    try:
        manifest = read(body)
    except (ValueError, KeyError, TypeError, InvalidInput) as exc:
        raise CorruptSnapshot(f"manifest {name}: the checksum holds, but {exc}") from exc
    if manifest.object_name != name:
        raise CorruptSnapshot(
            f"manifest {name} is that of {manifest.object_name}: the object was renamed or "
            "swapped; take another snapshot"
        )
    return manifest


def _read_format_1(body: bytes) -> Manifest:
    fields = json.loads(body)
    files = tuple(SnapshotFile(*file) for file in fields.pop("files"))
    return Manifest(files=files, **fields)


FORMATS: Formats[Callable[[bytes], Manifest]] = Formats(
    name="snapshot-manifest",
    current=2,
    readers={1: _read_format_1, 2: _read_format_1},
    error=UnknownFormat,
)


def _check_files(files: Iterable[SnapshotFile]) -> None:
    """Raise unless these can be the files of one directory: names are paths when restored."""
    names = set()
    for file in files:
        if file.name in ("", ".", "..") or "/" in file.name or "\0" in file.name:
            raise InvalidInput(f"{file.name!r} is not the name of a file")
        if file.name in names:
            raise InvalidInput(f"the file {file.name} is there twice")
        if _DATA_NAME.fullmatch(file.object_name) is None or file.size < 0:
            raise InvalidInput(f"{file} is not a file of a snapshot")
        names.add(file.name)
