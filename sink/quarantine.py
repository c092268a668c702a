"""Bad rows, set aside as Parquet with the reason: a replayed batch writes the same files again.

Rows are staged first, in a file that its name hides from readers, and published by the driver when
it knows whose they are: what a task stages that was given up, or came late, nobody publishes.

A file is readable whatever is in it: a column with text that is not UTF-8 is written as bytes.
"""

import hashlib
import uuid
from collections.abc import Iterable

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import fs

from merge_engine.soundness import readable


def stage(rows: pa.Table, path: str, owner: str, batch: int, part: int = 0) -> str:
    """Write the rows of one part of a batch where readers do not look; return the file's name."""
    filesystem, directory = _open(path)
    filesystem.create_dir(directory, recursive=True)
    name = f".{_prefix(owner)}{batch}-part-{part}.parquet.{uuid.uuid4().hex}"
    pq.write_table(readable(rows), f"{directory}/{name}", filesystem=filesystem)
    return name


def publish(path: str, staged: Iterable[str]) -> list[str]:
    """Give staged files the names under which readers find them; return those."""
    filesystem, directory = _open(path)
    published = []
    for name in staged:
        target = f"{directory}/{name[1:].rpartition('.')[0]}"
        filesystem.move(f"{directory}/{name}", target)
        published.append(target)
    return published


def clear(path: str, owner: str, batch: int) -> None:
    """Remove what an earlier attempt at a batch has set aside, and what nobody published.

    It may have had other parts, by the other route or of another number of source partitions.
    """
    filesystem, directory = _open(path)
    prefix = _prefix(owner)
    for found in filesystem.get_file_info(fs.FileSelector(directory, allow_not_found=True)):
        staged = found.base_name.startswith(f".{prefix}")
        if staged or found.base_name.startswith(f"{prefix}{batch}-"):
            filesystem.delete_file(found.path)


def _prefix(owner: str) -> str:
    return f"owner-{hashlib.sha256(owner.encode()).hexdigest()[:12]}-batch-"


def _open(path: str) -> tuple[fs.FileSystem, str]:
    if "://" in path:
        filesystem, directory = fs.FileSystem.from_uri(path)
        return filesystem, directory
    return fs.LocalFileSystem(), path
